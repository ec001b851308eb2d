"""Reading a TOML file that a person wrote: all its problems at once, each with its line, its key and a way out.

The file is checked against a pydantic model, but no word of pydantic's reaches the user: what is wrong is said from
the field's declared type.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic import BaseModel

    from endstop.errors import UsageError

    M = TypeVar("M", bound=BaseModel)

__all__ = [
    "TOML_BYTES_MAX",
    "Problem",
    "TomlSource",
    "close_to",
    "parse_toml",
    "read_text",
    "shown_path",
    "validate",
]

TOML_BYTES_MAX: Final = 1024 * 1024
PROBLEMS_SHOWN_MAX: Final = 50
ALLOWED_SHOWN_MAX: Final = 8
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_KEY_LINE: Final = re.compile(r"\s*(?P<key>(?:[A-Za-z0-9_.\s-]|\"[^\"\n]*\"|'[^'\n]*')+?)\s*=")
_HEADER_LINE: Final = re.compile(r"\s*(?P<header>\[.*\])\s*(?:#.*)?")
_AT_LINE: Final = re.compile(r"\s*\(at line (?P<line>\d+), column \d+\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong: the key it stands at and what to do."""

    path: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TomlSource:
    """Where a document came from: `name` is shown, and `prefix` is the table of the file that holds the document."""

    name: str
    text: str
    error: type[UsageError]
    prefix: tuple[str, ...] = ()

    def refusal(self, problems: Iterable[Problem]) -> UsageError:
        """The error to raise: every problem, one a line, in the file's order."""
        lines = _key_lines(self.text)
        found = sorted({(self._line(lines, item.path), item.path, item.message) for item in problems})
        shown = [self._shown(line, path, message) for line, path, message in found[:PROBLEMS_SHOWN_MAX]]
        if len(found) > PROBLEMS_SHOWN_MAX:
            shown.append(f"{self.name}: and {len(found) - PROBLEMS_SHOWN_MAX} more problems")
        return self.error("\n".join(shown))

    def _line(self, lines: Mapping[tuple[str, ...], int], path: tuple[str, ...]) -> int:
        """The line of `path`, or of the nearest table or key around it; 0 when there is none."""
        full = self.prefix + path
        for length in range(len(full), len(self.prefix), -1):
            if full[:length] in lines:
                return lines[full[:length]]
        return 0

    def _shown(self, line: int, path: tuple[str, ...], message: str) -> str:
        place = f"{self.name}:{line}" if line else self.name
        return f"{place}: {shown_path(self.prefix + path)}: {message}" if path else f"{place}: {message}"


def read_text(path: Path, error: type[UsageError], what: str) -> str:
    """The text of `path` (UTF-8, at most `TOML_BYTES_MAX` bytes). Raises `error` when it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(TOML_BYTES_MAX + 1)
    except (OSError, ValueError) as fault:  # the latter for a path that no system can have
        msg = f"{path}: the {what} cannot be read: {getattr(fault, 'strerror', None) or type(fault).__name__}"
        raise error(msg) from fault
    if len(data) > TOML_BYTES_MAX:
        msg = f"{path}: the {what} has more than {TOML_BYTES_MAX} bytes"
        raise error(msg)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        msg = f"{path}: the {what} is not UTF-8 text (byte {fault.start})"
        raise error(msg) from fault


def parse_toml(text: str, name: str, error: type[UsageError]) -> dict[str, object]:
    """The document in `text`. Raises `error` with the line when it is no TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        said = str(fault)
        at = _AT_LINE.search(said)
        place = f"{name}:{at['line']}" if at else name
        msg = f"{place}: this is no valid TOML: {_AT_LINE.sub('', said)}"
        raise error(msg) from fault
    except RecursionError as fault:
        msg = f"{name}: the file is nested too deep"
        raise error(msg) from fault


def shown_path(path: tuple[str, ...]) -> str:
    """A key path as TOML writes it: parts that need quotes have them."""
    return ".".join(part if _BARE_KEY.fullmatch(part) else '"' + part.replace('"', '\\"') + '"' for part in path)


def close_to(name: str, known: Iterable[str]) -> str | None:
    """The member of `known` that `name` was probably meant to be, or None."""
    import difflib

    found = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def validate(model: type[M], data: Mapping[str, object]) -> tuple[M | None, list[Problem]]:
    """`data` as a `model`, or None with everything that is wrong with it."""
    from pydantic import ValidationError

    try:
        return model.model_validate(data), []
    except ValidationError as fault:
        problems: dict[tuple[str, ...], Problem] = {}
        for item in fault.errors(include_url=False):
            path, annotation = _field_at(model, tuple(str(part) for part in item["loc"]))
            if item["type"] == "extra_forbidden":
                message = _unknown(model, path, item["input"])
            elif item["type"] == "missing":
                message = "is missing"
            elif item["type"] in ("greater_than_equal", "less_than_equal"):
                least = item["ctx"].get("ge")
                message = f"must be at least {least}" if least is not None else f"must be at most {item['ctx']['le']}"
            else:
                message = f"must be {_expected(annotation)}{_suggested(annotation, item['input'])}"
            problems.setdefault(path, Problem(path=path, message=message))
        return None, list(problems.values())


