"""The one question: may the next call of this run happen?

Rules of this file:

1. Everything here is a pure function of its arguments. Nothing reads a clock, and nothing changes the evidence.
2. The order of checks before a call is the order of the numbered blocks in `decide_call`: the ended run, the
   operators' controls, wall clock, steps, the committed operation, cycles, the same call, then the rest.
3. A block's reason never ends a run by itself; the streak of blocks does.
4. The last line of a decision denies.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from endstop.core import loops
from endstop.core.canonical import value_at
from endstop.core.events import GO, NO_CONTROLS, Verdict
from endstop.core.evidence import NEEDS_CHANGE, PENDING_MAX
from endstop.core.ladder import caps_or_go, climb
from endstop.core.model import Detail
from endstop.core.reasons import Action, Effect, ErrorClass, Reason

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
_UNSURE: Final = (Effect.WRITE, Effect.UNKNOWN)


def decide_call(  # noqa: PLR0911  # one return a numbered rule is the point of this function
    policy: Policy,
    evidence: Evidence,
    proposal: Proposal,
    now_us: int,
    *,
    controls: Controls = NO_CONTROLS,
    operation: OperationView | None = None,
) -> Verdict:
    """May this tool call run now? `now_us` is microseconds on the run's clock; `operation` is what its key names."""
    # 1. A run that ended stays ended; controls and caps that stand before every paid or acting call.
    gate = _gate(policy, evidence, now_us, controls)
    if gate is not None:
        return gate
    denied = _denied(policy, evidence, proposal, controls)
    if denied is not None:
        return denied
    if len(evidence.pending) >= PENDING_MAX and proposal.call_id not in evidence.pending:
        full = Detail(limit_name="PENDING_MAX", limit=PENDING_MAX, value=len(evidence.pending))
        return Verdict(action=Action.BLOCK, reason=Reason.IN_PROGRESS, guard="pending", detail=full)
    # 2. Steps. In-flight calls have been counted when they were let through.
    if evidence.steps >= policy.limits.steps_max:
        capped = caps_or_go(policy, Reason.STEP_CAP, "steps_max", policy.limits.steps_max, evidence.steps)
        if capped is not None:
            return capped
    # 3. Calls that the host already knows cannot run, and tools nobody declared.
    refused = _refused_by_host(policy, evidence, proposal)
    if refused is not None:
        return refused
    # 4. The committed operation.
    known = _operation(policy, evidence, proposal, operation)
    if known is not None:
        return known
    # 5. Cycles, then the same call: the longer story is named first.
    trip = loops.cycle_before(policy.limits, evidence, proposal) or loops.same_call_before(
        policy.limits, evidence, proposal
    )
    if trip is not None:
        return climb(policy, evidence, trip)
    # 6. The rest: a second copy in one round, retries and their waits.
    copy = _round_copy(policy, evidence, proposal)
    if copy is not None:
        return copy
    return _retry(policy, evidence, proposal, now_us, controls, operation)


def decide_turn(
    policy: Policy,
    evidence: Evidence,
    proposal: TurnProposal,
    now_us: int,
    *,
    controls: Controls = NO_CONTROLS,
) -> Verdict:
    """May this model call leave now? The limit-th turn is allowed, the next refused; bounds count what is in flight."""
    limits = policy.limits
    # 1. The ended run, controls, wall clock.
    gate = _gate(policy, evidence, now_us, controls)
    if gate is not None:
        return gate
    if controls.frozen is not None and proposal.is_retry:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze")
    capped: Verdict | None = None
    # 2. Retries of provider faults share the run's retry cap.
    if proposal.is_retry and evidence.retries >= limits.retries_max:
        capped = caps_or_go(policy, Reason.RETRY_CAP, "retries_max", limits.retries_max, evidence.retries + 1)
    # 3. Turns.
    if capped is None and evidence.turns >= limits.turns_max:
        capped = caps_or_go(policy, Reason.TURN_CEILING, "turns_max", limits.turns_max, evidence.turns)
    # 4. Tokens: used more than the maximum, or used plus every known bound would be.
    if capped is None:
        used = evidence.input_tokens + evidence.output_tokens + evidence.held_tokens
        asked = used + (proposal.tokens_bound or 0)
        if used > limits.tokens_max or asked > limits.tokens_max:
            capped = caps_or_go(policy, Reason.TOKEN_CEILING, "tokens_max", limits.tokens_max, asked)
    # 5. Spend: with a maximum set, a call without a price cannot be let through.
    if capped is None and limits.spend_nanos_max is not None:
        capped = _spend(policy, evidence, proposal, limits.spend_nanos_max)
    if capped is not None:
        return capped
    return Verdict(is_retry=proposal.is_retry) if proposal.is_retry else GO


