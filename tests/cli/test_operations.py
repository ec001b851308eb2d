"""ops show, settle and expire, reconcile with probes, and a restored store: what an operator does about a doubt."""

from __future__ import annotations

from pathlib import Path

import pytest

import endstop as es
from tests.cli.conftest import Endstop
from tests.runtime.scenes import SPEC

STORE = ".endstop/endstop.db"
POLICY = """
[tools.pay]
effect = "write"
idempotency_key = "{order}"
outcome_class = "probeable"
probe = "tests.cli.test_operations:probe"
"""


def probe(request: es.ProbeRequest) -> es.ProbeAnswer:
    """The target that `endstop.toml` of these tests names."""
    return es.ProbeAnswer.applied({"found": (request.args or {})["order"]}, receipt="r-7")


def lose(order: str) -> str:
    """A write whose answer was lost; gives the operation's id."""
    tool = es.ToolPolicy(effect="write", idempotency_key="{order}", probe="tests.cli.test_operations:probe")

    def pay(order: str) -> None:
        raise ConnectionResetError

    policy = es.Policy(tools={"pay": tool})
    with (
        es.open(STORE, policy=policy) as guard,
        guard.run(SPEC, run_id=f"run-{order}") as run,
        pytest.raises(es.OutcomeUnknownError) as raised,
    ):
        run.call(pay, {"order": order}, tool="pay")
    return raised.value.operation_id


@pytest.fixture
def operation(folder: Path) -> str:
    return lose("a")


def test_one_operation_is_shown_with_its_whole_history(run_cli: Endstop, operation: str) -> None:
    shown = run_cli("ops", "show", operation[:14], "--json")
    assert shown.code == 10, "in doubt"
    assert shown.json["operation"]["state"] == "UNKNOWN"
    assert [item["entry"]["type"] for item in shown.json["history"]] == ["call_intent", "result"]
    text = run_cli("ops", "show", operation).out
    assert "call_intent" in text
    assert "UNKNOWN" in text


@pytest.mark.parametrize("words", [(), ("list",)])
def test_the_list_needs_no_name(run_cli: Endstop, operation: str, words: tuple[str, ...]) -> None:
    assert [item["operation_id"] for item in run_cli("ops", *words, "--json").json["operations"]] == [operation]
    assert run_cli("ops", *words, "--state", "COMMITTED", "--json").json["operations"] == []
    assert operation in run_cli("ops", *words, "run-a").out


def test_a_person_settles_it_and_the_history_says_who(run_cli: Endstop, operation: str) -> None:
    settled = run_cli(
        "ops", "settle", operation, "--applied", "--reason", "asked", "--evidence", "line 4", "--actor", "ann",
        "--receipt", "tx-1", "--json",
    )  # fmt: skip
    assert (settled.code, settled.json["state"], settled.json["receipt"]) == (0, "COMMITTED", "tx-1")
    shown = run_cli("ops", "show", operation, "--json")
    last = shown.json["history"][-1]["entry"]
    assert (shown.code, last["code"], last["actor"]) == (0, "hand_applied", "ann")
    assert "hand_applied" in run_cli("ops", "show", operation).out


def test_not_applied_by_a_dead_worker_needs_no_exclusion(run_cli: Endstop, operation: str) -> None:
    """The worker was of this process, whose guard is closed."""
    answer = run_cli("ops", "settle", operation, "--not-applied", "--reason", "asked", "--evidence", "nothing there")
    assert (answer.code, answer.out.split()[-1]) == (0, "FAILED_RETRYABLE")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--applied or --not-applied"), (("--applied", "--not-applied"), "--applied or --not-applied"),
        (("--applied",), "needs a reason"), (("--applied", "--reason", "r"), "needs evidence"),
    ],
)  # fmt: skip
def test_what_is_missing_to_settle_is_named(
    run_cli: Endstop, operation: str, options: tuple[str, ...], says: str
) -> None:
    answer = run_cli("ops", "settle", operation, *options)
    assert (answer.code, answer.out) == (2, "")
    assert says in answer.err


def test_an_operation_that_is_not_there_is_not_found(run_cli: Endstop, operation: str) -> None:
    for verb in (("show",), ("settle", "--applied", "--reason", "r", "--evidence", "e")):
        assert run_cli("ops", verb[0], "op_00000000000", *verb[1:]).code == 8


def test_reconcile_asks_the_probes_of_the_policy_here(run_cli: Endstop, operation: str, folder: Path) -> None:
    left = run_cli("reconcile", "--json")
    assert (left.code, left.json["probes"][0]["code"]) == (10, "no_probe")
    (folder / "endstop.toml").write_text(POLICY, encoding="utf-8")
    answer = run_cli("reconcile", "--json")
    assert (answer.code, answer.json["in_doubt"]) == (0, [])
    assert answer.json["probes"] == [
        {
            "operation_id": operation, "tool": "pay", "code": "probe_applied", "found": "applied",
            "state": "COMMITTED", "not_before": None,
        }
    ]  # fmt: skip


def test_reconcile_takes_a_policy_file_and_says_what_came_of_each_probe(
    run_cli: Endstop, operation: str, folder: Path
) -> None:
    (folder / "team.toml").write_text(POLICY, encoding="utf-8")
    assert f"{operation}: probe_applied, COMMITTED" in run_cli("reconcile", "--policy", "team.toml").out
    assert run_cli("reconcile", "--policy", "none.toml").code == 2


def test_results_are_removed_when_they_are_old(run_cli: Endstop, operation: str) -> None:
    assert run_cli("ops", "expire", "--days", "1", "--json").json["expired"] == 0
    assert run_cli("ops", "expire").code == 2


def test_a_restored_store_is_named_by_the_doctor_and_accepted_with_a_reason(
    run_cli: Endstop, operation: str, folder: Path
) -> None:
    assert run_cli("doctor", "--accept-restore", "--reason", "r").code == 2
    (folder / ".endstop" / "endstop.db.owners" / "incarnation").unlink()
    found = run_cli("doctor", "--json")
    assert found.code == 1
    assert next(item for item in found.json["checks"] if item["check"] == "restore")["verdict"] == "fail"
    assert run_cli("doctor", "--accept-restore").code == 2
    accepted = run_cli("doctor", "--accept-restore", "--reason", "compared", "--json")
    assert next(item for item in accepted.json["checks"] if item["check"] == "restore")["verdict"] == "ok"
    assert run_cli("doctor", "--json").json["ok"]