# -- What a field expects, from its type.


def _field_at(model: type[BaseModel], path: tuple[str, ...]) -> tuple[tuple[str, ...], object]:
    """The path down to the field that holds `path`, without list positions and names of types, and its annotation."""
    from pydantic import BaseModel

    annotation: object = model
    for at, part in enumerate(path):
        options = _options(annotation)
        tables = [one for one in options if isinstance(one, type) and issubclass(one, BaseModel)]
        mapped = [typing.get_args(one)[1] for one in options if typing.get_origin(one) is dict]
        if tables:
            if part not in tables[0].model_fields:
                return path[: at + 1], None
            annotation = tables[0].model_fields[part].annotation
        elif mapped and len(options) == 1 and mapped[0] is not object:
            annotation = mapped[0]
        else:
            return path[:at], annotation
    return path, annotation


def _options(annotation: object) -> list[object]:
    """The members of a union but None, or the type alone; annotations taken off."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [one for one in typing.get_args(annotation) if one is not type(None)]
        return [option for one in members for option in _options(one)]
    return [annotation]


_NAMES: Final[dict[object, str]] = {int: "a whole number", str: "text", bool: "true or false"}


def _expected(annotation: object) -> str:
    return " or ".join(_expected_one(option) for option in _options(annotation))


def _expected_one(option: object) -> str:
    origin = typing.get_origin(option)
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in typing.get_args(option))
    if origin is list:
        inner = typing.get_args(option)[0]
        return "a list of texts" if inner is str else "a list, each item " + _expected(inner)
    return _NAMES.get(option, "a table")


def _suggested(annotation: object, value: object) -> str:
    if not isinstance(value, str):
        return ""
    words = []
    for option in _options(annotation):
        inner = typing.get_args(option)[0] if typing.get_origin(option) is list else option
        words += [str(word) for word in typing.get_args(inner)] if typing.get_origin(inner) is Literal else []
    meant = close_to(value, words)
    return f"; did you mean {meant!r}?" if meant else ""


# -- What an unknown key was meant to be.


def _unknown(model: type[BaseModel], path: tuple[str, ...], value: object) -> str:
    name = path[-1]
    if len(path) > 2 and path[0] == "tools" and isinstance(value, dict):  # noqa: PLR2004  # tools, its name, the rest
        return f'unknown key; a tool name with dots needs quotes: [tools."{".".join(path[1:])}"]'
    siblings = _names_at(model, path[:-1])
    meant = close_to(name, siblings)
    if name == "api_key":
        return "unknown key; put the key into the environment and name the variable with 'api_key_env'"
    places = [shown_path(place) for place, names in _tables(model, ()) if name in names]
    if places:
        return f"unknown key here; it belongs into [{places[0]}]" if places[0] else "unknown key here; it stands on top"
    if meant:
        return f"unknown key; did you mean {meant!r}?"
    allowed = sorted(siblings)
    return "unknown key" + (f"; allowed: {', '.join(allowed)}" if 0 < len(allowed) <= ALLOWED_SHOWN_MAX else "")


def _names_at(model: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    from pydantic import BaseModel

    _, annotation = _field_at(model, path) if path else (path, model)
    tables = [one for one in _options(annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    return list(tables[0].model_fields) if tables else []


def _tables(model: type[BaseModel], place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every table of the file with the keys that stand in it. A tool's name is shown as NAME."""
    from pydantic import BaseModel

    yield place, list(model.model_fields)
    for name, field in model.model_fields.items():
        for option in _options(field.annotation):
            inner, step = (
                (typing.get_args(option)[1], (name, "NAME")) if typing.get_origin(option) is dict else (option, (name,))
            )
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _tables(inner, place + step)


# -- Lines. The parser tells none, so keys and headers are looked up in the text.


def _key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line of every key and table header that stands at the beginning of a line."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        if fence:
            fence = "" if line.count(fence) % 2 else fence
            continue
        header = _HEADER_LINE.fullmatch(line)
        key = _KEY_LINE.match(line)
        if header and (path := _keys_of(header["header"])):
            table = path
            lines.setdefault(path, number)
        elif key and (path := _keys_of(key["key"] + " = 0")):
            lines.setdefault(table + path, number)
        fence = next((quotes for quotes in ('"""', "'''") if line.count(quotes) % 2), "")
    return lines


def _keys_of(text: str) -> tuple[str, ...]:
    """The path that one header or key writes down."""
    try:
        node: object = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while True:
        if isinstance(node, list):
            node = node[0] if node else None
        if not isinstance(node, dict) or len(node) != 1:
            return tuple(path)
        [(name, node)] = node.items()
        path.append(name)
