"""`endstop resume`: let a run that ended go on, after a named change."""

from __future__ import annotations

from pathlib import Path

import click

from endstop.cli.codes import ExitCode
from endstop.cli.frozen import refuse_frozen
from endstop.cli.run_names import find_run
from endstop.cli.session import ACTOR, Session, examples, verb

__all__ = ["command"]


@click.command(
    "resume",
    epilog=examples(
        "endstop resume last --change limit:steps_max=40 --reason 'twice as many pages'",
        "endstop resume RUN --change authorisation --reason 'access granted' --task task.toml",
    ),
)
@click.argument("run")
@click.option(
    "--change", metavar="CHANGE", required=True,
    help="What is different now: cursor, args, authorisation, strategy, retry_after or limit:NAME=VALUE.",
)  # fmt: skip
@click.option("--reason", metavar="TEXT", required=True, help="Why, for the record.")
@click.option(
    "--task", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Go on at once with this task file."
)
@ACTOR
@verb()
def command(session: Session, run: str, change: str, reason: str, task: Path | None, actor: str) -> int:
    """Let a stopped, paused or interrupted run go on in a new generation. Its counters and totals stay.

    A run that was ended by a cap needs that limit raised. Without --task, a worker goes on with it when it joins the
    run by its id: `endstop run TASK.toml --run-id RUN`.
    """
    guard = session.guard()
    record = find_run(guard, run)
    refuse_frozen(guard, record)
    generation = guard.resume(record.root_run_id, change=change, reason=reason, actor=actor)
    if task is not None:
        from endstop.cli.run_task import RunOptions, carry_out

        session.output.note(f"endstop: {record.root_run_id} goes on in generation {generation}")
        guard.close()
        return carry_out(session, task, RunOptions(run_id=record.root_run_id))
    if session.output.as_json:
        session.output.json({"run_id": record.root_run_id, "generation": generation, "change": change})
    else:
        session.output.line(f"resumed: {record.root_run_id}, generation {generation}")
        session.output.note(f"endstop: go on with `endstop run TASK.toml --run-id {record.root_run_id}`")
    return ExitCode.DONE
