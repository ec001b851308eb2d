"""`endstop run`: carry out a task file under the guard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from endstop.cli.session import Session, examples, name_value, verb
from endstop.cli.spec import new_run_id

__all__ = ["command"]

TIMEOUT_SECONDS_MAX = 7 * 86_400


@click.command(
    "run",
    epilog=examples(
        "endstop run task.toml",
        "endstop run task.toml --model scripted:turns.jsonl --json",
        "endstop run task.toml --timeout 300 --label team=seo",
        "endstop run task.toml --spec $(endstop spec)",
    ),
)
@click.argument("task", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--spec", "spec_of", metavar="RUN", help="Take the spec that is stored for this run.")
@click.option(
    "--run-id",
    metavar="ID",
    callback=new_run_id,
    help="The run's id. Default: the task's run.key, else a new one.",
)
@click.option(
    "--timeout", "timeout_s", metavar="SECONDS", type=click.IntRange(1, TIMEOUT_SECONDS_MAX),
    help="Stop the run after so long, and end with 124.",
)  # fmt: skip
@click.option(
    "--model", metavar="NAME", help="Another model than the task's. A scripted: path is relative to this folder."
)
@click.option(
    "--label", "labels", metavar="NAME=VALUE", multiple=True, callback=name_value,
    help="A label to find the run by; may be given again.",
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="No live progress on stderr.")
@verb()
def command(
    session: Session, task: Path, spec_of: str | None, run_id: str | None, timeout_s: int | None, model: str | None,
    labels: Mapping[str, str], quiet: bool,
) -> int:  # fmt: skip
    """Carry out a task file under the guard. The exit code says how the run ended.

    A run of the same id (the task's run.key, or --run-id) is never started twice: one that has ended, or that a living
    process is working on, is only shown. One that was interrupted, or resumed, goes on.

    Ctrl-C stops the run and leaves its terminal envelope; a second Ctrl-C leaves at once. SIGTERM,
    SIGHUP and --timeout stop it too, and wait at most five seconds for calls in flight.
    """
    from endstop.cli.run_task import RunOptions, carry_out

    options = RunOptions(
        spec_of=spec_of, run_id=run_id, timeout_s=timeout_s, model=model, labels=labels, quiet=quiet
    )  # fmt: skip
    return carry_out(session, task, options)
