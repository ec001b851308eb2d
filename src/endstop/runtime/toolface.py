"""What a function says of itself as a tool, without describing its parameters."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from endstop.core.policy import NO_TOOL_POLICY, ToolPolicy
from endstop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MARK", "declared_of", "fits", "is_async", "mark_of", "refuse_generator"]

MARK = "__endstop_tool__"


def declared_of(function: Callable[..., object]) -> tuple[str, ToolPolicy]:
    """The tool's name and declared policy: the decorator's, else the function's own name and nothing declared."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    mark = mark_of(function)
    name = getattr(mark, "name", None) or getattr(plain, "__name__", type(plain).__name__)
    policy = getattr(mark, "policy", NO_TOOL_POLICY)
    return str(name), policy if isinstance(policy, ToolPolicy) else NO_TOOL_POLICY


def mark_of(function: Callable[..., object]) -> object:
    """What the decorator left on the function, or on the one inside partial objects; None without one."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    return getattr(function, MARK, None) or getattr(plain, MARK, None)


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives an awaitable, as far as its definition tells."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    called = plain if inspect.isroutine(plain) else inspect.getattr_static(type(plain), "__call__", plain)
    return inspect.iscoroutinefunction(called)


def refuse_generator(function: Callable[..., object]) -> None:
    """Raise UsageError for a generator function: calling it runs nothing, so its answer would say nothing."""
    plain: object = function
    while isinstance(plain, functools.partial):
        plain = plain.func
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        msg = f"tool {declared_of(function)[0]} is a generator: collect what it yields and return that"
        raise UsageError(msg)


_signatures: WeakKeyDictionary[object, inspect.Signature | None] = WeakKeyDictionary()


def fits(function: Callable[..., object], args: Mapping[str, object]) -> bool:
    """Whether `function(**args)` names every parameter that it must and none that it does not have.

    True for what has no signature to read: then only the call itself can tell.
    """
    signature = _signature_of(function)
    if signature is None:
        return True
    try:
        signature.bind(**args)
    except TypeError:
        return False
    return True


def _signature_of(function: Callable[..., object]) -> inspect.Signature | None:
    try:
        return _signatures[function]
    except (KeyError, TypeError):
        pass  # not seen yet, or neither hashable nor weakly referable
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        found = None
    try:
        _signatures[function] = found
    except TypeError:
        return found  # made anew each time
    return found
