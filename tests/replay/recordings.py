"""Small recordings made for the tests, and what is read out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from endstop import Limits, Policy
from endstop.replay.recognise import load_runs, recognise
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.report import RunReport
from endstop.replay.source import Source
from endstop.replay.trace import Skips, TraceRun, TraceTurn, TraceUsage, UserInput, paired
from tests.fixtures.driver import Step

NO_CAPS: Final = Limits(
    steps_max=100_000, turns_max=100_000, tokens_max=10**9, wall_ms_max=10**9, retries_max=100_000, handoffs_max=1_000
)
OPEN: Final = Policy(limits=NO_CAPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One file as it was read: its format, its runs, and what was skipped by reason."""

    format: str
    runs: tuple[TraceRun, ...]
    skipped: dict[str, int]

    @property
    def run(self) -> TraceRun:
        """The only run."""
        (found,) = self.runs
        return found

    def calls(self) -> list[tuple[str, object, object]]:
        """Tool, arguments and answer of each call of the only run; `...` for a call without an outcome."""
        return [
            (one.call.tool, one.call.args, ... if one.result is None else one.result.value) for one in paired(self.run)
        ]

    def tokens(self) -> int:
        """All tokens of the only run."""
        used = [event.usage for event in self.run.events if isinstance(event, TraceTurn | TraceUsage)]
        return sum(usage.total_tokens for usage in used if usage is not None)

    def turns(self) -> int:
        """Model calls of the only run."""
        return sum(isinstance(event, TraceTurn) for event in self.run.events)

    def people(self) -> int:
        """How often a person spoke."""
        return sum(isinstance(event, UserInput) for event in self.run.events)


def read(path: Path) -> Read:
    """Recognise `path` by its content and read it whole."""
    skips = Skips()
    found = recognise(Source(path))
    runs = load_runs(path, skips)
    return Read(
        format="" if found is None else found.name, runs=runs,
        skipped={skip.reason: skip.count for skip in skips.found()},
    )  # fmt: skip


def lines(path: Path, records: Iterable[object], *, end: bytes = b"") -> Path:
    """A file of JSON lines; text and bytes stand as they are."""
    parts = [
        item if isinstance(item, bytes) else item.encode() if isinstance(item, str) else orjson.dumps(item)
        for item in records
    ]
    path.write_bytes(b"\n".join(parts) + b"\n" + end)
    return path


def document(path: Path, value: object) -> Path:
    """A file with one JSON value."""
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    return path


def replayed(path: Path, policy: Policy = OPEN, **settings: object) -> RunReport:
    """The report of the only run in `path`."""
    found = replay_file(path, ReplaySettings(policy=policy, **settings))  # type: ignore[arg-type]  # of ReplaySettings
    assert found.error is None
    (report,) = found.runs
    return report


def plain(path: Path, steps: Sequence[Step], **more: object) -> Path:
    """Steps of the guard's own tests as a plain recording; answers must be plain values."""
    records: list[object] = []
    for step in steps:
        if step.user_speaks:
            records.append({"type": "user"})
        record = {"tool": step.tool, "args": step.args, "result": step.answer, **more}
        if step.round_id is not None:
            record["round"] = step.round_id
        records.append(record)
    return lines(path, records)
