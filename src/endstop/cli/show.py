"""`endstop show`: one run, its timeline, and its end in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from endstop.cli.ending import ending_facts, run_facts
from endstop.cli.run_names import find_run
from endstop.cli.session import Session, examples, verb
from endstop.cli.timeline import COLUMNS, event_of, events_of, leaf_of, row_of
from endstop.core.codec import run_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endstop.core.records import EntryRecord
    from endstop.store.port import Store

__all__ = ["command", "entries_of"]

PAGE: Final = 1_000
ENTRIES_MAX: Final = 20_000


@click.command("show", epilog=examples("endstop show last", "endstop show seo-2026-W31 --json | jq .envelope"))
@click.argument("run")
@click.option("--entries", is_flag=True, help="Every ledger entry by itself; with --json, as it is stored.")
@verb()
def command(session: Session, run: str, entries: bool) -> None:
    """Show one run: what it is for, what it used, its timeline with the guard that fired and why, and its end.

    RUN is a run's id, the first six or more letters of it, or "last".
    """
    output = session.output
    guard = session.guard()
    record = find_run(guard, run)
    if output.as_json and not entries:
        output.json(run_json(record))
        return
    found = list(entries_of(guard.store, record.root_run_id))
    if output.as_json:
        stored = [{"index": entry.index, "entry": dict(leaf_of(entry))} for entry in found]
        output.json({**run_json(record), "ledger_entries": stored})
        return
    output.facts(run_facts(record))
    output.line("")
    events = [event_of(entry) for entry in found] if entries else events_of(found)
    output.table(COLUMNS, [row_of(event) for event in events])
    if len(found) == ENTRIES_MAX:
        output.note(f"endstop: only the first {ENTRIES_MAX} entries are shown; `endstop ledger show` pages on")
    if record.envelope is not None:
        output.line("")
        output.facts(ending_facts(record, record.envelope))


def entries_of(store: Store, run_id: str) -> Iterator[EntryRecord]:
    """A run's entries from the first on, page by page, `ENTRIES_MAX` at most."""
    after, count = -1, 0
    while count < ENTRIES_MAX:
        page = store.entries(run_id=run_id, after_index=after, limit=PAGE).result()
        yield from page
        if len(page) < PAGE:
            return
        count += len(page)
        after = page[-1].index
