"""Ledger entries as a timeline: one row for what happened, with the guard that fired and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import orjson

from endstop.cli.figures import clock_time, duration, money
from endstop.cli.output import Column, Row
from endstop.errors import StoreCorruptError

if TYPE_CHECKING:
    from endstop.core.records import EntryRecord

__all__ = ["COLUMNS", "Event", "Leaf", "event_of", "events_of", "leaf_of", "row_of"]

Leaf = Mapping[str, object]

COLUMNS: Final = (
    Column(name="time", keeps=True), Column(name="turn", is_number=True), Column(name="step", is_number=True),
    Column(name="agent"), Column(name="tool"), Column(name="decision"), Column(name="guard"), Column(name="why"),
)  # fmt: skip
# What a reader of a timeline can do without: the rows that follow say it again.
_QUIET: Final = frozenset({"ledger_open", "turn_intent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One row of a timeline. `decision` is what was decided, or what kind of event it is."""

    index: int
    kind: str
    at_us: int
    turn: int | None = None
    step: int | None = None
    agent: str = ""
    tool: str = ""
    decision: str = ""
    guard: str = ""
    why: str = ""
    call_id: str = ""


def leaf_of(entry: EntryRecord) -> Leaf:
    """The fields of an entry. Raises StoreCorruptError when it cannot be read."""
    try:
        found: object = orjson.loads(entry.leaf)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        msg = f"entry {entry.index} of the ledger cannot be read: restore the store from a backup"
        raise StoreCorruptError(msg)
    return found


def events_of(entries: Iterable[EntryRecord]) -> list[Event]:
    """The timeline: a call and its result share a row, at the call's time."""
    events: list[Event] = []
    open_calls: dict[str, int] = {}
    for entry in entries:
        event = event_of(entry)
        if event.kind in _QUIET:
            continue
        if event.kind == "call_intent":
            open_calls[event.call_id] = len(events)
        elif event.kind in ("result", "lost") and event.call_id in open_calls:
            place = open_calls.pop(event.call_id)
            events[place] = replace(events[place], why=_joined(events[place].why, event.why))
            continue
        events.append(event)
    for place in open_calls.values():
        events[place] = replace(events[place], why=_joined(events[place].why, "no outcome is recorded"))
    return events


def event_of(entry: EntryRecord) -> Event:
    """One entry as a row of its own."""
    leaf = leaf_of(entry)
    kind = _text(leaf, "type")
    decision, why = _said(kind, leaf)
    return Event(
        index=entry.index, kind=kind, at_us=_number(leaf, "ts_us") or 0, turn=_number(leaf, "turn"),
        step=_number(leaf, "step"), agent=_text(leaf, "agent") or _by(leaf), tool=_text(leaf, "tool"),
        decision=decision, guard="" if kind == "complete" else _text(leaf, "guard"), why=why,
        call_id=_text(leaf, "call"),
    )  # fmt: skip


def row_of(event: Event) -> Row:
    """An event as cells for `COLUMNS`."""
    return (
        clock_time(event.at_us), _shown(event.turn), _shown(event.step), event.agent, event.tool, event.decision,
        event.guard, event.why,
    )  # fmt: skip


def _said(kind: str, leaf: Leaf) -> tuple[str, str]:
    """What was decided (or what kind of event it is), and the rest in words."""
    match kind:
        case "call_intent" | "call_refused" | "call_replayed" | "handoff" | "child":
            return _text(leaf, "action") or kind, _call_words(leaf)
        case "result":
            return "result", _result_words(leaf)
        case "lost":
            return "lost", f"outcome unknown ({_text(leaf, 'cause')})"
        case "turn":
            return "turn", _turn_words(leaf)
        case "turn_refused":
            return "stop", _figures(leaf)
        case "turn_intent":
            return "ask", _model(leaf)
        case "stop":
            return "stopped", _joined(_text(leaf, "reason"), _figures(leaf))
        case "complete":
            return kind, ""
        case "control":
            return _text(leaf, "order") or "control", _words(leaf, "label", "effect")
        case "resume":
            return "resume", _joined(_text(leaf, "change"), _limit_words(leaf))
        case "recover":
            lost = leaf.get("lost")
            return "recover", f"the worker died; {len(lost) if isinstance(lost, list) else 0} calls lost"
        case "run_open":
            return "start", ""
        case "run_join":
            return "join", f"generation {leaf.get('generation', 1)}"
        case _:
            return kind.replace("_", " "), ""


def _call_words(leaf: Leaf) -> str:
    reason = _text(leaf, "reason")
    return _joined(
        reason,
        _figures(leaf),
        "retry" if leaf.get("retry") else "",
        "warned" if leaf.get("warn") else "",
        "observed only" if leaf.get("observed") else "",
        f"rule {_text(leaf, 'rule')}" if leaf.get("rule") else "",
    )


def _result_words(leaf: Leaf) -> str:
    took_ms = _number(leaf, "ms")
    return _joined(
        _text(leaf, "status"),
        _text(leaf, "cls"),
        "nothing new" if leaf.get("old") else "",
        "confirmed progress" if leaf.get("progress") else "",
        f"operation {_text(leaf, 'op_state')}" if leaf.get("op_state") else "",
        "came late" if leaf.get("late") else "",
        "" if took_ms is None else duration(took_ms),
    )


def _turn_words(leaf: Leaf) -> str:
    nanos, took_ms = _number(leaf, "nanos") or 0, _number(leaf, "ms")
    return _joined(
        _model(leaf),
        f"{_number(leaf, 'in') or 0} + {_number(leaf, 'out') or 0} tokens{' (bound)' if leaf.get('estimated') else ''}",
        money(nanos) if nanos else "",
        f"fault: {_text(leaf, 'fault')}" if leaf.get("fault") else "",
        "" if took_ms is None else duration(took_ms),
    )


def _model(leaf: Leaf) -> str:
    """The model's name; of a script's path the last part."""
    name = _text(leaf, "model")
    head, slash, tail = name.rpartition("/")
    return f"scripted:{tail}" if slash and head.startswith("scripted:") else name


def _figures(leaf: Leaf) -> str:
    name, limit, value = leaf.get("d.limit_name"), leaf.get("d.limit"), leaf.get("d.value")
    return _joined(
        f"{name} = {limit}" if name is not None and limit is not None else str(name or ""),
        f"met by {value}" if value is not None else "",
        f"a cycle of {leaf['d.period']} calls" if leaf.get("d.period") is not None else "",
        f"{leaf['d.repeats']} times" if leaf.get("d.repeats") is not None else "",
        f"class {leaf['d.error_class']}" if leaf.get("d.error_class") is not None else "",
    )


def _limit_words(leaf: Leaf) -> str:
    return f"{leaf['limit']} = {leaf.get('value')}" if leaf.get("limit") else ""


def _words(leaf: Leaf, *names: str) -> str:
    return _joined(*(f"{name} {leaf[name]}" for name in names if leaf.get(name)))


def _by(leaf: Leaf) -> str:
    actor = _text(leaf, "actor")
    return "" if actor == "agent" else actor


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _text(leaf: Leaf, name: str) -> str:
    value = leaf.get(name)
    return value if isinstance(value, str) else ""


def _number(leaf: Leaf, name: str) -> int | None:
    value = leaf.get(name)
    return value if type(value) is int else None


def _shown(value: int | None) -> str:
    return "" if value is None else str(value)
