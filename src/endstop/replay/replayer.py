"""From files to reports: every run of a file through the driver, several files through several processes.

A file is streamed: what is held are the runs under way, at most `RUNS_OPEN_MAX` of them. A run that comes back after
it was closed for room is a run of its own, and is counted as such.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from endstop.core.policy import Policy
from endstop.errors import UsageError
from endstop.replay.driver import RunReplay
from endstop.replay.formats.claude_code import subagent_files
from endstop.replay.gauges import uncapped
from endstop.replay.recognise import read
from endstop.replay.story import story_of
from endstop.replay.trace import RunEnd, RunHead, Skipped, Skips

if TYPE_CHECKING:
    from endstop.core.policy import Limits, ToolPolicy
    from endstop.replay.report import RunReport
    from endstop.replay.trace import Event, Item

__all__ = ["FileReport", "ReplaySettings", "expand", "replay_file", "replay_files", "replay_items", "spooled"]

RUNS_OPEN_MAX: Final = 500
FILES_MAX: Final = 200_000
COPY_BYTES: Final = 1024 * 1024
SUFFIXES: Final = frozenset(
    {".json", ".jsonl", ".ndjson", ".traj", ".txt", ".log", ".yaml", ".yml", ".db", ".sqlite", ".sqlite3"}
)
CLOSED_FOR_ROOM: Final = "run closed for room, its rest taken as another run"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """How to replay. `caps` False leaves the caps (steps, turns, tokens, money, time, retries) out of both policies.

    `against` is a second policy, judged beside the first. `all_guards` asks each guard alone and takes the peaks;
    `sampled` keeps the points of a plot. `run_id` picks one run; `format_name` overrides what the content says.
    """

    policy: Policy
    against: Policy | None = None
    caps: bool = True
    all_guards: bool = False
    sampled: bool = False
    run_id: str | None = None
    format_name: str | None = None

    def judged_by(self, policy: Policy) -> Policy:
        """`policy` as it is applied here."""
        return policy if self.caps else uncapped(policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReport:
    """One file's runs, in the order in which they ended, and what of the file was not read."""

    source: str
    runs: tuple[RunReport, ...]
    skipped: tuple[Skipped, ...] = ()
    error: str | None = None


class _Running:
    """One run under way, under one or two policies."""

    __slots__ = ("feed", "first", "head", "second")

    def __init__(self, head: RunHead, settings: ReplaySettings) -> None:
        self.head = head
        self.first = RunReplay(
            settings.judged_by(settings.policy), goes_on=settings.all_guards, sampled=settings.sampled
        )
        against = settings.against
        self.second = None if against is None else RunReplay(settings.judged_by(against), goes_on=settings.all_guards)
        self.feed: Callable[[Event], None] = self.first.feed if self.second is None else self._feed_both

    def _feed_both(self, event: Event) -> None:
        self.first.feed(event)
        if self.second is not None:
            self.second.feed(event)

    def report(self) -> RunReport:
        """The run's report, with its story."""
        found = self.first.report(self.head)
        found = replace(found, story=story_of(found))
        if self.second is None:
            return found
        other = self.second.report(self.head)
        return replace(found, against=replace(other, story=story_of(other)))


def replay_items(stream: Iterable[Item], settings: ReplaySettings, skips: Skips) -> Iterator[RunReport]:
    """Replay the runs of one stream of events; a run's report comes as soon as it is over."""
    running: dict[str, _Running] = {}
    closed: set[str] = set()
    wanted = settings.run_id
    # Most streams give one run after the other: the run of the event before is not looked up again.
    last_head: RunHead | None = None
    last: _Running | None = None
    for head, event in stream:
        if head is not last_head or last is None:
            if wanted is not None and head.run_id != wanted:
                continue
            last_head, last = head, running.get(head.run_id)
            if last is None:
                if head.run_id in closed:
                    skips.add(CLOSED_FOR_ROOM)
                last = running[head.run_id] = _Running(head, settings)
                if len(running) > RUNS_OPEN_MAX:
                    oldest = next(iter(running))
                    closed.add(oldest)
                    yield running.pop(oldest).report()
        last.feed(event)
        if type(event) is RunEnd:
            del running[head.run_id]
            yield last.report()
            last_head = last = None
    for left in running.values():
        yield left.report()


