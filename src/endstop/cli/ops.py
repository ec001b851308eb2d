"""`endstop ops`: side effects and their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from endstop.cli.codes import ExitCode
from endstop.cli.figures import seconds_time
from endstop.cli.output import Column
from endstop.cli.run_names import root_id
from endstop.cli.session import ACTOR, REASON, Session, examples, verb
from endstop.cli.timeline import leaf_of
from endstop.core.codec import operation_json
from endstop.core.probing import Exclusion
from endstop.core.transitions import OperationState
from endstop.errors import RunNotFoundError, UsageError
from endstop.store.port import ROWS_MAX

if TYPE_CHECKING:
    from endstop.cli.output import Output, Row
    from endstop.core.records import EntryRecord, OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["OPERATION_COLUMNS", "command", "operation_row"]

OPERATION_HEAD: Final = "op_"
PREFIX_CHARS_MIN: Final = 9
LIMIT: Final = 1_000

DAY_MS: Final = 24 * 3_600_000
IN_DOUBT: Final = (OperationState.UNKNOWN, OperationState.MANUAL)
HISTORY_COLUMNS: Final = (
    Column(name="entry", is_number=True), Column(name="time", keeps=True), Column(name="run", keeps=True),
    Column(name="who"), Column(name="event"), Column(name="state"), Column(name="why"),
)  # fmt: skip

OPERATION_COLUMNS: Final = (
    Column(name="operation", keeps=True), Column(name="tool"), Column(name="state"),
    Column(name="attempt", is_number=True), Column(name="run", keeps=True), Column(name="sent", keeps=True),
    Column(name="settled", keeps=True), Column(name="why"),
)  # fmt: skip


class Operations(click.Group):
    """A group whose list needs no name: what is no verb of it is what the list is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # the signature is click's
        """In the order of a person's questions."""
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the list's name where none was given."""
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group("ops", cls=Operations)
def command() -> None:
    """Operations: side effects and their state. Without a verb: list."""


@command.command(
    "list",
    epilog=examples(
        "endstop ops", "endstop ops last", "endstop ops list --state UNKNOWN --json", "endstop ops op_1a2b3c4d"
    ),
)
@click.argument("run_or_operation", required=False)
@click.option(
    "--state", "states", multiple=True, type=click.Choice([state.value for state in OperationState]),
    help="Only operations in this state; may be given again.",
)  # fmt: skip
@click.option(
    "--limit", type=click.IntRange(1, ROWS_MAX), default=LIMIT, show_default=True, help="So many operations at most."
)
@verb()
def list_operations(session: Session, run_or_operation: str | None, states: tuple[str, ...], limit: int) -> int:
    """List operations, oldest first: of one run, or of all. An id that begins with "op_" shows that operation.

    UNKNOWN and MANUAL mean in doubt: the side effect may have happened, and nothing sends it again.
    """
    output = session.output
    guard = session.guard()
    if run_or_operation is not None and run_or_operation.startswith(OPERATION_HEAD):
        _show(output, _find(guard, run_or_operation))
        return ExitCode.DONE
    run_id = None if run_or_operation is None else root_id(guard, run_or_operation)
    found = guard.operations(run_id, states=tuple(OperationState(state) for state in states), limit=limit)
    if output.as_json:
        output.json({"operations": [operation_json(operation) for operation in found]})
    elif found:
        output.table(OPERATION_COLUMNS, [operation_row(operation) for operation in found])
    else:
        output.note("endstop: no such operations")
    return ExitCode.DONE


@command.command("show", epilog=examples("endstop ops show op_1a2b3c4d", "endstop ops show op_1a2b3c4d --json"))
@click.argument("operation")
@verb()
def show(session: Session, operation: str) -> int:
    """Show one operation and its whole history: every entry of the ledger about it, in all its runs.

    Ends with 10 while it is in doubt.
    """
    from endstop.runtime.settling import operation_history

    output = session.output
    guard = session.guard()
    found = _find(guard, operation)
    history = operation_history(guard, found)
    if output.as_json:
        entries = [{"index": entry.index, "entry": dict(leaf_of(entry))} for entry in history]
        output.json({"operation": operation_json(found), "history": entries})
    else:
        _show(output, found)
        output.table(HISTORY_COLUMNS, [_history_row(entry) for entry in history])
    return ExitCode.IN_DOUBT if found.state in IN_DOUBT else ExitCode.DONE


