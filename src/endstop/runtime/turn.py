"""One model call under the guard: `with run.model_call(...) as turn: turn.record(...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from endstop.core.events import TurnProposal
from endstop.core.messages import message_of
from endstop.core.model import Usage
from endstop.core.pipeline import halted
from endstop.core.reasons import Action
from endstop.core.steps_turn import ReserveTurn, SettleTurn, StepAnswer
from endstop.errors import NotAuthorisedError, UsageError
from endstop.runtime.drivers import await_commit

if TYPE_CHECKING:
    from types import TracebackType

    from endstop.core.model import ModelCall
    from endstop.runtime.run import Run

__all__ = ["Prices", "Turn"]

# A provider that refused the call before doing any work does not bill it.
UNBILLED_FAULTS = frozenset({"rate_limit", "auth", "invalid_request", "unreachable"})


class Prices(Protocol):
    """What models cost, in whole nano-dollars. None means that no price is known."""

    def price_nanos(self, model: str, usage: Usage) -> int | None:
        """The price of a finished call."""
        ...

    def worst_case_nanos(self, model: str, input_tokens_max: int | None, output_tokens_max: int | None) -> int | None:
        """The most that a call within these bounds can cost; None also when a bound is missing."""
        ...


class Turn:
    """A model call. Entering reserves it, leaving settles it.

    Entering raises RunHalted when the call may not leave, NotAuthorisedError for a retry of a frozen run, UsageError
    when `TURNS_OPEN_MAX` calls of the run are open.

    A call whose usage is never recorded, or recorded as all zero, is charged its worst case: `worst_case` (input and
    output tokens) where the host knows one, else the call's own bounds.
    """

    def __init__(
        self,
        run: Run,
        call: ModelCall,
        *,
        is_retry: bool = False,
        input_digest: str = "",
        worst_case: tuple[int, int] | None = None,
    ) -> None:
        self._run = run
        self._call = call
        self._worst_case = worst_case or (call.input_tokens_max, call.output_tokens_max)
        self._is_retry = is_retry
        self._input_digest = input_digest
        self._usage: Usage | None = None
        self._fault: str | None = None
        self._started_us = 0
        self._is_used = False
        self.call_id = call.call_id or run.new_call_id("turn")

    def record(
        self,
        *,
        input_tokens: int = 0,
        output_tokens: int = 0,
        cache_read_tokens: int = 0,
        cache_write_tokens: int = 0,
        reasoning_tokens: int = 0,
        spend_nanos: int | None = None,
    ) -> None:
        """What the provider says the call used. Totals replace what was recorded before; they never add up."""
        usage = Usage(
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            cache_read_tokens=cache_read_tokens,
            cache_write_tokens=cache_write_tokens,
            reasoning_tokens=reasoning_tokens,
            spend_nanos=spend_nanos,
        )
        self.record_usage(usage)

    def record_usage(self, usage: Usage) -> None:
        """The same from a record."""
        self._usage = usage if usage.total_tokens else None

    def bound(self, *, input_tokens: int, output_tokens: int) -> None:
        """What the call can have used at most, where its host knows that better after the answer than before."""
        self._worst_case = (input_tokens, output_tokens)

    def fail(self, fault: str) -> None:
        """The provider failed with this class of fault; a call it never worked on is not charged."""
        self._fault = fault

    def __enter__(self) -> Turn:
        held: list[BaseException] = []
        answer = self._run.world.store.transact_now(self._reserve(), held)
        if held:
            # Interrupted in the commit: the call never left, so it is given back.
            if answer.verdict.action is Action.EXECUTE:
                self._run.world.store.transact_now(self._settle(held[0], left=False), held)
            raise held[0]
        self._entered(answer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held: list[BaseException] = []
        answer = self._run.world.store.transact_now(self._settle(error), held)
        if held:
            raise held[0]
        self._left(answer, error)

    async def __aenter__(self) -> Turn:
        held: list[BaseException] = []
        answer = await await_commit(self._run.world.store.transact_async(self._reserve()), held)
        if held:
            if answer.verdict.action is Action.EXECUTE:
                settling = self._run.world.store.transact_async(self._settle(held[0], left=False))
                await await_commit(settling, held)
            raise held[0]
        self._entered(answer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held: list[BaseException] = []
        answer = await await_commit(self._run.world.store.transact_async(self._settle(error)), held)
        if held:
            raise held[0]
        self._left(answer, error)

    # -- Parts

    def _reserve(self) -> ReserveTurn:
        run, call = self._run, self._call
        run.check_open()
        if self._is_used:
            msg = "a model call is entered once; ask the run for another one"
            raise UsageError(msg)
        bounds = [bound for bound in (call.input_tokens_max, call.output_tokens_max) if bound is not None]
        nanos: int | None = None
        if run.limits.spend_nanos_max is not None and run.prices is not None:
            nanos = run.prices.worst_case_nanos(call.model, *self._worst_case)
        self._is_used = True
        self._started_us = run.world.clock.now_us()
        return ReserveTurn(
            run_id=run.root_run_id,
            now_us=self._started_us,
            policy=run.policy,
            proposal=TurnProposal(
                call_id=self.call_id, model=call.model, agent=run.agent, tokens_bound=sum(bounds) if bounds else None,
                nanos_bound=nanos, is_retry=self._is_retry,
            ),
            generation=run.generation,
            input_digest=self._input_digest,
        )  # fmt: skip

    def _entered(self, answer: StepAnswer) -> None:
        verdict = answer.verdict
        if verdict.action is Action.STOP:
            raise self._run.halt(halted(answer.envelope))
        if verdict.guard == "in_flight":
            detail = verdict.detail
            msg = (
                f"{detail.limit} model calls of this run are open at once, which is the most ({detail.limit_name}): "
                "nothing was sent, let one of them end first"
            )
            raise UsageError(msg)
        if verdict.action is not Action.EXECUTE:
            raise NotAuthorisedError(message_of(verdict))

    def _settle(self, error: BaseException | None, *, left: bool = True) -> SettleTurn:
        """The settlement. `left` False says that the call never went to the provider, so that it costs nothing."""
        run, call = self._run, self._call
        usage, estimated = self._usage, False
        fault = self._fault or (type(error).__name__ if error is not None else None)
        if usage is None:
            unbilled = not left or fault in UNBILLED_FAULTS
            estimated = not unbilled
            input_tokens, output_tokens = (0, 0) if unbilled else self._worst_case
            usage = Usage(input_tokens=input_tokens or 0, output_tokens=output_tokens or 0)
        now_us = run.world.clock.now_us()
        return SettleTurn(
            run_id=run.root_run_id, now_us=now_us, call_id=self.call_id, usage=usage,
            spend_nanos=self._price(usage, estimated=estimated), took_us=max(0, now_us - self._started_us),
            model=call.model, estimated=estimated, fault=fault,
        )  # fmt: skip

    def _price(self, usage: Usage, *, estimated: bool) -> int:
        if usage.spend_nanos is not None:
            return usage.spend_nanos
        prices = self._run.prices
        if prices is None:
            return 0
        worst = prices.worst_case_nanos(self._call.model, *self._worst_case) if estimated else None
        return worst or prices.price_nanos(self._call.model, usage) or 0

    def _left(self, answer: StepAnswer, error: BaseException | None) -> None:
        if answer.envelope is not None and error is None:
            raise self._run.halt(halted(answer.envelope))


def checked_bound(name: str, value: int | None) -> int | None:
    """A token bound as given. Raises UsageError when it is no whole number or negative."""
    if value is not None and (type(value) is not int or value < 0):
        msg = f"{name} must be a whole number of tokens, 0 or more"
        raise UsageError(msg)
    return value
