"""A run's memory: bounded whatever happens, packed and unpacked without loss, refused when it is not one."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import orjson
import pytest

from endstop import Limits, LoopGuard, Policy, StoreCorruptError, ToolCall, ToolPolicy, ToolResult, Usage
from endstop.core import fold
from endstop.core.events import GO, Proposal, Verdict
from endstop.core.evidence import (
    ANSWERED_MAX,
    ANSWERS_MAX,
    CALLS_MAX,
    ENDED_CHARS_MAX,
    FORMAT,
    OPAQUE_VALUES_MAX,
    PACKED_BYTES_MAX,
    PENDING_MAX,
    POLLS_MAX,
    ROUND_CALLS_MAX,
    ROUNDS_MAX,
    RUNGS_MAX,
    SOURCES_MAX,
    STREAKS_MAX,
    TURNS_CHARGED_MAX,
    TURNS_OPEN_MAX,
    WAITS_MAX,
    Evidence,
    LastAnswer,
)
from endstop.core.likeness import TOKENS_MAX
from endstop.core.reasons import Action, Reason
from tests.core.kit import Clock, guard_of, proposal_of, turn_of
from tests.fixtures.driver import Step, drive

NAME = "n" * 80  # the longest name that a proposal can hold
BIG = 2**53 - 1


def name(number: int) -> str:
    return f"{number:04}" + "n" * 76


def test_a_new_memory_is_small_and_comes_back() -> None:
    assert len(Evidence().pack()) < 1_000
    assert Evidence.unpack(Evidence().pack()) == Evidence()


def filled(number: int) -> Proposal:
    return replace(
        proposal_of(n=number), tool=name(number), agent=NAME, call_id=name(number), round_id=name(number % ROUNDS_MAX),
        key_digest=f"{number:032x}",
    )  # fmt: skip


def test_with_every_part_full_and_every_name_at_its_longest_it_stays_within_its_bound() -> None:
    """The worst case, built through the folds, with names of 80 characters everywhere."""
    limits = Limits(call_window=64, cycle_period_max=64, same_answer_max=64)
    evidence = Evidence()
    for number in range(400):
        proposal = filled(number)
        loop = f"streak:{name(number)[:40]}{'x' * 40}"
        verdict = Verdict(action=Action.BLOCK, reason=Reason.KEY_MISSING, guard="key", loop=loop)
        fold.refused(evidence, proposal, verdict)
        fold.replayed(evidence, proposal, Verdict(action=Action.REPLAY))
        if number < PENDING_MAX:
            fold.let_through(evidence, proposal, GO, BIG, f"op_{number:032x}")
            evidence.pending[proposal.call_id].owner = "o" * 42
            evidence.pending[proposal.call_id].attempt_id = "9" * 10
        if number < TURNS_CHARGED_MAX:
            fold.turn_let_through(evidence, turn_of(name(1_000 + number), tokens=BIG, nanos=BIG))
            fold.turns_charged(evidence)
        fold.note_version(evidence, f"{name(number)[:40]}#{number:032x}", f"{number:020}")
        fold._put(evidence, evidence.polls, f"{number:032x}", (f"{number:032x}", BIG, BIG), POLLS_MAX)
        fold._put(evidence, evidence.waits, f"{number:032x}", BIG, WAITS_MAX)
        for answer in range(ANSWERS_MAX):
            fold._remember(evidence, f"{number:032x}", f"{answer}" * 32)
        fold._push(evidence, (f"{number:032x}", f"{number:032x}"), limits)
    for number in range(3):
        for value in range(OPAQUE_VALUES_MAX):
            fold.note_version(evidence, f"{name(number)[:40]}#{number:032x}", f"{value:020}")
    for number in range(TURNS_OPEN_MAX):
        fold.turn_let_through(evidence, turn_of(name(number), tokens=BIG, nanos=BIG))
    evidence.row_calls = [f"{number:032x}" for number in range(64)]
    evidence.row_tool, evidence.row_round = NAME, NAME
    evidence.last = LastAnswer(NAME, NAME, BIG, text="ab12 " * (TOKENS_MAX // 2))
    evidence.progress_version, evidence.ended_message = "v" * 200, "m" * ENDED_CHARS_MAX
    full = {
        "calls": CALLS_MAX, "pending": PENDING_MAX, "versions": SOURCES_MAX, "streaks": STREAKS_MAX,
        "streak_rounds": STREAKS_MAX, "rungs": RUNGS_MAX, "polls": POLLS_MAX, "waits": WAITS_MAX,
        "answered": ANSWERED_MAX, "turns_open": TURNS_OPEN_MAX,
        "turns_charged": TURNS_CHARGED_MAX, "trail": 64, "runs": 64,
    }  # fmt: skip
    assert {part: len(getattr(evidence, part)) for part in full} == full
    assert ROUND_CALLS_MAX - 40 < sum(map(len, evidence.rounds.values())) <= ROUND_CALLS_MAX
    assert len(evidence.pack()) <= PACKED_BYTES_MAX, sizes_of(evidence)


def sizes_of(evidence: Evidence) -> dict[str, int]:
    """The bytes of each part, the largest first."""
    _, values = orjson.loads(evidence.pack())
    parts = {item.name: len(orjson.dumps(value)) for item, value in zip(fields(Evidence), values, strict=True)}
    return dict(sorted(parts.items(), key=lambda part: -part[1])[:16])


def random_run(guard: LoopGuard, seed: int, calls: int) -> None:
    """A long run of every kind of event, some of them under a round, none of them judged by hand."""
    rng = random.Random(seed)
    answers: list[object] = [
        "same", 1, None, [], ToolResult(error_class="tool_failed", message="no"), ToolResult(status="retryable"),
        ToolResult(status="retryable", error_class="timeout"), ToolResult(error_class="not_found", message="no"),
    ]  # fmt: skip
    for number in range(calls):
        kind = rng.randrange(20)
        if kind == 0:
            guard.user_input()
        elif kind == 1:
            guard.before_turn(output_tokens_max=10)
            guard.after_turn(output_tokens=rng.randrange(10))
        else:
            steps = [
                Step(
                    tool=rng.choice(["read", "look", "poll", "wait", "write", f"t{number}"]),
                    args={"n": rng.choice([number, number % 7]), "id": number},
                    answer=rng.choice([*answers, f"text {number}", ToolResult(value=1, progress_version=f"v{number}")]),
                    call_id=f"call-{number}",
                    round_id=rng.choice([None, f"m{number // 5}"]),
                )
            ]
            drive(guard, steps)


TOOLS = {
    "read": ToolPolicy(effect="read"),
    "poll": ToolPolicy(effect="poll"),
    "wait": ToolPolicy(effect="wait"),
    "write": ToolPolicy(effect="write", idempotency_key="{id}"),
}


def test_ten_thousand_calls_of_every_kind_stay_within_the_bound() -> None:
    guard = guard_of(tools=TOOLS, on_trip=("observe",))
    random_run(guard, 1, 10_000)
    assert guard.ended is None
    assert guard.counters.steps > 5_000
    assert guard.evidence.evictions > 0
    assert len(guard.evidence.pack()) <= PACKED_BYTES_MAX // 2


def comparable(evidence: Evidence) -> Evidence:
    """What a packed state keeps: a sketch in place of the last answer's text."""
    return Evidence.unpack(evidence.pack())


