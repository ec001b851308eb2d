"""What one decision costs: `before` and `after` of the bare guard, in CPU time, in memory.

    python benchmarks/bench_core.py [--json] [--calls N] [--rounds N]

Calls and results are made beforehand: about 100 bytes of arguments and 150 bytes of answer as JSON, all of them new, so
that the run goes on. The figure is the mean over all calls of a round, the best and the median of several rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from endstop import Action, Limits, LoopGuard, Policy, ToolCall, ToolPolicy, ToolResult

AIM_US = 20.0
NO_CAPS = Limits(steps_max=2**40, turns_max=2**40, tokens_max=2**40, wall_ms_max=2**40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of call: its tools' declarations, and how to make its arguments and its answer."""

    name: str
    args: Callable[[int], dict[str, object]]
    answer: Callable[[int], object]
    tools: dict[str, ToolPolicy]
    call_ids: bool = True


def args_of(number: int) -> dict[str, object]:
    return {
        "query": "contact by email",
        "email": f"user{number}@example.org",
        "page": number,
        "limit": 50,
        "fields": ["id", "name"],
    }


def json_answer(number: int) -> object:
    return {
        "id": number,
        "name": f"Person {number}",
        "email": f"user{number}@example.org",
        "company": "Example",
        "phone": "555-0100",
        "tags": ["a", "b"],
        "updated": number * 7,
        "active": True,
    }


def key_args(number: int) -> dict[str, object]:
    return {**args_of(number), "contact_id": f"C-{number}", "version": number}


READ = {"search": ToolPolicy(effect="read")}
WRITE = {"search": ToolPolicy(effect="write", idempotency_key="{contact_id}:{version}")}
CASES = (
    Case(name="undeclared, JSON answer of 150 bytes", args=args_of, answer=json_answer, tools={}),
    Case(name="the same without call ids", args=args_of, answer=json_answer, tools={}, call_ids=False),
    Case(name="declared read, the same answer", args=args_of, answer=json_answer, tools=READ),
    Case(name="declared write with a key", args=key_args, answer=json_answer, tools=WRITE),
    Case(name="undeclared, text of 40 bytes", args=args_of, answer=lambda n: f"row {n:036}", tools={}),
    Case(name="undeclared, text of 5 kB", args=args_of, answer=lambda n: f"row {n} " * 500, tools={}),
)


def measured_us(case: Case, calls: int) -> float:
    """Microseconds of CPU time for `before` and `after` of one call, as the mean of `calls` fresh calls."""
    made = [
        ToolCall(tool="search", args=case.args(number), call_id=f"call-{number}" if case.call_ids else "")
        for number in range(calls)
    ]
    results = [ToolResult(value=case.answer(number)) for number in range(calls)]
    guard = LoopGuard(Policy(limits=NO_CAPS, tools=case.tools))
    started = time.process_time_ns()
    for call, result in zip(made, results, strict=True):
        guard.before(call)
        guard.after(call, result)
    passed = time.process_time_ns() - started
    if guard.ended is not None or guard.counters.steps != calls:
        sys.exit(f"the run ended early: {guard.ended}")
    return passed / calls / 1_000


def refused_us(calls: int) -> float:
    """Microseconds for `before` on a run that has ended: what every call after a stop costs."""
    guard = LoopGuard()
    call = ToolCall(tool="t", call_id="c")
    guard.before(call)
    guard.after(call, ToolResult(status="complete"))
    started = time.process_time_ns()
    for _ in range(calls):
        guard.before(call)
    passed = time.process_time_ns() - started
    if guard.before(call).action is not Action.STOP:
        sys.exit("the run did not stay ended")
    return passed / calls / 1_000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    found: dict[str, list[float]] = {case.name: [] for case in CASES}
    found["a call after the stop"] = []
    for _ in range(given.rounds):
        for case in CASES:
            found[case.name].append(measured_us(case, given.calls))
        found["a call after the stop"].append(refused_us(given.calls))
    figures = {
        name: {"median_us": round(statistics.median(times), 2), "best_us": round(min(times), 2)}
        for name, times in found.items()
    }
    median_us = figures[CASES[0].name]["median_us"]
    if given.json:
        report = {
            "benchmark": "core", "unit": "microseconds of CPU a call, before and after", "calls": given.calls,
            "aim_us": AIM_US, "median_us": median_us, "reached": median_us <= AIM_US, "cases": figures,
        }  # fmt: skip
        print(json.dumps(report, indent=2))
    else:
        print(f"decision before + after: {median_us:.1f} us of CPU a call (aim: {AIM_US:.0f})")
        for name, figure in figures.items():
            print(f"  {name:40} median {figure['median_us']:6.2f}  best {figure['best_us']:6.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
