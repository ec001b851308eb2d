"""The same core as a live guard, fed with a recording: nothing is executed, everything is decided.

A recorded agent cannot answer to a warning or a block: what it did next is taken as it stands. A call that was
refused, or that shared its twin's answer, has no outcome of its own, so its recorded result is left out. A call that
had to wait is taken to have waited, because it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core import fold, loops
from endstop.core.decide import decide_call, decide_handoff, decide_turn
from endstop.core.events import GO, Proposal, TurnProposal
from endstop.core.evidence import PENDING_MAX, Evidence
from endstop.core.messages import message_of
from endstop.core.model import ToolCall, ToolResult, Usage
from endstop.core.observe import Measured, checked, measure, observe
from endstop.core.policy import ToolPolicy
from endstop.core.propose import propose
from endstop.core.reasons import Action, Effect, Status
from endstop.replay.gauges import Gauges
from endstop.replay.marks import Logged, marks_of, new_log
from endstop.replay.operations import Operations
from endstop.replay.report import Judgement, RunReport, RunTotals, Sample, StopPoint
from endstop.replay.trace import (
    AnswerDigest,
    Event,
    RunEnd,
    RunHead,
    Skips,
    TraceCall,
    TraceHandoff,
    TraceLost,
    TracePause,
    TraceResult,
    TraceStart,
    TraceTurn,
    TraceUsage,
    UserInput,
)

if TYPE_CHECKING:
    from endstop.core.events import Observation, Verdict
    from endstop.core.policy import Policy

__all__ = ["RunReplay"]

JUDGEMENTS_MAX: Final = 200
SAMPLES_MAX: Final = 2_000
LEFT_MAX: Final = 256
_EXECUTE: Final = Action.EXECUTE
_STOP: Final = Action.STOP
_NO_USAGE: Final = Usage()
_DECLARED: Final = {effect: ToolPolicy(effect=effect) for effect in (Effect.READ, Effect.POLL, Effect.WAIT)}


@dataclass(slots=True)
class _Open:
    """A call without an outcome yet."""

    proposal: Proposal
    tool: ToolPolicy
    index: int
    turn: int
    executed: bool


class RunReplay:
    """One run under one policy. Feed it the run's events in order, then ask for the report.

    `goes_on` keeps judging after the first stop as if it had not been: for the guards one by one, for peaks and plots.
    Without it the rest of the run is only counted, which is what a stop would have saved.
    """

    def __init__(self, policy: Policy, *, goes_on: bool = False, sampled: bool = False) -> None:
        self._policy = policy
        self._evidence = Evidence()
        self._operations = Operations()
        self._gauges = Gauges(policy) if goes_on else None
        self._open: dict[str, list[_Open]] = {}
        self._left: dict[str, list[_Open]] = {}
        self._log = new_log()
        self._stop: StopPoint | None = None
        self._at_stop: RunTotals | None = None
        self._judgements: list[Judgement] = []
        self._samples: list[Sample] | None = [] if sampled else None
        self._stride = 1
        self._calls = self._turns = self._unanswered = self._orphans = 0
        self._input = self._output = self._spend = 0
        self._spend_known = False
        # The clock: microseconds of the recording, less what was spent waiting for a person.
        self._last_us = self._now_us = 1
        self._first_us: int | None = None
        self._waited_us = 0
        self._paused = False
        self._tools: dict[str, ToolPolicy] = {}
        self._outcome = ""

    @property
    def calls(self) -> int:
        """How many calls were fed so far."""
        return self._calls

    @property
    def stop(self) -> StopPoint | None:
        """Where the guard would have ended the run, so far."""
        return self._stop

    def feed(self, event: Event) -> None:
        """The next event of the run."""
        kind = type(event)
        if kind is TraceCall:
            self._call(event)  # type: ignore[arg-type]  # its type was just compared
        elif kind is TraceResult:
            self._result(event)  # type: ignore[arg-type]
        elif kind is TraceTurn:
            self._turn(event)  # type: ignore[arg-type]
        else:
            self._other(event)

    def _other(self, event: Event) -> None:
        match event:
            case TraceUsage():
                self._advance(event.at_us)
                self._post(event.usage, event.spend_nanos)
            case UserInput():
                self._person(event.at_us)
            case TraceLost():
                self._lost(event.call_id)
            case TraceHandoff():
                self._handoff(event)
            case TracePause():
                self._advance(event.at_us)
                self._paused = True
            case TraceStart():
                self._start(event)
            case RunEnd():
                self._outcome = event.outcome or self._outcome
            case _:
                return

    # -- Time and sums

    def _advance(self, at_us: int | None) -> None:
        if at_us is not None:
            if self._first_us is None:
                self._first_us = self._last_us = self._now_us = at_us
            elif at_us > self._last_us:
                if self._paused:
                    self._waited_us += at_us - self._last_us
                self._last_us = at_us
                self._now_us = max(self._now_us, at_us - self._waited_us)
            self._paused = False
        evidence = self._evidence
        if not evidence.running_since_us and evidence.ended is None:
            fold.started(evidence, self._now_us)

    def _person(self, at_us: int | None) -> None:
        """A person spoke. Waiting for them was no running time, unless calls were still under way."""
        if at_us is not None and self._first_us is not None and not self._open and at_us > self._last_us:
            self._waited_us += at_us - self._last_us
            self._last_us = at_us
        self._advance(at_us)
        if self._is_live:
            fold.user_input(self._evidence)

    def _start(self, event: TraceStart) -> None:
        self._advance(event.at_us)
        if not self._is_live:
            return
        if event.resumed:
            fold.resumed(self._evidence, self._now_us)
        if event.version is not None:
            fold.seed_version(self._evidence, event.version)

    @property
    def _is_live(self) -> bool:
        return self._stop is None or self._gauges is not None

    def _totals(self) -> RunTotals:
        first = self._first_us
        return RunTotals(
            calls=self._calls, turns=self._turns, input_tokens=self._input, output_tokens=self._output,
            spend_nanos=self._spend, time_us=0 if first is None else max(0, self._now_us - first),
            spend_known=self._spend_known,
        )  # fmt: skip

    def _post(self, usage: Usage, spend_nanos: int | None) -> None:
        self._input += usage.input_tokens
        self._output += usage.output_tokens
        if spend_nanos is not None:
            self._spend += spend_nanos
            self._spend_known = True
        if self._is_live:
            fold.turn_settled(self._evidence, "", usage, spend_nanos or 0)

    # -- Calls

    def _call(self, call: TraceCall) -> None:
        index = self._calls
        self._calls += 1
        self._advance(call.at_us)
        if self._stop is not None and self._gauges is None:
            return
        tool = self._tool(call)
        proposal = self._proposal(call, tool, index)
        if len(self._evidence.pending) >= PENDING_MAX - 1:
            self._give_up_oldest()
        verdict = self._decided(proposal)
        if self._gauges is not None:
            self._gauges.before(self._evidence, proposal, index, self._now_us)
        if verdict is not GO:
            self._judged(verdict, index)
        executed = verdict.action is _EXECUTE
        if verdict.action is _STOP:
            self._stopped(verdict, index, proposal=proposal)
            executed = self._gauges is not None
            verdict = GO
        if executed:
            self._let_through(proposal, verdict)
        elif verdict.action is Action.REPLAY:
            fold.replayed(self._evidence, proposal, verdict)
        elif verdict.action is Action.BLOCK:
            fold.refused(self._evidence, proposal, verdict)
            self._log_refusal(proposal, verdict, index)
        if executed or self._stop is None:
            self._open.setdefault(proposal.call_id, []).append(
                _Open(proposal=proposal, tool=tool, index=index, turn=self._turns, executed=executed)
            )
        if self._samples is not None:
            self._sample(index, proposal)

    def _tool(self, call: TraceCall) -> ToolPolicy:
        found = self._tools.get(call.tool)
        if found is None:
            if len(self._tools) > 10_000:  # noqa: PLR2004  # names are the recording's: forget, then look up again
                self._tools.clear()
            found = self._tools[call.tool] = self._policy.tool(call.tool)
        if not found.declared and call.effect in _DECLARED and call.fingerprint is None:
            # The recording declares what the policy does not; a write without a key would only be refused.
            return _DECLARED[call.effect]
        return found

    def _proposal(self, call: TraceCall, tool: ToolPolicy, index: int) -> Proposal:
        call_id = call.call_id or f"#{index + 1}"
        if call.fingerprint is None:
            return propose(
                ToolCall(tool=call.tool, args=call.args, call_id=call_id, round_id=call.round_id, agent=call.agent),
                tool, fault=call.fault,
            )  # fmt: skip
        return Proposal(
            tool=call.tool, effect=tool.effect if tool.declared else call.effect or Effect.UNKNOWN,
            fingerprint=call.fingerprint, call_id=call_id, round_id=call.round_id, agent=call.agent,
            key_digest=call.key_digest, replays_committed=tool.replays_committed, fault=call.fault,
            declared=tool.declared or bool(call.declared),
        )  # fmt: skip

    def _decided(self, proposal: Proposal) -> Verdict:
        key = proposal.key_digest
        operation = None if key is None else self._operations.view(key)
        verdict = decide_call(self._policy, self._evidence, proposal, self._now_us, operation=operation)
        if verdict.action is Action.WAIT:
            self._now_us = max(self._now_us, verdict.until_us)
            verdict = decide_call(self._policy, self._evidence, proposal, self._now_us, operation=operation)
        return verdict

    def _let_through(self, proposal: Proposal, verdict: Verdict) -> None:
        key = proposal.key_digest
        if key is not None:
            self._operations.begun(key, proposal, self._evidence.generation)
        fold.let_through(self._evidence, proposal, verdict, self._now_us, key)

    def _give_up_oldest(self) -> None:
        for waiting in self._open.values():
            if waiting and waiting[0].executed:
                self._set_aside(waiting[0])
                return

    def _set_aside(self, found: _Open) -> None:
        """No outcome came while it mattered; should one come late, it is still folded."""
        call_id = found.proposal.call_id
        waiting = self._open.get(call_id, [])
        if found in waiting:
            waiting.remove(found)
        if not waiting:
            self._open.pop(call_id, None)
        if not found.executed:
            return
        fold.abandoned(self._evidence, call_id)
        self._unanswered += 1
        self._left.setdefault(call_id, []).append(found)
        if len(self._left) > LEFT_MAX:
            del self._left[next(iter(self._left))]

    def _lost(self, call_id: str) -> None:
        waiting = self._open.get(call_id)
        if waiting:
            self._set_aside(waiting[0])

    # -- Results

    def _result(self, result: TraceResult) -> None:
        if result.at_us is None and result.took_ms:
            # Where there are no times, what the calls took is the time there is.
            self._advance(self._last_us + result.took_ms * 1_000)
        else:
            self._advance(result.at_us)
        found = self._answered(result.call_id)
        if found is None or not found.executed or not self._is_live:
            return
        proposal, tool = found.proposal, found.tool
        if result.digest is None:
            answer = checked(_tool_result(result), tool)
            measured = measure(answer, proposal, tool)
        else:
            answer, measured = _told(result, result.digest)
        evidence = self._evidence
        seen = observe(evidence, proposal, measured, self._now_us)
        fold.settled(evidence, seen, self._policy.limits, self._now_us)
        key = proposal.key_digest
        if key is not None:
            self._operations.settled(key, proposal, answer, evidence.generation)
        if seen.evidence or seen.failed:
            self._log_result(seen, key, found.index)
        if self._gauges is not None:
            self._gauges.after(evidence, seen, tool, found.index, self._calls)
        verdict = loops.after(self._policy, evidence, seen, tool)
        if verdict is not GO:
            self._judged(verdict, found.index)
            if verdict.action is _STOP:
                self._stopped(verdict, self._calls, proposal=proposal, after_call=found.index)
            else:
                fold.climbed_after(evidence, verdict)

    def _answered(self, call_id: str) -> _Open | None:
        for place in (self._open, self._left):
            waiting = place.get(call_id)
            if waiting:
                found = waiting.pop(0)
                if not waiting:
                    del place[call_id]
                if place is self._left:
                    self._unanswered -= 1
                return found
        if self._is_live:
            self._orphans += 1
        return None

    def _log_result(self, seen: Observation, key: str | None, index: int) -> None:
        failure = "" if seen.error_class is None else loops.streak_key(seen.tool, seen.error_class, seen.error_symbol)
        self._log.append(Logged(index, seen.tool, seen.fingerprint, seen.answer, seen.news, failure, key))

    def _log_refusal(self, proposal: Proposal, verdict: Verdict, index: int) -> None:
        failure = loops.refusal_keys(proposal.tool, verdict.reason, verdict.detail)[0]
        self._log.append(Logged(index, proposal.tool, proposal.fingerprint, "", True, failure, proposal.key_digest))

    # -- Turns and handoffs

    def _turn(self, turn: TraceTurn) -> None:
        self._advance(turn.at_us)
        self._turns += 1
        if self._is_live:
            # The model has spoken again: what has no outcome by now was not waited for.
            for found in [w for waiting in self._open.values() for w in waiting if w.proposal.agent == turn.agent]:
                self._set_aside(found)
            self._judge_turn(turn)
        usage = turn.usage or _NO_USAGE
        if turn.usage is not None or turn.spend_nanos is not None:
            self._post(usage, turn.spend_nanos)

    def _judge_turn(self, turn: TraceTurn) -> None:
        call_id = f"turn#{self._turns}"
        evidence = self._evidence
        # A recording seldom says what a call could have cost at most; what it did cost is posted after it.
        proposal = TurnProposal(
            call_id=call_id, model=turn.model, agent=turn.agent, tokens_bound=turn.tokens_bound,
            nanos_bound=0 if turn.nanos_bound is None else turn.nanos_bound,
        )  # fmt: skip
        verdict = decide_turn(self._policy, evidence, proposal, self._now_us)
        if self._gauges is not None:
            self._gauges.turn(evidence, self._calls, self._now_us)
        if verdict is not GO:
            self._judged(verdict, self._calls)
        if verdict.action is _STOP:
            self._stopped(verdict, self._calls, at_turn=True)
            if self._gauges is None:
                return
        fold.turn_let_through(evidence, proposal)
        fold.turn_settled(evidence, call_id, _NO_USAGE, 0)

    def _handoff(self, event: TraceHandoff) -> None:
        self._advance(event.at_us)
        if not self._is_live:
            return
        tool = self._policy.tool("handoff")
        made = propose(ToolCall(tool="handoff", args={"from": event.from_agent, "to": event.to_agent}), tool)
        if event.fingerprint is not None:
            made = Proposal(
                tool="handoff", effect=made.effect, fingerprint=event.fingerprint, call_id=made.call_id,
                agent=event.from_agent,
            )  # fmt: skip
        verdict = decide_handoff(self._policy, self._evidence, made, self._now_us)
        if verdict is not GO:
            self._judged(verdict, self._calls)
        if verdict.action is _STOP:
            self._stopped(verdict, self._calls, proposal=made)
            verdict = GO
        if verdict.action is _EXECUTE and self._is_live:
            fold.handed_off(self._evidence, made, verdict, self._policy.limits)

    # -- Stops

    def _judged(self, verdict: Verdict, index: int) -> None:
        if verdict.action is _STOP or verdict.reason is None or len(self._judgements) >= JUDGEMENTS_MAX:
            return
        self._judgements.append(
            Judgement(
                call_index=index,
                action=verdict.action,
                reason=verdict.reason,
                guard=verdict.guard,
                loop=verdict.loop,
                warned=verdict.warn,
                observed=verdict.observed,
            )  # fmt: skip
        )

    def _stopped(
        self,
        verdict: Verdict,
        index: int,
        *,
        proposal: Proposal | None = None,
        after_call: int | None = None,
        at_turn: bool = False,
    ) -> None:
        if self._gauges is not None:
            self._gauges.stopped(verdict, index)
        if self._stop is not None or verdict.reason is None:
            return
        fingerprint = "" if proposal is None else proposal.fingerprint
        self._stop = StopPoint(
            call_index=index, turn=self._turns - (1 if at_turn else 0), reason=verdict.reason, guard=verdict.guard,
            message=message_of(verdict), detail=verdict.detail, loop=verdict.loop, after_call=after_call,
            at_turn=at_turn, tool="" if proposal is None else proposal.tool,
            evidence=marks_of(self._log, verdict, fingerprint, None if proposal is None else proposal.key_digest),
            at_us=self._last_us if self._first_us is not None else None,
        )  # fmt: skip
        totals = self._totals()
        # The refused call was counted already, and so was the refused turn.
        self._at_stop = RunTotals(
            calls=index, turns=totals.turns - (1 if at_turn else 0), input_tokens=totals.input_tokens,
            output_tokens=totals.output_tokens, spend_nanos=totals.spend_nanos, time_us=totals.time_us,
            spend_known=totals.spend_known,
        )  # fmt: skip

    def _sample(self, index: int, proposal: Proposal) -> None:
        samples = self._samples
        if samples is None or index % self._stride:
            return
        repeats = sum(called == proposal.fingerprint for called, _ in self._evidence.trail) + 1
        samples.append(Sample(call_index=index, repeats=repeats, tokens=self._input + self._output))
        if len(samples) > SAMPLES_MAX:
            # Every second point goes, so that any run fits into one plot.
            self._samples = samples[::2]
            self._stride *= 2

    def report(self, head: RunHead, skips: Skips | None = None) -> RunReport:
        """What was found. `skips` are what the reader could not read of this run's source."""
        totals, before = self._totals(), self._at_stop
        skips = skips or Skips()
        if self._orphans:
            skips.add("result without a call", self._orphans)
        gauges = self._gauges
        return RunReport(
            run_id=head.run_id, source=head.source, format=head.format, outcome=self._outcome or head.outcome,
            totals=totals, stop=self._stop, after=None if before is None else _left(totals, before),
            judgements=tuple(self._judgements), alone=() if gauges is None else gauges.trips(),
            peaks=None if gauges is None else gauges.peaks(self._evidence, self._now_us),
            samples=tuple(self._samples or ()),
            unanswered=self._unanswered + sum(one.executed for waiting in self._open.values() for one in waiting),
            skipped=skips.found(),
        )  # fmt: skip


