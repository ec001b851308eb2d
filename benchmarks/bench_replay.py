"""How fast recordings are replayed, and in how much memory.

    python benchmarks/bench_replay.py [--calls 100000] [--memory-mb 1024] [--json] [--strict]

Writes recordings of its own (plain JSON lines, Claude Code sessions) into a temporary folder and replays them in one
process under the default policy without its caps, so that every call is judged. Figures are of the process's own CPU
time, the best of several rounds, so that what else a machine does weighs little; beside them stand the calls by the
clock and what a bare loop needs to parse the same lines. The memory is the peak of a process of its own on one large
file.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import orjson

from endstop.core.policy import Policy
from endstop.replay.replayer import ReplaySettings, replay_file

PLAIN_MIN, CLAUDE_MIN, MEMORY_MB_MAX = 40_000, 10_000, 150
BATCH = 2_000
WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliett")


def answer(number: int) -> str:
    """A tool's answer: different each time, of a usual size."""
    return " ".join(f"{WORDS[(number * 7 + place) % 10]}-{number + place}" for place in range(12))


def plain_line(number: int) -> bytes:
    line = {
        "run": f"run-{number // 200}", "tool": f"tool_{number % 5}",
        "args": {"path": f"src/{number}.py", "line": number},
        "result": answer(number), "round": str(number // 2), "at": 1_700_000_000_000_000 + number * 1_000,
    }  # fmt: skip
    return orjson.dumps(line) + b"\n"


def claude_lines(number: int, padding: int = 0) -> bytes:
    """One call as a session writes it: text and call in two lines of one id and one usage, then the answer."""
    clock = f"{number // 3_600 % 24:02d}:{number // 60 % 60:02d}:{number % 60:02d}.000Z"
    at = f"2026-01-{1 + number // 80_000 % 28:02d}T{clock}"
    usage = {
        "input_tokens": 4,
        "cache_read_input_tokens": 9_000,
        "cache_creation_input_tokens": 300,
        "output_tokens": 5,
    }
    frame = {
        "parentUuid": f"p-{number}", "isSidechain": False, "userType": "external", "cwd": "/project",
        "sessionId": "s-1", "version": "2.1.0", "gitBranch": "main", "timestamp": at,
    }  # fmt: skip
    head = {"model": "claude-x", "id": f"msg_{number}", "type": "message", "role": "assistant", "usage": usage}
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "Bash", "input": {"command": f"cat file-{number}.txt"}}
    said = {"type": "text", "text": "I look at the next file."}
    given = {"tool_use_id": f"toolu_{number}", "type": "tool_result", "content": answer(number) + "x" * padding}
    lines = (
        {**frame, "type": "assistant", "uuid": f"a-{number}", "message": {**head, "content": [said]}},
        {**frame, "type": "assistant", "uuid": f"b-{number}", "message": {**head, "content": [call]}},
        {
            **frame, "type": "user", "uuid": f"c-{number}", "message": {"role": "user", "content": [given]},
            "toolUseResult": {"stdout": answer(number), "stderr": "", "interrupted": False},
        },
    )  # fmt: skip
    return b"".join(orjson.dumps(line) + b"\n" for line in lines)


def write(path: Path, calls: int, make: object, **options: int) -> None:
    with path.open("wb") as file:
        for start in range(0, calls, BATCH):
            file.write(b"".join(make(number, **options) for number in range(start, min(start + BATCH, calls))))


def parse_seconds(path: Path) -> float:
    """The CPU time that a bare loop needs to read and parse the file."""
    start = time.process_time()
    with path.open("rb") as file:
        for line in file:
            orjson.loads(line)
    return time.process_time() - start


def speed(path: Path, calls: int, rounds: int) -> dict[str, float | int]:
    """Calls a second, the best of `rounds`: what disturbs a measurement only ever slows it down."""
    settings = ReplaySettings(policy=Policy(), caps=False)
    best = bare = wall = float("inf")
    for _ in range(rounds):
        bare = min(bare, parse_seconds(path))
        began, start = time.perf_counter(), time.process_time()
        report = replay_file(path, settings)
        best, wall = min(best, time.process_time() - start), min(wall, time.perf_counter() - began)
        counted = sum(run.totals.calls for run in report.runs)
        stopped = sum(run.stop is not None for run in report.runs)
        if counted != calls or stopped or report.skipped:
            raise SystemExit(f"the replay read {counted} of {calls} calls, stopped {stopped}, skipped {report.skipped}")
    return {
        "calls": calls,
        "calls_per_second": int(calls / best),
        "by_the_clock": int(calls / wall),
        "microseconds_per_call": round(best / calls * 1e6, 2),
        "of_which_bare_parsing": round(bare / calls * 1e6, 2),
    }


MEASURE = """
import resource, sys
from pathlib import Path
from endstop.core.policy import Policy
from endstop.replay.replayer import ReplaySettings, replay_file
report = replay_file(Path(sys.argv[1]), ReplaySettings(policy=Policy(), caps=False))
print(sum(run.totals.calls for run in report.runs), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def memory(path: Path) -> dict[str, int]:
    """The peak memory of a fresh process that replays `path`."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    calls, peak_mb = map(int, done.stdout.split())
    return {
        "file_mb": path.stat().st_size // 2**20, "calls": calls, "peak_mb": peak_mb,
        "seconds": int(time.perf_counter() - start),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the replay of recordings.")
    parser.add_argument("--calls", type=int, default=100_000, help="calls in each recording")
    parser.add_argument("--rounds", type=int, default=5, help="the best of so many")
    parser.add_argument(
        "--memory-mb", type=int, default=1024, help="size of the file for the memory figure; 0: leave out"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--strict", action="store_true", help="end with 1 when a target is missed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="endstop-bench-") as folder:
        plain, claude, large = (Path(folder) / name for name in ("plain.jsonl", "claude.jsonl", "large.jsonl"))
        write(plain, options.calls, plain_line)
        found: dict[str, object] = {"plain": speed(plain, options.calls, options.rounds)}
        calls = options.calls // 4
        write(claude, calls, claude_lines)
        found["claude_code"] = speed(claude, calls, options.rounds)
        reached = {
            "plain": found["plain"]["calls_per_second"] >= PLAIN_MIN,
            "claude_code": found["claude_code"]["calls_per_second"] >= CLAUDE_MIN,
        }
        if options.memory_mb:
            size = options.memory_mb * 2**20
            padding = 4_000
            write(large, size // len(claude_lines(0, padding)) + 1, claude_lines, padding=padding)
            found["memory_claude_code"] = memory(large)
            write(large, size // len(plain_line(10_000)) + 1, plain_line)
            found["memory_plain"] = memory(large)
            reached["memory"] = (
                max(found[name]["peak_mb"] for name in ("memory_claude_code", "memory_plain")) <= MEMORY_MB_MAX
            )
    found["reached"] = reached
    if options.json:
        print(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        for name, figures in found.items():
            print(f"{name:20} {figures}")
    return 1 if options.strict and not all(reached.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
