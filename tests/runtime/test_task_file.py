"""Task files: what they hold, how they stand to their base policy, what is refused, and the run key."""

from __future__ import annotations

import importlib.resources
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest

from endstop.core.model import Spec
from endstop.core.policy import NO_TOOL_POLICY, Limits, ToolPolicy
from endstop.core.reasons import Effect
from endstop.errors import PolicyInvalidError, TaskInvalidError
from endstop.runtime.task_file import ModelChoice, TaskFile, expand_run_key, load_task, task_json_schema

SMALLEST = 'task = "Do it"\n[model]\nname = "scripted:turns.jsonl"\n'


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task's folder joins the import path when one of its tools is resolved."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def task_in(folder: Path, text: str, environ: dict[str, str] | None = None) -> TaskFile:
    path = folder / "task.toml"
    path.write_text(dedent(text), encoding="utf-8")
    return load_task(path, environ=environ)


def refusal(folder: Path, text: str) -> list[str]:
    """The lines of the refusal of `text`, without the path of the file."""
    with pytest.raises(TaskInvalidError) as caught:
        task_in(folder, text)
    return str(caught.value).replace(f"{folder.resolve()}/", "").splitlines()


def micros(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000_000


# --- what loads -------------------------------------------------------------------------------------------------------


def test_the_smallest_task_has_defaults_for_all_else(tmp_path: Path) -> None:
    task = task_in(tmp_path, SMALLEST)
    assert task.task == "Do it"
    assert task.spec is None
    assert task.limits == Limits()
    assert task.policy.on_trip == ("stop",)
    assert dict(task.tools) == {}
    assert (task.run_key, task.agent, dict(task.labels)) == (None, "main", {})


def test_a_whole_task_is_read(tmp_path: Path) -> None:
    task = task_in(
        tmp_path,
        """
        task = "Audit the page"
        [spec]
        what_it_does = "Reads."
        what_it_does_not = "Writes."
        done_looks_like = "A list."
        [model]
        name = "openai:any"
        base_url = "http://127.0.0.1:8000/v1"
        api_key_env = "LOCAL_KEY"
        max_output_tokens = 500
        timeout_ms = 20_000
        options = { temperature = 0.5 }
        [limits]
        steps_max = 7
        [policy]
        on_trip = ["warn", "stop"]
        strict_tools = true
        redact = ["token"]
        [tools.crawl_url]
        function = "task_tools_a:crawl_url"
        effect = "read"
        [run]
        key = "seo-{iso_week}"
        agent = "auditor"
        labels = { team = "web" }
        """,
    )
    assert task.spec == Spec(what_it_does="Reads.", what_it_does_not="Writes.", done_looks_like="A list.")
    assert task.model == ModelChoice(
        name="openai:any",
        base_url="http://127.0.0.1:8000/v1",
        api_key_env="LOCAL_KEY",
        max_output_tokens=500,
        timeout_ms=20_000,
        options={"temperature": 0.5},
    )
    assert task.limits == Limits(steps_max=7)
    assert (task.policy.on_trip, task.policy.strict_tools, task.policy.redact) == (("warn", "stop"), True, ("token",))
    assert task.tools["crawl_url"].policy == ToolPolicy(effect=Effect.READ)
    assert task.policy.tool("crawl_url") == ToolPolicy(effect=Effect.READ)
    assert (task.run_key, task.agent, dict(task.labels)) == ("seo-{iso_week}", "auditor", {"team": "web"})


def test_paths_are_relative_to_the_task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    task = task_in(tmp_path, SMALLEST)
    assert task.path == tmp_path / "task.toml"
    assert task.model.name == f"scripted:{tmp_path / 'turns.jsonl'}"


def test_a_tool_is_imported_from_beside_the_task_and_only_when_it_is_resolved(tmp_path: Path) -> None:
    (tmp_path / "task_tools_b.py").write_text("def search(q):\n    return 'found ' + q\n", encoding="utf-8")
    task = task_in(tmp_path, SMALLEST + '[tools.search]\nfunction = "task_tools_b:search"\n')
    assert task.tools["search"].resolve()("x") == "found x"


@pytest.mark.parametrize("function", ["no_such_module_y:search", "json:no_such_function", "json:__name__"])
def test_a_tool_that_cannot_be_imported_is_a_task_error(tmp_path: Path, function: str) -> None:
    task = task_in(tmp_path, SMALLEST + f'[tools.search]\nfunction = "{function}"\n')
    with pytest.raises(TaskInvalidError, match=function):
        task.tools["search"].resolve()


def test_a_tool_with_nothing_but_a_function_is_not_declared(tmp_path: Path) -> None:
    task = task_in(tmp_path, SMALLEST + '[tools.search]\nfunction = "json:loads"\n')
    assert task.tools["search"].policy is NO_TOOL_POLICY
    assert dict(task.policy.tools) == {}


# --- the base policy --------------------------------------------------------------------------------------------------

BASE = """
on_trip = ["warn", "stop"]
strict_tools = true
[limits]
steps_max = 50
turns_max = 9
[tools.update]
effect = "write"
idempotency_key = "{id}"
deadline_ms = 1_000
[tools."crm.*"]
effect = "read"
deadline_ms = 2_000
"""

OVER = """
task = "Do it"
[model]
name = "openai:any"
[policy]
file = "rules/endstop.toml"
[limits]
steps_max = 3
[tools.update]
function = "json:loads"
deadline_ms = 9_000
[tools."crm.get"]
function = "json:loads"
[tools."crm.put"]
function = "json:loads"
effect = "write"
"""


@pytest.fixture
def based(tmp_path: Path) -> Path:
    """A folder with a base policy in a folder of its own."""
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "endstop.toml").write_text(BASE, encoding="utf-8")
    return tmp_path


