"""The README's claims run: every Python block, and the commands it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def expected_output(block: str) -> list[str]:
    """What the comments behind prints say will be printed."""
    return [match.strip() for match in re.findall(r"print\(.*\)  # (.+)$", block, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=[f"block-{number}" for number in range(1, len(BLOCKS) + 1)])
def test_every_python_block_runs_and_prints_what_it_says(block: str, tmp_path: Path) -> None:
    """A newcomer who pastes a block sees what its comments promise."""
    done = subprocess.run(
        [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected_output(block)


def test_there_are_at_least_four_python_blocks() -> None:
    assert len(BLOCKS) >= 4


def test_the_promise_stands_word_for_word() -> None:
    assert "at most once, plus an explicit in-doubt state" in TEXT


def test_every_verb_the_readme_names_exists() -> None:
    """`endstop VERB` in the README is a verb of the command line."""
    import click

    from endstop.cli.app import cli

    named = set(re.findall(r"^endstop ([a-z]+)", TEXT, re.MULTILINE)) | set(re.findall(r"`endstop ([a-z]+)", TEXT))
    assert named
    assert named <= set(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", TEXT))
def test_every_link_leads_somewhere(link: str) -> None:
    assert (README.parent / link).exists()
