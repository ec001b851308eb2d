"""Where text goes: data to stdout, notes to stderr; tables and colour on a terminal, plain aligned text elsewhere."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from endstop.cli.text import block, shortened, visible, width

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

__all__ = ["SCHEMA", "Column", "Output", "Row"]

SCHEMA: Final = "endstop/1"
Row = tuple[str, ...]

STYLES: Final[Mapping[str, str]] = {
    "running": "green", "complete": "green", "ok": "green", "execute": "green", "COMMITTED": "green",
    "paused": "yellow", "frozen": "cyan", "warn": "yellow", "interrupted": "magenta", "wait": "yellow",
    "stopped": "red", "fail": "red", "stop": "red", "block": "red", "UNKNOWN": "red", "MANUAL": "red",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: its heading, and whether its cells are words with a colour or numbers."""

    name: str
    is_number: bool = False
    keeps: bool = False


class Output:
    """One verb's way to its readers. `as_json` says that stdout gets JSON and nothing else."""

    def __init__(self, *, as_json: bool, no_color: bool) -> None:
        self.as_json = as_json
        self._no_color = no_color or bool(os.environ.get("NO_COLOR"))
        self._is_dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        self._closed = False
        # Kept from the start: while tools work, what they print goes to stderr.
        self._stdout = sys.stdout

    # -- What stands behind it

    @property
    def is_colourless(self) -> bool:
        """Whether colour is unwanted everywhere."""
        return self._no_color

    def draws_on(self, stream: TextIO) -> bool:
        """Whether `stream` is a terminal that can draw."""
        return stream.isatty() and not self._is_dumb

    def console(self, stream: TextIO) -> Console:
        """A console for `stream` that takes text as it is, without markup. Only for a stream that draws."""
        from rich.console import Console

        return Console(
            file=stream, no_color=self._no_color, markup=False, highlight=False, emoji=False,
            force_terminal=True, legacy_windows=False,
        )  # fmt: skip

    # -- Data

    def json(self, body: Mapping[str, object]) -> None:
        """One JSON object, with the schema's version first."""
        self._write(_dumps({"schema": SCHEMA, **body}, indent=2))

    def json_line(self, body: Mapping[str, object]) -> None:
        """One JSON object on one line, for streams."""
        self._write(_dumps({"schema": SCHEMA, **body}, indent=None))

    def line(self, text: str) -> None:
        """One line of data."""
        self._write(visible(text))

    def raw(self, text: str) -> None:
        """Text that was made here and holds nothing of an agent's."""
        self._write(text)

    def block(self, text: str, *, indent: str = "") -> None:
        """Lines of stored text."""
        self._write(block(text, indent=indent))

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Names and values, aligned."""
        pairs = [(visible(name), value) for name, value in facts]
        widest = max((width(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            first, *rest = block(value).split("\n")
            self._write(f"{name}{' ' * (widest - width(name))}  {first}")
            for line in rest:
                self._write(f"{' ' * widest}  {line}")

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Rows under headings: drawn on a terminal, aligned by spaces elsewhere."""
        cells = [tuple(visible(cell) if column.keeps else shortened(cell)
                       for column, cell in zip(columns, row, strict=True)) for row in rows]  # fmt: skip
        if self.draws_on(self._stdout):
            self._draw(columns, cells)
        else:
            self._align(columns, cells)

    # -- Everything else

    def note(self, text: str) -> None:
        """One line that is no data."""
        try:
            sys.stderr.write(f"{visible(text)}\n")
            sys.stderr.flush()
        except BrokenPipeError:
            _give_up(sys.stderr)

    # -- Parts

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            self._stdout.write(f"{text}\n")
            self._stdout.flush()
        except BrokenPipeError:
            # The reader has seen enough, as in `endstop ps | head`. What the verb does still goes on to its end.
            self._closed = True
            _give_up(self._stdout)

    @property
    def is_closed(self) -> bool:
        """Whether nobody reads stdout any more."""
        return self._closed

    def _align(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        lines = [tuple(column.name.upper() for column in columns), *rows]
        widths = [max(width(line[place]) for line in lines) for place in range(len(columns))]
        for line in lines:
            cells = []
            for column, cell, size in zip(columns, line, widths, strict=True):
                gap = " " * (size - width(cell))
                cells.append(gap + cell if column.is_number else cell + gap)
            self._write("  ".join(cells).rstrip())

    def _draw(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column in columns:
            table.add_column(
                Text(column.name.upper()), justify="right" if column.is_number else "left",
                no_wrap=column.is_number or column.keeps, overflow="fold",
            )  # fmt: skip
        for row in rows:
            table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        self.console(self._stdout).print(table)


def _dumps(body: Mapping[str, object], *, indent: int | None) -> str:
    """ASCII alone: what stands escaped in the text can neither steer a terminal nor reverse it."""
    separators = None if indent else (",", ":")
    text = json.dumps(body, ensure_ascii=True, allow_nan=False, indent=indent, separators=separators)
    return text.replace("\x7f", "\\u007f")


def _give_up(stream: TextIO) -> None:
    """Let later writes, and the flush at the end of the process, go nowhere."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    except (OSError, ValueError):
        # A stream without a descriptor has nothing left to flush.
        return
