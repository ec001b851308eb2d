"""Functions that a file names as `module:function`. They are imported when they are first used, never when read."""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING, Final, cast

from endstop.errors import PolicyInvalidError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["FunctionReference", "is_reference", "resolve_function"]

_REFERENCE: Final = re.compile(r"[\w.]+:[\w.]+")


def is_reference(text: str) -> bool:
    """Whether `text` has the form `module:function` (no braces, so it is no key template)."""
    return _REFERENCE.fullmatch(text) is not None


def resolve_function(
    reference: str, folder: Path | None = None, *, error: type[UsageError] = UsageError
) -> Callable[..., object]:
    """The function that `reference` (`module:function`) names, after importing its module.

    `folder` is the folder of the file that holds the reference. It is put at the end of the import path, so that a
    module beside the file is found and an installed one is never hidden. Raises `error` when there is no such module
    or function, or when importing the module fails (that exception is the cause).
    """
    module_name, _, attribute = reference.partition(":")
    if not is_reference(reference):
        msg = f"{reference!r} names no function: write module:function"
        raise error(msg)
    if folder is not None and str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as fault:
        missing = fault.name or module_name
        msg = f"{reference!r} cannot be used: there is no module {missing!r}; install it, or put it beside the file"
        raise error(msg) from fault
    except Exception as fault:
        msg = f"{reference!r} cannot be used: importing {module_name!r} raised {type(fault).__name__}"
        raise error(msg) from fault
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        msg = f"{reference!r} cannot be used: module {module_name!r} has no function {attribute!r}"
        raise error(msg)
    return cast("Callable[..., object]", found)


class FunctionReference:
    """A function by its name, imported at the first call. Two references are equal when they name the same function.

    It carries the function's own module and qualified name, so that a policy has one digest however it was written.
    A coroutine function's call gives its coroutine, as the function itself would.
    """

    def __init__(self, reference: str, folder: Path | None = None) -> None:
        module_name, _, attribute = reference.partition(":")
        self.__module__ = module_name
        self.__qualname__ = attribute
        self.__name__ = attribute.rpartition(".")[2]
        self.reference = reference
        self._folder = folder
        self._function: Callable[..., object] | None = None

    def resolve(self) -> Callable[..., object]:
        """The function itself. Raises PolicyInvalidError as `resolve_function` describes."""
        if self._function is None:
            self._function = resolve_function(self.reference, self._folder, error=PolicyInvalidError)
        return self._function

    def __call__(self, *args: object, **more: object) -> object:
        """Call the function with these arguments."""
        return self.resolve()(*args, **more)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionReference) and other.reference == self.reference

    def __hash__(self) -> int:
        return hash(self.reference)

    def __repr__(self) -> str:
        return f"FunctionReference({self.reference!r})"