def test_a_task_overrides_its_base_policy_field_by_field(based: Path) -> None:
    task = task_in(based, OVER)
    assert task.limits == Limits(steps_max=3, turns_max=9)
    assert task.policy.on_trip == ("warn", "stop")
    assert task.policy.strict_tools is True
    assert task.tools["update"].policy == ToolPolicy(effect=Effect.WRITE, idempotency_key="{id}", deadline_ms=9_000)


def test_a_pattern_of_the_base_policy_holds_for_the_tasks_tools(based: Path) -> None:
    task = task_in(based, OVER)
    assert task.tools["crm.get"].policy == ToolPolicy(effect=Effect.READ, deadline_ms=2_000)
    # What follows from the effect follows from the new one: a write owes no data.
    assert task.tools["crm.put"].policy == ToolPolicy(effect=Effect.WRITE, deadline_ms=2_000)
    assert task.tools["crm.put"].policy.owes_data is False


def test_the_environment_wins_over_the_task(based: Path) -> None:
    environ = {"ENDSTOP__LIMITS__STEPS_MAX": "77"}
    assert task_in(based, OVER, environ).limits == Limits(steps_max=77, turns_max=9)


def test_a_fault_of_the_base_policy_names_that_file(based: Path) -> None:
    (based / "rules" / "endstop.toml").write_text("[limits]\nstep_max = 3\n", encoding="utf-8")
    with pytest.raises(PolicyInvalidError, match=r"rules/endstop\.toml:2: limits\.step_max: unknown key"):
        task_in(based, OVER)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    advice = "put the key into the environment and name the variable with 'api_key_env'"
    assert refusal(
        tmp_path,
        """\
        tsk = "x"
        task = 3
        [spec]
        what_it_does = "x"
        done_look_like = "x"
        [model]
        nam = "x"
        api_key = "sk-secret"
        [tools.a]
        effect = "raed"
        [run]
        kye = "x"
        labels = { a = 1 }
        """,
    ) == [
        "task.toml:1: tsk: unknown key; did you mean 'task'?",
        "task.toml:2: task: must be text",
        "task.toml:3: spec.done_looks_like: is missing",
        "task.toml:3: spec.what_it_does_not: is missing",
        "task.toml:5: spec.done_look_like: unknown key; did you mean 'done_looks_like'?",
        "task.toml:6: model.name: is missing",
        "task.toml:7: model.nam: unknown key; did you mean 'name'?",
        f"task.toml:8: model.api_key: unknown key; {advice}",
        "task.toml:9: tools.a.function: is missing",
        "task.toml:10: tools.a.effect: must be one of read, write, poll, wait, unknown; did you mean 'read'?",
        "task.toml:12: run.kye: unknown key; did you mean 'key'?",
        "task.toml:13: run.labels.a: must be text",
    ]


