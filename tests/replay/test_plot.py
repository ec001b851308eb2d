"""Pictures of a run: well-formed, marked where the run would have ended, and free of anything but names and numbers."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from endstop.errors import UsageError
from endstop.replay.plot import svg_plot, terminal_plot
from endstop.replay.report import RunReport
from tests.replay.recordings import lines, replayed


def looping(tmp_path: Path, calls: int = 30, *, timed: bool = True, run: str = "a <b> & c") -> RunReport:
    records = [
        {"run": run, "tool": "look", "args": {"n": 0 if n < 21 else 99}, "result": n if n < 21 else "x",
         "round": n, "input_tokens": 100, "output_tokens": 10, **({"at": 1_767_225_600 + n} if timed else {})}
        for n in range(calls)
    ]  # fmt: skip
    return replayed(lines(tmp_path / "a.jsonl", records), all_guards=True, sampled=True)


@pytest.mark.parametrize("timed", [True, False])
def test_a_picture_is_well_formed_and_marks_the_stop(tmp_path: Path, *, timed: bool) -> None:
    report = looping(tmp_path, timed=timed)
    assert report.stop is not None
    root = ElementTree.fromstring(svg_plot(report))
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert f"stopped before call {report.stop.call_index}" in texts
    assert {"calls", "repeats of the call in the window", "tokens"} <= set(texts)
    assert "a <b> & c" in texts
    assert texts[-1] == ("29 s" if timed else "call 29")


def test_a_run_that_passes_has_no_mark(tmp_path: Path) -> None:
    report = looping(tmp_path, calls=15)
    assert report.stop is None
    assert "stopped before" not in svg_plot(report)
    assert "▲" not in terminal_plot(report)


@pytest.mark.parametrize("width", [1, 20, 72, 10_000])
def test_a_terminal_s_rows_have_one_width_and_end_full(tmp_path: Path, width: int) -> None:
    rows = terminal_plot(looping(tmp_path), width=width).splitlines()
    wide = min(max(width, 20), 400)
    assert [row.split()[0] for row in rows[:3]] == ["calls", "repeats", "tokens"]
    assert all(len(row[9:].split(" ")[0]) == wide for row in rows[:3])
    assert rows[0][8 + wide] == "█"
    assert "▲" in rows[3]


def test_a_long_run_is_thinned_out(tmp_path: Path) -> None:
    report = looping(tmp_path, calls=9_000)
    assert len(report.samples) <= 2_001
    assert report.samples[-1].call_index > 8_990


def test_without_samples_there_is_nothing_to_draw(tmp_path: Path) -> None:
    report = replayed(lines(tmp_path / "a.jsonl", [{"tool": "look", "args": {}, "result": 1}]))
    for draw in (svg_plot, terminal_plot):
        with pytest.raises(UsageError, match="nothing to draw"):
            draw(report)
