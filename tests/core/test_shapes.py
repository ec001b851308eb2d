"""The shapes of tests/core/shapes.py against the guard, with all caps out of the way."""

from __future__ import annotations

from typing import Final

import pytest

from endstop import Limits, LoopGuard, Policy
from endstop.core.propose import fingerprint_of
from tests.core.shapes import LEGITIMATE, LOOPS, Shape
from tests.fixtures.driver import drive

# Caps would stop many a loop before its guard does; here only the guards speak.
NO_CAPS: Final = Limits(steps_max=10_000, turns_max=10_000, tokens_max=10**9, wall_ms_max=10**9)


def stopped_at(shape: Shape, *, declared: bool) -> int | None:
    """The call that is refused for good; a stop that follows from a result refuses the next call."""
    guard = LoopGuard(Policy(limits=NO_CAPS, tools=shape.tools if declared else {}))
    return drive(guard, shape.steps).stopped_at


@pytest.mark.parametrize("shape", LOOPS, ids=lambda shape: shape.name)
def test_a_loop_with_nothing_declared_is_refused_where_it_should_be(shape: Shape) -> None:
    assert stopped_at(shape, declared=False) == shape.refused


@pytest.mark.parametrize("shape", LOOPS, ids=lambda shape: shape.name)
def test_a_loop_with_its_tools_declared_is_refused_where_it_should_be(shape: Shape) -> None:
    assert stopped_at(shape, declared=True) == shape.declared_refused


@pytest.mark.parametrize("shape", LEGITIMATE, ids=lambda shape: shape.name)
def test_legitimate_work_with_nothing_declared_goes_on(shape: Shape) -> None:
    """Two shapes are stopped without declarations: nothing tells them from a loop (F02, F12)."""
    assert stopped_at(shape, declared=False) == shape.refused


@pytest.mark.parametrize("shape", LEGITIMATE, ids=lambda shape: shape.name)
def test_legitimate_work_with_its_tools_declared_goes_on(shape: Shape) -> None:
    assert stopped_at(shape, declared=True) is None


def test_the_shapes_add_up_to_the_published_table() -> None:
    undeclared = [shape.name[:3] for shape in LOOPS if stopped_at(shape, declared=False) is None]
    assert len(LOOPS) == 19
    assert undeclared == ["L08", "L09", "L10", "L19"]
    assert all(stopped_at(shape, declared=True) is not None for shape in LOOPS)
    assert len(LEGITIMATE) == 13
    assert [shape.name[:3] for shape in LEGITIMATE if stopped_at(shape, declared=False) is not None] == ["F02", "F12"]


def test_l15_one_and_one_point_nought_and_true_are_three_arguments() -> None:
    """The one shape that is about fingerprints alone."""
    tool = Policy().tool("t")
    found = {fingerprint_of("t", {"x": value}, tool) for value in (1, 1.0, True)}
    assert len(found) == 3


def test_files_that_are_re_read_once_in_order_pass() -> None:
    for names in ("abcdef", "abcdefghijkl"):
        lap = [step for shape in LOOPS if shape.name.startswith("L05") for step in shape.steps[: len(names)]]
        guard = LoopGuard(Policy(limits=NO_CAPS))
        story = drive(guard, [*lap, *lap])
        assert story.stopped_at is None
        assert len(story.executed) == 2 * len(names)
