"""What every tool of the examples raises, so that a caller can tell "refused" from "broken".

    ExampleError
      InputRefusedError    an argument is not acceptable; nothing was read or written
      WriteRefusedError    a write was refused before it had any effect

Both are `endstop.NotAppliedError` as well: proof for the guard that no side effect happened, so that a refused write
is not in doubt and may be tried again with other arguments. Whatever else a write tool raises leaves it in doubt.

A message names what was refused, why, and what to do instead. It never carries file or page contents.
"""

from __future__ import annotations

from endstop import NotAppliedError

SHOWN_CHARS_MAX = 120


class ExampleError(Exception):
    """The root of all errors that the example tools raise on purpose."""


class InputRefusedError(ExampleError, NotAppliedError):
    """An argument is not acceptable. Nothing was read or written."""


class WriteRefusedError(ExampleError, NotAppliedError):
    """A write was refused before it had any effect: it is proven not applied."""


def shown(text: str) -> str:
    """`text` as one short printable line for an error message: control characters escaped, cut at a named length."""
    line = text.encode("unicode_escape").decode("ascii")
    return line if len(line) <= SHOWN_CHARS_MAX else line[: SHOWN_CHARS_MAX - 1] + "…"
