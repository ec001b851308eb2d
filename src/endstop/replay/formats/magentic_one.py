"""Magentic-One chats: an orchestrator's messages and those of WebSurfer, FileSurfer and ComputerTerminal.

The log has no calls, only what each agent reports. WebSurfer's first sentence ("I clicked 'X'.") is the call, the
page that follows is the answer; FileSurfer's address is the call; ComputerTerminal answers the code block before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import Json, records_in, text
from endstop.replay.format import Format
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn, UserInput

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT", "code_block"]

NAME: Final = "magentic_one"
_SURFERS: Final = ("WebSurfer", "FileSurfer")
_TERMINAL: Final = "ComputerTerminal"
_PAGE: Final = re.compile(r"\n\s*\n(?=Here is a screenshot|The web browser is open)")
_CODE: Final = re.compile(r"```(\w*)[^\n]*\n(.*?)```", re.DOTALL)
_NO_WORK: Final = "(no code before it)"


def code_block(said: str) -> str | None:
    """The first fenced block of code in `said`, or None."""
    found = _CODE.search(said)
    return found[2].strip() if found else None


def _sniff(source: Source) -> int:
    roles = {text(message.get("role")) for message in _history(source)[:60]}
    named = any(role.startswith("Orchestrator") for role in roles) or "MagenticOneOrchestrator" in roles
    return 92 if named else 60 if roles & {*_SURFERS, _TERMINAL} else 0


def _history(source: Source) -> list[Json]:
    document = source.document
    if isinstance(document, dict):
        return records_in(document.get("history") or document.get("messages"))
    return records_in(document)


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    head = RunHead(run_id=source.stem, source=source.name, format=NAME)
    code: str | None = None
    number = 0
    for message in _history(source):
        role, said = text(message.get("role")), text(message.get("content"))
        if role in ("human", "user"):
            yield head, UserInput()
            continue
        if role.startswith("Orchestrator") or role not in (*_SURFERS, _TERMINAL):
            # The block stands in the message of whichever agent spoke last with one.
            code = code_block(said) or code
            if not role:
                skips.add("message without a role")
            continue
        number += 1
        call_id = f"call-{number}"
        asked, answer = _split(role, said, code)
        code = None if role == _TERMINAL else code
        yield head, TraceTurn(agent=role)
        yield head, TraceCall(tool=role, args={"action": asked}, call_id=call_id, round_id=call_id, agent=role)
        yield head, TraceResult(call_id=call_id, value=answer, agent=role)
    yield head, RunEnd()


def _split(role: str, said: str, code: str | None) -> tuple[str, str]:
    """What was done and what came back."""
    if role == _TERMINAL:
        return code or _NO_WORK, said
    if role == "FileSurfer":
        first, _, rest = said.partition("\n")
        return (first, rest) if rest else ("", said)
    page = _PAGE.search(said)
    if page:
        return said[: page.start()], said[page.end() :]
    first, _, rest = said.partition("\n\n")
    return first, rest


FORMAT: Final = Format(name=NAME, title="Magentic-One chats (Who&When, AgentRx)", tried=True, sniff=_sniff, read=_read)
