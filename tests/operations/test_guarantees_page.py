"""The page of guarantees names everything there is: each state, each class, each exclusion and each window."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from endstop.core.codec import RESULT_BYTES_MAX
from endstop.core.policy import WAITERS, ToolPolicy
from endstop.core.probing import Exclusion, Found
from endstop.core.propose import KEY_CHARS_MAX
from endstop.core.reasons import OutcomeClass
from endstop.core.transitions import FINAL_OPERATION_STATES, OperationState
from tests.operations.test_processes import POINTS


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs" / "guarantees.md").read_text(encoding="utf-8")


def table(page: str, heading: str) -> list[list[str]]:
    section = page.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_every_state_stands_once_with_whether_it_is_final(page: str) -> None:
    rows = {row[0].strip("`"): row for row in table(page, "The states")}
    assert list(rows) == [state.value for state in OperationState]
    for state in OperationState:
        assert rows[state][2] == ("yes" if state in FINAL_OPERATION_STATES else "no"), state


def test_every_outcome_class_stands_once(page: str) -> None:
    rows = [re.findall(r"`(\w+)`", row[0])[0] for row in table(page, "By what is declared of the tool")]
    assert sorted(rows) == sorted(item.value for item in OutcomeClass)
    assert ToolPolicy().target_class is OutcomeClass.AT_MOST_ONCE
    assert ToolPolicy(probe="m:f").target_class is OutcomeClass.PROBEABLE


def test_every_exclusion_and_every_answer_of_a_probe_is_named(page: str) -> None:
    settling = page.split("\n## What settles a doubt\n", 1)[1].split("\n## ", 1)[0]
    assert all(f"`{item.value}`" in settling for item in Exclusion)
    assert all(item.value.replace("_", " ") in settling for item in Found)


def test_every_window_that_is_tested_is_on_the_page(page: str) -> None:
    windows = [row[0] for row in table(page, "Crash window by crash window")]
    assert len(windows) >= len(POINTS)
    assert all(row[-1] == "1" for row in table(page, "Crash window by crash window"))


def test_words_and_limits_are_those_of_the_code(page: str) -> None:
    assert all(f"`{waiter}`" in page for waiter in WAITERS)
    assert f"{RESULT_BYTES_MAX // 1024} KiB" in page
    assert f"1 to {KEY_CHARS_MAX} bytes" in page
