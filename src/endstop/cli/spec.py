"""`endstop spec`: a person writes down what "done" means before the first model call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click

from endstop.cli.run_names import LAST
from endstop.cli.session import Session, ask, can_ask, examples, needs_terminal, verb
from endstop.core.model import Spec
from endstop.errors import SpecInvalidError, UsageError

__all__ = ["SpecWords", "ask_spec", "command", "given_spec", "new_run_id", "run_id_fault"]

RUN_ID_CHARS_MAX: Final = 200
_QUESTIONS: Final = (
    ("what_it_does", "What does it do?"),
    ("what_it_does_not", "What does it not do?"),
    ("done_looks_like", "What does done look like?"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecWords:
    """The three answers as far as they were given."""

    what_it_does: str | None = None
    what_it_does_not: str | None = None
    done_looks_like: str | None = None


def new_run_id(_: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A new run's own name as an option: it has to fit a record and a command."""
    fault = None if value is None else run_id_fault(value)
    if fault is not None:
        raise click.BadParameter(fault, param=parameter)
    return value


def run_id_fault(run_id: str) -> str | None:
    """What is wrong with a new run's id, or None: plain letters, digits and signs stand in a record and a command."""
    if run_id == LAST:
        return f"{LAST!r} names the newest run; take another id"
    plain = run_id.isascii() and all(sign.isalnum() or sign in "._:@+-" for sign in run_id)
    if not run_id or not plain or len(run_id) > RUN_ID_CHARS_MAX or run_id.startswith("-"):
        return f"a run id has 1 to {RUN_ID_CHARS_MAX} letters, digits or signs of . _ : @ + -"
    return None


@click.command(
    "spec",
    epilog=examples(
        "endstop spec",
        "endstop spec --what-it-does 'Audits our site' --what-it-does-not 'Changes nothing' \\",
        "             --done-looks-like 'A report names the three worst faults'",
        "endstop run task.toml --spec $(endstop spec --file spec.toml)",
    ),
)
@click.option("--what-it-does", metavar="TEXT", help="What the run does.")
@click.option("--what-it-does-not", metavar="TEXT", help="What it must not do.")
@click.option("--done-looks-like", metavar="TEXT", help="How anyone can see that it is done.")
@click.option(
    "--file", "file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take the three from a TOML file, at its top or in its table [spec].",
)  # fmt: skip
@click.option("--run-id", metavar="ID", callback=new_run_id, help="The run's id. Default: a new one.")
@verb()
def command(
    session: Session, what_it_does: str | None, what_it_does_not: str | None, done_looks_like: str | None,
    file: Path | None, run_id: str | None,
) -> None:  # fmt: skip
    """Write down what a run is for, and print the run's id: `endstop run TASK.toml --spec ID` starts it.

    Without options it asks three questions; a blank answer is asked for again.
    """
    words = SpecWords(
        what_it_does=what_it_does, what_it_does_not=what_it_does_not, done_looks_like=done_looks_like
    )  # fmt: skip
    spec = given_spec(words, file)
    named = session.guard(makes_store=True).save_spec(spec, run_id=run_id)
    if session.output.as_json:
        session.output.json({"run_id": named, "spec": asdict(spec)})
    else:
        session.output.line(named)


def given_spec(words: SpecWords, file: Path | None) -> Spec:
    """The spec from flags, a file or, for what is missing, a person. Raises UsageError when there is nobody to ask."""
    if file is not None:
        if any(value is not None for value in asdict(words).values()):
            msg = "give the spec by --file or by its three options, not by both"
            raise UsageError(msg)
        return _read_spec(file)
    missing = [name for name, value in asdict(words).items() if value is None]
    if missing and not can_ask():
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise needs_terminal(f"{options}, or --file", "a run needs a spec")
    return ask_spec(words)


def ask_spec(words: SpecWords) -> Spec:
    """Ask for what is missing, and again for what is blank or too long."""
    answers: dict[str, str] = {}
    for name, question in _QUESTIONS:
        given = getattr(words, name)
        answers[name] = given if isinstance(given, str) else _answer(name, question)
    return Spec(**answers)


def _answer(name: str, question: str) -> str:
    trial = {known: "-" for known, _ in _QUESTIONS}
    while True:
        text = ask(question)
        try:
            Spec(**{**trial, name: text})
        except SpecInvalidError as fault:
            click.echo(f"{fault}", err=True)
            continue
        return text


def _read_spec(file: Path) -> Spec:
    from endstop.runtime.toml_file import close_to, parse_toml, read_text

    found = parse_toml(read_text(file, SpecInvalidError, "spec file"), str(file), SpecInvalidError)
    table = found.get("spec", found)
    if not isinstance(table, dict):
        msg = f"{file}: [spec] must be a table"
        raise SpecInvalidError(msg)
    names = [name for name, _ in _QUESTIONS]
    for key in table:
        if key not in names:
            near = close_to(str(key), names)
            msg = f"{file}: unknown key {key!r}; " + (
                f"did you mean {near!r}?" if near else f"one of {', '.join(names)}"
            )
            raise SpecInvalidError(msg)
    missing = [name for name in names if name not in table]
    if missing:
        msg = f"{file}: {', '.join(missing)} is missing"
        raise SpecInvalidError(msg)
    return Spec(**{name: table[name] for name in names})