def decide_handoff(
    policy: Policy, evidence: Evidence, proposal: Proposal, now_us: int, *, controls: Controls = NO_CONTROLS
) -> Verdict:
    """May this agent hand the run to another one? Handoffs are counted, and judged as calls with a constant answer."""
    gate = _gate(policy, evidence, now_us, controls)
    if gate is not None:
        return gate
    if controls.frozen is not None:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze")
    if evidence.handoffs >= policy.limits.handoffs_max:
        capped = caps_or_go(policy, Reason.HANDOFF_CAP, "handoffs_max", policy.limits.handoffs_max, evidence.handoffs)
        if capped is not None:
            return capped
    trip = loops.cycle_before(policy.limits, evidence, proposal) or loops.same_call_before(
        policy.limits, evidence, proposal
    )
    return GO if trip is None else climb(policy, evidence, trip)


def decide_child(
    policy: Policy, evidence: Evidence, depth: int, now_us: int, *, controls: Controls = NO_CONTROLS
) -> Verdict:
    """May an agent at `depth` - 1 start a child at `depth` (the root's children are at 1)?"""
    gate = _gate(policy, evidence, now_us, controls)
    if gate is not None:
        return gate
    if controls.frozen is not None:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze")
    if depth > policy.limits.depth_max:
        capped = caps_or_go(policy, Reason.DEPTH_CAP, "depth_max", policy.limits.depth_max, depth)
        if capped is not None:
            return capped
    return GO


def _gate(policy: Policy, evidence: Evidence, now_us: int, controls: Controls) -> Verdict | None:
    """What stands before every call: the latch, stop and kill orders, the wall clock."""
    if evidence.ended is not None:
        return Verdict(action=Action.STOP, reason=Reason(evidence.ended), guard="latch")
    if controls.kill is not None:
        return Verdict(action=Action.STOP, reason=Reason.KILL_SWITCH, guard="kill")
    if controls.stop is not None:
        return Verdict(action=Action.STOP, reason=Reason.OPERATOR_CANCELLED_LOOP, guard="stop")
    elapsed_ms = evidence.elapsed_us_at(now_us) // 1_000
    if elapsed_ms >= policy.limits.wall_ms_max:
        return caps_or_go(policy, Reason.WALL_CLOCK_CAP, "wall_ms_max", policy.limits.wall_ms_max, elapsed_ms)
    return None


def _denied(policy: Policy, evidence: Evidence, proposal: Proposal, controls: Controls) -> Verdict | None:
    """The first deny rule that fits blocks the call; an agent that keeps proposing it ends the run."""
    for rule in controls.denies:
        if _fits(rule, proposal):
            detail = Detail(tool=proposal.tool, error_class=ErrorClass.DENIED, rule=rule.rule_id)
            return loops.refuse(policy, evidence, proposal, Reason.DENY_RULE, "deny", detail)
    return None


def _fits(rule: DenyRule, proposal: Proposal) -> bool:
    if rule.tool is not None and not fnmatchcase(proposal.tool, rule.tool):
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
    return value is not None and fnmatchcase(value if isinstance(value, str) else repr(value), pattern)


def _refused_by_host(policy: Policy, evidence: Evidence, proposal: Proposal) -> Verdict | None:
    if proposal.fault is not None:
        reason = _FAULT_REASONS.get(proposal.fault, Reason.HOST_DENIED)
        detail = Detail(tool=proposal.tool, error_class=proposal.fault)
        return loops.refuse(policy, evidence, proposal, reason, "host", detail)
    if policy.strict_tools and not proposal.declared:
        return loops.refuse(policy, evidence, proposal, Reason.UNDECLARED_TOOL, "strict_tools", Detail(tool=proposal.tool))
    if proposal.effect is Effect.WRITE and proposal.key_digest is None:
        detail = Detail(tool=proposal.tool, rule=proposal.key_missing)
        return loops.refuse(policy, evidence, proposal, Reason.KEY_MISSING, "key", detail)
    return None


