"""Positional and named arguments of a tool's function as one object of named arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from endstop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["bound_arguments", "signature_of"]


def signature_of(function: Callable[..., object]) -> inspect.Signature:
    """The signature of a tool's function."""
    return inspect.signature(function)


def bound_arguments(
    signature: inspect.Signature, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Positional arguments by name, so that `f(1)` and `f(a=1)` are one call."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    found: dict[str, object] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is kind.VAR_KEYWORD:
            found.update(value)
        elif kind is kind.VAR_POSITIONAL and not value:
            continue
        elif kind in (kind.VAR_POSITIONAL, kind.POSITIONAL_ONLY):
            msg = f"a tool's parameters must be nameable; {name} is positional only"
            raise UsageError(msg)
        else:
            found[name] = value
    return found
