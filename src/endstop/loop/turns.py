"""One assistant turn under the guard: bounds, budget, provider faults by class, streaming.

A provider fault is handled by class: rate limits, outages and time-outs wait and try again, within the run's retries
and its wall clock; a refused key or request ends the run at once. Each attempt is one guarded turn. The reason is
`provider_fault`, never success and never an endless retry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import digest
from endstop.core.reasons import Reason
from endstop.errors import EndstopError, InvariantError, NotAuthorisedError, ProviderError
from endstop.loop.faults import provider_error
from endstop.loop.model import input_bound
from endstop.runtime.drivers import DeadlinePassedError, watched
from endstop.runtime.waiting import sleep_watched

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endstop.loop.conversation import AssistantTurn, Item, ToolOffer
    from endstop.loop.model import ModelClient
    from endstop.runtime.run import Run

__all__ = ["LoopEvent", "RunFrozen", "Turns"]

BACKOFF_MS: Final = 500
BACKOFF_MS_MAX: Final = 30_000
PRICED_OUTPUT_TOKENS: Final = 4_096
RETRYABLE_FAULTS: Final = frozenset({"rate_limit", "outage", "timeout", "unreachable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvent:
    """Something that happened in a loop, for progress displays.

    `kind` is turn | text | call | answer | wait | fault | stop. Counts are the run's totals where they are known.
    """

    kind: str
    turn: int | None = None
    step: int | None = None
    tool: str | None = None
    status: str | None = None
    reason: Reason | None = None
    text: str | None = None
    tokens: int | None = None
    spend_nanos: int | None = None
    wait_ms: int | None = None


class RunFrozen(Exception):
    """The next model call would be a retry, and the run is frozen."""


class Turns:
    """Makes the model calls of one run."""

    def __init__(
        self,
        run: Run,
        client: ModelClient,
        *,
        system: str,
        offers: Sequence[ToolOffer],
        output_tokens_max: int | None,
        tell: Callable[[LoopEvent], None],
        stream: bool,
    ) -> None:
        self._run = run
        self._client = client
        self._system = system
        self._offers = offers
        self._output_tokens_max = output_tokens_max
        self._tell = tell
        self._on_text: Callable[[str], None] | None = self._stream_text if stream else None

    async def next(self, items: Sequence[Item]) -> tuple[AssistantTurn, str]:
        """The next assistant turn and its id.

        Raises RunHalted when the run is over or the provider gave up, RunFrozen when only a retry would be left.
        """
        attempt = 0
        while True:
            try:
                return await self._attempt(items, is_retry=attempt > 0)
            except DeadlinePassedError:
                # The run's own time is over: the breaker before the next call says so.
                self._tell(LoopEvent(kind="fault", text="the run's time was over before the model answered"))
            except NotAuthorisedError as error:
                raise RunFrozen(str(error)) from error
            except ProviderError as error:
                self._tell(LoopEvent(kind="fault", text=str(error), reason=Reason.PROVIDER_FAULT))
                await self._give_up_or_wait(error, attempt)
                attempt += 1

    async def _attempt(self, items: Sequence[Item], *, is_retry: bool) -> tuple[AssistantTurn, str]:
        run, limits = self._run, self._run.limits
        bound = input_bound(self._system, items, self._offers)
        cap = self._output_tokens_max
        if cap is None and limits.spend_nanos_max is not None:
            # A budget needs a worst case, so an uncapped call gets a cap.
            cap = PRICED_OUTPUT_TOKENS
        call = run.model_call(
            model=self._client.name,
            output_tokens_max=self._output_tokens_max,
            is_retry=is_retry,
            input_digest=digest(repr(items[-1]).encode("utf-8", "replace"), run.world.store.store_key),
            worst_case=(bound, cap or PRICED_OUTPUT_TOKENS),
        )
        async with call as turn:
            record = run.record()
            self._tell(LoopEvent(kind="turn", turn=record.counters.turns, step=record.counters.steps))
            left_us = limits.wall_ms_max * 1_000 - record.counters.elapsed_ms * 1_000
            deadline_us = None if run.policy.observes else run.world.clock.now_us() + max(left_us, 0)
            try:
                answer = await watched(
                    run.world,
                    self._client.respond(
                        system=self._system, items=items, tools=self._offers, output_tokens_max=cap,
                        on_text=self._on_text,
                    ),
                    run.root_run_id,
                    deadline_us,
                )  # fmt: skip
            except DeadlinePassedError:
                turn.fail("timeout")
                raise
            except ProviderError as error:
                turn.fail(error.fault)
                raise
            except EndstopError:
                raise
            except Exception as error:  # a client of the caller's own, which maps nothing
                mapped = provider_error(error, model=self._client.name, now_us=run.world.clock.now_us())
                turn.fail(mapped.fault)
                raise mapped from None
            if answer.usage is not None:
                turn.record_usage(answer.usage)
            elif cap is None:
                # Nothing capped the answer; now that it is here, its own size does.
                turn.bound(input_tokens=bound, output_tokens=input_bound("", (answer,), ()))
        counters = run.record().counters
        self._tell(
            LoopEvent(
                kind="turn", turn=counters.turns, step=counters.steps, text=answer.text,
                tokens=counters.input_tokens + counters.output_tokens, spend_nanos=counters.spend_nanos,
            )
        )  # fmt: skip
        return answer, turn.call_id

    async def _give_up_or_wait(self, error: ProviderError, attempt: int) -> None:
        run, limits = self._run, self._run.limits
        wait_ms = error.retry_after_ms
        if wait_ms is None:
            wait_ms = min(BACKOFF_MS * 2**attempt, BACKOFF_MS_MAX)
        counters = run.record().counters
        left_ms = limits.wall_ms_max - counters.elapsed_ms
        if (
            error.fault not in RETRYABLE_FAULTS
            or counters.retries >= limits.retries_max
            or counters.turns >= limits.turns_max
            or wait_ms >= left_ms
        ):
            run.end(Reason.PROVIDER_FAULT, str(error), guard=error.fault)
            run.check_open()
            msg = "a run that was ended is still open"
            raise InvariantError(msg)
        self._tell(LoopEvent(kind="wait", wait_ms=wait_ms, reason=Reason.PROVIDER_FAULT))
        await sleep_watched(run.world, wait_ms, run.root_run_id)

    def _stream_text(self, piece: str) -> None:
        self._tell(LoopEvent(kind="text", text=piece))
