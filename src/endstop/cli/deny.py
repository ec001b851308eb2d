"""`endstop deny` and `endstop undeny`: calls that an operator refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from endstop.cli.control import control_json
from endstop.cli.run_names import root_id
from endstop.cli.session import ACTOR, REASON, Session, examples, name_value, verb
from endstop.core.reasons import Effect
from endstop.errors import RunNotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["command", "undeny"]


@click.command(
    "deny",
    epilog=examples(
        "endstop deny --tool 'crm.*' --reason 'CRM migration'",
        "endstop deny --run last --effect write",
        "endstop deny --tool send_mail --arg 'to=*@example.org'",
        "endstop deny --list",
    ),
)
@click.option("--tool", metavar="PATTERN", help="The tool's name, or a shell pattern.")
@click.option("--run", metavar="RUN", help="Only in this run; without it, in every run.")
@click.option("--effect", type=click.Choice([effect.value for effect in Effect]), help="Only calls with this effect.")
@click.option(
    "--arg", "args", metavar="PATH=PATTERN", multiple=True, callback=name_value,
    help="Only calls whose argument fits; may be given again.",
)  # fmt: skip
@click.option("--list", "lists", is_flag=True, help="List the rules in force instead.")
@REASON
@ACTOR
@verb()
def command(
    session: Session, tool: str | None, run: str | None, effect: str | None, args: Mapping[str, str], lists: bool,
    reason: str, actor: str,
) -> None:  # fmt: skip
    """Refuse calls that fit every part given, and print the rule's id. Calls in flight go on."""
    output = session.output
    if lists:
        if tool or run or effect or args:
            msg = "--list takes no other part of a rule"
            raise UsageError(msg)
        _list(session)
        return
    guard = session.guard(makes_store=run is None)
    root = None if run is None else root_id(guard, run)
    order = guard.deny(tool=tool, run_id=root, effect=effect, args=args, reason=reason, actor=actor)
    if output.as_json:
        output.json({"control": control_json(order)})
    else:
        output.line(order.control_id)


@click.command("undeny", epilog=examples("endstop undeny --rule RULE", "endstop undeny --tool 'crm.*'"))
@click.option("--rule", metavar="ID", help="The rule that `endstop deny` printed.")
@click.option("--tool", metavar="PATTERN", help="Rules with exactly this pattern.")
@click.option("--run", metavar="RUN", help="Rules of this run.")
@click.option("--all", "everything", is_flag=True, help="Every rule.")
@REASON
@ACTOR
@verb()
def undeny(
    session: Session, rule: str | None, tool: str | None, run: str | None, everything: bool, reason: str, actor: str
) -> None:
    """Withdraw the deny rules that fit every part given."""
    if everything is bool(rule or tool or run):
        msg = "name --rule, --tool or --run, or say --all"
        raise UsageError(msg)
    guard = session.guard()
    root = None if run is None else root_id(guard, run)
    count = guard.undeny(tool=tool, run_id=root, rule_id=rule, reason=reason, actor=actor)
    if count == 0:
        msg = "no deny rule fits; `endstop deny --list` lists the rules in force"
        raise RunNotFoundError(msg)
    if session.output.as_json:
        session.output.json({"withdrawn": count})
    else:
        session.output.line(f"withdrawn: {count}")


def _list(session: Session) -> None:
    from endstop.cli.output import Column

    rules = [order for order in session.guard().store.controls().result() if order.kind == "deny"]
    if session.output.as_json:
        session.output.json({"controls": [control_json(order) for order in rules]})
        return
    columns = [
        Column(name="rule", keeps=True),
        *(Column(name=name) for name in ("tool", "effect", "run", "args", "why")),
    ]
    rows = [
        (
            order.control_id, order.tool or "*", order.effect or "*", order.run_id or "*",
            ", ".join(f"{name}={pattern}" for name, pattern in order.args), order.reason,
        )
        for order in rules
    ]  # fmt: skip
    session.output.table(columns, rows)
