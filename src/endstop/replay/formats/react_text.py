"""ReAct logs in plain text: `Thought 1:`, `Action 1: Search[x]`, `Observation 1: …` over several lines.

A `Question:` begins a run; `BEGIN TRIAL 2` and `BEGIN HALTED AGENTS` headings give the trial and the outcome. A line
that names several calls is one call, as the environment took it: the first tool, and all that stands between the
first bracket and the last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from endstop.replay.fields import name
from endstop.replay.format import Format
from endstop.replay.trace import Item, RunEnd, RunHead, Skips, TraceCall, TraceResult, TraceTurn

if TYPE_CHECKING:
    from endstop.replay.source import Source

__all__ = ["FORMAT"]

NAME: Final = "react_text"
_ACTION: Final = re.compile(r"Action ?(\d*) ?: ?(.*)")
_OBSERVATION: Final = re.compile(r"Observation ?(\d*) ?: ?(.*)")
_THOUGHT: Final = re.compile(r"Thought ?\d* ?:")
_CALL: Final = re.compile(r"(\w[\w .-]*?)\[(.*)\]?\s*$", re.DOTALL)
_TRIAL: Final = re.compile(r"\s*BEGIN TRIAL (\d+)\s*$")
_HEADING: Final = re.compile(r"-+ BEGIN (\w+) AGENTS -+\s*$")
_QUESTION: Final = "Question: "
OBSERVATION_CHARS_MAX: Final = 1_000_000


def _sniff(source: Source) -> int:
    if source.shape != "text":
        return 0
    found = source.head_text
    has_calls = re.search(r"^Action ?\d* ?: ?\w+\[", found, re.MULTILINE) is not None
    has_answers = re.search(r"^Observation ?\d* ?:", found, re.MULTILINE) is not None
    return 85 if has_calls and has_answers else 40 if has_calls else 0


class _Log:
    """Reads the log line by line; one run, one open call and its growing observation at a time."""

    def __init__(self, source: Source, skips: Skips) -> None:
        self._source = source
        self._skips = skips
        self._trial = ""
        self._outcome = ""
        self._head: RunHead | None = None
        self._steps = 0
        self._open = ""
        self._heard: list[str] | None = None

    def line(self, line: str) -> Iterator[Item]:
        trial, heading = _TRIAL.match(line), _HEADING.match(line)
        if trial or heading or line.startswith(_QUESTION):
            yield from self.end()
            if trial:
                self._trial, self._outcome = f"trial{trial[1]}_", ""
            elif heading:
                self._outcome = heading[1]
            else:
                self._begin(line.removeprefix(_QUESTION))
            return
        action, observation = _ACTION.match(line), _OBSERVATION.match(line)
        if action:
            yield from self._call(action[2])
        elif observation and self._open:
            self._heard = [observation[2]]
        elif observation:
            self._skips.add("observation without an action")
        elif _THOUGHT.match(line) or line.startswith("Correct answer:"):
            yield from self._answered()
        elif self._heard is not None:
            self._heard.append(line)

    def _begin(self, question: str) -> None:
        digest = hashlib.sha1(question.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[:10]
        self._head = RunHead(
            run_id=f"{self._trial}{digest}", source=self._source.name, format=NAME, outcome=self._outcome.lower()
        )
        self._steps = 0

    def _call(self, said: str) -> Iterator[Item]:
        yield from self._answered()
        if self._head is None:
            self._head = RunHead(run_id=self._source.stem, source=self._source.name, format=NAME)
        self._steps += 1
        self._open = f"step-{self._steps}"
        found = _CALL.match(said)
        tool, argument = (
            (found[1], found[2].removesuffix("]"))
            if found
            else (said.split("[", maxsplit=1)[0].strip() or "action", said)
        )
        yield self._head, TraceTurn()
        yield (
            self._head,
            TraceCall(tool=name(tool), args={"argument": argument}, call_id=self._open, round_id=self._open),
        )

    def _answered(self) -> Iterator[Item]:
        if self._head is not None and self._open and self._heard is not None:
            value = "\n".join(self._heard).rstrip()[:OBSERVATION_CHARS_MAX]
            yield self._head, TraceResult(call_id=self._open, value=value)
        elif self._open and self._heard is None:
            self._skips.add("action without an observation")
        self._open, self._heard = "", None

    def end(self) -> Iterator[Item]:
        """The run is over: its last observation, and its end."""
        yield from self._answered()
        if self._head is not None:
            yield self._head, RunEnd()
        self._head = None


def _read(source: Source, skips: Skips) -> Iterator[Item]:
    log = _Log(source, skips)
    for line in source.lines():
        yield from log.line(line)
    yield from log.end()


FORMAT: Final = Format(name=NAME, title="ReAct text logs", tried=True, sniff=_sniff, read=_read)
