"""Stored text on its way to a terminal. Agents, tools and other people's sites wrote it, so it is hostile.

Rule: nothing that moves a cursor, changes a colour, reverses the reading order or hides itself reaches a terminal. Such
signs are shown as what they are: `\\x1b`, `\\u202e`.
"""

from __future__ import annotations

import unicodedata
from typing import Final

__all__ = ["CELL_CHARS_MAX", "block", "shortened", "visible", "width"]

CELL_CHARS_MAX: Final = 200
BLOCK_CHARS_MAX: Final = 100_000

# Control, format (bidi, zero width, tags), surrogate, private and unassigned signs; line and paragraph separators.
_HIDDEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_BYTE_MAX: Final = 0xFF
_PLANE_MAX: Final = 0xFFFF


def visible(text: str) -> str:
    """`text` on one line, with every sign that is not plainly visible written as its escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(sign) if unicodedata.category(sign) in _HIDDEN else sign for sign in text)


def block(text: str, *, indent: str = "") -> str:
    """The same for text of several lines: line feeds and tabs stay, every line is indented."""
    cut = text[:BLOCK_CHARS_MAX] + (" […]" if len(text) > BLOCK_CHARS_MAX else "")
    lines = cut.replace("\r\n", "\n").expandtabs(4).split("\n")
    return "\n".join(f"{indent}{visible(line)}" for line in lines)


def shortened(text: str, chars_max: int = CELL_CHARS_MAX) -> str:
    """`visible` text, cut to `chars_max` characters."""
    shown = visible(text[: chars_max * 2])
    return shown if len(shown) <= chars_max and len(text) <= chars_max * 2 else shown[: chars_max - 1] + "…"


def width(text: str) -> int:
    """How many columns `text` takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(sign) else 2 if unicodedata.east_asian_width(sign) in ("W", "F") else 1
        for sign in text
    )


def _escaped(sign: str) -> str:
    code = ord(sign)
    if code <= _BYTE_MAX:
        return {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(sign, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code <= _PLANE_MAX else f"\\U{code:08x}"
