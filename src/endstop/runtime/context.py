"""What a tool may know about the call it is in: `endstop.current()`."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from endstop.errors import UsageError

__all__ = ["CallContext", "current", "entered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """The call under way. `idempotency_key` is stable across attempts and may be sent to the target; `deadline_us` is
    microseconds since 1970; `cancelled` turns true when the run was stopped or the deadline has passed."""

    run_id: str
    tool: str
    call_id: str
    idempotency_key: str | None
    operation_id: str | None
    attempt: int
    deadline_us: int | None
    is_cancelled: Callable[[], bool] = field(repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether this call should give up as soon as it safely can."""
        return self.is_cancelled()


_CONTEXT: Final[ContextVar[CallContext | None]] = ContextVar("endstop_call", default=None)


def current() -> CallContext:
    """The context of the guarded call that this code runs in. Raises UsageError outside of one."""
    context = _CONTEXT.get()
    if context is None:
        msg = "endstop.current() was asked outside a guarded call"
        raise UsageError(msg)
    return context


class entered:  # noqa: N801  # used as a statement: `with entered(context):`
    """Make `context` the current one for a block."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: CallContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = _CONTEXT.set(self._context)

    def __exit__(self, *_: object) -> None:
        _CONTEXT.reset(self._token)
