"""What a run's guards remember: a bounded fold over its events.

`Evidence` is changed only by the functions of `endstop.core.fold`; `decide` reads it. Everything in it is bounded by a
named limit, so that its packed form stays below `PACKED_BYTES_MAX` however long the run is. `pack` and `unpack` are
inverse, by test.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Final

import orjson

from endstop.core.likeness import Sketch
from endstop.core.likeness import sketch as sketch_of
from endstop.core.model import Counters, Version
from endstop.errors import StoreCorruptError

__all__ = [
    "ANSWERED_MAX",
    "ANSWERS_MAX",
    "ANSWER_CHARS_KEPT",
    "CALLS_MAX",
    "ENDED_CHARS_MAX",
    "NEEDS_CHANGE",
    "OPAQUE_VALUES_MAX",
    "PACKED_BYTES_MAX",
    "PENDING_MAX",
    "POLLS_MAX",
    "ROUNDS_MAX",
    "ROUND_CALLS_MAX",
    "RUNGS_MAX",
    "SOURCES_MAX",
    "STREAKS_MAX",
    "TURNS_CHARGED_MAX",
    "TURNS_OPEN_MAX",
    "VERSIONS_MAX",
    "WAITS_MAX",
    "Evidence",
    "LastAnswer",
    "Pending",
    "call_symbol",
    "kept_version",
    "short_name",
]

CALLS_MAX: Final = 64
ANSWERS_MAX: Final = 4
SOURCES_MAX: Final = 32
VERSIONS_MAX: Final = 64  # opaque values of one source
OPAQUE_VALUES_MAX: Final = 64  # opaque values of all sources
STREAKS_MAX: Final = 24
RUNGS_MAX: Final = 16
RUNG_STEPS_KEPT: Final = 16
POLLS_MAX: Final = 32
WAITS_MAX: Final = 32
PENDING_MAX: Final = 64
TURNS_OPEN_MAX: Final = 32
TURNS_CHARGED_MAX: Final = 24
ROUNDS_MAX: Final = 8
ROUND_CALLS_MAX: Final = 64  # calls of all remembered rounds
ANSWERED_MAX: Final = 32
NAME_CHARS_KEPT: Final = 40
VERSION_CHARS_KEPT: Final = 20
ANSWER_CHARS_KEPT: Final = 16
ENDED_CHARS_MAX: Final = 500
NEEDS_CHANGE: Final = -1
PACKED_BYTES_MAX: Final = 64 * 1024
FORMAT: Final = 2


def call_symbol(name: str) -> int:
    """A short stand-in for the id of a call or a round, where telling two neighbours apart is all that is asked."""
    return zlib.crc32(name.encode("utf-8", "replace"))


def short_name(name: str) -> str:
    """A name as evidence keeps it: whole up to `NAME_CHARS_KEPT` characters, else its head and a digest."""
    if len(name) <= NAME_CHARS_KEPT:
        return name
    tail = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:12]
    return f"{name[: NAME_CHARS_KEPT - 13]}~{tail}"


def kept_version(version: Version) -> str:
    """An opaque progress version as evidence keeps it: short text as it is, anything longer as a digest."""
    text = str(version)
    if len(text) <= VERSION_CHARS_KEPT and text.isascii() and text.isprintable():
        return text
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:VERSION_CHARS_KEPT]


@dataclass(slots=True)
class Pending:
    """A call that was let through and has no outcome yet. `owner` and `attempt_id` say for whom."""

    tool: str
    fingerprint: str
    since_us: int
    operation_id: str | None = None
    owner: str = ""
    attempt_id: str = ""


@dataclass(slots=True)
class LastAnswer:
    """The call executed last, how often it ran back to back with this answer, and what is needed to compare it."""

    fingerprint: str
    answer: str
    count: int
    sketch: Sketch | None = None
    text: str | bytes | None = None  # only in memory; a packed state carries the sketch


@dataclass(slots=True)
class Evidence:
    """The memory of one root run. See `endstop.core.fold` for how each event changes it."""

    # -- what was used
    steps: int = 0
    turns: int = 0
    retries: int = 0
    handoffs: int = 0
    blocked: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    spend_nanos: int = 0
    held_tokens: int = 0
    held_nanos: int = 0
    # -- time: running since (0 = not running), and what earlier stretches took
    running_since_us: int = 0
    elapsed_us: int = 0
    # -- life
    generation: int = 1
    epoch: int = 0
    ended: str | None = None
    ended_message: str = ""
    frozen: bool = False
    # -- the window since the last change: symbols (fingerprint, answer), newest last
    trail: list[tuple[str, str]] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    last: LastAnswer | None = None
    # -- the epoch's memory
    # -- calls, and of each the heads of its answers with their counts; at both levels what was used last stands last
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    evictions: int = 0
    stall: int = 0
    stall_round: str | None = None
    row_tool: str = ""
    row_answer: str = ""
    row_calls: list[str] = field(default_factory=list)
    row_round: str | None = None
    streaks: dict[str, int] = field(default_factory=dict)
    streak_rounds: dict[str, int] = field(default_factory=dict)
    polls: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    # -- progress
    versions: dict[str, int | list[str]] = field(default_factory=dict)
    version_floor: int | None = None
    seeded: str | None = None
    progress_version: Version | None = None
    # -- the rounds under way: for each fingerprint, how often it was proposed and the symbol of the first call's id
    rounds: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)
    # -- calls that may be retried: fingerprint -> not before (us), or NEEDS_CHANGE
    waits: dict[str, int] = field(default_factory=dict)
    # -- ladder: loop identity -> rungs climbed, and the step at which it last climbed; warnings given in the epoch
    rungs: dict[str, tuple[int, int]] = field(default_factory=dict)
    warned: int = 0
    # -- in flight: calls by id, and turns by id with (tokens held, nanos held)
    pending: dict[str, Pending] = field(default_factory=dict)
    turns_open: dict[str, tuple[int, int]] = field(default_factory=dict)
    # -- turns whose hold was posted because nobody was expected to report them, with (tokens, nanos) that were posted
    turns_charged: dict[str, tuple[int, int]] = field(default_factory=dict)
    # -- keys that the ledger already answered in this generation
    answered: list[str] = field(default_factory=list)

    def counters(self, now_us: int) -> Counters:
        """The public counters at `now_us`."""
        return Counters(
            steps=self.steps,
            turns=self.turns,
            retries=self.retries,
            handoffs=self.handoffs,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cache_read_tokens=self.cache_read_tokens,
            cache_write_tokens=self.cache_write_tokens,
            reasoning_tokens=self.reasoning_tokens,
            spend_nanos=self.spend_nanos,
            elapsed_ms=self.elapsed_us_at(now_us) // 1_000,
            blocked=self.blocked,
        )

    def elapsed_us_at(self, now_us: int) -> int:
        """Running time in microseconds at `now_us`; a clock that went backwards adds nothing."""
        if not self.running_since_us:
            return self.elapsed_us
        return self.elapsed_us + max(0, now_us - self.running_since_us)

    def rungs_climbed(self, loop: str) -> int:
        """How far up the ladder this loop is; one that stayed away for `RUNG_STEPS_KEPT` steps starts again."""
        climbed, step = self.rungs.get(loop, (0, 0))
        return climbed if self.steps - step <= RUNG_STEPS_KEPT else 0

    def pack(self) -> bytes:
        """This evidence as JSON bytes."""
        values: list[object] = list(_values_of(self))
        # Packed once a step: only these two have parts that JSON does not know.
        if self.last is not None:
            values[_AT_LAST] = _packed_last(self.last)
        if self.pending:
            values[_AT_PENDING] = {name: _pending_parts(call) for name, call in self.pending.items()}
        return orjson.dumps([FORMAT, values])

    @classmethod
    def unpack(cls, data: bytes) -> Evidence:
        """The evidence that `pack` wrote. Raises StoreCorruptError for anything else."""
        try:
            version, values = orjson.loads(data)
            if version != FORMAT or len(values) != len(_FIELD_NAMES):
                msg = f"the stored run state has format {version}; this code reads format {FORMAT}"
                raise StoreCorruptError(msg)
            evidence = cls(**dict(zip(_FIELD_NAMES, values, strict=True)))
            _restore(evidence)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            msg = "the stored run state cannot be read: restore the store from a backup, the run is refused"
            raise StoreCorruptError(msg) from error
        return evidence


_FIELD_NAMES: Final = tuple(item.name for item in fields(Evidence))
_AT_LAST: Final = _FIELD_NAMES.index("last")
_AT_PENDING: Final = _FIELD_NAMES.index("pending")
_values_of = attrgetter(*_FIELD_NAMES)
_pending_parts = attrgetter(*(item.name for item in fields(Pending)))


def _packed_last(last: LastAnswer) -> list[object]:
    sketch = last.sketch
    if sketch is None and last.text is not None:
        sketch = sketch_of(last.text)
    return [last.fingerprint, last.answer, last.count, None if sketch is None else sketch.pack()]


def _restore(evidence: Evidence) -> None:
    """Give back their types to the parts that JSON flattened."""
    evidence.trail = [(call, answer) for call, answer in evidence.trail]
    evidence.polls = {name: (item[0], item[1], item[2]) for name, item in evidence.polls.items()}
    evidence.rungs = {name: (item[0], item[1]) for name, item in evidence.rungs.items()}
    evidence.rounds = {
        name: {call: (item[0], item[1]) for call, item in calls.items()} for name, calls in evidence.rounds.items()
    }
    evidence.turns_open = {name: (item[0], item[1]) for name, item in evidence.turns_open.items()}
    evidence.turns_charged = {name: (item[0], item[1]) for name, item in evidence.turns_charged.items()}
    raw_pending: dict[str, object] = dict(evidence.pending)
    evidence.pending = {name: Pending(*_sequence(item)) for name, item in raw_pending.items()}
    if evidence.last is not None:
        call, answer, count, parts = _sequence(evidence.last)
        evidence.last = LastAnswer(call, answer, count, None if parts is None else Sketch.unpack(parts))


def _sequence(item: object) -> list:  # type: ignore[type-arg]  # JSON: the constructors check the shape
    if not isinstance(item, list):
        msg = "not a list"
        raise TypeError(msg)
    return item
