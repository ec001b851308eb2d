"""Folding a ledger back: from the entries of one run to its evidence.

The evidence that a store keeps is a projection; the entries are the record. `refold` reads them in order and runs the
same folds as the live call did. What an entry does not carry is not in the result either: the sketch of the last
answer (only needed to compare the next one) and opaque progress versions, which entries hold as digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core import fold
from endstop.core.events import Observation, Proposal, TurnProposal, Verdict
from endstop.core.evidence import Evidence
from endstop.core.messages import message_of
from endstop.core.model import Detail, Usage
from endstop.core.reasons import Action, Effect, ErrorClass, Reason, Status
from endstop.errors import StoreCorruptError

if TYPE_CHECKING:
    from endstop.core.policy import Limits

__all__ = ["fold_entry", "refold"]

Entry = Mapping[str, object]


def refold(leaves: Iterable[bytes], limits: Limits) -> Evidence:
    """The evidence after these entries of one run, in order. Raises StoreCorruptError for a gap or an unreadable one."""
    evidence = Evidence()
    state = _Held()
    for expected, leaf in enumerate(leaves):
        entry: Entry = orjson.loads(leaf)
        if entry.get("seq") != expected:
            msg = f"entry {expected} of the run is missing: the ledger has a gap"
            raise StoreCorruptError(msg)
        fold_entry(evidence, entry, limits, state)
    return evidence


class _Held:
    """What one entry leaves for the next: a dead worker's last time, the owners inside."""

    def __init__(self) -> None:
        self.last_us = 0
        self.owners: set[str] = set()


def fold_entry(evidence: Evidence, entry: Entry, limits: Limits, held: _Held) -> None:
    """Run the fold of one entry."""
    kind = str(entry["type"])
    now_us = _int(entry, "ts_us")
    handler = _HANDLERS.get(kind)
    if handler is None:
        msg = f"an entry of type {kind!r} is unknown to this version"
        raise StoreCorruptError(msg)
    handler(evidence, entry, limits, now_us, held)
    held.last_us = now_us


def _int(entry: Entry, name: str) -> int:
    value = entry.get(name, 0)
    return value if isinstance(value, int) else 0


def _text(entry: Entry, name: str) -> str | None:
    value = entry.get(name)
    return value if isinstance(value, str) else None


def _version(entry: Entry) -> int | str | None:
    value = entry.get("ver")
    return value if isinstance(value, int | str) else None


def _proposal(entry: Entry) -> Proposal:
    return Proposal(
        tool=str(entry.get("tool", "")),
        effect=Effect(str(entry.get("effect", "unknown"))),
        fingerprint=str(entry.get("fp", "")),
        call_id=str(entry.get("call", "")),
        round_id=_text(entry, "round"),
        agent=str(entry.get("agent", "main")),
        key_digest=_text(entry, "key"),
    )


def _verdict(entry: Entry) -> Verdict:
    reason = _text(entry, "reason")
    found = _text(entry, "d.error_class")
    return Verdict(
        action=Action(str(entry.get("action", "execute"))),
        reason=None if reason is None else Reason(reason),
        guard=_text(entry, "guard"),
        detail=Detail(error_class=None if found is None else ErrorClass(found)),
        loop=_text(entry, "loop"),
        is_retry="retry" in entry,
        warn="warn" in entry,
        observed="observed" in entry,
    )


