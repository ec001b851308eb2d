"""The calls of one assistant message: each goes through the guard, each is answered exactly once.

First occurrences run side by side, at most `parallel_max` at a time, in the order of the message; copies of a call
follow after, so that they can share its answer. When the run ends in the middle, the calls that had not started are
answered with why, and only then the end is raised.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.answers import failure_of
from endstop.core.canonical import canonical_bytes
from endstop.core.codec import output_text, result_json
from endstop.core.messages import TEXTS
from endstop.core.model import NAME_CHARS_MAX, ToolResult
from endstop.core.reasons import Effect, ErrorClass, Reason, Status
from endstop.errors import (
    GuardClosedError,
    NotCanonicalError,
    OutcomeUnknownError,
    RunHalted,
    StoreError,
    UsageError,
)
from endstop.loop.conversation import AssistantTurn, Item, ToolAnswer, ToolAnswers, ToolOffer, ToolRequest
from endstop.loop.turns import LoopEvent
from endstop.runtime.declare import bind_arguments, declaration_of
from endstop.runtime.toolface import MARK, declared_of, is_async, mark_of
from endstop.runtime.waiting import sleep_watched

if TYPE_CHECKING:
    from endstop.runtime.run import Run

__all__ = ["Finished", "Toolbox", "answer_round"]

Tool = Callable[..., object]
WAITS_PER_CALL_MAX: Final = 10
NO_NAME: Final = "(no name)"
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
                ToolOffer(name=_offered_name(name), description=declared.description, parameters=declared.parameters)
            )
        self.offers = tuple(offers)

    def find(self, name: str) -> tuple[str, Tool | None]:
        """The tool's own name and the tool, None when there is none of this name."""
        own = self._own_names.get(name, name)
        found = self._tools.get(own)
        # Whatever a model makes up for a name, the guard gets one that it can count.
        return own if found is not None else own[:NAME_CHARS_MAX] or NO_NAME, found


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
    requests = _with_own_ids(turn.tool_requests, _ids_of(items, turn), turn_id)
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


async def _all(work: Callable[[ToolRequest], Coroutine[object, object, None]], requests: Sequence[ToolRequest]) -> None:
    """Run all to their end, then raise the first failure: a stopped sibling never leaves another half-way."""
    if len(requests) == 1:
        await work(requests[0])
        return
    tasks = [asyncio.ensure_future(work(request)) for request in requests]
    done: list[object] = []
    held: list[asyncio.CancelledError] = []
    while not done:
        try:
            done = list(await asyncio.gather(*tasks, return_exceptions=True))
        except asyncio.CancelledError as signal:
            # It has reached the tasks; they are waited for until each is settled.
            held.append(signal)
    if held:
        raise held[0]
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
            self._keep(signal)
            result = _halted_answer(signal)
        if result.status is Status.COMPLETE and result.error_class is None:
            self.finished = Finished(output=output_text(result.value))
        self.answers[request.call_id] = ToolAnswer(
            call_id=request.call_id, name=request.name, content=_content(result), failed=result.failed
        )
        self._tell(LoopEvent(kind="answer", tool=own_name, status=result.status.value, reason=result.reason))

    def _keep(self, signal: RunHalted) -> None:
        """The first end is the one that is told."""
        if self.signal is None:
            self.signal = signal

    async def _called(self, request: ToolRequest, own_name: str, tool: Tool | None) -> ToolResult[object]:
        args: Mapping[str, object] | str = request.args
        fault: ErrorClass | None = None
        complaint: str | None = None
        if tool is None:
            fault = ErrorClass.UNKNOWN_TOOL
        elif not isinstance(args, str):
            try:
                bound = bind_arguments(tool, args)
            except UsageError as error:
                fault, complaint = ErrorClass.SCHEMA, str(error)
            else:
                args = _plain_arguments(bound)
                tool = tool if args is bound else _with_values(tool, bound)
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
            return await self._run.acall(tool, args, tool=name, call_id=call_id, round_id=self._turn_id, fault=fault)
        except OutcomeUnknownError as error:
            return ToolResult(
                status=Status.POLICY_BLOCKED, reason=Reason.OUTCOME_UNKNOWN, operation_id=error.operation_id,
                error_class=ErrorClass.OUTCOME_UNKNOWN, message=TEXTS[Reason.OUTCOME_UNKNOWN],
                next_allowed_action="human_review",
            )  # fmt: skip
        except (StoreError, GuardClosedError):
            raise
        except Exception as error:  # a tool's own exception, already settled: an answer for the model
            return failure_of(error, Effect.READ)[0]

    def unanswered(self, request: ToolRequest) -> ToolAnswer:
        """The answer to a call that was never started because the run ended first."""
        result: ToolResult[object] = ToolResult(
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


def _with_own_ids(requests: Sequence[ToolRequest], taken: set[str], turn_id: str) -> list[ToolRequest]:
    """The requests with ids that no other call of the conversation has, whatever the model wrote.

    To the guard an id that comes again is the same call proposed again, which is answered from the ledger. Models that
    count their calls anew in every message mean another call.
    """
    named = []
    for place, request in enumerate(requests):
        call_id = request.call_id
        if not call_id or call_id in taken:
            call_id = f"{call_id}#{turn_id}.{place}"
        taken.add(call_id)
        named.append(request if call_id == request.call_id else replace(request, call_id=call_id))
    return named


def _ids_of(items: Sequence[Item], turn: AssistantTurn) -> set[str]:
    """The ids of the calls in earlier messages."""
    earlier = (item for item in items if isinstance(item, AssistantTurn) and item is not turn)
    return {request.call_id for item in earlier for request in item.tool_requests}


def _plain_arguments(bound: Mapping[str, object]) -> Mapping[str, object]:
    """Arguments as the guard sees them: values that have a canonical form as they are, others in their JSON form."""
    try:
        canonical_bytes(dict(bound))
    except NotCanonicalError:
        return {name: _plain_argument(value) for name, value in bound.items()}
    return bound


def _plain_argument(value: object) -> object:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        canonical_bytes(value)
    except NotCanonicalError:
        try:
            plain = to_jsonable_python(value)
        except PydanticSerializationError:
            return value
        # A set has no order of its own, and its printed order changes from process to process.
        return sorted(plain, key=canonical_bytes) if isinstance(value, set | frozenset) else plain
    return value


def _with_values(tool: Tool, bound: Mapping[str, object]) -> Tool:
    """`tool`, called with the values that its type hints ask for in place of their JSON form."""

    async def awaited(**_: object) -> object:
        called: Callable[..., Awaitable[object]] = tool  # type: ignore[assignment]  # it is async, as asked below
        return await called(**bound)

    def called_with(**_: object) -> object:
        return tool(**bound)

    stand_in = functools.wraps(tool)(awaited if is_async(tool) else called_with)
    setattr(stand_in, MARK, mark_of(tool))
    return stand_in


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
