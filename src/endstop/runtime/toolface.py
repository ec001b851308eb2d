"""What a function says of itself as a tool, without describing its parameters."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from endstop.core.policy import NO_TOOL_POLICY, ToolPolicy
from endstop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["MARK", "declared_of", "fits", "is_async", "mark_of", "refuse_generator"]

MARK = "__endstop_tool__"


def declared_of(function: Callable[..., object]) -> tuple[str, ToolPolicy]:
    """The tool's name and declared policy: the decorator's, else the function's own name and nothing declared."""
    mark = mark_of(function)
    plain = _plain(function)
    name = getattr(mark, "name", None) or getattr(plain, "__name__", type(plain).__name__)
    policy = getattr(mark, "policy", NO_TOOL_POLICY)
    return str(name), policy if isinstance(policy, ToolPolicy) else NO_TOOL_POLICY


def mark_of(function: Callable[..., object]) -> object:
    """What the decorator left on the function, or on the one inside partial objects; None without one."""
    return getattr(function, MARK, None) or getattr(_plain(function), MARK, None)


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling `function` gives an awaitable, as far as its definition tells."""
    return _shape_of(function).is_async


def refuse_generator(function: Callable[..., object]) -> None:
    """Raise UsageError for a generator function: calling it runs nothing, so its answer would say nothing."""
    if _shape_of(function).is_generator:
        msg = f"tool {declared_of(function)[0]} is a generator: collect what it yields and return that"
        raise UsageError(msg)


def fits(function: Callable[..., object], args: Mapping[str, object]) -> bool:
    """Whether `function(**args)` names every parameter that it must and none that it does not have.

    True for what has no signature to read: then only the call itself can tell.
    """
    shape = _shape_of(function)
    if shape.names is not None:
        return shape.required <= args.keys() <= shape.names
    if shape.signature is None:
        return True
    try:
        shape.signature.bind(**args)
    except TypeError:
        return False
    return True


def _plain(function: object) -> object:
    """The function inside partial objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What the definition of a function tells of calling it. `names` is None where only binding can tell what fits."""

    is_async: bool
    is_generator: bool
    signature: inspect.Signature | None
    required: frozenset[str] = frozenset()
    names: frozenset[str] | None = None


_shapes: WeakKeyDictionary[object, _Shape] = WeakKeyDictionary()
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _shape_of(function: Callable[..., object]) -> _Shape:
    try:
        return _shapes[function]
    except (KeyError, TypeError):
        pass  # not seen yet, or neither hashable nor weakly referable
    found = _read_shape(function)
    try:
        _shapes[function] = found
    except TypeError:
        return found  # read anew each time
    return found


def _read_shape(function: Callable[..., object]) -> _Shape:
    plain = _plain(function)
    called = plain if inspect.isroutine(plain) else inspect.getattr_static(type(plain), "__call__", plain)
    is_generator = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    is_coroutine = inspect.iscoroutinefunction(called)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return _Shape(is_async=is_coroutine, is_generator=is_generator, signature=None)
    parameters = signature.parameters.values()
    named = all(item.kind in _NAMED for item in parameters)
    return _Shape(
        is_async=is_coroutine,
        is_generator=is_generator,
        signature=signature,
        required=frozenset(item.name for item in parameters if item.default is item.empty),
        names=frozenset(item.name for item in parameters) if named else None,
    )