@pytest.mark.parametrize("seed", range(8))
def test_what_is_packed_comes_back_at_every_point_of_a_run(seed: int) -> None:
    guard = guard_of(tools=TOOLS, on_trip=("observe",))
    for _ in range(60):
        random_run(guard, seed, 5)
        seed += 101
        packed = guard.evidence.pack()
        back = Evidence.unpack(packed)
        assert back.pack() == packed
        live = {item.name: getattr(guard.evidence, item.name) for item in fields(Evidence) if item.name != "last"}
        assert {name: getattr(back, name) for name in live} == live


@pytest.mark.parametrize("seed", range(8))
def test_a_run_that_is_packed_between_all_its_calls_is_decided_the_same(seed: int) -> None:
    rng = random.Random(seed)
    steps = [
        Step(tool=rng.choice("ab"), args={"n": rng.randrange(3)}, answer=f"at 10:{n:02} {rng.choice('xy')}")
        for n in range(60)
    ]
    kept, stored = guard_of(), guard_of()
    for number, step in enumerate(steps):
        call = ToolCall(tool=step.tool, args=step.args, call_id=f"c{number}")
        stored._evidence = comparable(stored.evidence)
        one, other = kept.before(call), stored.before(call)
        assert (one.action, one.reason) == (other.action, other.reason)
        if one.action is Action.EXECUTE:
            stored._evidence = comparable(stored.evidence)
            assert kept.after(call, step.answer).action is stored.after(call, step.answer).action
    assert comparable(kept.evidence).trail == stored.evidence.trail


