"""`endstop kill` and `endstop unkill`: end many runs at once, and let none of them start again."""

from __future__ import annotations

import click

from endstop.cli.session import ACTOR, REASON, Session, can_ask, confirm, examples, verb
from endstop.errors import UsageError

__all__ = ["command", "unkill"]


@click.command(
    "kill",
    epilog=examples(
        "endstop kill --label team=seo --reason 'bad deploy' --yes", "endstop kill --all --reason INCIDENT"
    ),
)
@click.option("--label", metavar="NAME[=VALUE]", help="Every run with this label.")
@click.option("--all", "everything", is_flag=True, help="Every run.")
@click.option("--reason", metavar="TEXT", required=True, help="Why, for the record.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@ACTOR
@verb()
def command(session: Session, label: str | None, everything: bool, reason: str, yes: bool, actor: str) -> None:
    """End every run, or every run with a label, and refuse new ones until `endstop unkill`."""
    _check_scope(label, everything)
    scope = "every run" if label is None else f"every run with label {label}"
    # The emergency switch works from a script and a pager too: only a person at a terminal is asked.
    if not yes and can_ask():
        confirm(f"End {scope} now, and refuse new ones?")
    guard = session.guard(makes_store=True)
    ended = guard.kill(label=label, all=everything, reason=reason, actor=actor)
    if session.output.as_json:
        session.output.json({"label": label, "ended": list(ended)})
        return
    for run_id in ended:
        session.output.line(run_id)
    session.output.note(f"endstop: {len(ended)} runs ended; new ones are refused until `endstop unkill`")


@click.command("unkill", epilog=examples("endstop unkill --all", "endstop unkill --label team=seo"))
@click.option("--label", metavar="NAME[=VALUE]", help="The order for exactly this label.")
@click.option("--all", "everything", is_flag=True, help="Every kill order, also those for labels.")
@REASON
@ACTOR
@verb()
def unkill(session: Session, label: str | None, everything: bool, reason: str, actor: str) -> None:
    """Withdraw a kill order. Runs that it ended stay ended; resume those that should go on."""
    _check_scope(label, everything)
    count = session.guard().unkill(label=label, reason=reason, actor=actor)
    if session.output.as_json:
        session.output.json({"label": label, "withdrawn": count})
    else:
        session.output.line(f"withdrawn: {count}")


def _check_scope(label: str | None, everything: bool) -> None:
    if (label is None) is not everything:
        msg = "name a --label, or say --all"
        raise UsageError(msg)