def _left(totals: RunTotals, before: RunTotals) -> RunTotals:
    return RunTotals(
        calls=totals.calls - before.calls, turns=totals.turns - before.turns,
        input_tokens=totals.input_tokens - before.input_tokens,
        output_tokens=totals.output_tokens - before.output_tokens,
        spend_nanos=totals.spend_nanos - before.spend_nanos, time_us=totals.time_us - before.time_us,
        spend_known=totals.spend_known,
    )  # fmt: skip


def _tool_result(result: TraceResult) -> ToolResult[object]:
    if result.error_class is None and result.status is Status.PROGRESS and result.progress_version is None:
        return ToolResult(value=result.value)
    status = result.status
    if result.error_class is not None and status is Status.PROGRESS:
        status = Status.RETRYABLE
    return ToolResult(
        status=status, value=result.value, error_class=result.error_class, message=result.message,
        progress_version=result.progress_version, retry_after_ms=result.retry_after_ms,
    )  # fmt: skip


def _told(result: TraceResult, digest: AnswerDigest) -> tuple[ToolResult[object], Measured]:
    """A result of which only digests were recorded."""
    answer = _tool_result(result)
    measured = Measured(
        status=answer.status, failed=digest.failed or answer.failed, answer=digest.answer, evidence=digest.evidence,
        error_class=answer.error_class, error_symbol=digest.error_symbol, version=answer.progress_version,
        version_source=digest.version_source, retry_after_ms=digest.retry_after_ms,
    )  # fmt: skip
    return answer, measured