@command.command(
    "settle",
    epilog=examples(
        "endstop ops settle op_1a2b3c4d --applied --reason 'asked the bank' --evidence 'statement 7, line 4'",
        "endstop ops settle op_1a2b3c4d --not-applied --exclusion key_voided --reason 'voided' --evidence 'ticket 12'",
    ),
)
@click.argument("operation")
@click.option("--applied", is_flag=True, help="The side effect happened: it is never sent again.")
@click.option("--not-applied", is_flag=True, help="It did not happen: the next call may send it.")
@click.option("--evidence", metavar="TEXT", default="", help="What was seen at the target; kept as a digest.")
@click.option(
    "--exclusion", type=click.Choice([item.value for item in Exclusion]),
    help="With --not-applied: why a late send of the old attempt has no effect. A dead worker needs none.",
)  # fmt: skip
@click.option("--receipt", metavar="TEXT", help="The target's own name for the effect.")
@REASON
@ACTOR
@verb()
def settle(
    session: Session, operation: str, applied: bool, not_applied: bool, evidence: str, exclusion: str | None,
    receipt: str | None, reason: str, actor: str,
) -> int:  # fmt: skip
    """Settle one operation in doubt by what a person found out at its target.

    Needs a reason and evidence. No agent can reach this.
    """
    if applied is not_applied:
        msg = "say what was found: --applied or --not-applied"
        raise UsageError(msg)
    guard = session.guard()
    found = _find(guard, operation)
    settled = guard.settle_operation(
        found.operation_id, outcome="applied" if applied else "not_applied", reason=reason, evidence=evidence,
        actor=actor, exclusion=exclusion, receipt=receipt,
    )  # fmt: skip
    if session.output.as_json:
        session.output.json(operation_json(settled))
    else:
        session.output.line(f"{settled.operation_id} is {settled.state}")
    return ExitCode.DONE


@command.command("expire", epilog=examples("endstop ops expire --days 400"))
@click.option("--days", type=click.IntRange(1), required=True, help="Results settled longer ago than this.")
@ACTOR
@verb()
def expire(session: Session, days: int, actor: str) -> int:
    """Remove the results of operations that were settled long ago. Their records stay, so nothing is sent again.

    Keep results for longer than anything may ask for them again: a queue's redelivery, a restored backup.
    """
    count = session.guard().expire_results(older_than_ms=days * DAY_MS, actor=actor)
    if session.output.as_json:
        session.output.json({"expired": count})
    else:
        session.output.line(f"{count} results removed")
    return ExitCode.DONE


def _history_row(entry: EntryRecord) -> Row:
    leaf = leaf_of(entry)
    state = f"{leaf['from']} → {leaf['to']}" if "to" in leaf else str(leaf.get("op_state", ""))
    said = (str(leaf.get(name, "")) for name in ("code", "reason", "cause", "exclusion"))
    words = [word for word in said if word] + (["incident"] if leaf.get("incident") else [])
    at_us = leaf.get("ts_us")
    return (
        str(entry.index), seconds_time(at_us) if isinstance(at_us, int) else "", str(leaf.get("run", "")),
        str(leaf.get("actor", "")), str(leaf.get("type", "")), state, ", ".join(words),
    )  # fmt: skip


def operation_row(operation: OperationRecord) -> Row:
    """An operation as cells for `OPERATION_COLUMNS`."""
    return (
        operation.operation_id,
        operation.tool,
        operation.state.value,
        str(operation.attempt),
        operation.run_id,
        "" if operation.dispatched_at_us is None else seconds_time(operation.dispatched_at_us),
        "" if operation.settled_at_us is None else seconds_time(operation.settled_at_us),
        operation.reason or operation.outcome or "",
    )


def _find(guard: Guard, named: str) -> OperationRecord:
    exact = guard.store.operations(operation_id=named).result()
    if exact:
        return exact[0]
    if len(named) >= PREFIX_CHARS_MIN:
        found = [item for item in guard.operations(limit=ROWS_MAX) if item.operation_id.startswith(named)]
        if len(found) == 1:
            return found[0]
        if found:
            msg = f"{named!r} fits {len(found)} operations; write more of the id"
            raise UsageError(msg)
    msg = f"there is no operation {named!r} in this store; `endstop ops` lists them"
    raise RunNotFoundError(msg)


def _show(output: Output, operation: OperationRecord) -> None:
    body = operation_json(operation)
    if output.as_json:
        output.json(body)
    else:
        output.facts((name.replace("_", " "), "" if value is None else str(value)) for name, value in body.items())
