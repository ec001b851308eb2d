"""What the command line's tests share: a folder of their own, the runner, and real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import endstop
from endstop.cli.app import cli
from endstop.runtime.clock import SystemClock

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("ENDSTOP_STORE", "ENDSTOP_DEBUG", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How one call of the command line ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Endstop = Callable[..., Answer]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own as the current one, and no setting of the person who runs the tests."""
    for name in [*SETTINGS, *(name for name in os.environ if name.startswith("ENDSTOP__"))]:
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def run_cli() -> Endstop:
    """The command line in this process."""

    def call(*args: str, answers: str | None = None) -> Answer:
        result = CliRunner().invoke(cli, list(args), input=answers)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return Answer(code=result.exit_code, out=result.stdout, err=result.stderr)

    return call


def process_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that finds the package under test and the tests' tools."""
    paths = [str(Path(endstop.__file__).resolve().parents[1]), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(more or {})}


def start(*args: str, **more: Any) -> subprocess.Popen[str]:
    """`endstop ARGS` as a process."""
    command = [sys.executable, "-m", "endstop", *args]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=process_environment(), **{**streams, **more})


def finished(process: subprocess.Popen[str], seconds: int = 30) -> Answer:
    """Wait for a process; one that hangs fails the test."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the process hangs:\n{out}\n{err}")
    return Answer(code=process.returncode, out=out, err=err)


@pytest.fixture
def run_process() -> Endstop:
    """The command line as a process of its own."""

    def call(*args: str) -> Answer:
        return finished(start(*args))

    return call


SPEC = """
[spec]
what_it_does = "Looks for x."
what_it_does_not = "Changes nothing."
done_looks_like = "x is found."
"""

ALL_TOOLS = """
[tools.look]
function = "tests.cli.task_tools:look"
effect = "read"
[tools.touch]
function = "tests.cli.task_tools:touch"
effect = "write"
idempotency_key = "{path}"
scope = "run"
[tools.dawdle]
function = "tests.cli.task_tools:dawdle"
effect = "write"
idempotency_key = "{seconds}"
scope = "run"
[tools.ask_person]
function = "tests.cli.task_tools:ask_person"
effect = "read"
[tools.unpermitted]
function = "tests.cli.task_tools:unpermitted"
effect = "read"
"""

USAGE = {"input_tokens": 40, "output_tokens": 10}


def text_turn(text: str, **more: object) -> dict[str, object]:
    return {"text": text, "usage": USAGE, **more}


def call_turn(name: str, call_id: str = "c1", **args: object) -> dict[str, object]:
    return {"tool_calls": [{"id": call_id, "name": name, "args": args}], "usage": USAGE}


def write_task(
    folder: Path, *turns: Mapping[str, object], name: str = "task", spec: bool = True, key: str = "", more: str = ""
) -> str:
    """A task file with a scripted model; gives its name."""
    script = folder / f"{name}.jsonl"
    script.write_text("".join(json.dumps(turn) + "\n" for turn in turns), encoding="utf-8")
    keyed = f'[run]\nkey = "{key}"\n' if key else ""
    text = (
        f'task = "find x"\n{SPEC if spec else ""}\n[model]\nname = "scripted:{script.name}"\n{more}{ALL_TOOLS}{keyed}'
    )
    (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return f"{name}.toml"


def await_state(run_id: str, state: str, *, turns: int = 1, in_flight: int = 0) -> None:
    """Wait until another process has brought a run into `state`, with so many turns and calls in flight."""
    clock = SystemClock()
    until_us = clock.now_us() + 20_000_000
    with endstop.open(".endstop/endstop.db") as guard:
        while clock.now_us() < until_us:
            found = guard.store.run(run_id).result()
            is_there = found is not None and found.state == state and found.counters.turns >= turns
            if is_there and found is not None and len(found.in_flight) >= in_flight:
                return
            clock.sleep_ms(10)
    pytest.fail(f"run {run_id} never was {state}")
