"""How the demonstration is told: few lines, drawn on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from endstop.demo.agent import ITERATIONS_MAX, STAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endstop.core.envelope import Envelope
    from endstop.core.records import OperationRecord
    from endstop.demo.facts import Check, Facts, Guarded, KilledRun, Unguarded
    from endstop.demo.processes import Place
    from endstop.store.port import LedgerRow

__all__ = ["Story"]

DIGEST_CHARS: Final = 12
_DRAWN: Final = {"✓": "bold green", "✗": "bold red", "pass": "green", "fail": "red"}
_PLAIN_MARKS: Final = {"✓": "ok", "✗": "FAILED"}


class Story:
    """Tells the acts on stdout as they end. A silent one says nothing."""

    def __init__(self, *, is_silent: bool, is_plain: bool) -> None:
        self._is_plain = is_plain or not sys.stdout.isatty()
        self._console = Console(
            file=sys.stdout, quiet=is_silent, markup=False, highlight=False, emoji=False, soft_wrap=True,
            color_system=None if self._is_plain else "auto",
        )  # fmt: skip

    # -- The acts

    def opening(self, crm_url: str) -> None:
        """Where it plays."""
        self._say(f"A real CRM on {crm_url}, with its own SQLite file. Only the model is scripted.")
        self._say(
            f'The job: set one contact to stage "{STAGE}", once. The model does what a public incident\'s model\n'
            "did: it repeats the update after it succeeded, under new call ids, until the iteration cap of "
            f"{ITERATIONS_MAX}."
        )

    def first(self, act: Unguarded) -> None:
        """Without a guard."""
        self._heading("1  Without a guard")
        self._checks(act.checks)

    def second(self, act: Guarded) -> None:
        """Under the guard."""
        self._heading("2  Under the guard: the same model, the same tool, an SQLite store")
        self._end(act.envelope, act.operations)
        self._ledger(act.ledger)
        self._checks(act.checks)

    def third(self, act: KilledRun) -> None:
        """After a kill -9."""
        self._heading("3  After kill -9 in mid-call: the CRM has applied the write, the agent never heard of it")
        operations = ", ".join(f"{item.operation_id} {item.state}" for item in act.operations)
        answer = "none" if act.answer is None else f"{act.answer.status}, {act.answer.reason}"
        self._facts(
            ("worker", f"process {act.killed.pid}, ended by {act.killed.signal}"),
            ("endstop ps", f"{act.state_after_kill or 'no such run'}; in doubt: {operations or 'nothing'}"),
            ("next worker", f"joined the run, proposed the same update and was answered: {answer}"),
        )
        self._end(act.envelope, ())
        self._checks(act.checks)

    def closing(self, facts: Facts) -> None:
        """The acts side by side."""
        acts = (facts.without_guard, facts.with_guard, facts.after_kill)
        self._say("")
        self._table(
            ("", "without guard", "with guard", "after kill -9"),
            (
                ("writes in the CRM", *(str(act.writes) for act in acts)),
                ("model turns", *(str(act.model_turns) for act in acts)),
                ("ended by", *(act.ended for act in acts)),
            ),
        )
        held = sum(check.held for check in facts.checks)
        verdict = f"{held} of {len(facts.checks)} checks held, in {facts.took_ms / 1_000:.1f} s."
        self._say(verdict, style="bold green" if facts.held else "bold red")

    def kept(self, place: Place, facts: Facts) -> None:
        """Where the files are, and how to look at them."""
        self._say(
            f"\nKept: {place.folder}. To look further:\n"
            f"  endstop show {facts.with_guard.run_id} --store {place.store_url}\n"
            f"  endstop ops {facts.after_kill.run_id} --store {place.store_url}"
        )

    # -- Parts

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))

    def _heading(self, text: str) -> None:
        self._say(f"\n{text}", style="bold")

    def _facts(self, *facts: tuple[str, str]) -> None:
        for name, value in facts:
            self._console.print(Text.assemble((f"  {name:<20}", "cyan"), value))

    def _end(self, envelope: Envelope | None, operations: Sequence[OperationRecord]) -> None:
        if envelope is None:
            self._facts(("envelope", "none: the run was not ended"))
            return
        facts = [("terminal_reason", f"{envelope.terminal_reason} (guard: {envelope.guard})")]
        blocked = envelope.blocked_call
        if blocked is not None:
            args = ", ".join(f"{name}: {note}" for name, note in blocked.args)
            facts.append(("blocked_call", f"{blocked.tool} [{args}] as {blocked.call_id}"))
        facts += [("operation", f"{item.operation_id} {item.state}") for item in operations]
        facts.append(("next_allowed_action", envelope.next_allowed_action.value))
        self._facts(*facts)

    def _ledger(self, rows: Sequence[LedgerRow]) -> None:
        cells = [
            (
                str(row.turn_count), row.state_origin, (row.input_hash or "")[:DIGEST_CHARS], row.pass_fail,
                row.breach_reason or "",
            )
            for row in rows
        ]  # fmt: skip
        self._table(("turn_count", "state_origin", "input_hash", "pass_fail", "breach_reason"), cells)

    def _table(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._is_plain:
            widths = [max(len(line[place]) for line in (names, *rows)) for place in range(len(names))]
            for line in (names, *rows):
                cells = (cell.ljust(size) for cell, size in zip(line, widths, strict=True))
                self._say(f"  {'  '.join(cells)}".rstrip())
            return
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
        for name in names:
            table.add_column(name, no_wrap=True)
        for row in rows:
            table.add_row(*(Text(cell, style=_DRAWN.get(cell, "")) for cell in row))
        self._console.print(Padding(table, (0, 0, 0, 2)))

    def _checks(self, checks: Sequence[Check]) -> None:
        for check in checks:
            mark = "✓" if check.held else "✗"
            found = "" if check.held else f" (expected {check.expected}, found {check.found})"
            self._console.print(Text.assemble("  ", (self._mark(mark), _DRAWN[mark]), f" {check.claim}{found}"))

    def _mark(self, mark: str) -> str:
        try:
            mark.encode(self._console.encoding)
        except UnicodeEncodeError:
            return _PLAIN_MARKS[mark]
        return mark
