"""SWE-agent trajectories (`.traj`): each step's action is one call, its observation the answer.

The tool is the action's first word. Tokens and cost are known for the whole run only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import name, nanos_of_dollars, record, records_in, text, usage_of
from endstop.replay.format import Format
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceCall, TraceLost, TraceResult, TraceTurn, TraceUsage

if TYPE_CHECKING:
    from endstop.core.model import Usage
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "swe_agent"
SECONDS_MAX: Final = 10**7
NO_ACTION: Final = "(no action)"


def _sniff(source: Source) -> int:
    steps = records_in(record(source.document).get("trajectory"))
    return 95 if steps and "action" in steps[0] and "observation" in steps[0] else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    document = record(source.document)
    if document.get("history") is not None and not records_in(document.get("trajectory")):
        skips.add("trajectory without steps")
    info = record(document.get("info"))
    head = RunHead(run_id=source.stem, source=source.name, format=NAME, outcome=text(info.get("exit_status")))
    for number, step in enumerate(records_in(document.get("trajectory")), 1):
        action = text(step.get("action")).strip()
        call_id = f"step-{number}"
        words = action.split(maxsplit=1)
        yield head, TraceTurn()
        yield (
            head,
            TraceCall(
                tool=name(words[0]) if words else NO_ACTION, args={"rest": words[1] if len(words) > 1 else ""},
                call_id=call_id, round_id=call_id,
            ),
        )  # fmt: skip
        seconds = step.get("execution_time")
        took_ms = int(seconds * 1_000) if isinstance(seconds, int | float) and 0 <= seconds < SECONDS_MAX else None
        if "observation" in step:
            yield head, TraceResult(call_id=call_id, value=step["observation"], took_ms=took_ms)
        else:
            yield head, TraceLost(call_id=call_id)
    usage, spend_nanos = _totals(info.get("model_stats"))
    if usage is not None:
        yield head, TraceUsage(usage=usage, spend_nanos=spend_nanos)
    yield head, RunEnd()


def _totals(value: object) -> tuple[Usage | None, int | None]:
    stats = record(value)
    usage = usage_of(input_tokens=stats.get("tokens_sent"), output_tokens=stats.get("tokens_received"))
    return usage, nanos_of_dollars(stats.get("instance_cost"))


FORMAT: Final = Format(name=NAME, title="SWE-agent trajectories", tried=True, sniff=_sniff, read=_read)
