"""AG2 (AutoGen) group chats: code in an agent's message, run by `Computer_terminal` in the next one.

Only code that the terminal answered is a call: a block that nobody ran, and a report that quotes a block again, are
none. A terminal that found no code ran nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.core.reasons import ErrorClass
from endstop.replay.fields import Json, name, records_in, text
from endstop.replay.format import Format
from endstop.replay.formats.magentic_one import code_block
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "ag2_chat"
_TERMINALS: Final = frozenset({"Computer_terminal", "computer_terminal", "code_executor", "Executor"})
_EXIT: Final = re.compile(r"exitcode: (-?\d+)[^\n]*\n(?:Code output: ?)?", re.IGNORECASE)
_NOTHING_RUN: Final = "There is no code from the last"


def _history(source: Source) -> list[Json]:
    document = source.document
    if isinstance(document, dict):
        return records_in(document.get("history") or document.get("messages") or document.get("chat_history"))
    return records_in(document)


def _sniff(source: Source) -> int:
    found = _history(source)
    if not found:
        return 0
    names = {text(message.get("name")) for message in found}
    if names & _TERMINALS:
        return 88
    # A chat in which nobody ran anything is one all the same.
    return 35 if isinstance(source.document, dict) and "history" in source.document and "" not in names else 0


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    code: str | None = None
    author = "main"
    number = 0
    for message in _history(source):
        speaker, said = name(message.get("name") or message.get("role")), text(message.get("content"))
        if speaker not in _TERMINALS:
            code = code_block(said)
            author = speaker
            yield head, TraceTurn(agent=author)
            continue
        if said.startswith(_NOTHING_RUN):
            continue
        if code is None:
            skips.add("terminal answer without code before it")
            continue
        number += 1
        call_id = f"call-{number}"
        yield head, TraceCall(tool=speaker, args={"code": code}, call_id=call_id, round_id=call_id, agent=author)
        yield head, _result(call_id, said)
        code = None
    yield head, RunEnd()


def _result(call_id: str, said: str) -> TraceResult:
    found = _EXIT.match(said)
    output = said[found.end() :] if found else said
    # An exit code without a word (a search that found nothing) is an answer, no failure.
    if found and found[1] != "0" and output.strip():
        return TraceResult(call_id=call_id, value=output, error_class=ErrorClass.TOOL_FAILED, message=output)
    return TraceResult(call_id=call_id, value=output)


FORMAT: Final = Format(name=NAME, title="AG2 group chats (Who&When)", tried=True, sniff=_sniff, read=_read)
