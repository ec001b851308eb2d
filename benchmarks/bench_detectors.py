"""How good the detectors are on recorded runs: precision, recall, delay, and stops of runs that succeeded.

    python benchmarks/bench_detectors.py [--data FOLDER] [--json] [--strict] [--verbose]

The caps are off and no tool is declared; every source is read and judged the same way. A stop that was decided after
a result counts as refusing the next call, and one behind the last call counts as none. The folder holds the
recordings and `labels.csv`; without it the benchmark says so and ends well.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from endstop.core.policy import Policy
from endstop.replay.replayer import ReplaySettings, replay_file
from endstop.replay.report import RunReport

PRECISION_MIN, RECALL_MIN, FALSE_STOPS_MAX, DELAY_MAX = 0.90, 0.85, 0.005, 4
DATA = Path(__file__).resolve().parents[2] / "shared" / "traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """One run beside what was expected of it."""

    verdict: str
    source: str
    file: str
    run_id: str
    call_index: int | None
    calls: int
    reason: str | None
    story: str
    note: str = ""


@dataclass(slots=True, kw_only=True)
class Group:
    """Successful runs of one kind, and those of them that were stopped before their success."""

    runs: int = 0
    stopped: list[Stopped] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Harm:
    """Stops of runs in which a later step raised the reward (kinds that are scored step by step)."""

    stops: int = 0
    harmful: list[Stopped] = field(default_factory=list)


class Corpus:
    """The recordings, each file replayed once."""

    def __init__(self, folder: Path, policy: Policy) -> None:
        self.folder = folder
        self._settings = ReplaySettings(policy=policy, caps=False)
        self._reports: dict[Path, dict[str, RunReport]] = {}
        self.skipped: dict[str, int] = {}

    def runs(self, path: Path) -> dict[str, RunReport]:
        if path not in self._reports:
            report = replay_file(path, self._settings)
            for skip in report.skipped:
                self.skipped[skip.reason] = self.skipped.get(skip.reason, 0) + skip.count
            self._reports[path] = {run.run_id: run for run in report.runs}
        return self._reports[path]

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.folder.glob(pattern))


def stop_index(report: RunReport) -> int | None:
    """The first call that would not have been made, or None."""
    stop = report.stop
    return None if stop is None or stop.call_index >= report.totals.calls else stop.call_index


def judged(verdict: str, source: str, file: str, report: RunReport, note: str = "") -> Stopped:
    index = stop_index(report)
    return Stopped(
        verdict=verdict, source=source, file=file, run_id=report.run_id, call_index=index, calls=report.totals.calls,
        reason=None if index is None or report.stop is None else report.stop.reason.value,
        story="" if index is None else report.story, note=note,
    )  # fmt: skip


def labelled(corpus: Corpus) -> tuple[list[Stopped], list[int], set[tuple[str, str]]]:
    """Every labelled run with its verdict, the delays of the loops found, and the runs that are labelled loops."""
    found: list[Stopped] = []
    delays: list[int] = []
    loops: set[tuple[str, str]] = set()
    with (corpus.folder / "labels.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            runs = corpus.runs(corpus.folder / row["file"])
            name = row["trace_id"].split("_", 1)[1] if row["source"] == "reflexion" else row["trace_id"]
            report = runs.get(name) or (next(iter(runs.values())) if len(runs) == 1 else None)
            if report is None:
                raise SystemExit(f"no run {name} in {row['file']}: the reader of this format is broken")
            index, is_loop = stop_index(report), row["label"] == "loop"
            verdict = (
                ("found" if is_loop else "false alarm") if index is not None else ("missed" if is_loop else "passed")
            )
            if is_loop:
                loops.add((row["file"], report.run_id))
                if index is not None:
                    delays.append(index - int(row["loop_start_step"]))
            found.append(judged(verdict, row["source"], row["file"], report, row["reason"]))
    return found, delays, loops


def intercode(corpus: Corpus, loops: set[tuple[str, str]]) -> tuple[Group, Group, Harm]:
    """Runs that earned the whole reward, react style apart (it scores at its submit only), and harm over all runs."""
    group, react, harm = Group(), Group(), Harm()
    for path in corpus.files("intercode/**/*.json"):
        file = str(path.relative_to(corpus.folder))
        document = orjson.loads(path.read_bytes())
        for run_id, report in corpus.runs(path).items():
            rewards = [step or 0 for step in document[run_id]["turn_history"]["rewards"]]
            index = stop_index(report)
            if index is not None and "react" not in path.name:
                harm.stops += 1
                if max(rewards[index:], default=0) > max(rewards[:index], default=0):
                    harm.harmful.append(judged("harm", "intercode", file, report, f"rewards {rewards}"))
            best = document[run_id].get("summary", {}).get("max_reward")
            if best != 1 or (file, run_id) in loops:
                continue
            kind = react if "react" in path.name else group
            kind.runs += 1
            first = next((number for number, reward in enumerate(rewards) if reward == 1), len(rewards))
            if index is not None and index <= first:
                kind.stopped.append(judged("false stop", "intercode", file, report, f"earned at {first}"))
    return group, react, harm


def successes(corpus: Corpus, pattern: str, source: str, outcome: str | None, loops: set[tuple[str, str]]) -> Group:
    """Runs whose recording says `outcome` (None: all of them), and which of them were stopped."""
    group = Group()
    for path in corpus.files(pattern):
        file = str(path.relative_to(corpus.folder))
        for report in corpus.runs(path).values():
            if (outcome is not None and report.outcome != outcome) or (file, report.run_id) in loops:
                continue
            if report.totals.calls == 0:
                continue
            group.runs += 1
            if stop_index(report) is not None:
                group.stopped.append(judged("false stop", source, file, report))
    return group


def figures(folder: Path, policy: Policy) -> dict[str, object]:
    """All figures, with the runs behind every miss."""
    corpus = Corpus(folder, policy)
    runs, delays, loops = labelled(corpus)
    count = {name: sum(run.verdict == name for run in runs) for name in ("found", "false alarm", "missed", "passed")}
    code, react, harm = intercode(corpus, loops)
    groups = {
        "intercode": code,
        "taubench": successes(corpus, "taubench/**/*.json", "taubench", "reward 1", loops),
        "agentrx_tau": successes(corpus, "agentrx/data/tau_retail/*.json", "agentrx_tau", "reward 1", loops),
        "hotpotqa": successes(corpus, "reflexion/**/*.txt", "hotpotqa", "correct", loops),
        "codex": successes(corpus, "agentcmd/**/codex/**/*.jsonl", "codex", None, loops),
        "claude_code": successes(corpus, "agentcmd/**/claude/**/*.jsonl", "claude_code", None, loops),
        "claude_code_shared": successes(corpus, "sessionshare/**/*.jsonl", "claude_code", None, loops),
    }
    total = sum(group.runs for group in groups.values())
    stopped = [run for group in groups.values() for run in group.stopped]
    found, alarms, missed = count["found"], count["false alarm"], count["missed"]
    return {
        "precision": found / (found + alarms) if found + alarms else 0.0,
        "recall": found / (found + missed) if found + missed else 0.0,
        "median_delay": statistics.median(delays) if delays else None,
        "delays": sorted(delays),
        "labelled": count,
        "false_stops": len(stopped) / total if total else 0.0,
        "false_stops_of": [len(stopped), total],
        "groups": {name: [len(group.stopped), group.runs] for name, group in groups.items()},
        "intercode_react": [len(react.stopped), react.runs],
        "harm": [len(harm.harmful), harm.stops],
        "misses": [asdict(run) for run in runs if run.verdict in ("missed", "false alarm")],
        "false_stop_runs": [asdict(run) for run in stopped],
        "harm_runs": [asdict(run) for run in harm.harmful],
        "skipped": dict(sorted(corpus.skipped.items())),
    }


def reached(found: dict[str, object]) -> dict[str, bool]:
    """Which of the targets hold."""
    delay = found["median_delay"]
    return {
        "precision": float(str(found["precision"])) >= PRECISION_MIN,
        "recall": float(str(found["recall"])) >= RECALL_MIN,
        "false_stops": float(str(found["false_stops"])) <= FALSE_STOPS_MAX,
        "median_delay": delay is not None and float(str(delay)) <= DELAY_MAX,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the detectors on recorded runs.")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the recordings and labels.csv")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--strict", action="store_true", help="end with 1 when a target is missed")
    parser.add_argument("--verbose", action="store_true", help="name the runs behind every miss")
    options = parser.parse_args()
    if not (options.data / "labels.csv").is_file():
        print("skipped: no recordings with labels.csv there (--data FOLDER)", file=sys.stderr)
        if options.json:
            print(orjson.dumps({"skipped": "no recordings with labels.csv"}).decode())
        return 0
    found = figures(options.data, Policy())
    found["reached"] = reached(found)
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        names = [
            "precision", "recall", "median_delay", "labelled", "false_stops", "false_stops_of", "groups",
            "intercode_react", "harm", "reached",
        ]  # fmt: skip
        if options.verbose:
            names += ["misses", "false_stop_runs", "harm_runs", "skipped"]
        for name in names:
            value = found[name]
            print(f"{name:18} {value:.4f}" if isinstance(value, float) else f"{name:18} {value}")
    return 1 if options.strict and not all(found["reached"].values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
