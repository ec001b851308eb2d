"""On a real terminal (a pseudo-terminal): tables, colour, bars and questions; elsewhere none of them."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from endstop.runtime.clock import SystemClock
from tests.cli.conftest import Endstop, call_turn, process_environment, text_turn, write_task

pytestmark = pytest.mark.slow
ESCAPE = "\x1b["


class Terminal:
    """`endstop ARGS` on a pseudo-terminal of its own; what it writes can be waited for, and answered."""

    def __init__(self, *args: str, env: Mapping[str, str] | None = None, stdout: int | None = None) -> None:
        ours, theirs = pty.openpty()
        self._ours = ours
        settings = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **(env or {})}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "endstop", *args],
            stdin=theirs,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env=process_environment(settings),
        )
        os.close(theirs)
        self.text = ""
        self.piped = ""

    def read_until(self, wanted: str, seconds: int = 20) -> None:
        clock = SystemClock()
        until_us = clock.now_us() + seconds * 1_000_000
        while wanted not in self.text:
            if clock.now_us() > until_us or not self._read():
                pytest.fail(f"{wanted!r} never came:\n{self.text}")

    def answer(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._ours)
        if self.process.stdout is not None:
            with self.process.stdout as pipe:
                self.piped = pipe.read().decode()
        return self.process.wait(timeout=20)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 20)
        if not ready:
            return False
        try:
            piece = os.read(self._ours, 65_536)
        except OSError:
            # Linux reports the other side's end like this.
            return False
        self.text += piece.decode(errors="replace")
        return bool(piece)


@pytest.fixture
def one_run(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, call_turn("look", q="x"), text_turn("done")), "--run-id", "r1").code == 0


def test_the_three_questions_are_asked_and_a_blank_answer_again() -> None:
    terminal = Terminal("spec", "--run-id", "asked")
    terminal.read_until("What does it do?")
    terminal.answer("\n")
    terminal.read_until("is blank")
    terminal.answer("It looks.\n")
    terminal.read_until("What does it not do?")
    terminal.answer("It changes nothing.\n")
    terminal.read_until("What does done look like?")
    terminal.answer("x is found.\n")
    assert terminal.end() == 0
    assert terminal.text.rstrip().endswith("asked")


def test_while_it_asks_nothing_but_the_run_id_goes_to_stdout() -> None:
    """As in `endstop run TASK.toml --spec "$(endstop spec)"`."""
    terminal = Terminal("spec", "--run-id", "asked", stdout=subprocess.PIPE)
    for question in ("What does it do?", "What does it not do?", "What does done look like?"):
        terminal.read_until(question)
        terminal.answer("words\n")
    assert terminal.end() == 0
    assert terminal.piped == "asked\n"


def test_a_task_without_a_spec_asks_for_it(folder: Path) -> None:
    terminal = Terminal("run", write_task(folder, text_turn("done"), spec=False), "--run-id", "asked")
    for question in ("What does it do?", "What does it not do?", "What does done look like?"):
        terminal.read_until(question)
        terminal.answer("words\n")
    assert terminal.end() == 0


def test_a_kill_is_asked_about(one_run: None) -> None:
    assert one_run is None
    terminal = Terminal("kill", "--all", "--reason", "incident")
    terminal.read_until("End every run now")
    terminal.answer("n\n")
    assert terminal.end() == 130


@pytest.mark.usefixtures("one_run")
@pytest.mark.parametrize(
    ("args", "env", "colour", "drawn"),
    [
        ((), {}, True, True),
        (("--no-color",), {}, False, True),
        ((), {"NO_COLOR": "1"}, False, True),
        ((), {"TERM": "dumb"}, False, False),
    ],
)
def test_tables_are_drawn_on_a_terminal_and_coloured_unless_unwanted(
    args: tuple[str, ...], env: dict[str, str], colour: bool, drawn: bool
) -> None:
    terminal = Terminal("ps", "--all", *args, env=env)
    assert terminal.end() == 0
    assert "r1" in terminal.text
    assert (f"{ESCAPE}32m" in terminal.text) is colour
    assert ("─" in terminal.text) is drawn


@pytest.mark.usefixtures("one_run")
def test_through_a_pipe_the_same_is_plain(run_process: Endstop) -> None:
    answer = run_process("ps", "--all")
    assert ESCAPE not in answer.out + answer.err
    assert "─" not in answer.out


def test_progress_is_drawn_as_bars_and_taken_away_at_the_end(folder: Path) -> None:
    turns = (call_turn("look", q="x"), text_turn("done", delay_ms=800))
    terminal = Terminal("run", write_task(folder, *turns))
    terminal.read_until("━")
    terminal.read_until("1 of 20")
    terminal.read_until("ended   complete")
    assert terminal.end() == 0


def test_control_c_at_a_terminal_stops_the_run(folder: Path, run_cli: Endstop) -> None:
    terminal = Terminal("run", write_task(folder, text_turn("late", delay_ms=60_000)), "--run-id", "r")
    terminal.read_until("ask")
    os.kill(terminal.process.pid, 2)
    terminal.read_until("operator_cancelled_loop")
    assert terminal.end() == 130
    assert run_cli("show", "r", "--json").json["state"] == "stopped"


@pytest.mark.usefixtures("one_run")
def test_watching_redraws_until_interrupted() -> None:
    terminal = Terminal("ps", "--all", "--watch")
    terminal.read_until("r1")
    terminal.process.send_signal(2)
    assert terminal.end() == 130
