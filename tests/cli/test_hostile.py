"""What an agent, a tool or a label brought along steers no terminal and forges no line, in any verb."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

import endstop as es
from tests.cli.conftest import Answer, Endstop, text_turn, write_task
from tests.cli.task_tools import HOSTILE

STORE = ".endstop/endstop.db"


def _is_clean(text: str) -> bool:
    hidden = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    return not any(unicodedata.category(sign) in hidden for sign in text.replace("\n", ""))


@pytest.fixture
def hostile(folder: Path) -> str:
    """A run whose every text is hostile: spec, agent, label, tool, arguments, stop reason."""
    spec = es.Spec(what_it_does=HOSTILE, what_it_does_not=HOSTILE, done_looks_like=HOSTILE)
    with es.open(STORE) as guard:
        with guard.run(spec, run_id="hostile", labels={"x": HOSTILE}, agent=HOSTILE) as run:
            run.call(lambda **_: HOSTILE, {HOSTILE: HOSTILE}, tool=HOSTILE, call_id=HOSTILE)
            run.checkpoint({"note": HOSTILE})
        guard.deny(tool=HOSTILE, reason=HOSTILE, run_id="hostile")
        guard.stop("hostile", reason=HOSTILE)
    assert folder.exists()
    return "hostile"


VERBS = [
    ("ps", "--all"), ("show", "hostile"), ("show", "hostile", "--entries"), ("ops",), ("ops", "hostile"),
    ("ledger", "show"), ("ledger", "show", "--entries"), ("ledger", "tail"), ("deny", "--list"), ("stop", "hostile"),
    ("reconcile",), ("doctor",),
]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_lets_a_hidden_sign_through(
    run_cli: Endstop, hostile: str, verb: tuple[str, ...], as_json: bool
) -> None:
    answer = run_cli(*verb, *(("--json",) if as_json else ()))
    assert hostile
    assert answer.out or verb == ("reconcile",)
    assert _is_clean(answer.out)
    assert _is_clean(answer.err)
    if as_json:
        assert answer.out.isascii()


def test_json_carries_the_text_as_it_was(run_cli: Endstop, hostile: str) -> None:
    body = run_cli("show", hostile, "--json").json
    assert body["labels"] == {"x": HOSTILE}
    assert body["spec"]["what_it_does"] == HOSTILE
    assert body["envelope"]["message"] == HOSTILE


def test_a_line_feed_in_stored_text_forges_no_line_of_its_own(run_cli: Endstop, hostile: str) -> None:
    """In aligned output a second line of a value is indented, so that it cannot pass for a fact of ours."""
    for line in run_cli("show", hostile).out.splitlines():
        assert not line.startswith("fake: line")


def _runs(run_cli: Endstop, folder: Path, *args: str) -> Answer:
    return run_cli("run", write_task(folder, text_turn(HOSTILE)), *args)


def test_the_output_of_an_agent_is_shown_harmless_and_kept_whole(run_cli: Endstop, folder: Path) -> None:
    answer = _runs(run_cli, folder)
    assert answer.code == 0
    assert _is_clean(answer.out)
    assert _is_clean(answer.err)
    assert "\\x1b[31mred" in answer.out
    assert _runs(run_cli, folder, "--json").json["output"] == HOSTILE


def test_what_is_wrong_with_hostile_input_is_told_harmless(run_cli: Endstop, folder: Path) -> None:
    (folder / "p.toml").write_text('"\\u001b[31mx" = 1\n')
    for args in (
        ("policy", "check", "p.toml"),
        ("show", HOSTILE),
        (HOSTILE,),
        ("ps", f"--{HOSTILE}"),
        ("run", HOSTILE),
    ):
        answer = run_cli(*args)
        assert answer.code in (2, 8)
        assert answer.err
        assert _is_clean(answer.err)
