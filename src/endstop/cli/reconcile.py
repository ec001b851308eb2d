"""`endstop reconcile`: what crashed workers left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from endstop.cli.codes import ExitCode
from endstop.cli.ops import OPERATION_COLUMNS, operation_row
from endstop.cli.policy import POLICY_FILE
from endstop.cli.session import Session, examples, verb
from endstop.core.codec import operation_json, rfc3339
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.policy import Policy
    from endstop.core.probe_flow import ProbeReport
    from endstop.core.records import OperationRecord
    from endstop.runtime.guard import Guard

__all__ = ["command"]


@click.command(
    "reconcile",
    epilog=examples(
        "endstop reconcile", "endstop reconcile --policy endstop.toml", "endstop reconcile --json | jq .in_doubt"
    ),
)
@click.option(
    "--policy", "policy_file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="The policy whose probes are asked. Without it endstop.toml here, where there is one.",
)  # fmt: skip
@verb()
def command(session: Session, policy_file: Path | None) -> int:
    """Take over every run whose workers are all dead, and ask the targets of operations in doubt. Sends nothing.

    Ends with 10 while an operation is in doubt: someone has to find out at the target whether it took effect.
    """
    output = session.output
    guard = session.guard()
    found = guard.reconcile(policy=_policy(policy_file))
    in_doubt = tuple(operation for operation in found.in_doubt if _is_in_doubt(guard, operation))
    if output.as_json:
        output.json(
            {
                "interrupted": list(found.interrupted),
                "probes": [_probe_json(report) for report in found.probes],
                "in_doubt": [operation_json(item) for item in in_doubt],
            }
        )
    else:
        for run_id in found.interrupted:
            output.line(f"interrupted: {run_id}")
        for report in found.probes:
            output.line(f"{report.operation.operation_id}: {report.code}, {report.operation.state}")
        if in_doubt:
            output.table(OPERATION_COLUMNS, [operation_row(item) for item in in_doubt])
        if not found.interrupted and not in_doubt:
            output.note("endstop: no run is interrupted, and no operation is in doubt")
    if found.interrupted and not output.as_json:
        output.note(
            "endstop: go on with `endstop resume RUN --change cursor --reason …`, or end them with `endstop stop`"
        )
    if in_doubt and not output.as_json:
        output.note("endstop: settle what stays in doubt with `endstop ops settle`, once you know at the target")
    return ExitCode.IN_DOUBT if in_doubt else ExitCode.DONE


def _policy(named: Path | None) -> Policy | None:
    from endstop.runtime.policy_file import load_policy

    file = named or Path(POLICY_FILE)
    return load_policy(file, environ=os.environ) if named is not None or file.exists() else None


def _probe_json(report: ProbeReport) -> dict[str, object]:
    return {
        "operation_id": report.operation.operation_id, "tool": report.operation.tool, "code": report.code,
        "found": None if report.found is None else report.found.value, "state": report.operation.state.value,
        "not_before": rfc3339(report.not_before_us or None),
    }  # fmt: skip


def _is_in_doubt(guard: Guard, operation: OperationRecord) -> bool:
    """One that a living worker is executing is under way, not in doubt."""
    if operation.state is not OperationState.EXECUTING:
        return True
    return not guard.world.board.is_alive(operation.owner_id)
