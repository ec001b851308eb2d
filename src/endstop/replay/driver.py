"""The same core as a live guard, fed with a recording: nothing is executed, everything is decided.

A recorded agent cannot answer to a warning or a block: what it did next is taken as it stands. A call that was
refused, or that shared its twin's answer, has no outcome of its own, so its recorded result is left out. A call that
had to wait is taken to have waited, because it was made. A call without an outcome is in flight until the agent that
made it speaks again; then it was not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core import fold, loops
from endstop.core.decide import decide_call, decide_handoff, decide_turn
from endstop.core.events import GO, Proposal, TurnProposal
from endstop.core.evidence import PENDING_MAX, Evidence
from endstop.core.messages import message_of
from endstop.core.model import ToolCall, ToolResult, Usage
from endstop.core.observe import checked, measure, observe
from endstop.core.policy import ToolPolicy
from endstop.core.propose import propose
from endstop.core.reasons import Action, Effect, Status
from endstop.core.slots import open_twin, sealed
from endstop.replay.clock import RunClock
from endstop.replay.gauges import Gauges
from endstop.replay.marks import failure_of, grounds_of, new_log, reads_as_failure
from endstop.replay.open_calls import OpenCalls
from endstop.replay.operations import Operations
from endstop.replay.report import Judgement, RunReport, RunTotals, Sample, StopPoint
from endstop.replay.told import identity_of, rest_of, told_proposal, told_result, tool_result
from endstop.replay.trace import (
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
    from endstop.core.events import Verdict
    from endstop.core.policy import Policy
    from endstop.replay.open_calls import OpenCall

__all__ = ["RunReplay"]

JUDGEMENTS_MAX: Final = 200
SAMPLES_MAX: Final = 2_000
TOOLS_MAX: Final = 10_000
_EXECUTE: Final = Action.EXECUTE
_STOP: Final = Action.STOP
_WAIT: Final = Action.WAIT
_PROGRESS: Final = Status.PROGRESS
_NO_USAGE: Final = Usage()
_TURN: Final = "turn"
_OPEN_CALL: Final = open_twin(ToolCall)
_DECLARED: Final = {effect: ToolPolicy(effect=effect) for effect in (Effect.READ, Effect.POLL, Effect.WAIT)}


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
        self._clock = RunClock()
        self._open = OpenCalls()
        self._log = new_log()
        self._live = True
        self._started = False
        self._stop: StopPoint | None = None
        self._at_stop: RunTotals | None = None
        self._judgements: list[Judgement] = []
        self._samples: list[Sample] | None = [] if sampled else None
        self._stride = 1
        self._calls = self._turns = self._unanswered = self._orphans = 0
        self._input = self._output = self._spend = 0
        self._spend_known = False
        self._tools: dict[str, ToolPolicy] = {}
        self._proposals: dict[tuple[str, str], TurnProposal] = {}
        self._outcome = ""
        # The refused call, and how often the recording made it from there on.
        self._refused: tuple[str, object] | None = None
        self._repeated = 0

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
            self._result(event)  # type: ignore[arg-type]  # the same
        elif kind is TraceTurn:
            self._turn(event)  # type: ignore[arg-type]  # the same
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
                self._give_up(event.call_id)
            case TraceHandoff():
                self._handoff(event)
            case TracePause():
                self._advance(event.at_us)
                self._clock.pause()
                self._outcome = event.outcome or self._outcome
            case TraceStart():
                self._start(event)
            case RunEnd():
                self._outcome = event.outcome or self._outcome
            case _:
                return

    # -- Time and sums

    def _advance(self, at_us: int | None) -> None:
        if at_us is not None:
            self._clock.advance(at_us)
        if not self._started:
            self._started = True
            fold.started(self._evidence, self._clock.now_us)

    def _person(self, at_us: int | None) -> None:
        """A person spoke. Waiting for them was no running time, unless calls were still under way."""
        if not self._open.now and self._started:
            self._clock.pause()
        self._advance(at_us)
        if self._live:
            fold.user_input(self._evidence)

    def _start(self, event: TraceStart) -> None:
        self._advance(event.at_us)
        if not self._live:
            return
        if event.resumed:
            fold.resumed(self._evidence, self._clock.now_us)
        if event.version is not None:
            fold.seed_version(self._evidence, event.version)

    def _totals(self) -> RunTotals:
        return RunTotals(
            calls=self._calls, turns=self._turns, input_tokens=self._input, output_tokens=self._output,
            spend_nanos=self._spend, time_us=self._clock.elapsed_us, spend_known=self._spend_known,
        )  # fmt: skip

    def _post(self, usage: Usage, spend_nanos: int | None) -> None:
        self._input += usage.input_tokens
        self._output += usage.output_tokens
        if spend_nanos is not None:
            self._spend += spend_nanos
            self._spend_known = True
        if self._live:
            fold.turn_settled(self._evidence, "", usage, spend_nanos or 0)

    # -- Calls

    def _call(self, call: TraceCall) -> None:
        index = self._calls
        self._calls = index + 1
        if call.at_us != self._clock.last_us or not self._started:
            self._advance(call.at_us)
        if self._stop is not None:
            self._repeated += self._refused is not None and identity_of(call) == self._refused
            if self._gauges is None:
                return
        evidence = self._evidence
        tool = self._tools.get(call.tool)
        if tool is None or call.effect is not None:
            tool = self._tool(call)
        call_id = call.call_id or f"#{index + 1}"
        if call.fingerprint is None:
            # Readers give sound names, so that the call need not be checked again.
            asked = _OPEN_CALL(
                tool=call.tool, args=call.args, call_id=call_id, round_id=call.round_id, agent=call.agent
            )
            proposal = propose(sealed(asked, ToolCall), tool, fault=call.fault)
        else:
            proposal = told_proposal(call, call_id, tool)
        if len(evidence.pending) >= PENDING_MAX - 1:
            self._give_up(next(iter(evidence.pending)))
        if self._gauges is not None:
            self._gauges.before(evidence, proposal, index, self._clock.now_us)
        key = proposal.key_digest
        if key is None:
            verdict = decide_call(self._policy, evidence, proposal, self._clock.now_us)
        else:
            operation = self._operations.view(key)
            verdict = decide_call(self._policy, evidence, proposal, self._clock.now_us, operation=operation)
        if verdict.action is _WAIT:
            self._clock.wait_until(verdict.until_us)
            operation = None if key is None else self._operations.view(key)
            verdict = decide_call(self._policy, evidence, proposal, self._clock.now_us, operation=operation)
        action = verdict.action
        if verdict is not GO:
            self._judged(verdict, index)
            if action is _STOP:
                if self._stop is None:
                    self._refused, self._repeated = identity_of(call), 1
                self._stopped(verdict, index, proposal=proposal)
                if self._gauges is None:
                    return
                action, verdict = _EXECUTE, GO
        executed = action is _EXECUTE
        if executed:
            if key is not None:
                self._operations.begun(key, proposal, evidence.generation)
            fold.let_through(evidence, proposal, verdict, self._clock.now_us, key)
        elif action is Action.REPLAY:
            fold.replayed(evidence, proposal, verdict)
        elif action is Action.BLOCK:
            fold.refused(evidence, proposal, verdict)
            failure = loops.refusal_keys(proposal.tool, verdict.reason, verdict.detail)[0]
            self._log.append((index, proposal.tool, proposal.fingerprint, "", True, failure, key, True))
        now = self._open.now
        if proposal.call_id in now:
            self._open.add((proposal, tool, index, executed))
        else:
            now[proposal.call_id] = (proposal, tool, index, executed)
        if self._samples is not None:
            self._sample(index, proposal)

    def _tool(self, call: TraceCall) -> ToolPolicy:
        found = self._tools.get(call.tool)
        if found is None:
            if len(self._tools) >= TOOLS_MAX:
                # The names are the recording's: forget, then look up again.
                self._tools.clear()
            found = self._tools[call.tool] = self._policy.tool(call.tool)
        if call.effect is not None and not found.declared and call.effect in _DECLARED and call.fingerprint is None:
            # The recording declares what the policy does not; a write without a key would only be refused.
            return _DECLARED[call.effect]
        return found

    def _give_up(self, call_id: str) -> None:
        """No outcome came while it mattered; should one come late, it is still folded."""
        if self._open.give_up(call_id) is not None:
            fold.abandoned(self._evidence, call_id)
            self._unanswered += 1

    # -- Results

    def _result(self, result: TraceResult) -> None:
        at_us = result.at_us
        if at_us is None and result.took_ms:
            # Where there are no times, what the calls took is the time there is.
            at_us = self._clock.last_us + result.took_ms * 1_000
        if at_us != self._clock.last_us:
            self._advance(at_us)
        if not self._live:
            return
        found = self._open.now.pop(result.call_id, None)
        if found is None:
            found = self._late(result.call_id)
            if found is None:
                return
        elif self._open.more:
            self._open.move_up(result.call_id)
        proposal, tool, place, executed = found
        if not executed:
            return
        if result.digest is None:
            simple = result.error_class is None and result.status is _PROGRESS and result.progress_version is None
            answer = ToolResult(value=result.value) if simple else tool_result(result)
            if tool.owes_data:
                answer = checked(answer, tool)
            measured = measure(answer, proposal, tool)
        else:
            answer, measured = told_result(result, result.digest)
        evidence, now_us = self._evidence, self._clock.now_us
        seen = observe(evidence, proposal, measured, now_us)
        fold.settled(evidence, seen, self._policy.limits, now_us)
        key = proposal.key_digest
        if key is not None:
            self._operations.settled(key, proposal, answer, evidence.generation)
        if seen.evidence or seen.failed:
            failure = "" if seen.error_class is None else failure_of(seen)
            failing = seen.failed or reads_as_failure(result.value)
            self._log.append((place, seen.tool, seen.fingerprint, seen.answer, seen.news, failure, key, failing))
        if self._gauges is not None:
            self._gauges.after(evidence, seen, tool, place, self._calls)
        verdict = loops.after(self._policy, evidence, seen, tool)
        if verdict is GO:
            return
        self._judged(verdict, place)
        if verdict.action is _STOP:
            self._stopped(verdict, self._calls, proposal=proposal, after_call=place)
        else:
            fold.climbed_after(evidence, verdict)

    def _late(self, call_id: str) -> OpenCall | None:
        found = self._open.late(call_id)
        if found is None:
            self._orphans += 1
        else:
            self._unanswered -= 1
        return found

    # -- Turns and handoffs

    def _turn(self, turn: TraceTurn) -> None:
        if turn.at_us != self._clock.last_us or not self._started:
            self._advance(turn.at_us)
        self._turns += 1
        if self._live:
            if self._open.now:
                # The model has spoken again: what has no outcome by now was not waited for.
                for call_id in self._open.of_agent(turn.agent):
                    self._give_up(call_id)
            self._judge_turn(turn)
        if turn.usage is not None or turn.spend_nanos is not None:
            self._post(turn.usage or _NO_USAGE, turn.spend_nanos)

    def _judge_turn(self, turn: TraceTurn) -> None:
        evidence, now_us = self._evidence, self._clock.now_us
        proposal = self._turn_proposal(turn)
        if self._gauges is not None:
            self._gauges.turn(evidence, self._calls, now_us)
        verdict = decide_turn(self._policy, evidence, proposal, now_us)
        if verdict is not GO:
            self._judged(verdict, self._calls)
            if verdict.action is _STOP:
                self._stopped(verdict, self._calls, at_turn=True)
                if self._gauges is None:
                    return
        fold.turn_let_through(evidence, proposal)
        fold.turn_settled(evidence, _TURN, _NO_USAGE, 0)

    def _turn_proposal(self, turn: TraceTurn) -> TurnProposal:
        """A recording seldom says what a call could have used at most; what it did use is posted after it."""
        if turn.tokens_bound is not None or turn.nanos_bound is not None:
            return TurnProposal(
                call_id=_TURN, model=turn.model, agent=turn.agent, tokens_bound=turn.tokens_bound,
                nanos_bound=turn.nanos_bound,
            )  # fmt: skip
        name = (turn.model, turn.agent)
        found = self._proposals.get(name)
        if found is None:
            found = TurnProposal(call_id=_TURN, model=turn.model, agent=turn.agent, nanos_bound=0)
            if len(self._proposals) < TOOLS_MAX:
                self._proposals[name] = found
        return found

    def _handoff(self, event: TraceHandoff) -> None:
        self._advance(event.at_us)
        if not self._live:
            return
        tool = self._policy.tool("handoff")
        made = propose(ToolCall(tool="handoff", args={"from": event.from_agent, "to": event.to_agent}), tool)
        if event.fingerprint is not None:
            made = Proposal(
                tool="handoff", effect=made.effect, fingerprint=event.fingerprint, call_id=made.call_id,
                agent=event.from_agent,
            )  # fmt: skip
        verdict = decide_handoff(self._policy, self._evidence, made, self._clock.now_us)
        if verdict is not GO:
            self._judged(verdict, self._calls)
        if verdict.action is _STOP:
            self._stopped(verdict, self._calls, proposal=made)
            verdict = GO
        if verdict.action is _EXECUTE and self._live:
            fold.handed_off(self._evidence, made, verdict, self._policy.limits)

    # -- Stops

    def _judged(self, verdict: Verdict, index: int) -> None:
        if verdict.action is _STOP or verdict.reason is None or len(self._judgements) >= JUDGEMENTS_MAX:
            return
        made = Judgement(
            call_index=index, action=verdict.action, reason=verdict.reason, guard=verdict.guard, loop=verdict.loop,
            warned=verdict.warn, observed=verdict.observed,
        )  # fmt: skip
        self._judgements.append(made)

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
            self._gauges.stopped(verdict, index, after_call)
        if self._stop is not None or verdict.reason is None:
            return
        fingerprint, key = ("", None) if proposal is None else (proposal.fingerprint, proposal.key_digest)
        turns = self._turns - (1 if at_turn else 0)
        clock, grounds = self._clock, grounds_of(self._log, verdict, fingerprint, key)
        self._stop = StopPoint(
            call_index=index, turn=turns, reason=verdict.reason, guard=verdict.guard, message=message_of(verdict),
            detail=verdict.detail, loop=verdict.loop, after_call=after_call, at_turn=at_turn,
            tool="" if proposal is None else proposal.tool, evidence=grounds.marks,
            between=grounds.between, failing=grounds.failing,
            at_us=None if clock.first_us is None else clock.last_us,
        )  # fmt: skip
        totals = self._totals()
        # The refused call was counted already, and so was the refused turn.
        self._at_stop = RunTotals(
            calls=index, turns=turns, input_tokens=totals.input_tokens, output_tokens=totals.output_tokens,
            spend_nanos=totals.spend_nanos, time_us=totals.time_us, spend_known=totals.spend_known,
        )  # fmt: skip
        self._live = self._gauges is not None

    def _sample(self, index: int, proposal: Proposal) -> None:
        samples = self._samples
        if samples is None or index % self._stride:
            return
        repeats = sum(called == proposal.fingerprint for called, _ in self._evidence.trail) + 1
        samples.append(
            Sample(call_index=index, repeats=repeats, tokens=self._input + self._output, time_us=self._clock.elapsed_us)
        )
        if len(samples) > SAMPLES_MAX:
            # Every second point goes, so that any run fits into one plot.
            self._samples = samples[::2]
            self._stride *= 2

    def report(self, head: RunHead, skips: Skips | None = None) -> RunReport:
        """What was found. `skips` are what the reader could not read of this run alone."""
        totals, before = self._totals(), self._at_stop
        skips = skips or Skips()
        if self._orphans:
            skips.add("result without a call", self._orphans)
        gauges = self._gauges
        return RunReport(
            run_id=head.run_id, source=head.source, format=head.format, outcome=self._outcome or head.outcome,
            totals=totals, stop=self._stop, after=None if before is None else rest_of(totals, before),
            judgements=tuple(self._judgements), alone=() if gauges is None else gauges.trips(),
            peaks=None if gauges is None else gauges.peaks(self._evidence, self._clock.now_us),
            samples=tuple(self._samples or ()), repeated_after=self._repeated,
            unanswered=self._unanswered + self._open.unanswered(), skipped=skips.found(),
        )  # fmt: skip