def replay_file(path: Path, settings: ReplaySettings, *, name: str | None = None) -> FileReport:
    """Replay every run of one file. A file that cannot be opened is a report with an error, not an exception."""
    skips, found = Skips(), name or str(path)
    runs: list[RunReport] = []
    error: str | None = None
    try:
        stream = read(path, skips, format_name=settings.format_name, name=name)
        runs.extend(replay_items(stream, settings, skips))
    except UsageError as refused:
        error = str(refused)
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as fault:
        # A reader's own fault with a shape of record that it does not know: named, never taken for an empty file.
        error = f"{found}: reading broke off with {type(fault).__name__}; the runs before it stand"
    return FileReport(source=found, runs=tuple(runs), skipped=skips.found(), error=error)


def replay_files(paths: Sequence[Path], settings: ReplaySettings, *, processes: int = 1) -> Iterator[FileReport]:
    """Replay files in their order, on `processes` processes. Each report comes as soon as it and those before are done.

    With several processes the policies are sent to them: declared key functions must be importable by name.
    """
    if processes <= 1 or len(paths) <= 1:
        for path in paths:
            yield replay_file(path, settings)
        return
    # A fresh interpreter each: a fork would take threads' locks along.
    context = multiprocessing.get_context("spawn")
    packed = _packed(settings)
    with ProcessPoolExecutor(max_workers=min(processes, len(paths)), mp_context=context) as pool:
        yield from pool.map(_replay_packed, paths, [packed] * len(paths), chunksize=1)


# A policy holds its tools in a read-only view, which does not travel; its parts do.
_PolicyParts = tuple["Limits", dict[str, "ToolPolicy"], tuple[str, ...], bool, tuple[str, ...]]
_Packed = tuple[ReplaySettings, _PolicyParts, _PolicyParts | None]


def _packed(settings: ReplaySettings) -> _Packed:
    against = settings.against
    bare = replace(settings, policy=Policy(), against=None)
    object.__setattr__(bare, "policy", None)  # put back on arrival
    return bare, _parts(settings.policy), None if against is None else _parts(against)


def _parts(policy: Policy) -> _PolicyParts:
    return policy.limits, dict(policy.tools), policy.on_trip, policy.strict_tools, policy.redact


def _whole(parts: _PolicyParts) -> Policy:
    limits, tools, on_trip, strict_tools, redact = parts
    return Policy(limits=limits, tools=tools, on_trip=on_trip, strict_tools=strict_tools, redact=redact)


def _replay_packed(path: Path, packed: _Packed) -> FileReport:
    bare, policy, against = packed
    return replay_file(path, replace(bare, policy=_whole(policy), against=None if against is None else _whole(against)))


def expand(names: Sequence[str]) -> tuple[Path, ...]:
    """The files that `names` mean, without repeats: files as they are, folders with all recordings below them, globs.

    Sub-agent files are read with their session, so they are left out beside it. Raises UsageError for a name that
    means nothing, and for more than `FILES_MAX` files.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            matches = [item for item in sorted(path.rglob("*")) if item.suffix in SUFFIXES and item.is_file()]
            matches = [
                item for item in matches if not any(part.startswith(".") for part in item.relative_to(path).parts)
            ]
        elif path.exists():
            matches = [path]
        else:
            matches = _globbed(name)
        if not matches:
            msg = f"{name} is no file, no folder with recordings and no pattern that fits any"
            raise UsageError(msg)
        found.update(dict.fromkeys(matches))
        if len(found) > FILES_MAX:
            msg = f"more than {FILES_MAX} files: replay them in parts"
            raise UsageError(msg)
    inner = {file for path in found if path.suffix == ".jsonl" for file in subagent_files(path)}
    return tuple(path for path in found if path not in inner)


def _globbed(pattern: str) -> list[Path]:
    if not any(sign in pattern for sign in "*?["):
        return []
    path = Path(pattern)
    parts = path.parts
    fixed = next(number for number, part in enumerate(parts) if any(sign in part for sign in "*?["))
    folder = Path(*parts[:fixed]) if fixed else Path()
    return sorted(item for item in folder.glob(str(Path(*parts[fixed:]))) if item.is_file())


def spooled(stream: IO[bytes], folder: str | None = None) -> Path:
    """What `stream` (standard input) holds, in a temporary file that the caller removes."""
    with tempfile.NamedTemporaryFile(prefix="endstop-replay-", dir=folder, delete=False) as file:
        while chunk := stream.read(COPY_BYTES):
            file.write(chunk)
        return Path(file.name)
