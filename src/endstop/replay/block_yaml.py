"""As much YAML as HTTP cassettes are written in: block mappings and lists, quoted, plain and literal scalars.

Cassettes are dumped by one library in one style, so this reads that style and refuses the rest (anchors, flow
collections other than empty ones, complex keys) with ValueError. It makes text, lists and mappings, and bytes for
`!!binary`; numbers, booleans and null where they stand bare. No tag makes an object.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Final

__all__ = ["parse_blocks"]

DEPTH_MAX: Final = 64
_KEY: Final = re.compile(
    r"""(?P<key>'(?:[^']|'')*'|"(?:[^"\\]|\\.)*"|[^\s\-?:,\[\]{}#&*!|>'"%@`][^#]*?|-[^\s][^#]*?)\s*:(?=\s|$)"""
)
_NUMBER: Final = re.compile(r"-?\d{1,18}$")
_ESCAPES: Final = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b", " ": " ",
    '"': '"', "/": "/", "\\": "\\", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029",
}  # fmt: skip
_ESCAPE: Final = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_BARE: Final = {"null": None, "~": None, "": None, "true": True, "false": False}


def parse_blocks(lines: Iterable[str]) -> object:
    """The value that `lines` hold. Raises ValueError for what is outside the style, or cut off inside a scalar."""
    parser = _Parser([line.rstrip("\r\n") for line in lines])
    return parser.node(0, 0)


class _Parser:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0

    def _skip_blank(self) -> None:
        while self._at < len(self._lines):
            bare = self._lines[self._at].strip()
            if bare and not bare.startswith("#") and bare != "---":
                return
            self._at += 1

    def _indent(self) -> int:
        line = self._lines[self._at]
        return len(line) - len(line.lstrip(" "))

    def node(self, indent: int, depth: int) -> object:
        """The block that begins at the next line, indented by at least `indent`."""
        if depth > DEPTH_MAX:
            msg = "nested too deep"
            raise ValueError(msg)
        self._skip_blank()
        if self._at >= len(self._lines) or self._indent() < indent:
            return None
        found = self._indent()
        line = self._lines[self._at][found:]
        if line == "-" or line.startswith("- "):
            return self._list(found, depth)
        if _KEY.match(line):
            return self._mapping(found, depth)
        self._at += 1
        return self._scalar(line, found - 1)

    def _list(self, indent: int, depth: int) -> list[object]:
        found: list[object] = []
        while True:
            self._skip_blank()
            if self._at >= len(self._lines) or self._indent() != indent:
                return found
            line = self._lines[self._at]
            rest = line[indent:]
            if rest == "-":
                self._at += 1
                found.append(self.node(indent + 1, depth + 1))
            elif rest.startswith("- "):
                # The item goes on where the dash was, as if it were indented.
                self._lines[self._at] = " " * (indent + 2) + rest[2:]
                found.append(self.node(indent + 2, depth + 1))
            else:
                return found

    def _mapping(self, indent: int, depth: int) -> dict[str, object]:
        found: dict[str, object] = {}
        while True:
            self._skip_blank()
            if self._at >= len(self._lines) or self._indent() != indent:
                return found
            line = self._lines[self._at][indent:]
            key = _KEY.match(line)
            if key is None or line.startswith("- "):
                return found
            self._at += 1
            found[str(self._word(key["key"]))] = self._value(line[key.end() :].strip(), indent, depth)

    def _value(self, rest: str, indent: int, depth: int) -> object:
        if rest:
            return self._scalar(rest, indent)
        self._skip_blank()
        if self._at >= len(self._lines):
            return None
        below = self._indent()
        # A list may stand at its key's own indent.
        if below > indent or (below == indent and self._lines[self._at][below:].startswith("-")):
            return self.node(below, depth + 1)
        return None

    def _scalar(self, rest: str, indent: int) -> object:
        binary = rest.startswith("!!binary")
        if binary:
            rest = rest.removeprefix("!!binary").strip()
        if rest[:1] in "&*!?{[" and rest not in ("{}", "[]"):
            msg = "outside the style of cassettes"
            raise ValueError(msg)
        if rest[:1] in ("|", ">"):
            value: object = self._literal(rest, indent)
        elif rest[:1] in ("'", '"'):
            value = self._quoted(rest, rest[0])
        elif rest in ("{}", "[]"):
            return {} if rest == "{}" else []
        else:
            value = self._word(self._folded(rest, indent))
        if binary:
            try:
                return base64.b64decode(str(value).encode())
            except (binascii.Error, ValueError) as error:
                msg = "bytes that are no base64"
                raise ValueError(msg) from error
        return value

    def _literal(self, rest: str, indent: int) -> str:
        lines: list[str] = []
        inner: int | None = None
        digits = [sign for sign in rest[1:] if sign.isdigit()]
        if digits:
            inner = max(indent, 0) + int(digits[0])
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.strip():
                if self._indent() <= indent:
                    break
                inner = self._indent() if inner is None else inner
            lines.append(line[inner or 0 :] if line.strip() else "")
            self._at += 1
        joined = "\n".join(lines)
        return joined.rstrip("\n") + ("" if "-" in rest else "\n")

    def _quoted(self, rest: str, quote: str) -> str:
        """A quoted scalar, perhaps over several lines: one break is a space, blank lines are breaks."""
        parts = [rest[1:]]
        while not _is_closed(parts[-1], quote):
            if self._at >= len(self._lines):
                msg = "cut off inside a quoted text"
                raise ValueError(msg)
            parts.append(self._lines[self._at])
            self._at += 1
        parts[-1] = parts[-1].rstrip()[:-1]
        joined = parts[0]
        breaks = 0
        for part in parts[1:]:
            bare = part.strip(" \t") if part is not parts[-1] else part.lstrip(" \t")
            if not bare and part is not parts[-1]:
                breaks += 1
                continue
            escaped = quote == '"' and _ends_in_backslash(joined)
            joined = joined[:-1] + bare if escaped else joined.rstrip(" \t") + ("\n" * breaks or " ") + bare
            breaks = 0
        return joined.replace("''", "'") if quote == "'" else _ESCAPE.sub(_unescaped, joined)

    def _folded(self, rest: str, indent: int) -> str:
        parts = [rest]
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if (
                not line.strip()
                or self._indent() <= indent
                or _KEY.match(line.strip())
                or line.strip().startswith("- ")
            ):
                break
            parts.append(line.strip())
            self._at += 1
        return " ".join(parts)

    def _word(self, said: str) -> object:
        if said[:1] == "'" and said[-1:] == "'":
            return said[1:-1].replace("''", "'")
        if said[:1] == '"' and said[-1:] == '"':
            return _ESCAPE.sub(_unescaped, said[1:-1])
        if said in _BARE:
            return _BARE[said]
        return int(said) if _NUMBER.match(said) else said


def _is_closed(line: str, quote: str) -> bool:
    bare = line.rstrip()
    if quote == "'":
        return bool(re.fullmatch(r"(?:[^']|'')*'", bare))
    return bool(re.fullmatch(r'(?:[^"\\]|\\.)*"', bare))


def _ends_in_backslash(line: str) -> bool:
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(min(int(code[1:], 16), 0x10FFFF))
    return _ESCAPES.get(code, code)
