"""`endstop ledger`: read the append-only record."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Final

import click

from endstop.cli.output import Column
from endstop.cli.run_names import root_id
from endstop.cli.session import Session, examples, verb
from endstop.cli.timeline import event_of, leaf_of, row_of
from endstop.store.port import ROWS_MAX, LedgerRow

if TYPE_CHECKING:
    from endstop.core.records import EntryRecord
    from endstop.runtime.guard import Guard

__all__ = ["command"]

LIMIT: Final = 1_000
TAIL: Final = 20
FOLLOW_MS: Final = 100
PAGE: Final = 1_000
_NUMBERS: Final = ("turn_count", "token_delta", "execution_time_ms")

RUN = click.option("--run", metavar="RUN", help="Only this run's entries.")


@click.group("ledger")
def command() -> None:
    """Read the append-only record. Every event of every run is one entry, written with the change it records."""


@command.command("show", epilog=examples("endstop ledger show", "endstop ledger show --run last --json"))
@RUN
@click.option(
    "--limit", type=click.IntRange(1, ROWS_MAX), default=LIMIT, show_default=True, help="So many rows at most."
)
@click.option("--entries", is_flag=True, help="The entries as they are stored, one JSON object a line.")
@click.option("--after", type=click.IntRange(-1), default=-1, help="With --entries: only those after this position.")
@verb()
def show(session: Session, run: str | None, limit: int, entries: bool, after: int) -> None:
    """Show the ledger, oldest first, in its nine columns."""
    output = session.output
    guard = session.guard()
    run_id = None if run is None else root_id(guard, run)
    if entries:
        found = guard.store.entries(run_id=run_id, after_index=after, limit=limit).result()
        if output.as_json:
            output.json({"ledger": guard.store.ledger, "entries": [_stored(entry) for entry in found]})
            return
        for entry in found:
            output.line(entry.leaf.decode("ascii", "backslashreplace"))
        return
    rows = guard.store.ledger_rows(run_id=run_id, limit=limit).result()
    if output.as_json:
        output.json({"ledger": guard.store.ledger, "rows": [asdict(row) for row in rows]})
        return
    names = [item.name for item in fields(LedgerRow)]
    columns = [Column(name=name, is_number=name in _NUMBERS, keeps=name == "session_id") for name in names]
    cells = [tuple("" if value is None else str(value) for value in asdict(row).values()) for row in rows]
    output.table(columns, cells)


@command.command("tail", epilog=examples("endstop ledger tail -f", "endstop ledger tail -n 100 --run last --json"))
@RUN
@click.option(
    "-n", "--lines", type=click.IntRange(0, ROWS_MAX), default=TAIL, show_default=True, help="The last so many."
)
@click.option("-f", "--follow", is_flag=True, help="Go on with new entries until Ctrl-C.")
@verb()
def tail(session: Session, run: str | None, lines: int, follow: bool) -> None:
    """Show the last entries, one a line; with --json, one JSON object a line."""
    guard = session.guard()
    run_id = None if run is None else root_id(guard, run)
    counter = guard.store.change_counter()
    newest = guard.store.entries(run_id=run_id, limit=max(lines, 1), newest_first=True).result()
    after = newest[0].index if newest else -1
    for entry in reversed(newest[:lines]):
        _print(session, entry)
    while follow and not session.output.is_closed:
        # The counter is read before the entries, so that nothing written in between is missed.
        now = guard.store.change_counter()
        if now != counter:
            after = _print_after(session, guard, run_id, after)
            counter = now
        else:
            session.clock.sleep_ms(FOLLOW_MS)


def _print_after(session: Session, guard: Guard, run_id: str | None, after: int) -> int:
    while True:
        page = guard.store.entries(run_id=run_id, after_index=after, limit=PAGE).result()
        for entry in page:
            _print(session, entry)
            after = entry.index
        if len(page) < PAGE:
            return after


def _print(session: Session, entry: EntryRecord) -> None:
    if session.output.as_json:
        session.output.json_line(_stored(entry))
        return
    event = event_of(entry)
    run_id = leaf_of(entry).get("run")
    time, turn, step, *rest = row_of(event)
    where = f"turn {turn} step {step}" if turn or step else ""
    words = [str(entry.index), time, str(run_id or "-"), where, *rest]
    session.output.line("  ".join(word for word in words if word))


def _stored(entry: EntryRecord) -> dict[str, object]:
    return {"index": entry.index, "entry": dict(leaf_of(entry))}
