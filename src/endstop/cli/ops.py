"""`endstop ops`: side effects and their state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from endstop.cli.codes import ExitCode
from endstop.cli.figures import seconds_time
from endstop.cli.output import Column
from endstop.cli.run_names import root_id
from endstop.cli.session import Session, examples, verb
from endstop.core.codec import operation_json
from endstop.core.transitions import OperationState
from endstop.errors import RunNotFoundError, UsageError
from endstop.store.port import ROWS_MAX

if TYPE_CHECKING:
    from endstop.cli.output import Output, Row
    from endstop.core.records import OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["OPERATION_COLUMNS", "command", "operation_row"]

OPERATION_HEAD: Final = "op_"
PREFIX_CHARS_MIN: Final = 9
LIMIT: Final = 1_000

OPERATION_COLUMNS: Final = (
    Column(name="operation", keeps=True), Column(name="tool"), Column(name="state"),
    Column(name="attempt", is_number=True), Column(name="run", keeps=True), Column(name="sent", keeps=True),
    Column(name="settled", keeps=True), Column(name="why"),
)  # fmt: skip


@click.command(
    "ops",
    epilog=examples("endstop ops", "endstop ops last", "endstop ops --state UNKNOWN --json", "endstop ops op_1a2b3c4d"),
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
def command(session: Session, run_or_operation: str | None, states: tuple[str, ...], limit: int) -> int:
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
