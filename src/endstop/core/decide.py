"""The one question: may the next call of this run happen?

Rules of this file:

1. Everything here is a pure function of its arguments. Nothing reads a clock, and nothing changes the evidence.
2. The order of checks before a call is the order of the numbered blocks in `decide_call`: the ended run, the
   operators' controls, wall clock, steps, the committed operation, cycles, the same call, then the rest.
3. A block's reason never ends a run by itself; the streak of blocks does.
4. The last line of a decision denies.
"""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from endstop.core import loops
from endstop.core.canonical import canonical_bytes, value_at
from endstop.core.events import GO, NO_CONTROLS, RETRY, Verdict
from endstop.core.evidence import NEEDS_CHANGE, PENDING_MAX, TURNS_OPEN_MAX, call_symbol
from endstop.core.ladder import Trip, cap_verdict, climb
from endstop.core.model import Detail
from endstop.core.reasons import Action, Effect, ErrorClass, Reason
from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from endstop.core.events import Controls, DenyRule, OperationView, Proposal, TurnProposal
    from endstop.core.evidence import Evidence
    from endstop.core.policy import Policy

__all__ = ["decide_call", "decide_child", "decide_handoff", "decide_turn"]

_FAULT_REASONS: Final = {
    ErrorClass.UNKNOWN_TOOL: Reason.UNKNOWN_TOOL,
    ErrorClass.SCHEMA: Reason.MALFORMED_CALL,
    ErrorClass.DENIED: Reason.HOST_DENIED,
}
# On CPython 3.11 reading a member through its enum costs more than the comparison it is for.
_STOP: Final = Action.STOP
_WRITE: Final = Effect.WRITE
_UNSURE: Final = (Effect.WRITE, Effect.UNKNOWN)


def decide_call(
    policy: Policy,
    evidence: Evidence,
    proposal: Proposal,
    now_us: int,
    *,
    controls: Controls = NO_CONTROLS,
    operation: OperationView | None = None,
) -> Verdict:
    """May this tool call run now? `now_us` is microseconds on the run's clock; `operation` is what its key names."""
    # 1. A run that ended stays ended; then the operators' orders.
    halted = _halted(evidence, controls)
    if halted is not None:
        return halted
    if controls.denies:
        denied = _denied(policy, evidence, proposal, controls)
        if denied is not None:
            return denied
    # 2. Wall clock and steps. Calls in flight were counted when they were let through.
    capped = _wall_clock(policy, evidence, now_us)
    if capped is None and evidence.steps >= policy.limits.steps_max:
        capped = cap_verdict(policy, Reason.STEP_CAP, "steps_max", policy.limits.steps_max, evidence.steps)
    if capped is None:
        return _judge_call(policy, evidence, proposal, now_us, controls, operation)
    if capped.action is _STOP:
        return capped
    # Under `observe` a cap is a note, and what the guards after it say goes first.
    return _noted(capped, _judge_call(policy, evidence, proposal, now_us, controls, operation))


def _judge_call(
    policy: Policy,
    evidence: Evidence,
    proposal: Proposal,
    now_us: int,
    controls: Controls,
    operation: OperationView | None,
) -> Verdict:
    """The rules after the caps, in their order."""
    # 3. Room for one more call in flight, calls that the host knows cannot run, and tools nobody declared.
    refused = _refused_by_host(policy, evidence, proposal)
    if refused is not None:
        return refused
    # 4. A second copy in one message is no call of its own: its twin has been, or will be, answered. One that a
    # ladder lets through is a call like any other, and everything after this rule still stands before it.
    note = None if proposal.round_id is None else _round_copy(policy, evidence, proposal)
    if note is not None and note.action is not Action.EXECUTE:
        return note
    # 5. The committed operation.
    if operation is not None:
        known = _operation(policy, evidence, proposal, operation)
        if known is not None:
            return known
    # 6. Cycles, then the same call: the longer story is named first.
    trip = loops.cycle_before(policy.limits, evidence, proposal) or loops.same_call_before(
        policy.limits, evidence, proposal
    )
    if trip is not None and note is None:
        return climb(policy, evidence, trip)
    # 7. The rest: polls that come too soon, retries and their waits.
    last = _too_soon(policy, evidence, proposal, now_us) or _retry(
        policy, evidence, proposal, now_us, controls, operation
    )
    return last if note is None else _noted(note, last)


