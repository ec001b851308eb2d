"""What every tool of the examples raises, so that a caller can tell "refused" from "broken".

    ExampleError
      InputRefusedError    an argument is not acceptable; nothing was read or written
      WriteRefusedError    a write was refused before it had any effect

A message names what was refused, why, and what to do instead. It never carries file or page contents.
"""

from __future__ import annotations

SHOWN_CHARS_MAX = 120


class ExampleError(Exception):
    """The root of all errors that the example tools raise on purpose."""


class InputRefusedError(ExampleError):
    """An argument is not acceptable. Nothing was read or written."""


class WriteRefusedError(ExampleError):
    """A write was refused before it had any effect: it is proven not applied."""


def shown(text: str) -> str:
    """`text` as one short printable line for an error message: control characters escaped, cut at a named length."""
    line = text.encode("unicode_escape").decode("ascii")
    return line if len(line) <= SHOWN_CHARS_MAX else line[: SHOWN_CHARS_MAX - 1] + "…"
