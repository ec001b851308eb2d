"""`endstop policy`: check, show and describe policy files."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from endstop.cli.output import Column
from endstop.cli.session import Session, examples, verb

if TYPE_CHECKING:
    from endstop.core.policy import Policy, ToolPolicy

__all__ = ["command"]

POLICY_FILE: Final = "endstop.toml"
FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default=Path(POLICY_FILE))


@click.group("policy")
def command() -> None:
    """Check, show and describe policy files."""


@command.command("check", epilog=examples("endstop policy check", "endstop policy check team.toml --json"))
@FILE
@click.option("--strict", is_flag=True, help="End with 2 when there is a warning.")
@verb(uses_store=False)
def check(session: Session, file: Path, strict: bool) -> int:
    """Read a policy file (endstop.toml), tell what is wrong or probably not meant, and print its digest.

    Limits from the environment (ENDSTOP__LIMITS__STEPS_MAX=40) count as they do in a run.
    """
    from endstop.cli.codes import ExitCode
    from endstop.runtime.policy_file import load_policy, policy_warnings

    policy = load_policy(file, environ=os.environ)
    warnings = policy_warnings(policy)
    if session.output.as_json:
        session.output.json(
            {"file": str(file), "valid": True, "digest": policy.digest(), "warnings": list(warnings)}
        )  # fmt: skip
    else:
        for warning in warnings:
            session.output.note(f"warning: {warning}")
        session.output.line(f"ok  {policy.digest()}  {file}")
    return ExitCode.USAGE if strict and warnings else ExitCode.DONE


@command.command("show", epilog=examples("endstop policy show", "endstop policy show team.toml --json"))
@FILE
@verb(uses_store=False)
def show(session: Session, file: Path) -> None:
    """Show what a policy file comes to, defaults and environment included."""
    from endstop.runtime.policy_file import load_policy

    policy = load_policy(file, environ=os.environ)
    output = session.output
    if output.as_json:
        output.json(_policy_json(policy))
        return
    output.facts(
        [
            ("digest", policy.digest()),
            ("on_trip", ", ".join(policy.on_trip)),
            ("strict_tools", str(policy.strict_tools).lower()),
            ("redact", ", ".join(policy.redact) or "nothing"),
        ]
    )
    output.line("")
    rows = [(name, "none" if value is None else str(value)) for name, value in asdict(policy.limits).items()]
    output.table((Column(name="limit"), Column(name="value", is_number=True)), rows)
    if policy.tools:
        output.line("")
        columns = tuple(Column(name=name) for name in ("tool", "effect", "idempotency key", "scope", "outcome class"))
        output.table(
            columns,
            [
                (name, tool.effect.value, _shown(tool.idempotency_key), tool.key_scope, tool.target_class.value)
                for name, tool in policy.tools.items()
            ],
        )


@command.command("schema", epilog=examples("endstop policy schema > endstop.schema.json", "endstop policy schema task"))
@click.argument("kind", type=click.Choice(["policy", "task", "tool-result"]), default="policy")
@verb(uses_store=False)
def schema(session: Session, kind: str) -> None:
    """Print the JSON Schema of policy files, task files, or a tool's result."""
    from endstop.runtime.policy_file import policy_json_schema, tool_result_json_schema
    from endstop.runtime.task_file import task_json_schema

    made = {"policy": policy_json_schema, "task": task_json_schema, "tool-result": tool_result_json_schema}
    # A schema is a document of its own: it is the same with and without --json.
    session.output.raw(made[kind]().rstrip("\n"))


def _policy_json(policy: Policy) -> dict[str, object]:
    return {
        "digest": policy.digest(),
        "on_trip": list(policy.on_trip),
        "strict_tools": policy.strict_tools,
        "redact": list(policy.redact),
        "limits": asdict(policy.limits),
        "tools": {name: _tool_json(tool) for name, tool in policy.tools.items()},
    }


def _tool_json(tool: ToolPolicy) -> dict[str, object]:
    body: dict[str, object] = {}
    for item in fields(tool):
        value = getattr(tool, item.name)
        if item.name == "result_schema" and isinstance(value, str):
            body[item.name] = json.loads(value)
        else:
            body[item.name] = _shown(value) if callable(value) else list(value) if isinstance(value, tuple) else value
    return body


def _shown(value: object) -> str:
    if value is None:
        return ""
    if callable(value):
        return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', '?')}"
    return ", ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
