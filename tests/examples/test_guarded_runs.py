"""The shipped task files run under the guard, on an SQLite store, and end as designed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="NOT TESTED: the examples need httpx, install endstop[examples]")
pytest.importorskip("selectolax", reason="NOT TESTED: the examples need selectolax, install endstop[examples]")
pytest.importorskip("unidiff", reason="NOT TESTED: the examples need unidiff, install endstop[examples]")

import endstop as es
from endstop.loop.conversation import ToolAnswers
from endstop.loop.scripted import ScriptedModel
from endstop.runtime.task_file import TaskFile, expand_run_key, load_task
from endstop_examples.refusals import ExampleError, InputRefusedError, WriteRefusedError
from endstop_examples.site import PORT, serve_site

CLI = "import sys; from endstop.cli import main; sys.exit(main())"
VARIABLES = ("SEO_OUT", "REVIEW_ROOT", "REVIEW_OUT", "TRIAGE_DB", "TRIAGE_SEED", "EXTRACT_ROOT", "EXTRACT_OUT")
NOW_US = 1_767_600_000_000_000
WRITES = {"seo-audit": 1, "code-review": 4, "support-triage": 4, "document-extraction": 3}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serve_site() as url:
        monkeypatch.setenv("ENDSTOP_SEO_ALLOW", url.removeprefix("http://"))
        yield url.removeprefix("http://")


def copied(repository: Path, name: str, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example in a folder of its own, which is also the working folder; its site stands on a free port."""
    folder = tmp_path / name
    shutil.copytree(repository / "examples" / name, folder, ignore=shutil.ignore_patterns("out", ".endstop"))
    for file in ("task.toml", "turns.jsonl"):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace(f"127.0.0.1:{PORT}", site))
    for variable in VARIABLES:
        monkeypatch.delenv(f"ENDSTOP_{variable}", raising=False)
    monkeypatch.chdir(folder)
    return folder


def opened(task: TaskFile) -> es.Guard:
    return es.open("sqlite:///.endstop/endstop.db", policy=task.policy)


def loop_of(guard: es.Guard, task: TaskFile, model: object | None = None) -> es.AgentLoop:
    tools = {name: tool.resolve() for name, tool in task.tools.items()}
    return es.AgentLoop(guard, model=model or task.model.name, tools=tools)


def run_key(task: TaskFile) -> str:
    assert task.run_key is not None
    return expand_run_key(task.run_key, NOW_US)