def decide_turn(
    policy: Policy,
    evidence: Evidence,
    proposal: TurnProposal,
    now_us: int,
    *,
    controls: Controls = NO_CONTROLS,
) -> Verdict:
    """May this model call leave now? The limit-th turn is allowed, the next refused; bounds count what is in flight."""
    # 1. The ended run, the operators' orders.
    halted = _halted(evidence, controls)
    if halted is not None:
        return halted
    if controls.frozen is not None and proposal.is_retry:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze")
    if len(evidence.turns_open) >= TURNS_OPEN_MAX:
        return _no_room("TURNS_OPEN_MAX", TURNS_OPEN_MAX, len(evidence.turns_open))
    # 2. Wall clock, retries, turns, tokens, spend: the first that is met.
    capped = _wall_clock(policy, evidence, now_us) or _turn_cap(policy, evidence, proposal)
    if capped is None:
        return RETRY if proposal.is_retry else GO
    if capped.observed and proposal.is_retry:
        return replace(capped, is_retry=True)
    return capped


def _turn_cap(policy: Policy, evidence: Evidence, proposal: TurnProposal) -> Verdict | None:
    limits = policy.limits
    # 1. Retries of provider faults share the run's retry cap.
    if proposal.is_retry and evidence.retries >= limits.retries_max:
        return cap_verdict(policy, Reason.RETRY_CAP, "retries_max", limits.retries_max, evidence.retries)
    # 2. Turns.
    if evidence.turns >= limits.turns_max:
        return cap_verdict(policy, Reason.TURN_CEILING, "turns_max", limits.turns_max, evidence.turns)
    # 3. Tokens: what was used, what calls in flight may use, and what this call may use where that is known.
    tokens = evidence.input_tokens + evidence.output_tokens + evidence.held_tokens + (proposal.tokens_bound or 0)
    if tokens > limits.tokens_max:
        return cap_verdict(policy, Reason.TOKEN_CEILING, "tokens_max", limits.tokens_max, tokens)
    # 4. Spend: with a maximum set, a call without a price cannot be let through.
    if limits.spend_nanos_max is None:
        return None
    if proposal.nanos_bound is None:
        return cap_verdict(policy, Reason.BUDGET_UNPRICED, "spend_nanos_max", limits.spend_nanos_max, None)
    nanos = evidence.spend_nanos + evidence.held_nanos + proposal.nanos_bound
    if nanos > limits.spend_nanos_max:
        return cap_verdict(policy, Reason.SPEND_CAP, "spend_nanos_max", limits.spend_nanos_max, nanos)
    return None


def decide_handoff(
    policy: Policy, evidence: Evidence, proposal: Proposal, now_us: int, *, controls: Controls = NO_CONTROLS
) -> Verdict:
    """May this agent hand the run to another one? Handoffs are counted, and judged as calls with a constant answer."""
    limits = policy.limits
    gate = _gate(evidence, controls)
    if gate is not None:
        return gate
    capped = _wall_clock(policy, evidence, now_us)
    if capped is None and evidence.handoffs >= limits.handoffs_max:
        capped = cap_verdict(policy, Reason.HANDOFF_CAP, "handoffs_max", limits.handoffs_max, evidence.handoffs)
    if capped is not None and capped.action is Action.STOP:
        return capped
    trip = loops.cycle_before(limits, evidence, proposal) or loops.same_call_before(limits, evidence, proposal)
    if trip is not None:
        return climb(policy, evidence, trip)
    return capped or GO


def decide_child(
    policy: Policy, evidence: Evidence, depth: int, now_us: int, *, controls: Controls = NO_CONTROLS
) -> Verdict:
    """May an agent at `depth` - 1 start a child at `depth` (the root's children are at 1)?"""
    gate = _gate(evidence, controls)
    if gate is not None:
        return gate
    capped = _wall_clock(policy, evidence, now_us)
    if capped is None and depth > policy.limits.depth_max:
        capped = cap_verdict(policy, Reason.DEPTH_CAP, "depth_max", policy.limits.depth_max, depth)
    return capped or GO


def _halted(evidence: Evidence, controls: Controls) -> Verdict | None:
    """What stands before every call: the latch, then kill and stop orders."""
    if evidence.ended is not None:
        return Verdict(action=Action.STOP, reason=Reason(evidence.ended), guard="latch")
    if controls.kill is not None:
        return Verdict(action=Action.STOP, reason=Reason.KILL_SWITCH, guard="kill")
    if controls.stop is not None:
        return Verdict(action=Action.STOP, reason=Reason.OPERATOR_CANCELLED_LOOP, guard="stop")
    return None


def _gate(evidence: Evidence, controls: Controls) -> Verdict | None:
    """What stands before a handoff or a child: halts, and a freeze."""
    halted = _halted(evidence, controls)
    if halted is None and controls.frozen is not None:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze")
    return halted


def _wall_clock(policy: Policy, evidence: Evidence, now_us: int) -> Verdict | None:
    limit = policy.limits.wall_ms_max
    elapsed_ms = evidence.elapsed_us_at(now_us) // 1_000
    if elapsed_ms < limit:
        return None
    return cap_verdict(policy, Reason.WALL_CLOCK_CAP, "wall_ms_max", limit, elapsed_ms)


