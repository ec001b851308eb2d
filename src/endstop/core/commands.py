"""What a pipeline may ask of the world, as a closed set of typed commands.

`Command[A]` carries the type of its answer. `perform` is the one place where that type is taken on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from endstop.core.probing import ProbeAnswer, ProbeRequest

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.model import ToolResult
    from endstop.core.records import OperationRecord
    from endstop.core.steps import Step

__all__ = [
    "AskTarget", "AwaitOutcome", "CallCut", "Command", "Execute", "Flow", "IsOwnerGone", "Recall", "RecoverOwner",
    "Remember", "Returned", "Transact", "perform",
]  # fmt: skip

A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command(Generic[A]):
    """One request to the driver; its answer is of type A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transact(Command[A]):
    """Run `step` in one durable transaction: reserve, settle or lose. Never abandoned half-way."""

    step: Step[A]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """How a tool ended: with a value, or with an exception of its own. `took_us` is its running time."""

    value: object = None
    error: Exception | None = None
    took_us: int = 0


class CallCut(BaseException):
    """What a driver throws into a pipeline in place of a tool's outcome, when the bare `signal` would not say enough.

    `sent` False: it came before the tool was called, so nothing was sent. A GeneratorExit comes in this way too,
    because a bare one means that the pipeline itself is dropped.
    """

    def __init__(self, signal: BaseException, *, sent: bool) -> None:
        super().__init__(signal)
        self.signal = signal
        self.sent = sent


@dataclass(frozen=True, slots=True, kw_only=True)
class Execute(Command[Returned]):
    """Call the tool, outside any transaction. A cancellation or interrupt is thrown into the pipeline; one that came
    before the tool was called, as CallCut."""

    proposal: Proposal
    operation: OperationRecord | None
    call: Callable[[], object] = field(repr=False)
    deadline_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall(Command["ToolResult[object] | None"]):
    """The answer that the twin of this call got earlier in its round, when this process knows it."""

    round_id: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remember(Command[None]):
    """Keep this answer for twins of the call in its round."""

    round_id: str
    fingerprint: str
    result: ToolResult[object] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoverOwner(Command[bool]):
    """Is the worker that owns this executing operation dead? If so its run is recovered; True says that it was."""

    operation: OperationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitOutcome(Command[bool]):
    """Wait, without a lock or a transaction, until this operation of another call is no longer in flight, its worker is
    dead, or `until_us` has come. True says that asking again may give another answer."""

    operation: OperationRecord
    until_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IsOwnerGone(Command[bool]):
    """Is it proven that this operation's worker can send nothing more? A lease that ran out is no proof."""

    operation: OperationRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class AskTarget(Command[ProbeAnswer]):
    """Put one question to a target, outside any transaction, until the request's deadline. What breaks is an answer
    too: inconclusive."""

    probe: Callable[..., object] | str = field(repr=False)
    request: ProbeRequest


Flow = Generator["Command[object]", object, R]


def perform(command: Command[A]) -> Generator[Command[object], object, A]:
    """Ask the driver for `command` and give its answer its type."""
    answer = yield cast("Command[object]", command)
    return cast("A", answer)
