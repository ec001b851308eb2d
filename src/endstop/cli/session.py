"""What every verb shares: its options, its output, and the guard it opens on the store."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

import click

from endstop.cli.output import Output
from endstop.errors import UsageError
from endstop.runtime.clock import SystemClock
from endstop.runtime.guard import DEFAULT_STORE, Guard, open_guard

if TYPE_CHECKING:
    from pathlib import Path

    from endstop.core.policy import Policy
    from endstop.runtime.clock import Clock

__all__ = [
    "ACTOR", "JSON_OPTION", "NO_COLOR_OPTION", "REASON", "STORE_OPTION", "Session", "Shared", "ask", "can_ask",
    "confirm", "examples", "name_value", "needs_terminal", "sqlite_path", "verb",
]  # fmt: skip

C = TypeVar("C", bound=Callable[..., object])

ACTOR_CHARS_MAX: Final = 80
REASON_CHARS_MAX: Final = 1_000
_ACTOR: Final = re.compile(r"[A-Za-z0-9_.:/@#+\- ]{1,80}")


class Session:
    """One verb's surroundings. The guard is opened when it is first asked for, and closed with the verb."""

    def __init__(self, *, store_url: str | None, output: Output) -> None:
        self.output = output
        self.clock: Clock = SystemClock()
        self._store_url = store_url

    @property
    def store_url(self) -> str:
        """The store: as given, else `$ENDSTOP_STORE`, else the one of this folder."""
        return self._store_url or os.environ.get("ENDSTOP_STORE") or DEFAULT_STORE

    def guard(self, policy: Policy | None = None, *, makes_store: bool = False) -> Guard:
        """Open the guard. A verb that only reads or orders does not make a store: it finds an empty one instead."""
        url = self.store_url
        path = sqlite_path(url)
        if not makes_store and path is not None and not path.exists():
            self.output.note(f"endstop: there is no store at {path} yet")
            url = "memory:"
        guard = open_guard(url, policy=policy, clock=self.clock)
        click.get_current_context().call_on_close(guard.close)
        return guard


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite store, None for another kind."""
    from pathlib import Path

    if url == "memory:":
        return None
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///"))
    return None if "://" in url else Path(url)


def can_ask() -> bool:
    """Whether a person sits here: questions are seen, and answers come from a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> str:
    """One answer of a person; the question goes to stderr. Raises Abort at the end of input."""
    # Not `click.prompt`, which leaves a space on stdout for every question.
    sys.stderr.write(f"{question} ")
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise click.Abort
    return line.strip()


def confirm(question: str) -> None:
    """Go on when a person says yes; raises Abort otherwise."""
    if ask(f"{question} [y/N]").lower() not in ("y", "yes"):
        raise click.Abort


def examples(*lines: str) -> str:
    """The end of a help page."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def name_value(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """`NAME=VALUE` options as a mapping."""
    found: dict[str, str] = {}
    for value in values:
        name, has_value, rest = value.partition("=")
        if not name or not has_value:
            msg = f"{value!r} is not NAME=VALUE"
            raise click.BadParameter(msg, param=parameter)
        found[name] = rest
    return found


def _actor(_: click.Context, parameter: click.Parameter, value: str) -> str:
    if not _ACTOR.fullmatch(value):
        msg = f"a name has 1 to {ACTOR_CHARS_MAX} plain letters, digits or signs"
        raise click.BadParameter(msg, param=parameter)
    return value


def _reason(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and len(value) > REASON_CHARS_MAX:
        msg = f"a reason has {REASON_CHARS_MAX} characters at most"
        raise click.BadParameter(msg, param=parameter)
    return value


STORE_OPTION = click.option(
    "--store",
    metavar="URL",
    help="The store: sqlite:///PATH or a path. Default $ENDSTOP_STORE, else .endstop/endstop.db.",
)
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout.")
NO_COLOR_OPTION = click.option("--no-color", is_flag=True, help="No colours, also on a terminal.")
ACTOR = click.option(
    "--actor",
    metavar="NAME",
    default="operator",
    show_default=True,
    callback=_actor,
    help="Who does this, for the record.",
)
REASON = click.option("--reason", metavar="TEXT", default="", callback=_reason, help="Why, for the record.")


def verb(*, uses_store: bool = True) -> Callable[[C], C]:
    """Give a verb the shared options and, in their place, a `session`."""

    def wrap(function: C) -> C:
        @functools.wraps(function)
        def with_session(
            *args: object, as_json: bool, no_color: bool, store: str | None = None, **more: object
        ) -> object:
            above = click.get_current_context().find_root().obj
            shared = above if isinstance(above, Shared) else Shared()
            output = Output(as_json=as_json, no_color=no_color or shared.no_color)
            session = Session(store_url=store or shared.store, output=output)
            return function(*args, session=session, **more)

        decorated = NO_COLOR_OPTION(JSON_OPTION(with_session))
        found: C = STORE_OPTION(decorated) if uses_store else decorated  # type: ignore[assignment]  # same callable
        return found

    return wrap


class Shared:
    """The options that stand before the verb."""

    def __init__(self, *, store: str | None = None, no_color: bool = False) -> None:
        self.store = store
        self.no_color = no_color


def needs_terminal(option: str, what: str) -> UsageError:
    """The refusal of a question that nobody could answer."""
    return UsageError(f"{what}, and there is no terminal to ask at: give {option}")
