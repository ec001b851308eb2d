"""The calls of one assistant message: each goes through the guard, each is answered exactly once.

First occurrences run side by side, at most `parallel_max` at a time, in the order of the message; copies of a call
follow after, so that they can share its answer. When the run ends in the middle, the calls that had not started are
answered with why, and only then the end is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.answers import failure_of
from endstop.core.canonical import canonical_bytes
from endstop.core.codec import output_text, result_json
from endstop.core.messages import TEXTS
from endstop.core.model import ToolResult
from endstop.core.reasons import Effect, ErrorClass, Reason, Status
from endstop.errors import NotCanonicalError, OutcomeUnknownError, RunHalted, StoreError, UsageError
from endstop.loop.conversation import Item, ToolAnswer, ToolAnswers, ToolOffer, ToolRequest
from endstop.loop.turns import LoopEvent
from endstop.runtime.declare import bind_arguments, declaration_of
from endstop.runtime.toolface import declared_of
from endstop.runtime.waiting import sleep_watched

if TYPE_CHECKING:
    from endstop.loop.conversation import AssistantTurn
    from endstop.runtime.run import Run

__all__ = ["Finished", "Toolbox", "answer_round"]

Tool = Callable[..., object]
WAITS_PER_CALL_MAX: Final = 10
_WAITABLE: Final = (Reason.NOT_BEFORE, Reason.IN_PROGRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A tool said that the task is complete."""

    output: str | None


class Toolbox:
    """The tools of a loop by the name that the model uses."""

    def __init__(self, tools: Sequence[Tool] | Mapping[str, Tool], *, parallel_max: int) -> None:
        named = dict(tools) if isinstance(tools, Mapping) else {declared_of(tool)[0]: tool for tool in tools}
        if not isinstance(tools, Mapping) and len(named) != len(tools):
            msg = "two tools have one name: give one of them another with @endstop.tool(name=...)"
            raise UsageError(msg)
        self._tools = named
        self.parallel_max = parallel_max
        # A provider's names are letters, digits, _ and -; the model sees those, the guard the tool's own name.
        self._own_names = {_offered_name(name): name for name in named}
        if len(self._own_names) != len(named):
            msg = "two tools have names that a provider cannot tell apart"
            raise UsageError(msg)
        offers = []
        for name, tool in named.items():
            declared = declaration_of(tool)
            offers.append(
                ToolOffer(
                    name=_offered_name(name), description=declared.description, parameters=declared.parameters
                )
            )
        self.offers = tuple(offers)

    def find(self, name: str) -> tuple[str, Tool | None]:
        """The tool's own name and the tool, None when there is none of this name."""
        own = self._own_names.get(name, name)
        return own, self._tools.get(own)


def _offered_name(name: str) -> str:
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_-") else "_" for sign in name)[:64]


async def answer_round(
    run: Run,
    toolbox: Toolbox,
    turn: AssistantTurn,
    turn_id: str,
    items: list[Item],
    tell: Callable[[LoopEvent], None],
) -> tuple[ToolAnswers, Finished | None]:
    """Answer every call of `turn` and append the answers to `items`. Raises RunHalted after that when the run ended."""
    round_ = _Round(run, toolbox, turn_id, tell)
    requests = _with_own_ids(turn.tool_requests)
    first, copies = _split(requests)
    try:
        # 1. First occurrences, side by side.
        gate = asyncio.Semaphore(toolbox.parallel_max)

        async def one(request: ToolRequest) -> None:
            async with gate:
                await round_.answer(request)

        await _all(one, first)
        # 2. Copies, one after the other.
        for request in copies:
            await round_.answer(request)
    finally:
        # 3. Whatever has no answer yet was not executed.
        answers = ToolAnswers(
            answers=tuple(
                replace(round_.answers.get(asked.call_id) or round_.unanswered(asked), call_id=told.call_id)
                for asked, told in zip(requests, turn.tool_requests, strict=True)
            )
        )
        items.append(answers)
    if round_.signal is not None:
        raise round_.signal
    return answers, round_.finished


async def _all(work: Callable[[ToolRequest], object], requests: Sequence[ToolRequest]) -> None:
    """Run all to their end, then raise the first failure: a stopped sibling never leaves another half-way."""
    if len(requests) == 1:
        await work(requests[0])  # type: ignore[misc]  # always a coroutine function
        return
    tasks = [asyncio.ensure_future(work(request)) for request in requests]  # type: ignore[call-overload]
    try:
        done = await asyncio.gather(*tasks, return_exceptions=True)
    except asyncio.CancelledError:
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    for outcome in done:
        if isinstance(outcome, BaseException):
            raise outcome


