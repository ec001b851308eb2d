"""Folding a ledger back: from the entries of one run to its evidence.

The evidence that a store keeps is a projection; the entries are the record. `refold` reads them in order and runs the
same folds as the live call did. What an entry does not carry is not in the result either: the sketch of the last
answer (only needed to compare the next one), the words of a run's end, and opaque progress versions, which entries
hold as digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import orjson

from endstop.core import fold
from endstop.core.events import Observation, Proposal, TurnProposal, Verdict
from endstop.core.evidence import Evidence
from endstop.core.model import Detail, Usage
from endstop.core.reasons import Action, Effect, ErrorClass, Reason, Status
from endstop.errors import StoreCorruptError

if TYPE_CHECKING:
    from endstop.core.policy import Limits

__all__ = ["fold_entry", "refold"]

Entry = Mapping[str, object]


def refold(leaves: Iterable[bytes], limits: Limits) -> Evidence:
    """The evidence after these entries of one run, in their order, from the first on.

    `limits` are those that the run ended with. Raises StoreCorruptError for a gap, and for an entry of an unknown type.
    """
    evidence = Evidence()
    owners: set[str] = set()
    for expected, leaf in enumerate(leaves):
        entry: Entry = orjson.loads(leaf)
        if entry.get("seq") != expected:
            msg = f"entry {expected} of the run is missing: the ledger has a gap"
            raise StoreCorruptError(msg)
        fold_entry(evidence, entry, limits, owners)
    return evidence


def fold_entry(evidence: Evidence, entry: Entry, limits: Limits, owners: set[str]) -> None:
    """Run the fold of one entry. `owners` holds the workers inside the run, from one entry to the next."""
    kind = str(entry["type"])
    now_us = _int(entry, "ts_us")
    match kind:
        case "run_open" | "run_join" | "run_leave" | "resume" | "recover" | "stop" | "complete":
            _fold_life(evidence, entry, kind, now_us, owners)
        case "call_intent":
            proposal = _proposal(entry)
            fold.let_through(evidence, proposal, _verdict(entry), now_us, _text(entry, "op"))
            pending = evidence.pending[proposal.call_id]
            pending.owner, pending.attempt_id = str(entry.get("owner", "")), str(entry.get("attempt_id", ""))
        case "call_refused":
            verdict = _verdict(entry)
            # The refusal that ends a run is followed by the stop, which folds it.
            if verdict.action in (Action.BLOCK, Action.WAIT):
                fold.refused(evidence, _proposal(entry), verdict)
        case "call_replayed":
            fold.replayed(evidence, _proposal(entry), _verdict(entry))
        case "result":
            _fold_result(evidence, entry, limits, now_us)
        case "lost":
            # Another delivery of the same call may be under way still.
            if "other" not in entry:
                fold.abandoned(evidence, str(entry.get("call", "")))
        case "turn_intent":
            fold.turn_let_through(evidence, _turn_proposal(entry))
        case "turn" if "charged" in entry:
            fold.turn_charged(evidence, str(entry["call"]))
        case "turn":
            fold.turn_settled(evidence, str(entry["call"]), _usage(entry), _int(entry, "nanos"))
        case "handoff":
            fold.handed_off(evidence, _proposal(entry), _verdict(entry), limits)
        case "child":
            fold.child_started(evidence, _verdict(entry))
        case "user_input":
            fold.user_input(evidence)
        case "control":
            # An order as such changes nothing in a run; what the run shows of it is an entry without the order's id.
            if "control" not in entry:
                evidence.frozen = entry.get("order") == "freeze"
        case "turn_refused" | "checkpoint" | "operation" | "ledger_open":
            pass  # about the run, but no evidence of its course
        case _:
            msg = f"an entry of type {kind!r} is unknown to this version"
            raise StoreCorruptError(msg)


def _fold_life(evidence: Evidence, entry: Entry, kind: str, now_us: int, owners: set[str]) -> None:
    owner = str(entry.get("owner", ""))
    match kind:
        case "run_open":
            version = _version(entry)
            if version is not None:
                fold.seed_version(evidence, version)
            owners.add(owner)
            fold.started(evidence, now_us)
        case "run_join":
            if _int(entry, "generation") > evidence.generation:
                fold.reentered(evidence)
            owners.add(owner)
            fold.continued(evidence, now_us)
        case "run_leave":
            owners.discard(owner)
            if not owners:
                fold.paused(evidence, now_us)
        case "resume":
            owners.clear()
            fold.resumed(evidence, now_us)
            fold.paused(evidence, now_us)
        case "recover":
            for call_id in _list(entry, "lost"):
                fold.abandoned(evidence, str(call_id))
            owners.difference_update(_list(entry, "owners"))
            if "seen_us" in entry:
                fold.paused(evidence, _int(entry, "seen_us"))
        case _:
            owners.clear()
            reason = Reason(str(entry["reason"]))
            if reason is Reason.CRASHED:
                fold.paused(evidence, now_us)
            else:
                # The words of an end stand in the run's envelope alone.
                fold.ended(evidence, reason, "", now_us)


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


def _fold_result(evidence: Evidence, entry: Entry, limits: Limits, now_us: int) -> None:
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
        fold.climbed_after(evidence, Verdict(loop=loop, warn="warn" in entry, observed="observed" in entry))


def _list(entry: Entry, name: str) -> list[object]:
    value = entry.get(name)
    return value if isinstance(value, list) else []


def _turn_proposal(entry: Entry) -> TurnProposal:
    tokens, nanos = entry.get("tokens_bound"), entry.get("nanos_bound")
    return TurnProposal(
        call_id=str(entry["call"]),
        tokens_bound=tokens if isinstance(tokens, int) else None,
        nanos_bound=nanos if isinstance(nanos, int) else None,
        is_retry="retry" in entry,
    )


def _usage(entry: Entry) -> Usage:
    return Usage(
        input_tokens=_int(entry, "in"),
        output_tokens=_int(entry, "out"),
        cache_read_tokens=_int(entry, "cache_read"),
        cache_write_tokens=_int(entry, "cache_write"),
        reasoning_tokens=_int(entry, "reasoning"),
    )
