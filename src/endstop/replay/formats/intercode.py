"""InterCode results: one object of runs by number, each with its turns as parallel lists.

Each action is one call of the environment's tool. A null observation is an answer of null, not an empty one. The last
action of a run in react style may be the harness's own submit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import Json, items, name, record, text
from endstop.replay.format import Format
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceCall, TraceLost, TraceResult, TraceTurn

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "intercode"


def _sniff(source: Source) -> int:
    if not isinstance(source.document, dict):
        return 0
    first = record(next(iter(source.document.values()), None))
    history = record(first.get("turn_history"))
    return 95 if isinstance(history.get("actions"), list) and isinstance(history.get("observations"), list) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    for key, value in record(source.document).items():
        run = record(value)
        history = run.get("turn_history")
        if not isinstance(history, dict):
            skips.add("run without turns")
            continue
        reward = record(run.get("summary")).get("max_reward")
        outcome = f"reward {reward:g}" if isinstance(reward, int | float) else ""
        head = RunHead(run_id=key, source=source.name, format=NAME, outcome=outcome)
        yield from _turns(head, run, history)
        yield head, RunEnd()


def _turns(head: RunHead, run: Json, history: Json) -> Iterator[Item]:
    tool = name(text(run.get("environment")).split("/")[-1] or "environment")
    observations = items(history.get("observations"))
    for number, action in enumerate(items(history.get("actions"))):
        round_id = f"turn-{number + 1}"
        yield head, TraceTurn()
        yield head, TraceCall(tool=tool, args={"action": action}, call_id=round_id, round_id=round_id)
        if number < len(observations):
            yield head, TraceResult(call_id=round_id, value=observations[number])
        else:
            yield head, TraceLost(call_id=round_id)


FORMAT: Final = Format(name=NAME, title="InterCode results", tried=True, sniff=_sniff, read=_read)
