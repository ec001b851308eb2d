"""The shipped task files name real tools, and their scripts work from end to end with them.

The script's calls are made here directly, in order, in a copy of the example's folder; the guard has tests of its own.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

import pytest

pytest.importorskip("httpx", reason="NOT TESTED: the examples need httpx, install endstop[examples]")
pytest.importorskip("selectolax", reason="NOT TESTED: the examples need selectolax, install endstop[examples]")
pytest.importorskip("unidiff", reason="NOT TESTED: the examples need unidiff, install endstop[examples]")

from endstop_examples.site import PORT, serve_site

EXAMPLES = ("seo-audit", "code-review", "support-triage", "document-extraction")
Tool = Callable[..., dict[str, object]]


class Call(TypedDict):
    id: str
    name: str
    args: dict[str, object]


class Turn(TypedDict, total=False):
    text: str
    tool_calls: list[Call]
    usage: dict[str, int]
    after: str


def tools_of(task: dict[str, dict[str, dict[str, str]]]) -> dict[str, Tool]:
    found = {}
    for name, tool in task["tools"].items():
        module, _, function = tool["function"].partition(":")
        found[name] = getattr(importlib.import_module(module), function)
    return found


def turns_of(folder: Path) -> list[Turn]:
    return [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]


def calls_of(folder: Path) -> Iterator[tuple[str, str, dict[str, object]]]:
    for turn in turns_of(folder):
        for call in turn.get("tool_calls", []):
            yield call["id"], call["name"], call["args"]


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest, repository: Path) -> Path:
    return repository / "examples" / str(request.param)


def test_every_example_folder_with_a_task_is_tested_here(repository: Path) -> None:
    assert {path.parent.name for path in (repository / "examples").glob("*/task.toml")} == set(EXAMPLES)


def test_a_task_file_is_whole_and_its_writes_have_keys_of_real_parameters(example: Path) -> None:
    task = tomllib.loads((example / "task.toml").read_text())
    assert set(task["spec"]) == {"what_it_does", "what_it_does_not", "done_looks_like"}
    assert task["task"].strip()
    assert "{iso_week}" in task["run"]["key"]
    for name, tool in tools_of(task).items():
        parameters = inspect.signature(tool, eval_str=True).parameters
        assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters.values())
        declared = task["tools"][name]
        assert (declared["effect"] == "write") == ("idempotency_key" in declared)
        if "idempotency_key" in declared:
            declared["idempotency_key"].format(**dict.fromkeys(parameters, "x"))


def test_a_script_ends_with_a_text_and_stays_within_the_limits_of_its_task(example: Path) -> None:
    task = tomllib.loads((example / "task.toml").read_text())
    settings, *turns = turns_of(example)
    assert settings == {"after": "end"}
    assert ["tool_calls" in turn for turn in turns] == [True] * (len(turns) - 1) + [False]
    assert turns[-1]["text"]
    usage = [turn["usage"] for turn in turns]
    calls = list(calls_of(example))
    assert len(turns) <= task["limits"]["turns_max"]
    assert len(calls) <= task["limits"]["steps_max"]
    assert sum(sum(use.values()) for use in usage) <= task["limits"]["tokens_max"]
    assert len({call_id for call_id, _, _ in calls}) == len(calls)


@pytest.fixture
def played(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, list[tuple[str, dict[str, object]]]]]:
    """The example's folder after its script was played, and every tool's answer."""
    folder = tmp_path / example.name
    shutil.copytree(example, folder, ignore=shutil.ignore_patterns("out", ".endstop"))
    monkeypatch.chdir(folder)
    for variable in ("SEO_OUT", "REVIEW_ROOT", "REVIEW_OUT", "TRIAGE_DB", "TRIAGE_SEED", "EXTRACT_ROOT", "EXTRACT_OUT"):
        monkeypatch.delenv(f"ENDSTOP_{variable}", raising=False)
    tools = tools_of(tomllib.loads((folder / "task.toml").read_text()))
    with serve_site() as url:
        netloc = url.removeprefix("http://")
        monkeypatch.setenv("ENDSTOP_SEO_ALLOW", netloc)
        answers = []
        for _, name, args in calls_of(folder):
            # The fixed port of the documentation may be taken on a test machine: the test's site has a free one.
            moved = json.loads(json.dumps(args).replace(f"127.0.0.1:{PORT}", netloc))
            answers.append((name, tools[name](**moved)))
        yield folder, answers


def test_a_script_played_with_the_real_tools_leaves_what_its_spec_promises(
    played: tuple[Path, list[tuple[str, dict[str, object]]]],
) -> None:
    folder, answers = played
    json.dumps(answers)
    out = folder / "out"
    if folder.name == "seo-audit":
        report = (out / "seo-audit.md").read_text()
        crawled = [answer for name, answer in answers if name == "crawl_url"]
        assert all(str(page["url"]).rpartition(":")[2].partition("/")[2] in report for page in crawled[1:2])
        untitled = [page["url"] for page in crawled if page["title"] is None]
        assert len(untitled) == 1
        assert "about.html" in str(untitled[0])
        assert report.count("\n| high |") == 3
    elif folder.name == "code-review":
        read = {(answer["file"], answer["index"]) for name, answer in answers if name == "read_hunk"}
        listed = answers[0][1]["files"]
        assert isinstance(listed, list)
        assert read == {(entry["file"], index) for entry in listed for index in range(entry["hunks"])}
        assert len((out / "review.jsonl").read_text().splitlines()) == 4
    elif folder.name == "support-triage":
        assert answers[-1] == ("next_ticket", {"ticket": None, "cursor": 4, "unassigned": 0})
        for name, answer in answers:
            if name == "search_kb":
                articles = answer["articles"]
                assert isinstance(articles, list)
                assert articles
    else:
        documents = answers[0][1]["documents"]
        assert isinstance(documents, list)
        assert sorted(path.stem for path in (out / "records").glob("*.json")) == [d["document_id"] for d in documents]
        for document in documents:
            cents = json.loads((out / "records" / f"{document['document_id']}.json").read_text())["total_cents"]
            text = (folder / document["path"]).read_text().replace(",", ".")
            assert f"{cents // 100}.{cents % 100:02d}" in text