def _run_open(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    version = _version(entry)
    if version is not None:
        fold.seed_version(evidence, version)
    held.owners.add(str(entry.get("owner", "")))
    fold.started(evidence, now_us)


def _run_join(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    if _int(entry, "generation") > evidence.generation:
        fold.reentered(evidence)
    held.owners.add(str(entry.get("owner", "")))
    fold.continued(evidence, now_us)


def _run_leave(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    held.owners.discard(str(entry.get("owner", "")))
    if not held.owners:
        fold.paused(evidence, now_us)


def _call_intent(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    proposal = _proposal(entry)
    fold.let_through(evidence, proposal, _verdict(entry), now_us, _text(entry, "op"))
    evidence.pending[proposal.call_id].owner = str(entry.get("owner", ""))


def _call_refused(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    verdict = _verdict(entry)
    # The refusal that ends a run is followed by the stop, which folds it.
    if verdict.action in (Action.BLOCK, Action.WAIT):
        fold.refused(evidence, _proposal(entry), verdict)


def _call_replayed(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    fold.replayed(evidence, _proposal(entry), _verdict(entry))


def _result(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    found = _text(entry, "cls")
    not_before = entry.get("nb")
    seen = Observation(
        tool=str(entry["tool"]),
        effect=Effect(str(entry["effect"])),
        fingerprint=str(entry["fp"]),
        call_id=str(entry["call"]),
        status=Status(str(entry["status"])),
        answer=str(entry["answer"]),
        round_id=_text(entry, "round"),
        agent=str(entry.get("agent", "main")),
        evidence="mute" not in entry,
        news="old" not in entry,
        changed="changed" in entry,
        progress="progress" in entry,
        error_class=None if found is None else ErrorClass(found),
        error_symbol=str(entry.get("sym", "")),
        version_source=_text(entry, "src"),
        version=_version(entry),
        declared="undeclared" not in entry,
        failed="failed" in entry,
        not_before_us=not_before if isinstance(not_before, int) else None,
    )
    fold.settled(evidence, seen, limits, now_us)
    loop = _text(entry, "loop")
    if loop is not None:
        fold.climbed_after(evidence, Verdict(loop=loop, observed="observed" in entry))


def _lost(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    fold.abandoned(evidence, str(entry.get("call", "")))


def _turn_intent(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    tokens, nanos = entry.get("tokens_bound"), entry.get("nanos_bound")
    fold.turn_let_through(
        evidence,
        TurnProposal(
            call_id=str(entry["call"]),
            tokens_bound=tokens if isinstance(tokens, int) else None,
            nanos_bound=nanos if isinstance(nanos, int) else None,
            is_retry="retry" in entry,
        ),
    )


def _turn(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    usage = Usage(
        input_tokens=_int(entry, "in"),
        output_tokens=_int(entry, "out"),
        cache_read_tokens=_int(entry, "cache_read"),
        cache_write_tokens=_int(entry, "cache_write"),
        reasoning_tokens=_int(entry, "reasoning"),
    )
    fold.turn_settled(evidence, str(entry["call"]), usage, _int(entry, "nanos"))


def _handoff(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    fold.handed_off(evidence, _proposal(entry), _verdict(entry), limits)


def _child(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    fold.child_started(evidence, _verdict(entry))


def _user_input(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    fold.user_input(evidence)


def _control(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    order = _text(entry, "order")
    if order in ("freeze", "unfreeze"):
        evidence.frozen = order == "freeze"


def _stop(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    reason = Reason(str(entry["reason"]))
    held.owners.clear()
    if reason is Reason.CRASHED:
        fold.paused(evidence, now_us)
        return
    fold.ended(evidence, reason, evidence.ended_message or message_of(Verdict()), now_us)


def _resume(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    held.owners.clear()
    fold.resumed(evidence, now_us)
    fold.paused(evidence, now_us)


def _recover(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    lost = entry.get("lost")
    for call_id in lost if isinstance(lost, list) else ():
        fold.abandoned(evidence, str(call_id))
    seen_us = entry.get("seen_us")
    if isinstance(seen_us, int):
        fold.paused(evidence, seen_us)


def _nothing(evidence: Evidence, entry: Entry, limits: Limits, now_us: int, held: _Held) -> None:
    """Entries that record something about the run, but are no evidence of its course."""


_HANDLERS: Final = {
    "run_open": _run_open,
    "run_join": _run_join,
    "run_leave": _run_leave,
    "call_intent": _call_intent,
    "call_refused": _call_refused,
    "call_replayed": _call_replayed,
    "result": _result,
    "lost": _lost,
    "turn_intent": _turn_intent,
    "turn": _turn,
    "handoff": _handoff,
    "child": _child,
    "user_input": _user_input,
    "control": _control,
    "stop": _stop,
    "complete": _stop,
    "resume": _resume,
    "recover": _recover,
    "turn_refused": _nothing,
    "checkpoint": _nothing,
    "operation": _nothing,
    "ledger_open": _nothing,
}