def _operation(
    policy: Policy, evidence: Evidence, proposal: Proposal, operation: OperationView | None
) -> Verdict | None:
    """What the ledger of operations says of this key. A key names one operation: other arguments never run under it."""
    if operation is None:
        return None
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
    same_call = operation.same_run and operation.call_id == proposal.call_id
    if same_call:
        return Verdict(action=Action.REPLAY, detail=detail)
    this_generation = operation.same_run and operation.generation == evidence.generation
    again = this_generation or proposal.key_digest in evidence.answered
    if again and not proposal.replays_committed and not policy.observes:
        return Verdict(
            action=Action.STOP, reason=Reason.ALREADY_COMMITTED, guard="operation", detail=detail,
            loop=f"committed:{proposal.key_digest}",
        )  # fmt: skip
    # Answering from the ledger costs nothing outside, but an agent that only asks for it again is in a loop.
    trip = loops.cycle_before(policy.limits, evidence, proposal) or loops.same_call_before(
        policy.limits, evidence, proposal
    )
    if trip is not None:
        climbed = climb(policy, evidence, trip)
        if climbed.action is not Action.EXECUTE:
            return climbed
    return Verdict(action=Action.REPLAY, detail=detail)


def _round_copy(policy: Policy, evidence: Evidence, proposal: Proposal) -> Verdict | None:
    """Identical calls of one assistant message: the second shares the first's result or is refused."""
    if proposal.round_id is None or proposal.effect is Effect.WAIT:
        return None
    copies = evidence.rounds.get(proposal.round_id, {}).get(proposal.fingerprint, 0)
    if copies == 0:
        return None
    detail = Detail(tool=proposal.tool, repeats=copies + 1)
    if copies >= policy.limits.same_call_max:
        trip = loops.Trip(
            reason=Reason.SAME_CALL_REPEAT, guard="round", detail=detail, loop=f"same_call:{proposal.fingerprint}"
        )
        return climb(policy, evidence, trip)
    action = Action.BLOCK if proposal.effect in _UNSURE else Action.REPLAY
    return Verdict(action=action, reason=Reason.ROUND_DUPLICATE, guard="round", detail=detail)


def _retry(
    policy: Policy,
    evidence: Evidence,
    proposal: Proposal,
    now_us: int,
    controls: Controls,
    operation: OperationView | None,
) -> Verdict:
    """A call that is another try at an answered or open one needs its back-off or a named change, and the cap."""
    wait_us = evidence.waits.get(proposal.fingerprint)
    open_call = evidence.pending.get(proposal.call_id) if proposal.call_id else None
    again = wait_us is not None or (open_call is not None and open_call.fingerprint == proposal.fingerprint)
    if operation is not None and operation.state == "FAILED_RETRYABLE":
        again = True
        wait_us = max(wait_us or 0, operation.not_before_us) if wait_us != NEEDS_CHANGE else wait_us
    if not again:
        return GO if evidence.ended is None else Verdict(action=Action.STOP, reason=Reason(evidence.ended))
    if controls.frozen is not None:
        return Verdict(action=Action.BLOCK, reason=Reason.FROZEN, guard="freeze", detail=Detail(tool=proposal.tool))
    if wait_us is not None and proposal.change is None:
        if wait_us == NEEDS_CHANGE:
            return loops.refuse(policy, evidence, proposal, Reason.NOT_BEFORE, "retry", Detail(tool=proposal.tool))
        if wait_us > now_us:
            return Verdict(action=Action.WAIT, reason=Reason.NOT_BEFORE, guard="retry", until_us=wait_us)
    if evidence.retries >= policy.limits.retries_max:
        capped = caps_or_go(policy, Reason.RETRY_CAP, "retries_max", policy.limits.retries_max, evidence.retries + 1)
        if capped is not None:
            return capped
    return Verdict(is_retry=True)


def _spend(policy: Policy, evidence: Evidence, proposal: TurnProposal, limit_nanos: int) -> Verdict | None:
    if proposal.nanos_bound is None:
        detail = Detail(limit_name="spend_nanos_max", limit=limit_nanos)
        if policy.observes:
            return Verdict(reason=Reason.BUDGET_UNPRICED, guard="spend", detail=detail, observed=True)
        return Verdict(action=Action.STOP, reason=Reason.BUDGET_UNPRICED, guard="spend", detail=detail)
    asked = evidence.spend_nanos + evidence.held_nanos + proposal.nanos_bound
    if asked > limit_nanos:
        return caps_or_go(policy, Reason.SPEND_CAP, "spend_nanos_max", limit_nanos, asked)
    return None

