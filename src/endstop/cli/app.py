"""The root command. It knows every verb by name and loads only the one that is called."""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import click

from endstop import __version__
from endstop.cli.codes import ExitCode, exit_code_of
from endstop.cli.session import NO_COLOR_OPTION, STORE_OPTION, Shared
from endstop.cli.text import block, visible
from endstop.errors import EndstopError, RunHalted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["VERBS", "cli", "run"]

DEBUG: Final = "ENDSTOP_DEBUG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """Where a verb lives, and what the overview says of it."""

    module: str
    section: str
    says: str
    name: str = "command"


_START: Final = "Start"
_LOOK: Final = "Look"
_STEER: Final = "Steer"
_CHECK: Final = "Check"

VERBS: Final[Mapping[str, Verb]] = {
    "demo": Verb(module="demo", section=_START, says="Show a runaway agent without the guard and under it."),
    "init": Verb(module="init", section=_START, says="Write a starter policy and an example task here."),
    "spec": Verb(module="spec", section=_START, says="Write down what a run is for, and print the run's id."),
    "run": Verb(module="run", section=_START, says="Carry out a task file under the guard."),
    "ps": Verb(module="ps", section=_LOOK, says="List runs."),
    "show": Verb(module="show", section=_LOOK, says="Show one run: its timeline, and how and why it ended."),
    "ops": Verb(module="ops", section=_LOOK, says="List operations, or show one: side effects and their state."),
    "ledger": Verb(module="ledger", section=_LOOK, says="Read the append-only record."),
    "stop": Verb(module="stop", section=_STEER, says="End a run now."),
    "freeze": Verb(module="freeze", section=_STEER, says="Refuse retries, sub-agents and handoffs."),
    "unfreeze": Verb(module="freeze", section=_STEER, says="Withdraw a freeze.", name="unfreeze"),
    "deny": Verb(module="deny", section=_STEER, says="Refuse calls by tool, effect or argument."),
    "undeny": Verb(module="deny", section=_STEER, says="Withdraw deny rules.", name="undeny"),
    "kill": Verb(module="kill", section=_STEER, says="End all runs, or those with a label, and refuse new ones."),
    "unkill": Verb(module="kill", section=_STEER, says="Withdraw a kill order.", name="unkill"),
    "resume": Verb(module="resume", section=_STEER, says="Let a run that ended go on after a named change."),
    "reconcile": Verb(module="reconcile", section=_STEER, says="Find interrupted runs and operations in doubt."),
    "policy": Verb(module="policy", section=_CHECK, says="Check, show and describe policy files."),
    "doctor": Verb(module="doctor", section=_CHECK, says="Check the store and this installation."),
}


class Endstop(click.Group):
    """The root group: verbs by table, and errors to exit codes in one place."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # the signature is click's
        """Every verb, in the order of the overview."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load one verb."""
        found = VERBS.get(cmd_name)
        if found is None:
            return None
        command = getattr(import_module(f"endstop.cli.{found.module}"), found.name)
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb; an unknown one is answered with the nearest."""
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`endstop --help` lists the verbs."
            ctx.fail(f"there is no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The overview, without loading a verb."""
        for section in (_START, _LOOK, _STEER, _CHECK):
            rows = [(name, found.says) for name, found in VERBS.items() if found.section == section]
            with formatter.section(section):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run, and end the process with the exit code; with `standalone_mode` False, give it back."""
        code = _code_of(lambda: super(Endstop, self).main(args, prog_name or "endstop", complete_var, False, **extra))
        if standalone_mode:
            sys.exit(code)
        return int(code)


def _code_of(call: Any) -> int:
    try:
        given = call()
        return given if isinstance(given, int) else ExitCode.DONE
    except click.exceptions.Abort:
        _say("interrupted")
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        _show_click(error)
        return ExitCode.USAGE
    except (EndstopError, RunHalted) as error:
        _trace(error)
        _say(f"{error}")
        return exit_code_of(error)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else ExitCode.INTERNAL
    except Exception as error:  # the last place that can turn a bug into one line
        _trace(error)
        _say(f"internal error: {type(error).__name__}: {visible(str(error))[:300]}")
        if not os.environ.get(DEBUG):
            _say(f"run with {DEBUG}=1 for the trace")
        return exit_code_of(error)


def _say(text: str) -> None:
    click.echo(f"endstop: {block(text)}", err=True)


def _trace(error: BaseException) -> None:
    if os.environ.get(DEBUG):
        import traceback

        click.echo(block("".join(traceback.format_exception(error))), err=True)


def _show_click(error: click.ClickException) -> None:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    _say(error.format_message())
    if context is not None:
        click.echo(f"Try '{context.command_path} --help'.", err=True)


@click.group(
    "endstop",
    cls=Endstop,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExit codes:\n"
    "  0 done              5 waiting for a person      9 not authorised\n"
    "  1 internal error    6 verification failed      10 in doubt\n"
    "  2 wrong usage       7 frozen                  124 time ran out\n"
    "  3 guard stopped it  8 not found               130 interrupted\n"
    "  4 operator stopped it",
)
@STORE_OPTION
@NO_COLOR_OPTION
@click.version_option(__version__, message="endstop %(version)s")
@click.pass_context
def cli(ctx: click.Context, store: str | None, no_color: bool) -> None:
    """Endstop stops an AI agent before its next bad call.

    \b
    Start:  endstop demo
            endstop init && endstop run example-task/task.toml
    """
    ctx.obj = Shared(store=store, no_color=no_color)


def run() -> int:
    """Run with this process's arguments; gives the exit code."""
    code = cli.main(standalone_mode=False)
    return code if isinstance(code, int) else ExitCode.INTERNAL
