"""ToolBench answers: a search tree, of which the chain that led to the final answer is the run.

The last list of `train_messages` is that chain (OpenAI messages with `function_call`); the branches that were given up
and the tokens of the whole search belong to no run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import items, json_value, record, records_in, text
from endstop.replay.format import Format
from endstop.replay.formats.openai_chat import Conversation
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceResult

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "toolbench"


def _sniff(source: Source) -> int:
    document = record(source.document)
    answer = record(document.get("answer_generation"))
    return 95 if "train_messages" in answer or ("tree" in document and "query" in answer) else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    answer = record(record(source.document).get("answer_generation"))
    chains = items(answer.get("train_messages"))
    head = RunHead(run_id=source.stem, source=source.name, format=NAME, outcome=text(answer.get("finish_type")))
    if answer.get("total_tokens"):
        skips.add("tokens of a whole search tree, not of its chain")
    if not chains:
        skips.add("search tree without a chain to an answer")
    conversation = Conversation(skips)
    for message in records_in(chains[-1]) if chains else []:
        for event in conversation.events(message):
            yield head, _judged(event) if isinstance(event, TraceResult) else event
    yield head, RunEnd()


def _judged(result: TraceResult) -> TraceResult:
    """The harness wraps each answer as `{"error": …, "response": …}`: a filled `error` is its word for a failure."""
    wrapped = json_value(result.value) if isinstance(result.value, str) else None
    if not isinstance(wrapped, dict):
        return result
    error = wrapped.get("error")
    if isinstance(error, str) and error:
        return replace(result, error_class=ErrorClass.TOOL_FAILED, message=error)
    return result


FORMAT: Final = Format(name=NAME, title="ToolBench answers", tried=True, sniff=_sniff, read=_read)
