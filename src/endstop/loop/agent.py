"""The agent loop: breaker, model call, ledger, tools through the guard, structured answers back, until it ends.

Provider-neutral and small: `turns.py` makes one guarded model call, `rounds.py` answers the calls of one assistant
message. What they keep to:

1. Nothing is sent to a model before the turn was reserved, and no tool is called outside the guard.
2. Every call that a model proposes is answered exactly once, whatever happens.
3. A stop is never success. The end's reason is in the run's record; `LoopResult` repeats it.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.envelope import Envelope
from endstop.core.model import Counters
from endstop.core.reasons import ENDINGS, Reason, RunState
from endstop.errors import InvariantError, RunHalted, RunStopped, StoreError, UsageError
from endstop.loop.conversation import Item, ToolOffer, UserText
from endstop.loop.model import open_model
from endstop.loop.rounds import Toolbox, answer_round
from endstop.loop.turns import LoopEvent, RunFrozen, Turns

if TYPE_CHECKING:
    from pathlib import Path

    from endstop.core.model import Spec
    from endstop.loop.model import ModelClient
    from endstop.runtime.guard import Guard
    from endstop.runtime.run import Run

__all__ = ["AgentLoop", "LoopEvent", "LoopResult", "system_prompt"]

Tool = Callable[..., object]
EMPTY_REPLIES_MAX: Final = 3
PARALLEL_TOOLS_MAX: Final = 8
CONTINUE: Final = "continue"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """How a loop ended. `success` is true exactly when the run is complete. `conversation` is all that was said."""

    success: bool
    run_id: str
    output: str | None
    turns: int
    total_tokens: int
    spend_nanos: int
    terminal_reason: Reason
    envelope: Envelope | None = None
    counters: Counters = Counters()
    conversation: tuple[Item, ...] = field(default=(), repr=False)


def system_prompt(spec: Spec, extra: str = "") -> str:
    """The system prompt: all three fields of the spec, and how answers of guarded tools are to be read."""
    parts = [
        "You work on one task under a guard that stops loops, overspend and repeated side effects.",
        f"What this run does:\n{spec.what_it_does}",
        f"What this run does not do:\n{spec.what_it_does_not}",
        f"Done looks like:\n{spec.done_looks_like}",
        (
            "Every tool answers with a JSON object. Its `status` says what happened: `progress` and `complete` are "
            "good; with `retryable` correct the cause first, trying the same again is refused; on any other status do "
            "not call that tool again. When the task is done, or cannot be done, say so in plain text without calling "
            "a tool."
        ),
    ]
    if extra.strip():
        parts.append(extra)
    return "\n\n".join(parts)


class AgentLoop:
    """A model, its tools and a guard. One loop may run several tasks, also at the same time.

    `model` is a name (`scripted:FILE`, `anthropic:…`, `openai:…`, `ollama:…`), a `ModelClient`, or an object with
    `messages.create`. `tools` are functions, or a mapping from names to functions. `max_output_tokens` caps each model
    call and is then a known bound of the token ceiling. `observer` is called with a `LoopEvent` for whatever happens.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        model: str | object,
        tools: Sequence[Tool] | Mapping[str, Tool] = (),
        system: str = "",
        max_output_tokens: int | None = None,
        base_dir: Path | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        client_model: str | None = None,
        parallel_tools_max: int = PARALLEL_TOOLS_MAX,
        observer: Callable[[LoopEvent], None] | None = None,
        stream: bool = False,
    ) -> None:
        if parallel_tools_max < 1:
            msg = "parallel_tools_max must be at least 1"
            raise UsageError(msg)
        self._guard = guard
        self._client: ModelClient = open_model(
            model, base_dir=base_dir, base_url=base_url, api_key=api_key, client_model=client_model,
            max_output_tokens=max_output_tokens,
        )  # fmt: skip
        self._toolbox = Toolbox(tools, parallel_max=parallel_tools_max)
        self._system = system
        self._output_tokens_max = max_output_tokens
        self._observer = observer
        self._stream = stream

    @property
    def offers(self) -> tuple[ToolOffer, ...]:
        """The tools as the model sees them."""
        return self._toolbox.offers

    def run(
        self,
        task: str,
        spec: Spec | None = None,
        *,
        run_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> LoopResult:
        """Work on `task` to its end, from ordinary code or from inside a running event loop (in a thread then).

        `spec` None takes the one stored for `run_id`. Raises RunStopped when the run had ended before, SpecInvalidError
        without a spec; everything that happens to the run itself comes back as a result.
        """
        work = self.arun(task, spec, run_id=run_id, labels=labels)
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(work)
        return _in_thread(work)

    async def arun(
        self,
        task: str,
        spec: Spec | None = None,
        *,
        run_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> LoopResult:
        """The same as `run`, in the running event loop."""
        scope = self._guard.run(spec, run_id=run_id, labels=labels)
        items: list[Item] = [UserText(text=task)]
        entered = False
        try:
            async with scope as run:
                entered = True
                output, reason = await self._ended(run, items)
        except RunStopped as stop:
            if not entered:
                raise
            return self._result(scope.run_id, items, None, stop.envelope.terminal_reason, stop.envelope)
        except StoreError as error:
            if not entered:
                raise
            return self._unrecorded(scope.run_id, items, error)
        return self._result(scope.run_id, items, output, reason, None)

    # -- Parts

    async def _ended(self, run: Run, items: list[Item]) -> tuple[str | None, Reason]:
        """Work until the run is over, or goes no further for now; what it put out, and why it ended."""
        try:
            return await self._work(run, items), Reason.COMPLETE
        except RunHalted as signal:
            reason = signal.envelope.terminal_reason
            self._tell(LoopEvent(kind="stop", reason=reason))
            return None, reason
        except RunFrozen:
            self._tell(LoopEvent(kind="stop", reason=Reason.FROZEN))
            return None, Reason.FROZEN
        except StoreError as error:
            # Nothing more is sent. Where the ledger answers again by now, it gets the end of the run.
            run.end(Reason.LEDGER_UNAVAILABLE, str(error), guard="ledger")
            raise

    async def _work(self, run: Run, items: list[Item]) -> str | None:
        turns = Turns(
            run, self._client, system=system_prompt(run.spec, self._system), offers=self.offers,
            output_tokens_max=self._output_tokens_max, tell=self._tell, stream=self._stream,
        )  # fmt: skip
        idle: list[str] = []
        while True:
            # 1. The breaker, the model call, its usage.
            turn, turn_id = await turns.next(items)
            items.append(turn)
            # 2. Tools, through the guard; the run may end in here.
            if turn.tool_requests:
                idle.clear()
                _, finished = await answer_round(run, self._toolbox, turn, turn_id, items, self._tell)
                if finished is not None:
                    if run.record().envelope is None:
                        # The answer came out of the ledger: an earlier run had it, and this one is not over yet.
                        run.complete(output=finished.output)
                    return finished.output
                continue
            # 3. The end, or one more push.
            if turn.stop_reason == "refusal":
                run.end(Reason.POLICY_BLOCKED, "the model refused to go on", guard="model")
                raise _halt_of(run)
            idle.append(turn.text)
            if turn.stop_reason == "end_turn":
                # An empty end says that the words before it were the last ones.
                output = next((text for text in reversed(idle) if text.strip()), "")
                run.complete(output=output)
                return output
            if len(idle) >= EMPTY_REPLIES_MAX and len({text.strip() for text in idle[-EMPTY_REPLIES_MAX:]}) == 1:
                message = f"the model gave {EMPTY_REPLIES_MAX} equal replies without a call or an end"
                run.end(Reason.NO_PROGRESS, message, guard="reply")
                raise _halt_of(run)
            items.append(UserText(text=CONTINUE))

    def _result(
        self, run_id: str, items: Sequence[Item], output: str | None, reason: Reason, envelope: Envelope | None
    ) -> LoopResult:
        """The result of a run that is recorded. Success is what the record says, and nothing else."""
        try:
            record = self._guard.show(run_id)
        except StoreError as error:
            return self._unrecorded(run_id, items, error)
        envelope = envelope or record.envelope
        success = record.state is RunState.COMPLETE and envelope is not None
        return LoopResult(
            success=success,
            run_id=run_id,
            output=(record.output if output is None else output) if success else None,
            turns=record.counters.turns,
            total_tokens=record.counters.input_tokens + record.counters.output_tokens,
            spend_nanos=record.counters.spend_nanos,
            terminal_reason=reason if envelope is None else envelope.terminal_reason,
            envelope=envelope,
            counters=record.counters,
            conversation=tuple(items),
        )

    def _unrecorded(self, run_id: str, items: Sequence[Item], error: StoreError) -> LoopResult:
        """The ledger cannot be written, so its end is not in it: the envelope says so and exists only here."""
        reason = Reason.LEDGER_UNAVAILABLE
        envelope = Envelope(
            run_id=run_id, generation=0, terminal_reason=reason, guard="ledger", message=str(error),
            next_allowed_action=ENDINGS[reason].next_action, occurred_at_us=self._guard.world.clock.now_us(),
        )  # fmt: skip
        return LoopResult(
            success=False, run_id=run_id, output=None, turns=0, total_tokens=0, spend_nanos=0, terminal_reason=reason,
            envelope=envelope, conversation=tuple(items),
        )  # fmt: skip

    def _tell(self, event: LoopEvent) -> None:
        if self._observer is not None:
            self._observer(event)


def _halt_of(run: Run) -> RunHalted:
    run.check_open()
    msg = "a run that was ended is still open"
    raise InvariantError(msg)


def _in_thread(work: Coroutine[object, object, LoopResult]) -> LoopResult:
    """Run `work` in an event loop of its own, in a thread; an interrupt of this thread cancels it first."""
    done: Future[LoopResult] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[LoopResult]]] = Future()

    async def main() -> LoopResult:
        task = asyncio.ensure_future(work)
        begun.set_result((asyncio.get_running_loop(), task))
        return await task

    def in_thread() -> None:
        try:
            done.set_result(asyncio.run(main()))
        except BaseException as error:  # handed to the caller's thread below
            done.set_exception(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(in_thread,), name="endstop-loop")
    thread.start()
    try:
        thread.join()
    except BaseException:
        loop, task = begun.result()
        if not done.done():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    return done.result()
