"""Nothing that steers a terminal gets through, and everything plain does."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.cli.text import block, shortened, visible, width


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größer 表 ✓", "größer 表 ✓"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b2J", "\\x9b2J"),
        ("a\r\nb\tc\x00\x7f", "a\\r\\nb\\tc\\x00\\x7f"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2066\u2069\u200b\ufeff", "\\u2066\\u2069\\u200b\\ufeff"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_a_sign_that_is_not_plainly_visible_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(alphabet=st.characters(exclude_categories=()), max_size=200))
def test_no_hidden_sign_survives_in_any_text(text: str) -> None:
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert not {unicodedata.category(sign) for sign in visible(text)} & hidden
    assert not {unicodedata.category(sign) for sign in block(text).replace("\n", "")} & hidden
    assert not {unicodedata.category(sign) for sign in shortened(text, 20)} & hidden


def test_a_block_keeps_its_lines_and_nothing_else() -> None:
    assert block("a\tb\r\nc\x1b[0m\rd", indent="> ") == "> a   b\n> c\\x1b[0m\\rd"


def test_long_text_is_cut_with_a_mark() -> None:
    assert shortened("x" * 500, 10) == "x" * 9 + "…"
    assert shortened("x" * 10, 10) == "x" * 10
    assert len(shortened("\x1b" * 30, 10)) == 10


def test_width_counts_columns() -> None:
    assert (width("ab"), width("表"), width("e\u0301")) == (2, 2, 1)
