"""`endstop demo`: a runaway agent without the guard and under it, against a real server on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from endstop.cli.session import Session, examples, verb

__all__ = ["command"]


@click.command("demo", epilog=examples("endstop demo", "endstop demo --json", "endstop demo --keep demo-files"))
@click.option(
    "--keep",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="Leave the demo's files in this folder, new or empty.",
)
@verb(uses_store=False)
def command(session: Session, keep: Path | None) -> int:
    """Show a runaway agent: without the guard it repeats an update until its cap, under the guard it writes once.

    Everything runs on this machine and takes some seconds. Ends with 0 only when each claim was checked.
    """
    from endstop.demo.scenario import main

    output = session.output
    return main(keep=keep, json=output.as_json, plain=output.is_colourless or not output.draws_on(sys.stdout))
