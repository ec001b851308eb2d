"""What a tool's docstring tells a model: what the tool does, and what each parameter is for.

Three customs are read: `Args:` with indented lines, `Parameters` underlined with dashes, and `:param name:`.
Anything else is description. Nothing here is an error: prose may look like anything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from inspect import cleandoc
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DocText", "read_docstring"]

DESCRIPTION_CHARS_MAX: Final = 4_000
_ARGS: Final = frozenset({"args:", "arguments:", "parameters:", "params:"})
_OTHERS: Final = frozenset(
    {"returns:", "return:", "raises:", "yields:", "examples:", "example:", "note:", "notes:", "warns:", "see also:"}
)
_UNDERLINED: Final = frozenset({"returns", "raises", "yields", "examples", "notes", "warns", "see also"})
_GOOGLE_ITEM: Final = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\([^)]*\))?\s*:\s*(?P<text>.*)")
_NUMPY_ITEM: Final = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?::.*)?")
_FIELD_ITEM: Final = re.compile(r":param\s+(?:[^:]*\s)?(?P<name>\w+)\s*:\s*(?P<text>.*)")
_FIELD: Final = re.compile(r":\w+[^:]*:")


@dataclass(frozen=True, slots=True, kw_only=True)
class DocText:
    """A docstring's description (at most `DESCRIPTION_CHARS_MAX` characters) and what it says of each parameter."""

    description: str
    parameters: Mapping[str, str]


def read_docstring(docstring: str | None) -> DocText:
    """Split a docstring into description and parameter texts, each on one line."""
    lines = cleandoc(docstring or "").splitlines()
    described: list[str] = []
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(lines):
        heading = lines[at].strip().lower()
        underlined = at + 1 < len(lines) and set(lines[at + 1].strip()) == {"-"}
        if heading in _ARGS:
            at = _google(lines, at + 1, found)
        elif heading == "parameters" and underlined:
            at = _numpy(lines, at + 2, found)
        elif heading in _OTHERS:
            at = _indented_end(lines, at + 1)
        elif heading in _UNDERLINED and underlined:
            at = _underlined_end(lines, at + 2)
        elif _FIELD.match(lines[at]):
            at = _field(lines, at, found)
        else:
            described.append(lines[at])
            at += 1
    return DocText(
        description="\n".join(described).strip()[:DESCRIPTION_CHARS_MAX],
        parameters=MappingProxyType({name: " ".join(text).strip() for name, text in found.items()}),
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _indented_end(lines: Sequence[str], start: int) -> int:
    at = start
    while at < len(lines) and (not lines[at].strip() or _indent(lines[at]) > 0):
        at += 1
    return at


def _underlined_end(lines: Sequence[str], start: int) -> int:
    at = start
    while at < len(lines) and not (
        at + 1 < len(lines) and lines[at + 1].strip() and set(lines[at + 1].strip()) == {"-"}
    ):
        at += 1
    return at


def _google(lines: Sequence[str], start: int, found: dict[str, list[str]]) -> int:
    end = _indented_end(lines, start)
    outer: int | None = None
    name = ""
    for line in lines[start:end]:
        if not line.strip():
            continue
        outer = _indent(line) if outer is None else outer
        item = _GOOGLE_ITEM.fullmatch(line.strip()) if _indent(line) <= outer else None
        if item:
            name = item["name"]
            found[name] = [item["text"]]
        elif name:
            found[name].append(line.strip())
    return end


def _numpy(lines: Sequence[str], start: int, found: dict[str, list[str]]) -> int:
    end = _underlined_end(lines, start)
    name = ""
    for line in lines[start:end]:
        item = _NUMPY_ITEM.fullmatch(line) if line and _indent(line) == 0 else None
        if item:
            name = item["name"]
            found[name] = []
        elif name and line.strip():
            found[name].append(line.strip())
    return end


def _field(lines: Sequence[str], start: int, found: dict[str, list[str]]) -> int:
    """One `:field:` with its indented lines; only `:param` ones are kept."""
    end = _indented_end(lines, start + 1)
    item = _FIELD_ITEM.fullmatch(lines[start].strip())
    if item:
        found[item["name"]] = [item["text"], *(line.strip() for line in lines[start + 1 : end] if line.strip())]
    return end