def _noted(note: Verdict, verdict: Verdict) -> Verdict:
    """`verdict`, with the note where it lets the call go and has nothing to say itself."""
    if verdict.reason is not None or verdict.action is not Action.EXECUTE:
        return verdict
    return replace(note, is_retry=verdict.is_retry)


def _no_room(limit_name: str, limit: int, value: int) -> Verdict:
    detail = Detail(limit_name=limit_name, limit=limit, value=value)
    return Verdict(action=Action.BLOCK, reason=Reason.IN_PROGRESS, guard="in_flight", detail=detail)


def _denied(policy: Policy, evidence: Evidence, proposal: Proposal, controls: Controls) -> Verdict | None:
    """The first deny rule that fits blocks the call; an agent that keeps proposing it ends the run."""
    for rule in controls.denies:
        if _fits(rule, proposal):
            detail = Detail(tool=proposal.tool, error_class=ErrorClass.DENIED, rule=rule.rule_id)
            return loops.refuse(policy, evidence, proposal, Reason.DENY_RULE, "deny", detail)
    return None


def _fits(rule: DenyRule, proposal: Proposal) -> bool:
    if rule.tool is not None and not _same_text(proposal.raw_tool or proposal.tool, rule.tool):
        return False
    # An effect nobody declared may be a write, so a ban on writes covers it.
    if rule.effect is not None and proposal.effect.value != rule.effect:
        unsure = rule.effect == Effect.WRITE.value and proposal.effect is Effect.UNKNOWN
        if not unsure:
            return False
    if rule.args and isinstance(proposal.args, str):
        # Arguments that cannot be read cannot be shown to be harmless.
        return True
    return all(_matches(value_at(proposal.args, path), pattern) for path, pattern in rule.args)


def _matches(value: object, pattern: str) -> bool:
    """Whether an argument fits: text as it is, anything else as its JSON text. None fits nothing."""
    if value is None:
        return False
    if isinstance(value, str):
        return _same_text(value, pattern)
    try:
        return _same_text(canonical_bytes(value).decode(), pattern)
    except NotCanonicalError:
        # What cannot be read cannot be shown to be harmless.
        return True


def _same_text(text: str, pattern: str) -> bool:
    return fnmatchcase(unicodedata.normalize("NFC", text), unicodedata.normalize("NFC", pattern))


def _refused_by_host(policy: Policy, evidence: Evidence, proposal: Proposal) -> Verdict | None:
    if proposal.fault is not None:
        reason = _FAULT_REASONS.get(proposal.fault, Reason.HOST_DENIED)
        detail = Detail(tool=proposal.tool, error_class=proposal.fault)
        return loops.refuse(policy, evidence, proposal, reason, "host", detail)
    if policy.strict_tools and not proposal.declared:
        detail = Detail(tool=proposal.tool)
        return loops.refuse(policy, evidence, proposal, Reason.UNDECLARED_TOOL, "strict_tools", detail)
    if proposal.key_digest is None and (proposal.effect is _WRITE or proposal.key_missing is not None):
        detail = Detail(tool=proposal.tool, rule=proposal.key_missing)
        return loops.refuse(policy, evidence, proposal, Reason.KEY_MISSING, "key", detail)
    if len(evidence.pending) >= PENDING_MAX and proposal.call_id not in evidence.pending:
        return _no_room("PENDING_MAX", PENDING_MAX, len(evidence.pending))
    return None


def _operation(policy: Policy, evidence: Evidence, proposal: Proposal, operation: OperationView) -> Verdict | None:
    """What the ledger of operations says of this key. A key names one operation: other arguments never run under it."""
    detail = Detail(tool=proposal.tool, rule=operation.operation_id)
    if operation.fingerprint != (proposal.operation_fingerprint or proposal.fingerprint):
        return loops.refuse(policy, evidence, proposal, Reason.KEY_MISMATCH, "key", detail)
    if operation.state in ("COMMITTED", "TOMBSTONE"):
        return _committed(policy, evidence, proposal, operation, detail)
    if operation.state in ("FAILED_FINAL", "CANCELLED"):
        return Verdict(action=Action.REPLAY, detail=detail)
    if operation.state in ("RESERVED", "EXECUTING"):
        return Verdict(action=Action.BLOCK, reason=Reason.IN_PROGRESS, guard="operation", detail=detail)
    if operation.state == "FAILED_RETRYABLE":
        return None
    # UNKNOWN, MANUAL, POISONED and whatever a newer version may write: no side effect.
    return loops.refuse(policy, evidence, proposal, Reason.OUTCOME_UNKNOWN, "operation", detail)