@pytest.mark.parametrize("name", WRITES)
def test_the_task_runs_to_its_end_and_every_write_is_committed_once(
    name: str, repository: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(repository, name, tmp_path, site, monkeypatch)
    task = load_task(folder / "task.toml")
    with opened(task) as guard:
        result = loop_of(guard, task).run(task.task, task.spec, run_id=run_key(task))
        assert (result.success, result.terminal_reason, result.output) == (True, "complete", result.output)
        assert result.output
        answers = [answer for item in result.conversation if isinstance(item, ToolAnswers) for answer in item.answers]
        assert [answer.content for answer in answers if answer.failed] == []
        assert len(answers) == result.counters.steps
        states = [operation.state.value for operation in guard.operations()]
    assert states == ["COMMITTED"] * WRITES[name]
    assert any((folder / "out").iterdir())


def test_the_audit_finds_the_faults_that_the_real_site_has(
    repository: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(repository, "seo-audit", tmp_path, site, monkeypatch)
    task = load_task(folder / "task.toml")
    with opened(task) as guard:
        result = loop_of(guard, task).run(task.task, task.spec)
    told: list[Mapping[str, object]] = []
    for item in result.conversation:
        if isinstance(item, ToolAnswers):
            told += [json.loads(answer.content)["value"] for answer in item.answers if answer.name == "crawl_url"]
    pages = {str(page["url"]).rpartition("/")[2]: page for page in told}
    assert pages["about.html"]["title"] is None
    assert pages["missing.html"]["status"] == 404
    assert pages["repairs.html"]["meta_description"] == pages["rentals.html"]["meta_description"]
    report = (folder / "out" / "seo-audit.md").read_text()
    assert all(f"http://{site}/{page}" in report for page in ("about.html", "missing.html", "repairs.html"))


@pytest.mark.parametrize("name", WRITES)
def test_the_same_run_key_starts_one_run(
    name: str, repository: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(repository, name, tmp_path, site, monkeypatch)
    task = load_task(folder / "task.toml")
    with opened(task) as guard:
        loop = loop_of(guard, task)
        first = loop.run(task.task, task.spec, run_id=run_key(task))
        shutil.rmtree(folder / "out")
        with pytest.raises(es.RunStopped) as second:
            loop.run(task.task, task.spec, run_id=run_key(task))
        assert second.value.envelope.terminal_reason == "complete"
        assert [run.run_id for run in guard.runs()] == [first.run_id]
        assert guard.show(first.run_id).counters == first.counters
    assert not (folder / "out").exists(), "the second start called no tool"


@pytest.mark.slow
def test_two_crons_that_fire_at_once_start_one_run(
    repository: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(repository, "seo-audit", tmp_path, site, monkeypatch)
    command = [sys.executable, "-c", CLI, "run", "task.toml", "--json", "--quiet"]
    started = [
        subprocess.Popen(command, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outcomes = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], outcomes
    told = [json.loads(out) for out, _ in outcomes if out]
    assert [answer["started"] for answer in told].count(True) == 1
    [done] = [answer for answer in told if answer["started"]]
    assert (done["state"], done["run"]["counters"]["turns"]) == ("complete", 5)
    third = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert third.returncode == 0, third.stderr
    assert json.loads(third.stdout)["started"] is False
    assert json.loads(third.stdout)["run"] == done["run"]
    assert (folder / "out" / "seo-audit.md").exists()


# --- a refused write is not in doubt ----------------------------------------------------------------------------------

FIELDS = {"supplier": "Quay", "invoice_number": "1", "issued_on": "2026-01-30", "currency": "USD", "total": "251.25"}
FINDING = {"url": "http://x/", "severity": "high", "fault": "No title.", "advice": ""}
COMMENT = {"diff_path": "change.diff", "review_path": "review.jsonl", "file": "shop/orders.py", "text": "Why?"}
REFUSED: list[tuple[str, str, dict[str, object], dict[str, object]]] = [
    (
        "document-extraction",
        "save_record",
        {"document_id": "a", "fields": {**FIELDS, "total": "much"}},
        {"document_id": "a", "fields": FIELDS},
    ),
    (
        "seo-audit",
        "write_report",
        {"path": "a.md", "findings": [{**FINDING, "severity": "dire"}]},
        {"path": "a.md", "findings": [FINDING]},
    ),
    ("seo-audit", "write_report", {"path": "../a.md", "findings": []}, {"path": "a.md", "findings": []}),
    ("code-review", "post_comment", {**COMMENT, "line": 9_999}, {**COMMENT, "line": 9}),
    (
        "support-triage",
        "assign_ticket",
        {"ticket_id": "T-101", "team": "billing", "version": 7},
        {"ticket_id": "T-101", "team": "billing", "version": 1},
    ),
]


@pytest.mark.parametrize(("name", "tool", "wrong", "right"), REFUSED)
def test_a_refused_write_is_proven_not_applied_and_its_correction_goes_through(
    name: str,
    tool: str,
    wrong: dict[str, object],
    right: dict[str, object],
    repository: Path,
    tmp_path: Path,
    site: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(repository, name, tmp_path, site, monkeypatch)
    task = load_task(folder / "task.toml")
    model = ScriptedModel(
        [
            {"tool_calls": [{"id": "c1", "name": tool, "args": wrong}]},
            {"tool_calls": [{"id": "c2", "name": tool, "args": right}]},
            {"text": "Done."},
        ]
    )
    with opened(task) as guard:
        result = loop_of(guard, task, model).run(task.task, task.spec)
        states = [operation.state.value for operation in guard.operations()]
    assert states == ["FAILED_RETRYABLE", "COMMITTED"]
    assert result.success
    first = next(item for item in result.conversation if isinstance(item, ToolAnswers)).answers[0]
    assert json.loads(first.content)["status"] == "retryable"


def test_a_team_that_does_not_exist_is_refused_before_it_becomes_an_operation(
    repository: Path, tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(repository, "support-triage", tmp_path, site, monkeypatch)
    task = load_task(folder / "task.toml")
    args = {"ticket_id": "T-101", "version": 1}
    model = ScriptedModel(
        [
            {"tool_calls": [{"id": "c1", "name": "assign_ticket", "args": {**args, "team": "sales"}}]},
            {"tool_calls": [{"id": "c2", "name": "assign_ticket", "args": {**args, "team": "billing"}}]},
            {"text": "Done."},
        ]
    )
    with opened(task) as guard:
        result = loop_of(guard, task, model).run(task.task, task.spec)
        assert [operation.state.value for operation in guard.operations()] == ["COMMITTED"]
    first = next(item for item in result.conversation if isinstance(item, ToolAnswers)).answers[0]
    assert "billing" in json.loads(first.content)["message"], "the model is told which teams there are"


def test_both_kinds_of_refusal_are_proof_and_a_failure_is_not() -> None:
    assert issubclass(InputRefusedError, es.NotAppliedError)
    assert issubclass(WriteRefusedError, es.NotAppliedError)
    assert not issubclass(ExampleError, es.NotAppliedError)
