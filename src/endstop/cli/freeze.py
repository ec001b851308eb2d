"""`endstop freeze` and `endstop unfreeze`: no retries, sub-agents and handoffs, while ordinary calls go on."""

from __future__ import annotations

import click

from endstop.cli.control import control_json
from endstop.cli.run_names import root_id
from endstop.cli.session import ACTOR, REASON, Session, examples, verb
from endstop.errors import UsageError

__all__ = ["command", "unfreeze"]


@click.command("freeze", epilog=examples("endstop freeze last --reason 'target is degraded'", "endstop freeze --all"))
@click.argument("run", required=False)
@click.option("--all", "everything", is_flag=True, help="Freeze every run, also those that start later.")
@REASON
@ACTOR
@verb()
def command(session: Session, run: str | None, everything: bool, reason: str, actor: str) -> None:
    """Refuse retries, sub-agents and handoffs of one run, or of all; ordinary calls go on.

    A frozen run that has no worker is neither started again nor resumed before it is unfrozen.
    """
    _check_scope(run, everything)
    guard = session.guard(makes_store=everything)
    order = guard.freeze(None if run is None else root_id(guard, run), reason=reason, actor=actor)
    if session.output.as_json:
        session.output.json({"control": control_json(order)})
    else:
        session.output.line(f"frozen: {order.run_id or 'all runs'}")


@click.command("unfreeze", epilog=examples("endstop unfreeze last", "endstop unfreeze --all"))
@click.argument("run", required=False)
@click.option("--all", "everything", is_flag=True, help="Withdraw every freeze, also those of single runs.")
@REASON
@ACTOR
@verb()
def unfreeze(session: Session, run: str | None, everything: bool, reason: str, actor: str) -> None:
    """Withdraw a freeze."""
    _check_scope(run, everything)
    guard = session.guard()
    root = None if run is None else root_id(guard, run)
    count = guard.unfreeze(root, reason=reason, actor=actor)
    if session.output.as_json:
        session.output.json({"run_id": root, "withdrawn": count})
    else:
        session.output.line(f"unfrozen: {root or 'all runs'} ({count} orders withdrawn)")


def _check_scope(run: str | None, everything: bool) -> None:
    if (run is None) is not everything:
        msg = "name one RUN, or say --all"
        raise UsageError(msg)
