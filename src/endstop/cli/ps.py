"""`endstop ps`: which runs there are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from endstop.cli.figures import age, money
from endstop.cli.output import Column
from endstop.cli.session import Session, examples, name_value, needs_terminal, verb
from endstop.core.codec import run_json
from endstop.core.reasons import RunState
from endstop.store.port import ROWS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from endstop.cli.output import Row
    from endstop.core.records import RunRecord
    from endstop.runtime.guard import Guard

__all__ = ["command"]

WATCH_MS: Final = 500
LIMIT: Final = 100
_OPEN: Final = (RunState.RUNNING, RunState.PAUSED, RunState.FROZEN, RunState.INTERRUPTED)
_COLUMNS: Final = (
    Column(name="run", keeps=True), Column(name="state"), Column(name="agent"), Column(name="turns", is_number=True),
    Column(name="steps", is_number=True), Column(name="tokens", is_number=True), Column(name="spend", is_number=True),
    Column(name="age", is_number=True), Column(name="ended by"),
)  # fmt: skip


@click.command(
    "ps",
    epilog=examples(
        "endstop ps", "endstop ps --all --label team=seo", "endstop ps --state interrupted --json", "endstop ps --watch"
    ),
)
@click.option("--all", "shows_all", is_flag=True, help="Also runs that are stopped or complete.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice([state.value for state in RunState]),
    help="Only runs in this state; may be given again.",
)  # fmt: skip
@click.option(
    "--label", "labels", metavar="NAME=VALUE", multiple=True, callback=name_value,
    help="Only runs with this label; may be given again.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1, ROWS_MAX), default=LIMIT, show_default=True, help="So many runs at most."
)
@click.option("--watch", is_flag=True, help="Show the list anew whenever it changes, until Ctrl-C.")
@verb()
def command(
    session: Session, shows_all: bool, states: tuple[str, ...], labels: Mapping[str, str], limit: int, watch: bool
) -> None:
    """List runs, newest first: running, paused, frozen and interrupted ones.

    A run whose processes have died is found here, marked as interrupted, and can be resumed.
    """
    output = session.output
    if watch and not output.as_json and not output.draws_on(sys.stdout):
        raise needs_terminal("--json with --watch", "the list is redrawn in place")
    guard = session.guard()
    wanted = tuple(RunState(state) for state in states) or (() if shows_all else _OPEN)
    if not watch:
        _print(session, _found(guard, wanted, labels, limit), once=True)
        return
    seen = -1
    while not output.is_closed:
        counter = guard.store.change_counter()
        if counter != seen:
            if not output.as_json:
                click.clear()
            _print(session, _found(guard, wanted, labels, limit), once=False)
            # Judging a run may itself have written.
            seen = guard.store.change_counter()
        session.clock.sleep_ms(WATCH_MS)


def _found(guard: Guard, states: tuple[RunState, ...], labels: Mapping[str, str], limit: int) -> tuple[RunRecord, ...]:
    # The guard filters by state after it has read, so the limit is applied here.
    return guard.runs(states=states, labels=labels, limit=ROWS_MAX)[:limit]


def _print(session: Session, runs: tuple[RunRecord, ...], *, once: bool) -> None:
    output = session.output
    if output.as_json:
        write = output.json if once else output.json_line
        write({"runs": [run_json(run) for run in runs]})
        return
    if not runs:
        output.note("endstop: no such runs; `endstop ps --all` lists those that have ended too")
        return
    now_us = session.clock.now_us()
    output.table(_COLUMNS, [_row(run, now_us) for run in runs])


def _row(run: RunRecord, now_us: int) -> Row:
    counters, limits = run.counters, run.limits
    return (
        run.run_id,
        run.state.value,
        run.agent,
        f"{counters.turns}/{limits.turns_max}",
        f"{counters.steps}/{limits.steps_max}",
        f"{counters.input_tokens + counters.output_tokens}/{limits.tokens_max}",
        money(counters.spend_nanos),
        age(run.created_at_us, now_us),
        "" if run.envelope is None else run.envelope.terminal_reason.value,
    )