def test_meaning_is_checked_as_well_as_shape(tmp_path: Path) -> None:
    lines = refusal(
        tmp_path,
        """\
        task = " "
        [spec]
        what_it_does = " "
        what_it_does_not = "x"
        done_looks_like = "x"
        [model]
        name = "scripted:"
        base_url = "https://user:secret@example.org"
        api_key_env = "sk-secret"
        [policy]
        on_trip = ["warn"]
        [tools.a]
        function = "no function"
        idempotency_key = "{}"
        [run]
        key = "x-{week}"
        agent = ""
        [run.labels]
        "" = "x"
        """,
    )
    assert [line.split(": ")[:2] for line in lines] == [
        ["task.toml:1", "task"],
        ["task.toml:2", "spec"],
        ["task.toml:7", "model.name"],
        ["task.toml:8", "model.base_url"],
        ["task.toml:9", "model.api_key_env"],
        ["task.toml:11", "policy.on_trip"],
        ["task.toml:13", "tools.a.function"],
        ["task.toml:14", "tools.a.idempotency_key"],
        ["task.toml:16", "run.key"],
        ["task.toml:17", "run.agent"],
        ["task.toml:19", 'run.labels.""'],
    ]
    assert "did you mean {iso_week}?" in lines[8]
    assert "secret" not in "".join(lines)


def test_a_limit_out_of_its_table_is_led_home(tmp_path: Path) -> None:
    assert refusal(tmp_path, "steps_max = 3\n" + SMALLEST) == [
        "task.toml:1: steps_max: unknown key here; it belongs into [limits]"
    ]


def test_too_many_and_too_long_labels_are_refused(tmp_path: Path) -> None:
    many = "[run.labels]\n" + "".join(f'l{number} = "x"\n' for number in range(33))
    assert "more than 32 labels" in refusal(tmp_path, SMALLEST + many)[0]
    assert "1 to 200 characters" in refusal(tmp_path, SMALLEST + f'[run.labels]\na = "{"x" * 201}"\n')[0]


def test_more_tools_than_a_policy_holds_are_refused(tmp_path: Path) -> None:
    many = "".join(f'[tools.t{number}]\nfunction = "json:loads"\n' for number in range(1_001))
    assert "at most 1000 tools" in refusal(tmp_path, SMALLEST + many)[0]


def test_a_task_of_endless_text_is_refused(tmp_path: Path) -> None:
    text = SMALLEST.replace("Do it", "x" * 100_001)
    assert refusal(tmp_path, text) == ["task.toml:1: task: has more than 100000 characters"]


def test_a_task_file_that_is_not_there_is_a_task_error(tmp_path: Path) -> None:
    with pytest.raises(TaskInvalidError, match="the task file cannot be read: No such file"):
        load_task(tmp_path / "no.toml")


# --- the run key ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "at", "key"),
    [
        ("seo-{iso_week}", "2024-12-30T00:00:00", "seo-2025-W01"),  # the week's year is not the day's
        ("seo-{iso_week}", "2027-01-03T23:59:59", "seo-2026-W53"),
        ("{date}", "2026-02-28T23:59:59", "2026-02-28"),
        ("{month}/x", "2026-02-28T23:59:59", "2026-02/x"),
        ("{hour}", "2026-02-28T23:59:59", "2026-02-28T23"),
        ("{{{date}}}", "2026-02-28T00:00:00", "{2026-02-28}"),
        ("plain", "1970-01-01T00:00:00", "plain"),
    ],
)
def test_a_run_key_is_filled_in_from_the_time_in_utc(template: str, at: str, key: str) -> None:
    assert expand_run_key(template, micros(at)) == key


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
def test_the_zone_of_the_machine_does_not_change_a_run_key(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    assert expand_run_key("{hour}", micros("2026-03-01T05:00:00")) == "2026-03-01T05"


@pytest.mark.parametrize(
    "template", ["", "  ", "{week}", "{}", "{0}", "{date!r}", "{date:%Y}", "{date.year}", "{date", "date}", "x" * 201]
)
def test_a_run_key_that_cannot_be_filled_in_is_refused(template: str) -> None:
    with pytest.raises(TaskInvalidError, match="the run key"):
        expand_run_key(template, 0)


# --- what is published ------------------------------------------------------------------------------------------------


def test_the_published_schema_is_the_one_that_the_models_give() -> None:
    published = importlib.resources.files("endstop.runtime").joinpath("schema/task.schema.json")
    schema = json.loads(published.read_text(encoding="utf-8"))
    assert schema == json.loads(task_json_schema())
    checker = jsonschema.Draft202012Validator(schema)
    assert checker.is_valid({"task": "x", "model": {"name": "a:b"}, "tools": {"t": {"function": "a:b"}}})
    assert not checker.is_valid({"task": "x"})
    assert not checker.is_valid({"task": "x", "model": {"name": "a:b", "api_key": "x"}})


def test_every_task_of_the_examples_loads(repository: Path) -> None:
    paths = sorted((repository / "examples").glob("*/task.toml"))
    assert paths
    for path in paths:
        task = load_task(path)
        assert task.spec is not None
        assert task.run_key is not None
        assert all(tool.policy.declared for tool in task.tools.values())
