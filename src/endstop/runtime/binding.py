"""Positional and named arguments of a tool's function as one object of named arguments."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from endstop.core.entries import safe_name
from endstop.core.reasons import Effect
from endstop.errors import StoreQuarantinedError, UsageError
from endstop.store.port import quarantine_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from endstop.core.policy import ToolPolicy

__all__ = ["bound_arguments", "refuse_in_quarantine", "signature_of"]


def refuse_in_quarantine(store: object, tool: ToolPolicy, name: str) -> None:
    """Raise StoreQuarantinedError for a tool that may write, when the store's records may lack what has happened."""
    if tool.effect not in (Effect.WRITE, Effect.UNKNOWN):
        return
    wrong = quarantine_of(store)
    if wrong is not None:
        msg = (
            f"tool {safe_name(name)} was not called: the store was restored ({wrong}), so side effects that it does "
            "not know of may have happened; compare it with the targets, then: endstop doctor --accept-restore --reason"
        )
        raise StoreQuarantinedError(msg)


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
