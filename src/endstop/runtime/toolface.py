"""What a function says of itself as a tool, without describing its parameters."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING

from endstop.core.policy import NO_TOOL_POLICY, ToolPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["declared_of", "is_async"]

MARK = "__endstop_tool__"


def declared_of(function: Callable[..., object]) -> tuple[str, ToolPolicy]:
    """The tool's name and declared policy: the decorator's, else the function's own name and nothing declared."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    mark = getattr(function, MARK, None) or getattr(plain, MARK, None)
    name = getattr(mark, "name", None) or getattr(plain, "__name__", type(plain).__name__)
    policy = getattr(mark, "policy", NO_TOOL_POLICY)
    return str(name), policy if isinstance(policy, ToolPolicy) else NO_TOOL_POLICY


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives an awaitable, as far as its definition tells."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    called = plain if inspect.isroutine(plain) else getattr(type(plain), "__call__", plain)
    return inspect.iscoroutinefunction(called)