def test_counters_are_those_of_the_evidence() -> None:
    clock = Clock()
    guard = LoopGuard(Policy(), clock=clock)
    guard.before(ToolCall(tool="a", call_id="c1"))
    guard.before(ToolCall(tool="a"), fault=None)
    guard.before_turn()
    guard.after_turn(input_tokens=3, output_tokens=4, cache_read_tokens=1, reasoning_tokens=2, spend_nanos=9)
    clock.pass_ms(7)
    counters = guard.counters
    assert (counters.steps, counters.turns, counters.elapsed_ms, counters.spend_nanos) == (2, 1, 7, 9)


def test_a_turn_that_was_never_opened_is_posted_all_the_same() -> None:
    evidence = Evidence()
    fold.turn_settled(evidence, "unknown", Usage(input_tokens=5), 7)
    assert (evidence.input_tokens, evidence.spend_nanos, evidence.held_tokens) == (5, 7, 0)


def test_a_charged_turn_posts_later_only_what_exceeds_its_charge() -> None:
    for used, posted in (((30, 50), (0, 0)), ((60, 70), (30, 0)), ((20, 100), (20, 0)), ((0, 130), (0, 30))):
        evidence = Evidence()
        fold.turn_let_through(evidence, turn_of("t1", tokens=100, nanos=7))
        fold.turns_charged(evidence)
        assert (evidence.output_tokens, evidence.spend_nanos) == (100, 7)
        assert (evidence.held_tokens, evidence.held_nanos) == (0, 0)
        usage = Usage(input_tokens=used[0], output_tokens=used[1], cache_read_tokens=3)
        excess, nanos = fold.turn_excess(evidence, "t1", usage, 9)
        assert (excess.input_tokens, excess.output_tokens, excess.cache_read_tokens, nanos) == (*posted, 3, 2)
        fold.turn_settled(evidence, "t1", excess, nanos)
        assert evidence.input_tokens + evidence.output_tokens == max(100, sum(used))
        assert (evidence.spend_nanos, evidence.turns_charged) == (9, {})
        # It is reported now; whatever else comes under its name is another call.
        assert fold.turn_excess(evidence, "t1", usage, 9) == (usage, 9)


def test_so_many_charged_turns_are_remembered_and_one_that_is_not_posts_in_full() -> None:
    evidence = Evidence()
    for number in range(TURNS_CHARGED_MAX + 1):
        fold.turn_let_through(evidence, turn_of(f"t{number}", tokens=10))
        fold.turn_charged(evidence, f"t{number}")
    assert (len(evidence.turns_charged), evidence.evictions) == (TURNS_CHARGED_MAX, 1)
    usage = Usage(output_tokens=8)
    assert fold.turn_excess(evidence, "t0", usage, 0) == (usage, 0)
    assert fold.turn_excess(evidence, "t1", usage, 0) == (Usage(), 0)
    # One that was held for nothing has no charge to remember.
    fold.turn_let_through(evidence, turn_of("free"))
    fold.turn_charged(evidence, "free")
    assert (evidence.turns_open, "free" in evidence.turns_charged) == ({}, False)


GOOD = Evidence().pack()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'[1,"x"]',
        orjson.dumps([FORMAT + 1, orjson.loads(GOOD)[1]]),
        orjson.dumps([FORMAT, orjson.loads(GOOD)[1][:-1]]),
        GOOD[:-5],
    ],
    ids=range(8),
)
def test_what_is_no_packed_memory_is_refused_as_corrupt(data: bytes) -> None:
    with pytest.raises(StoreCorruptError, match="stored run state"):
        Evidence.unpack(data)


def with_part(part: str, value: object) -> bytes:
    version, values = orjson.loads(GOOD)
    names = [item.name for item in fields(Evidence)]
    values[names.index(part)] = value
    return orjson.dumps([version, values])


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pending", {"c1": "not a list"}),
        ("pending", {"c1": ["too", "short"]}),
        ("last", [1, 2]),
        ("last", "text"),
        ("last", ["f", "a", 1, ["w", "\x00", "", False]]),
        ("trail", [["one"]]),
        ("trail", 5),
        ("polls", {"p": ["x"]}),
        ("turns_open", {"t": []}),
        ("turns_charged", {"t": [1]}),
        ("rungs", {"r": [1]}),
        ("rounds", {"m": {"f": [1]}}),
        ("rounds", ["m"]),
        ("rounds", {"m": 5}),
    ],
)
def test_a_part_of_another_shape_is_refused_as_corrupt(part: str, value: object) -> None:
    Evidence.unpack(with_part(part, orjson.loads(orjson.dumps(_default(part)))))
    with pytest.raises(StoreCorruptError):
        Evidence.unpack(with_part(part, value))


def _default(part: str) -> object:
    return getattr(Evidence(), part)
