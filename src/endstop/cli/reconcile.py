"""`endstop reconcile`: what crashed workers left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from endstop.cli.codes import ExitCode
from endstop.cli.ops import OPERATION_COLUMNS, operation_row
from endstop.cli.session import Session, examples, verb
from endstop.core.codec import operation_json
from endstop.core.transitions import OperationState
from endstop.runtime.owners import WorkerBoard

if TYPE_CHECKING:
    from endstop.core.records import OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["command"]


@click.command("reconcile", epilog=examples("endstop reconcile", "endstop reconcile --json | jq .in_doubt"))
@verb()
def command(session: Session) -> int:
    """Take over every run whose workers are all dead, and list the operations in doubt. Sends nothing.

    Ends with 10 while an operation is in doubt: someone has to find out at the target whether it took effect.
    """
    output = session.output
    guard = session.guard()
    found = guard.reconcile()
    in_doubt = tuple(operation for operation in found.in_doubt if _is_in_doubt(guard, operation))
    if output.as_json:
        output.json({"interrupted": list(found.interrupted), "in_doubt": [operation_json(item) for item in in_doubt]})
    else:
        for run_id in found.interrupted:
            output.line(f"interrupted: {run_id}")
        if in_doubt:
            output.table(OPERATION_COLUMNS, [operation_row(item) for item in in_doubt])
        if not found.interrupted and not in_doubt:
            output.note("endstop: no run is interrupted, and no operation is in doubt")
    if found.interrupted and not output.as_json:
        output.note(
            "endstop: go on with `endstop resume RUN --change cursor --reason …`, or end them with `endstop stop`"
        )
    return ExitCode.IN_DOUBT if in_doubt else ExitCode.DONE


def _is_in_doubt(guard: Guard, operation: OperationRecord) -> bool:
    """One that a living worker is executing is under way, not in doubt."""
    if operation.state is not OperationState.EXECUTING:
        return True
    return not WorkerBoard(guard.store.owners_dir).is_alive(operation.owner_id)
