"""When two different answers of one undeclared call still say the same, and when they do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import ToolPolicy
from endstop.core.likeness import CHARS_MAX, MASKED_CHARS_MAX, TOKENS_MAX, Sketch, alike, sketch
from tests.core.kit import guard_of
from tests.fixtures.driver import Step, drive

BASE = "the nightly import of the customer table is waiting for the lock"


def same(older: str | bytes, newer: str | bytes) -> bool:
    one, other = sketch(older), sketch(newer)
    assert one is not None
    assert other is not None
    return alike(one, other)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("at 2031-05-04 done", "at 2031-05-05 done"),
        ("at 2031-05-04T10:00:00Z done", "at 2031-05-04T11:22:33+02:00 done"),
        ("at 2031-05-04 10:00:00.123 done", "at 2031-05-04 10:00:01,456 done"),
        ("on 4/5/2031 done", "on 5.5.2031 done"),
        ("10:15 idle", "10:16:01 idle"),
        ("3:05 PM idle", "4:06 pm idle"),
        ("took 12 ms", "took 13 ms"),
        ("took 1.5s", "took 2.25 seconds"),
        ("after 3 minutes", "after 45 minutes"),
        ("id 123e4567-e89b-12d3-a456-426614174000 ok", "id 123e4567-e89b-12d3-a456-426614174fff ok"),
        ("at 0x7f3a ok", "at 0x7f3b ok"),
        ("pid 4312 ok", "pid 17 ok"),
        ("process id: 4312 ok", "process id: 17 ok"),
        ("PID=1 ok", "PID=2 ok"),
        (b"10:15 idle", b"10:16 idle"),
    ],
)
def test_clock_values_and_ids_of_processes_are_masked(older: str | bytes, newer: str | bytes) -> None:
    assert same(older, newer)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("47 % of the modules are built", "48 % of the modules are built"),
        ("1 failed, 11 passed", "2 failed, 10 passed"),
        ("row 7", "row 8"),
        ("version 1.2.3 of the tool", "version 1.2.4 of the tool"),
    ],
)
def test_plain_digits_are_never_masked_and_a_replaced_number_is_news(older: str, newer: str) -> None:
    assert not same(older, newer)


def test_a_few_other_words_say_the_same() -> None:
    assert same(BASE, BASE.replace("nightly", "nghtly"))
    assert not same(BASE, "the page shows another list of open orders for you")


def test_words_must_overlap_by_seventy_percent() -> None:
    """Seven of ten shared in the union of both is enough, fewer is not."""
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta"]
    assert same(" ".join([*words, "x"]), " ".join([*words, "y", "z"]))
    assert not same(" ".join([*words[:6], "x", "w"]), " ".join([*words[:6], "y", "z"]))


def test_short_answers_have_to_be_equal() -> None:
    assert not same("waiting for the lock", "waiting for a lock")
    assert same("waiting for the lock", "the lock for waiting")


def test_growth_is_news() -> None:
    assert not same(BASE, BASE + " and one line more")
    assert not same(BASE, BASE + " 17")


def test_a_text_that_lost_something_says_the_same() -> None:
    """A reader that cuts text makes answers shorter, and numbers fewer."""
    assert same(BASE + " 17 rows", BASE + " rows")


def test_long_answers_are_compared_whole_only() -> None:
    long = "word " * (CHARS_MAX // 5 + 1)
    assert same(long + "10:15", long + "10:16")
    assert not same(long + "a b", long + "a c")
    assert not same(BASE, long)
    many = "a " * (TOKENS_MAX + 1)
    assert same(many + "10:15", many + "10:16")
    assert not same(many + "b c", many + "b d")
    assert sketch("x" * (MASKED_CHARS_MAX + 1)) is None


@given(st.text(max_size=400), st.text(max_size=400))
def test_a_sketch_packs_and_unpacks_and_keeps_its_opinion(one: str, other: str) -> None:
    older, newer = sketch(one), sketch(other)
    assert older is not None
    assert newer is not None
    assert Sketch.unpack(older.pack()) == older
    assert alike(Sketch.unpack(older.pack()), Sketch.unpack(newer.pack())) is alike(older, newer)
    assert alike(older, older)


@pytest.mark.parametrize("parts", [[], ["a", "b", "c"], ["a", "\x00", "", False], ["a", "", "", False, 1]])
def test_what_is_no_packed_sketch_is_refused(parts: list[object]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Sketch.unpack(parts)


# -- When it is asked


def looks(answers: list[str], tool: ToolPolicy | None = None, between: bool = False) -> int | None:
    steps: list[Step] = []
    for number, answer in enumerate(answers):
        steps.append(Step(tool="look", answer=answer))
        if between:
            steps.append(Step(tool="read", args={"n": number}, answer=f"text {number}"))
    return drive(guard_of(tools={} if tool is None else {"look": tool}), steps).stopped_at


def test_likeness_is_asked_back_to_back_and_of_undeclared_tools_only() -> None:
    answers = [f"10:1{n} nothing to do" for n in range(6)]
    assert looks(answers) == 3
    assert looks(answers, ToolPolicy(effect="read")) is None
    assert looks(answers, between=True) is None


def test_each_answer_is_compared_with_the_one_before_it() -> None:
    steps = [BASE, BASE.replace("nightly", "weekly"), BASE.replace("nightly", "hourly")]
    assert looks([*steps, "x"]) == 3


def test_the_memory_of_the_last_answer_survives_packing() -> None:
    """In memory the text is kept, in a stored state its sketch: the verdict is the same."""
    from endstop.core.evidence import Evidence

    guard = guard_of()
    drive(guard, [Step(tool="look", answer=BASE)])
    packed = Evidence.unpack(guard.evidence.pack())
    assert packed.last is not None
    assert packed.last.text is None
    assert packed.last.sketch == sketch(BASE)
    assert BASE.encode() not in guard.evidence.pack()