class _Round:
    """The state of one round: answers by call id, and how the run went on in it."""

    def __init__(self, run: Run, toolbox: Toolbox, turn_id: str, tell: Callable[[LoopEvent], None]) -> None:
        self._run = run
        self._toolbox = toolbox
        self._turn_id = turn_id
        self._tell = tell
        self.answers: dict[str, ToolAnswer] = {}
        self.signal: RunHalted | None = None
        self.finished: Finished | None = None

    async def answer(self, request: ToolRequest) -> None:
        """Guard and call one tool; keep its answer. A halt is kept too, so that its siblings are answered."""
        if self.signal is not None or self.finished is not None:
            return
        own_name, tool = self._toolbox.find(request.name)
        result: ToolResult[object]
        self._tell(LoopEvent(kind="call", tool=own_name))
        try:
            result = await self._called(request, own_name, tool)
        except RunHalted as signal:
            self.signal = signal if self.signal is None else self.signal
            result = _halted_answer(signal)
        if result.status is Status.COMPLETE and result.error_class is None:
            self.finished = Finished(output=output_text(result.value))
        self.answers[request.call_id] = ToolAnswer(
            call_id=request.call_id, name=request.name, content=_content(result), failed=result.failed
        )
        self._tell(LoopEvent(kind="answer", tool=own_name, status=result.status.value, reason=result.reason))

    async def _called(self, request: ToolRequest, own_name: str, tool: Tool | None) -> ToolResult[object]:
        args: Mapping[str, object] | str = request.args
        fault: ErrorClass | None = None
        complaint: str | None = None
        if tool is None:
            fault = ErrorClass.UNKNOWN_TOOL
        elif not isinstance(args, str):
            try:
                args = bind_arguments(tool, args)
            except UsageError as error:
                fault, complaint = ErrorClass.SCHEMA, str(error)
        called = _no_tool if tool is None else tool
        result = await self._guarded(called, args, own_name, request.call_id, fault)
        for _ in range(WAITS_PER_CALL_MAX):
            if result.reason not in _WAITABLE or result.retry_after_ms is None:
                break
            left_ms = self._run.limits.wall_ms_max - self._run.record().counters.elapsed_ms
            if result.retry_after_ms >= left_ms:
                break
            self._tell(LoopEvent(kind="wait", tool=own_name, wait_ms=result.retry_after_ms, reason=result.reason))
            await sleep_watched(self._run.world, result.retry_after_ms, self._run.root_run_id)
            result = await self._guarded(called, args, own_name, request.call_id, fault)
        return result if complaint is None else replace(result, message=complaint)

    async def _guarded(
        self, tool: Tool, args: Mapping[str, object] | str, name: str, call_id: str, fault: ErrorClass | None
    ) -> ToolResult[object]:
        try:
            return await self._run.acall(
                tool, args, tool=name, call_id=call_id, round_id=self._turn_id, fault=fault
            )
        except OutcomeUnknownError as error:
            return ToolResult(
                status=Status.POLICY_BLOCKED, reason=Reason.OUTCOME_UNKNOWN, operation_id=error.operation_id,
                error_class=ErrorClass.OUTCOME_UNKNOWN, message=TEXTS[Reason.OUTCOME_UNKNOWN],
                next_allowed_action="human_review",
            )  # fmt: skip
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001  # a tool's own exception, already settled: an answer for the model
            return failure_of(error, Effect.READ)[0]

    def unanswered(self, request: ToolRequest) -> ToolAnswer:
        """The answer to a call that was never started because the run ended first."""
        result = ToolResult[object](
            status=Status.POLICY_BLOCKED, reason=Reason.LOOP_GUARD_TRIGGERED if self.signal else Reason.COMPLETE,
            error_class=ErrorClass.GUARD_BLOCKED, message="the run ended before this call was made; it was not made",
        )  # fmt: skip
        if self.signal is not None:
            result = replace(result, reason=self.signal.envelope.terminal_reason)
        return ToolAnswer(call_id=request.call_id, name=request.name, content=_content(result), failed=True)


def _no_tool(**_: object) -> object:
    msg = "there is no such tool"
    raise LookupError(msg)


def _halted_answer(signal: RunHalted) -> ToolResult[object]:
    envelope = signal.envelope
    return ToolResult(
        status=Status.POLICY_BLOCKED, reason=envelope.terminal_reason, error_class=ErrorClass.GUARD_BLOCKED,
        message=envelope.message, next_allowed_action=envelope.next_allowed_action.value,
    )  # fmt: skip


def _content(result: ToolResult[object]) -> str:
    """The answer as the model reads it: one JSON object."""
    body = result_json(result)
    try:
        return canonical_bytes(body).decode() if "warning" not in body else orjson.dumps(body).decode()
    except (NotCanonicalError, orjson.JSONEncodeError):
        body["value"] = str(body.get("value"))
        return orjson.dumps(body, default=str).decode()


def _with_own_ids(requests: Sequence[ToolRequest]) -> list[ToolRequest]:
    """The requests with ids that are unique within the message, whatever the model wrote."""
    seen: dict[str, int] = {}
    named = []
    for request in requests:
        count = seen[request.call_id] = seen.get(request.call_id, 0) + 1
        named.append(request if count == 1 else replace(request, call_id=f"{request.call_id}#{count}"))
    return named


def _split(requests: Sequence[ToolRequest]) -> tuple[list[ToolRequest], list[ToolRequest]]:
    """First occurrences, and copies of them."""
    first: list[ToolRequest] = []
    copies: list[ToolRequest] = []
    seen: set[object] = set()
    for request in requests:
        args = request.args if isinstance(request.args, str) else dict(request.args)
        try:
            name: object = (request.name, canonical_bytes(args))
        except NotCanonicalError:
            name = request.call_id
        (copies if name in seen else first).append(request)
        seen.add(name)
    return first, copies


