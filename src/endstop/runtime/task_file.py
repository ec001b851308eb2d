"""Task files: what `endstop run` carries out. Read once, complained about as a whole, frozen from then on.

Paths in a task file are relative to it, and a module beside it can hold its tools.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from endstop.core.model import Spec
from endstop.core.policy import NO_TOOL_POLICY, Limits, Policy, ToolPolicy
from endstop.errors import PolicyInvalidError, SpecInvalidError, TaskInvalidError
from endstop.runtime.function_reference import is_reference, resolve_function
from endstop.runtime.policy_file import (
    NO_PARTS,
    PolicyParts,
    environment_parts,
    ladder_problems,
    limit_fields,
    policy_of,
    read_policy_parts,
    tool_fields,
)
from endstop.runtime.toml_file import Problem, TomlSource, close_to, parse_toml, read_text, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from endstop.runtime.file_models import ModelTable, TaskTable

__all__ = ["ModelChoice", "TaskFile", "TaskTool", "expand_run_key", "load_task", "task_json_schema"]

TASK_CHARS_MAX: Final = 100_000
RUN_KEY_CHARS_MAX: Final = 200
LABELS_MAX: Final = 32
LABEL_CHARS_MAX: Final = 200
SCRIPTED: Final = "scripted:"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RUN_KEY_FORMATS: Final = {"iso_week": "%G-W%V", "date": "%Y-%m-%d", "month": "%Y-%m", "hour": "%Y-%m-%dT%H"}
_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ADDRESS: Final = re.compile(r"https?://[^\s/@]+(/\S*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The model of a task. A scripted model's `name` holds the absolute path of its file. `timeout_ms` is in
    milliseconds; `options` go to the provider as they are; the key is in the environment variable `api_key_env`."""

    name: str
    base_url: str | None = None
    api_key_env: str | None = None
    max_output_tokens: int | None = None
    timeout_ms: int | None = None
    options: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTool:
    """A tool of a task: its function as `module:function`, and its policy, also that of a base policy's pattern."""

    name: str
    function: str
    policy: ToolPolicy
    folder: Path

    def resolve(self) -> Callable[..., object]:
        """The function itself, after importing its module. Raises TaskInvalidError when there is none."""
        return resolve_function(self.function, self.folder, error=TaskInvalidError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """A task as it was read. `policy` is the base policy with the task's own limits and tools laid over it."""

    path: Path
    task: str
    spec: Spec | None
    model: ModelChoice
    policy: Policy
    tools: Mapping[str, TaskTool]
    run_key: str | None
    agent: str
    labels: Mapping[str, str]

    @property
    def limits(self) -> Limits:
        """The limits of `policy`."""
        return self.policy.limits


def load_task(path: str | Path, *, environ: Mapping[str, str] | None = None) -> TaskFile:
    """The task in the TOML file `path`. No tool is imported and no model is called.

    `environ` may override limits as it does for `load_policy`; it wins over the task, which wins over its base policy.
    Raises TaskInvalidError that tells every problem with file, line and key; PolicyInvalidError for what is wrong with
    the base policy file or the environment.
    """
    from endstop.runtime.file_models import TaskTable

    path = Path(path).resolve()
    text = read_text(path, TaskInvalidError, "task file")
    toml = TomlSource(name=str(path), text=text, error=TaskInvalidError)
    table, problems = validate(TaskTable, parse_toml(text, toml.name, TaskInvalidError))
    if table is None:
        raise toml.refusal(problems)
    spec = _spec(table, problems)
    parts = _policy_parts(table, path.parent, problems)
    model = _model(table.model, path.parent, problems)
    _check_texts(table, problems)
    if problems:
        raise toml.refusal(problems)
    base = NO_PARTS if table.policy.file is None else read_policy_parts(path.parent / table.policy.file)
    policy = policy_of(environment_parts(environ or {}).over(parts.over(base)))
    tools = {
        name: TaskTool(name=name, function=tool.function, policy=policy.tool(name), folder=path.parent)
        for name, tool in table.tools.items()
    }
    return TaskFile(
        path=path,
        task=table.task,
        spec=spec,
        model=model,
        policy=policy,
        tools=MappingProxyType(tools),
        run_key=table.run.key,
        agent=table.run.agent or "main",
        labels=MappingProxyType(dict(table.run.labels or {})),
    )


def expand_run_key(template: str, now_us: int) -> str:
    """The run key for the time `now_us` (microseconds since 1970); `{iso_week}`, `{date}`, `{month}`, `{hour}` in UTC.

    Raises TaskInvalidError for a template that `load_task` would refuse.
    """
    fault = _key_fault(template)
    if fault is not None:
        msg = f"the run key {fault}"
        raise TaskInvalidError(msg)
    now = _EPOCH + timedelta(microseconds=now_us)
    return template.format(**{name: now.strftime(form) for name, form in _RUN_KEY_FORMATS.items()})


def task_json_schema() -> str:
    """The JSON Schema (2020-12) of task files, as the text that is published as `task.schema.json`."""
    from endstop.runtime.file_models import TaskTable, published_schema

    return published_schema(TaskTable, "task")


def _spec(table: TaskTable, problems: list[Problem]) -> Spec | None:
    if table.spec is None:
        return None
    try:
        return Spec(**table.spec.model_dump())
    except SpecInvalidError as fault:
        problems.append(Problem(path=("spec",), message=str(fault)))
        return None


def _policy_parts(table: TaskTable, folder: Path, problems: list[Problem]) -> PolicyParts:
    """What the task itself says of limits, tools and ladder. A tool with nothing but a function stays undeclared."""
    tools = {}
    for name, tool in table.tools.items():
        path = ("tools", name)
        if not is_reference(tool.function):
            problems.append(Problem(path=(*path, "function"), message="must name a function: 'module:function'"))
        declared = tool_fields(tool, path, folder, problems)
        if declared:
            tools[name] = declared
    section = table.policy
    if section.on_trip is not None:
        problems += ladder_problems(section.on_trip, ("policy", "on_trip"))
    try:
        Policy(tools=dict.fromkeys(table.tools, NO_TOOL_POLICY))
    except PolicyInvalidError as fault:
        problems.append(Problem(path=("tools",), message=str(fault)))
    return PolicyParts(
        limits=limit_fields(table.limits),
        tools=MappingProxyType(tools),
        on_trip=None if section.on_trip is None else tuple(section.on_trip),
        strict_tools=section.strict_tools,
        redact=None if section.redact is None else tuple(section.redact),
    )


def _model(table: ModelTable, folder: Path, problems: list[Problem]) -> ModelChoice:
    name = table.name.strip()
    if not name or name == SCRIPTED:
        problems.append(Problem(path=("model", "name"), message="is blank: write provider:model or scripted:FILE"))
    elif name.startswith(SCRIPTED):
        name = SCRIPTED + str((folder / name.removeprefix(SCRIPTED)).resolve())
    if table.base_url is not None and not _ADDRESS.fullmatch(table.base_url):
        problems.append(Problem(path=("model", "base_url"), message="must be an http or https address without a login"))
    if table.api_key_env is not None and not _VARIABLE_NAME.fullmatch(table.api_key_env):
        # Never shown: what stands here by mistake is the key.
        message = "must be the name of an environment variable, not a key"
        problems.append(Problem(path=("model", "api_key_env"), message=message))
    return ModelChoice(
        name=name,
        base_url=table.base_url,
        api_key_env=table.api_key_env,
        max_output_tokens=table.max_output_tokens,
        timeout_ms=table.timeout_ms,
        options=MappingProxyType(dict(table.options or {})),
    )


def _check_texts(table: TaskTable, problems: list[Problem]) -> None:
    if not table.task.strip():
        problems.append(Problem(path=("task",), message="is blank: say what the agent has to do"))
    if len(table.task) > TASK_CHARS_MAX:
        problems.append(Problem(path=("task",), message=f"has more than {TASK_CHARS_MAX} characters"))
    if table.run.key is not None and (fault := _key_fault(table.run.key)) is not None:
        problems.append(Problem(path=("run", "key"), message=fault))
    if table.run.agent is not None and not table.run.agent.strip():
        problems.append(Problem(path=("run", "agent"), message="is blank: leave it out, or write a name"))
    labels = table.run.labels or {}
    if len(labels) > LABELS_MAX:
        problems.append(Problem(path=("run", "labels"), message=f"has more than {LABELS_MAX} labels"))
    for name, value in labels.items():
        if not name or len(name) > LABEL_CHARS_MAX or len(value) > LABEL_CHARS_MAX:
            message = f"a label's name and value have 1 to {LABEL_CHARS_MAX} characters"
            problems.append(Problem(path=("run", "labels", name), message=message))


def _key_fault(template: str) -> str | None:
    """What is wrong with a run key template, or None."""
    if not template.strip() or len(template) > RUN_KEY_CHARS_MAX:
        return f"must have 1 to {RUN_KEY_CHARS_MAX} characters"
    try:
        parts = list(Formatter().parse(template))
    except ValueError:
        return "has a brace that is not closed, or closed without being opened"
    for _, name, form, conversion in parts:
        if name is None:
            continue
        if name not in _RUN_KEY_FORMATS or form or conversion:
            meant = close_to(name, _RUN_KEY_FORMATS)
            known = ", ".join(f"{{{known}}}" for known in _RUN_KEY_FORMATS)
            return f"knows no {{{name}}}; " + (f"did you mean {{{meant}}}?" if meant else f"one of {known}")
    return None