def _committed(
    policy: Policy, evidence: Evidence, proposal: Proposal, operation: OperationView, detail: Detail
) -> Verdict:
    if operation.same_run and operation.call_id == proposal.call_id:
        return Verdict(action=Action.REPLAY, detail=detail)
    this_generation = operation.same_run and operation.generation == evidence.generation
    again = this_generation or proposal.key_digest in evidence.answered
    if again and not proposal.replays_committed and not policy.observes:
        return Verdict(
            action=Action.STOP, reason=Reason.ALREADY_COMMITTED, guard="operation", detail=detail,
            loop=f"committed:{proposal.key_digest}",
        )  # fmt: skip
    # Answering from the ledger costs nothing outside, but an agent that only asks for it again is in a loop.
    limit = policy.limits.same_call_max
    asked = evidence.streaks.get(loops.replay_key(proposal), 0)
    if asked >= limit and not policy.observes:
        found = Detail(limit_name="same_call_max", limit=limit, value=asked, repeats=asked, tool=proposal.tool)
        loop = f"same_call:{proposal.fingerprint}"
        trip = Trip(reason=Reason.SAME_CALL_REPEAT, guard="same_call", detail=found, loop=loop)
        climbed = climb(policy, evidence, trip)
        return replace(climbed, action=Action.REPLAY) if climbed.warn else climbed
    return Verdict(action=Action.REPLAY, guard=loops.LEDGER_GUARD, detail=detail)


def _round_copy(policy: Policy, evidence: Evidence, proposal: Proposal) -> Verdict | None:
    """Identical calls of one assistant message: the second shares the first's result or is refused."""
    copies, first = evidence.rounds.get(proposal.round_id or "", {}).get(proposal.fingerprint, (0, 0))
    # The first call itself, proposed again (a retry, a resumed message), is no copy.
    if copies == 0 or proposal.effect is Effect.WAIT or (copies == 1 and first == call_symbol(proposal.call_id)):
        return None
    limit = policy.limits.same_call_max
    if copies >= limit:
        detail = Detail(limit_name="same_call_max", limit=limit, value=copies, repeats=copies, tool=proposal.tool)
        loop = f"same_call:{proposal.fingerprint}"
        return climb(policy, evidence, Trip(reason=Reason.SAME_CALL_REPEAT, guard="round", detail=detail, loop=loop))
    detail = Detail(tool=proposal.tool, repeats=copies + 1)
    if policy.observes:
        return None
    action = Action.BLOCK if proposal.effect in _UNSURE else Action.REPLAY
    return Verdict(action=action, reason=Reason.ROUND_DUPLICATE, guard="round", detail=detail)


def _too_soon(policy: Policy, evidence: Evidence, proposal: Proposal, now_us: int) -> Verdict | None:
    """A poll waits out the interval that its tool declares."""
    interval_ms = proposal.poll_interval_ms_min
    if interval_ms is None or policy.observes:
        return None
    # Only polls are remembered there.
    last = evidence.polls.get(proposal.fingerprint)
    if last is None or last[2] + interval_ms * 1_000 <= now_us:
        return None
    return _wait_until(last[2] + interval_ms * 1_000, "poll")


def _wait_until(until_us: int, guard: str) -> Verdict:
    return Verdict(action=Action.WAIT, reason=Reason.NOT_BEFORE, guard=guard, until_us=until_us)


def _retry(
    policy: Policy,
    evidence: Evidence,
    proposal: Proposal,
    now_us: int,
    controls: Controls,
    operation: OperationView | None,
) -> Verdict:
    """A call that is another try at an answered or open one needs its back-off or a named change, and the cap."""
    # 1. Is it another try? Of an answer that asked for one, of a call still open, of a write proven not applied.
    wait_us = evidence.waits.get(proposal.fingerprint)
    if operation is not None and wait_us != NEEDS_CHANGE:
        wait_us = max(wait_us or 0, operation.not_before_us)
    if wait_us is None:
        twin = evidence.pending.get(proposal.call_id)
        if twin is None or twin.fingerprint != proposal.fingerprint:
            return GO
    # 2. What stands against trying again. Under `observe` only an operator's freeze does.
    if controls.frozen is not None:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze", detail=Detail(tool=proposal.tool))
    if wait_us is not None and proposal.change is None and not policy.observes:
        if wait_us == NEEDS_CHANGE:
            return loops.refuse(policy, evidence, proposal, Reason.NOT_BEFORE, "retry", Detail(tool=proposal.tool))
        if wait_us > now_us:
            return _wait_until(wait_us, "retry")
    # 3. The cap.
    if evidence.retries < policy.limits.retries_max:
        return RETRY
    return _noted(
        cap_verdict(policy, Reason.RETRY_CAP, "retries_max", policy.limits.retries_max, evidence.retries), RETRY
    )
