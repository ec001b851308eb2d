"""What one transaction does for a model call, a handoff and a child."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from endstop.core import fold
from endstop.core.decide import decide_child, decide_handoff, decide_turn
from endstop.core.ending import end_run, figures, left_behind
from endstop.core.entries import safe_name
from endstop.core.events import Verdict
from endstop.core.reasons import Action
from endstop.core.records import ChildRecord
from endstop.core.steps import Step

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope
    from endstop.core.events import Proposal, TurnProposal
    from endstop.core.model import Usage
    from endstop.core.policy import Policy
    from endstop.core.records import RunTransaction

__all__ = ["ReserveChild", "ReserveHandoff", "ReserveTurn", "SettleTurn", "StepAnswer", "charge_turns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnswer:
    """A verdict, and the run's end when there is one."""

    verdict: Verdict
    envelope: Envelope | None = None
    elapsed_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveTurn(Step[StepAnswer]):
    """May this model call leave? On yes its worst case is held with the same commit. `generation` as in ReserveCall."""

    policy: Policy
    proposal: TurnProposal
    generation: int | None = None
    input_digest: str = ""
    actor: str = "agent"

    def apply(self, txn: RunTransaction) -> StepAnswer:
        """Decide; hold the bounds or write the refusal."""
        policy, proposal = txn.effective(self.policy), self.proposal
        stale = left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return StepAnswer(verdict=stale.verdict, envelope=stale.envelope)
        verdict = decide_turn(policy, txn.evidence, proposal, self.now_us, controls=txn.controls)
        elapsed_us = txn.evidence.elapsed_us_at(self.now_us)
        go = verdict.action is Action.EXECUTE
        if go:
            fold.turn_let_through(txn.evidence, proposal)
        if txn.evidence.ended is None:
            seq = txn.append(
                "turn_intent" if go else "turn_refused",
                self.now_us,
                {
                    "call": proposal.call_id, "model": safe_name(proposal.model), "agent": safe_name(proposal.agent),
                    "tokens_bound": proposal.tokens_bound, "nanos_bound": proposal.nanos_bound,
                    "retry": 1 if proposal.is_retry else None, "reason": verdict.reason, "guard": verdict.guard,
                    "observed": 1 if verdict.observed else None,
                    "turn": txn.evidence.turns, "step": txn.evidence.steps, **figures(verdict),
                },
                actor=self.actor,
            )  # fmt: skip
            if self.input_digest:
                txn.input_digests.append((seq, self.input_digest))
            txn.evidence_changed = True
        if verdict.action is Action.STOP:
            return StepAnswer(verdict=verdict, envelope=end_run(txn, verdict, self.now_us), elapsed_us=elapsed_us)
        return StepAnswer(verdict=verdict, elapsed_us=elapsed_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleTurn(Step[StepAnswer]):
    """A model call has ended: give back its hold and post what it used. `fault` names a provider's failure.

    A call that was charged meanwhile posts what exceeds its charge; the entry then says in `used` what it used.
    """

    call_id: str
    usage: Usage
    spend_nanos: int
    took_us: int = 0
    model: str = ""
    estimated: bool = False
    fault: str | None = None
    actor: str = "agent"

    def apply(self, txn: RunTransaction) -> StepAnswer:
        """Post and note."""
        usage, nanos = fold.turn_excess(txn.evidence, self.call_id, self.usage, self.spend_nanos)
        fold.turn_settled(txn.evidence, self.call_id, usage, nanos)
        txn.evidence_changed = True
        was_charged = usage is not self.usage
        txn.append(
            "turn",
            self.now_us,
            {
                "call": self.call_id, "model": safe_name(self.model), "in": usage.input_tokens,
                "out": usage.output_tokens, "cache_read": usage.cache_read_tokens or None,
                "cache_write": usage.cache_write_tokens or None, "reasoning": usage.reasoning_tokens or None,
                "nanos": nanos, "tokens": usage.total_tokens, "ms": self.took_us // 1_000,
                "used": self.usage.total_tokens if was_charged else None,
                "used_nanos": self.spend_nanos if was_charged else None,
                "estimated": 1 if self.estimated else None,
                "fault": None if self.fault is None else safe_name(self.fault), "ok": self.fault is None,
                "turn": txn.evidence.turns, "step": txn.evidence.steps,
            },
            actor=self.actor,
        )  # fmt: skip
        if txn.evidence.ended is not None:
            return StepAnswer(verdict=Verdict(action=Action.STOP, guard="latch"), envelope=txn.envelope)
        return StepAnswer(verdict=Verdict())


def charge_turns(txn: RunTransaction, now_us: int, fault: str, *, actor: str = "agent") -> None:
    """Post what is held for open model calls that nobody is expected to report any more: their worst case."""
    for call_id, (tokens, nanos) in list(txn.evidence.turns_open.items()):
        fold.turn_charged(txn.evidence, call_id)
        txn.evidence_changed = True
        txn.append(
            "turn",
            now_us,
            {
                "call": call_id, "in": 0, "out": tokens, "nanos": nanos, "tokens": tokens, "ms": 0, "estimated": 1,
                "charged": 1, "fault": fault, "turn": txn.evidence.turns, "step": txn.evidence.steps,
            },
            actor=actor,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveHandoff(Step[StepAnswer]):
    """May one agent hand the run to another? `generation` as in ReserveCall."""

    policy: Policy
    proposal: Proposal
    generation: int | None = None

    def apply(self, txn: RunTransaction) -> StepAnswer:
        """Decide and count."""
        policy = txn.effective(self.policy)
        stale = left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return StepAnswer(verdict=stale.verdict, envelope=stale.envelope)
        verdict = decide_handoff(policy, txn.evidence, self.proposal, self.now_us, controls=txn.controls)
        return _reserved(txn, verdict, self.proposal, "handoff", self.now_us, policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveChild(Step[StepAnswer]):
    """May a child run start at `depth`? Its record is written by the store with the same commit. `generation` as in
    ReserveCall."""

    policy: Policy
    proposal: Proposal
    child_run_id: str
    parent_run_id: str
    depth: int
    child_agent: str = ""
    generation: int | None = None

    def apply(self, txn: RunTransaction) -> StepAnswer:
        """Decide and note."""
        policy = txn.effective(self.policy)
        stale = left_behind(txn, self.generation, self.now_us)
        if stale is not None:
            return StepAnswer(verdict=stale.verdict, envelope=stale.envelope)
        verdict = decide_child(policy, txn.evidence, self.depth, self.now_us, controls=txn.controls)
        if verdict.action is Action.EXECUTE:
            txn.children.append(
                ChildRecord(
                    run_id=self.child_run_id, root_run_id=txn.run_id, parent_run_id=self.parent_run_id,
                    depth=self.depth, agent=self.child_agent or self.proposal.agent, created_at_us=self.now_us,
                )
            )  # fmt: skip
        return _reserved(txn, verdict, self.proposal, "child", self.now_us, policy, self.child_run_id)


def _reserved(
    txn: RunTransaction,
    verdict: Verdict,
    proposal: Proposal,
    kind: str,
    now_us: int,
    policy: Policy,
    child_run_id: str | None = None,
) -> StepAnswer:
    if verdict.action is Action.EXECUTE:
        if kind == "handoff":
            fold.handed_off(txn.evidence, proposal, verdict, policy.limits)
        else:
            fold.child_started(txn.evidence, verdict)
    elif verdict.action is Action.BLOCK:
        fold.refused(txn.evidence, proposal, verdict)
    if txn.evidence.ended is None:
        txn.evidence_changed = True
        txn.append(
            kind if verdict.action is Action.EXECUTE else "call_refused",
            now_us,
            {
                "tool": safe_name(proposal.tool), "effect": proposal.effect.value, "fp": proposal.fingerprint,
                "call": proposal.call_id, "round": proposal.round_id, "agent": safe_name(proposal.agent),
                "child": child_run_id, "action": verdict.action.value, "reason": verdict.reason,
                "guard": verdict.guard, "loop": verdict.loop, "warn": 1 if verdict.warn else None,
                "observed": 1 if verdict.observed else None,
                "turn": txn.evidence.turns, "step": txn.evidence.steps, **figures(verdict),
            },
        )  # fmt: skip
    if verdict.action is Action.STOP:
        return StepAnswer(verdict=verdict, envelope=end_run(txn, verdict, now_us, blocked=proposal))
    return StepAnswer(verdict=verdict)
