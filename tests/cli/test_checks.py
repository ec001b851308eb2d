"""doctor, policy, init and demo."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from endstop.cli import doctor
from endstop.cli.init import frameworks_found
from endstop.store.port import StoreFacts
from tests.cli.conftest import Endstop, text_turn, write_task

DONE = text_turn("x is there.")


def _verdicts(answer: Any) -> dict[str, str]:
    return {check["check"]: check["verdict"] for check in answer.json["checks"]}


# -- doctor


def test_a_doctor_without_a_store_warns_and_makes_none(run_cli: Endstop, folder: Path) -> None:
    answer = run_cli("doctor", "--json")
    assert (answer.code, answer.json["ok"]) == (0, True)
    assert _verdicts(answer)["store"] == "warn"
    assert not (folder / ".endstop").exists()


def test_a_sound_store_passes_every_check(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, DONE)).code == 0
    answer = run_cli("doctor", "--json")
    found = _verdicts(answer)
    assert answer.code == 0
    checks = ("python", "store", "sqlite version", "journal mode", "synchronous", "file mode", "integrity", "schema",
              "workers' locks", "clock", "policy")  # fmt: skip
    assert {name: found[name] for name in checks} == dict.fromkeys(checks, "ok")
    plain = run_cli("doctor")
    assert plain.out.splitlines()[0].split() == ["CHECK", "VERDICT", "FOUND"]


def test_a_store_that_others_may_read_fails(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("run", write_task(folder, DONE)).code == 0
    (folder / ".endstop" / "endstop.db").chmod(0o644)
    answer = run_cli("doctor", "--json")
    # A store may refuse such a file, or mend it; what it may not do is pass it over.
    found = _verdicts(answer)
    mended = os.stat(folder / ".endstop" / "endstop.db").st_mode & 0o777 == 0o600
    assert mended or "fail" in (found["store"], found.get("file mode"))


def test_a_file_that_is_no_store_fails_with_1(run_cli: Endstop, folder: Path) -> None:
    (folder / "x.db").write_text("no database at all, and long enough to be looked at" * 30)
    answer = run_cli("doctor", "--store", "x.db", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    assert _verdicts(answer)["store"] == "fail"


def test_weak_settings_of_a_store_fail_one_by_one() -> None:
    facts = StoreFacts(
        kind="sqlite", engine_version="3.50.9", schema_version=1, journal_mode="delete", synchronous="normal",
        file_mode="0644", ledger="l", entries=0, runs=0, integrity="ok",
    )  # fmt: skip
    assert {finding.check: finding.verdict for finding in doctor._sqlite(facts)} == dict.fromkeys(
        ("sqlite version", "journal mode", "synchronous", "file mode"), "fail"
    )


def test_a_clock_that_is_behind_the_ledger_or_the_release_fails() -> None:
    class At:
        def __init__(self, now_us: int) -> None:
            self.clock = self
            self.us = now_us

        def now_us(self) -> int:
            return self.us

    good: Any = At(doctor.EARLIEST_US + 1)
    early: Any = At(0)
    assert doctor._clock(good, None).verdict == "ok"
    assert doctor._clock(good, doctor.EARLIEST_US + 2).verdict == "ok"
    assert doctor._clock(good, doctor.EARLIEST_US + 3 * doctor.AHEAD_US_MAX).verdict == "fail"
    assert doctor._clock(early, None).verdict == "fail"


def test_what_is_not_installed_is_a_warning_with_its_command(run_cli: Endstop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    answer = run_cli("doctor", "--json")
    assert answer.code == 0
    found = {check["check"]: check["found"] for check in answer.json["checks"] if check["verdict"] == "warn"}
    assert found["extra models"] == "not installed: pip install 'endstop[models]'"


def test_a_broken_policy_here_fails(run_cli: Endstop, folder: Path) -> None:
    (folder / "endstop.toml").write_text("[limits]\nsteps = 3\n")
    answer = run_cli("doctor", "--json")
    assert (answer.code, _verdicts(answer)["policy"]) == (1, "fail")


# -- policy


def test_a_sound_policy_has_a_digest(run_cli: Endstop, folder: Path) -> None:
    (folder / "p.toml").write_text("[limits]\nsteps_max = 40\n")
    answer = run_cli("policy", "check", "p.toml", "--json")
    assert (answer.code, answer.json["valid"], answer.json["warnings"]) == (0, True, [])
    assert run_cli("policy", "check", "p.toml").out == f"ok  {answer.json['digest']}  p.toml\n"


def test_what_is_wrong_is_told_with_file_line_and_key_and_ends_with_2(run_cli: Endstop, folder: Path) -> None:
    (folder / "endstop.toml").write_text('on_trip = ["warn"]\n[limits]\nstep_max = 3\n')
    answer = run_cli("policy", "check")
    assert (answer.code, answer.out) == (2, "")
    assert "endstop.toml:3" in answer.err
    assert "steps_max" in answer.err
    assert "stop" in answer.err
    assert run_cli("policy", "check", "nowhere.toml").code == 2


def test_warnings_go_to_stderr_and_count_when_strict(run_cli: Endstop, folder: Path) -> None:
    (folder / "endstop.toml").write_text('[tools.a]\neffect = "write"\n')
    answer = run_cli("policy", "check")
    assert (answer.code, answer.out[:4]) == (0, "ok  ")
    assert "warning: tool 'a' is a write without idempotency_key" in answer.err
    assert run_cli("policy", "check", "--strict").code == 2
    assert run_cli("policy", "check", "--json").json["warnings"]


def test_a_policy_is_shown_with_defaults_and_environment(
    run_cli: Endstop, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "endstop.toml").write_text(
        '[tools.a]\neffect = "write"\nidempotency_key = "{x}"\nresult_schema = { type = "object" }\n'
    )
    monkeypatch.setenv("ENDSTOP__LIMITS__TURNS_MAX", "9")
    body = run_cli("policy", "show", "--json").json
    assert (body["limits"]["turns_max"], body["limits"]["steps_max"]) == (9, 20)
    assert (body["tools"]["a"]["effect"], body["tools"]["a"]["result_schema"]) == ("write", {"type": "object"})
    out = run_cli("policy", "show").out
    assert "turns_max" in out
    assert "{x}" in out


@pytest.mark.parametrize("kind", [(), ("policy",), ("task",), ("tool-result",)])
def test_the_schemas_are_json_schemas(run_cli: Endstop, kind: tuple[str, ...]) -> None:
    assert json.loads(run_cli("policy", "schema", *kind).out)["$schema"].endswith("2020-12/schema")


# -- init


def test_init_writes_what_runs_and_doing_it_twice_changes_nothing(run_cli: Endstop, folder: Path) -> None:
    (folder / ".gitignore").write_text("*.log")
    first = run_cli("init", "--json").json
    assert first["written"] == [
        "endstop.toml", "example-task/task.toml", "example-task/turns.jsonl", "example-task/endstop_example_tools.py",
        ".gitignore",
    ]  # fmt: skip
    assert (folder / ".gitignore").read_text() == "*.log\n.endstop/\n"
    second = run_cli("init", "--json").json
    assert (second["written"], second["kept"]) == ([], first["written"])
    assert run_cli("policy", "check", "--strict").code == 0
    answer = run_cli("run", "example-task/task.toml", "--json")
    assert (answer.code, answer.json["output"]) == (0, "There are three files; the largest is task.toml.")


def test_the_example_tells_the_truth(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("init").code == 0
    sizes = {path.name: path.stat().st_size for path in (folder / "example-task").iterdir() if path.is_file()}
    assert len(sizes) == 3
    assert max(sizes, key=lambda name: sizes[name]) == "task.toml"


def test_init_keeps_what_was_changed_unless_forced(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("init").code == 0
    (folder / "endstop.toml").write_text("# mine\n")
    assert "kept     endstop.toml" in run_cli("init").out
    assert (folder / "endstop.toml").read_text() == "# mine\n"
    assert run_cli("init", "--force", "--json").json["written"] == ["endstop.toml"]
    assert (folder / "endstop.toml").read_text() != "# mine\n"


def test_git_ignores_the_store_after_init(run_cli: Endstop, folder: Path) -> None:
    assert run_cli("init").code == 0
    for command in (["git", "init", "-q"], ["git", "check-ignore", "-q", ".endstop/endstop.db"]):
        assert subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode == 0


def test_installed_frameworks_are_named_once(run_cli: Endstop, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from importlib.metadata import PackageNotFoundError

    def version(name: str) -> str:
        if name not in ("pydantic-ai", "pydantic-ai-slim", "langgraph"):
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr("endstop.cli.init.version", version)
    assert frameworks_found() == ("LangGraph 1.2", "Pydantic AI 1.2")
    assert run_cli("init", "--json").json["frameworks"] == ["LangGraph 1.2", "Pydantic AI 1.2"]
    assert "LangGraph 1.2, Pydantic AI 1.2" in (folder / "endstop.toml").read_text()


# -- demo


def test_the_demo_is_called_as_asked_and_its_code_is_given_back(
    run_cli: Endstop, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[dict[str, object]] = []

    def main(**options: object) -> int:
        called.append(options)
        return 1

    monkeypatch.setattr("endstop.demo.scenario.main", main)
    assert run_cli("demo", "--json", "--keep", "files").code == 1
    assert called == [{"keep": Path("files"), "json": True, "plain": True}]
