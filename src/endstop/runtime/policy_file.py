"""Policies from files: parsed once at the edge, complained about as a whole, frozen from then on.

A file's own words are kept apart (`PolicyParts`) from the policy they make, so that a task file can be laid over a
policy file field by field: what a file does not say, it does not change.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import canonical_bytes
from endstop.core.policy import NO_TOOL_POLICY, Limits, Policy, ToolPolicy
from endstop.errors import NotCanonicalError, PolicyInvalidError
from endstop.runtime.function_reference import FunctionReference, is_reference
from endstop.runtime.policy_warnings import policy_warnings
from endstop.runtime.schema_check import schema_check
from endstop.runtime.toml_file import Problem, TomlSource, parse_toml, read_text, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from endstop.runtime.file_models import LimitsTable, ToolTable

__all__ = [
    "ENVIRONMENT_PREFIX",
    "NO_PARTS",
    "PolicyParts",
    "ToolFields",
    "environment_parts",
    "ladder_problems",
    "limit_fields",
    "load_policy",
    "parse_policy",
    "policy_json_schema",
    "policy_of",
    "policy_template",
    "policy_warnings",
    "read_policy_parts",
    "tool_fields",
    "tool_result_json_schema",
]

ENVIRONMENT_PREFIX: Final = "ENDSTOP__"
PYPROJECT: Final = "pyproject.toml"
FRAMEWORK_CHARS_MAX: Final = 60
# Only these and limits may come from the environment: a tool's declaration belongs beside the code that keeps it.
_FROM_ENVIRONMENT: Final = ("on_trip", "redact", "strict_tools")
_DEFAULT_LADDER: Final = ("stop",)

# A tool policy's fields by name, as far as a file says them; the values are ready for ToolPolicy.
ToolFields = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What a file says, and nothing of what it does not: limits by name, tools by name and then field."""

    limits: Mapping[str, int]
    tools: Mapping[str, ToolFields]
    on_trip: tuple[str, ...] | None = None
    strict_tools: bool | None = None
    redact: tuple[str, ...] | None = None

    def over(self, base: PolicyParts) -> PolicyParts:
        """These parts laid over `base`: each field that is said here wins, all else is the base's.

        A tool that the base names only by a pattern starts from that pattern's fields.
        """
        return PolicyParts(
            limits=MappingProxyType({**base.limits, **self.limits}),
            tools=MappingProxyType({**base.tools, **{name: base.tool(name) | own for name, own in self.tools.items()}}),
            on_trip=base.on_trip if self.on_trip is None else self.on_trip,
            strict_tools=base.strict_tools if self.strict_tools is None else self.strict_tools,
            redact=base.redact if self.redact is None else self.redact,
        )

    def tool(self, name: str) -> ToolFields:
        """The fields of the tool called `name`, found as a policy finds it; empty when nothing is said of it."""
        if name in self.tools:
            return dict(self.tools[name])
        return dict(next((own for pattern, own in self.tools.items() if fnmatchcase(name, pattern)), {}))


NO_PARTS: Final = PolicyParts(limits=MappingProxyType({}), tools=MappingProxyType({}))


def load_policy(path: str | Path, *, environ: Mapping[str, str] | None = None) -> Policy:
    """The policy in the TOML file `path`; of a `pyproject.toml`, that in its table `[tool.endstop]`.

    `environ` may override limits and the settings at the top: `ENDSTOP__LIMITS__STEPS_MAX=40`. Functions that the
    file names are not imported. Raises PolicyInvalidError that tells every problem with file, line and key.
    """
    return policy_of(environment_parts(environ or {}).over(read_policy_parts(path)))


def parse_policy(text: str, source: str, *, folder: Path | None = None) -> Policy:
    """The policy in `text`. `source` is the name that errors show; one that ends in `pyproject.toml` is read as such.

    Files that the text names are relative to `folder`. Raises PolicyInvalidError as `load_policy` does.
    """
    return policy_of(_parse_parts(text, source, folder))


def read_policy_parts(path: str | Path) -> PolicyParts:
    """What the policy file `path` says. Raises PolicyInvalidError as `load_policy` does."""
    path = Path(path)
    return _parse_parts(read_text(path, PolicyInvalidError, "policy file"), str(path), path.resolve().parent)


def policy_of(parts: PolicyParts) -> Policy:
    """The policy that `parts` make; what they do not say has its default. Raises PolicyInvalidError."""
    return Policy(
        limits=Limits(**parts.limits),
        tools={name: _tool_policy(own) for name, own in parts.tools.items()},
        on_trip=_DEFAULT_LADDER if parts.on_trip is None else parts.on_trip,
        strict_tools=bool(parts.strict_tools),
        redact=parts.redact or (),
    )


def environment_parts(environ: Mapping[str, str]) -> PolicyParts:
    """What `ENDSTOP__…` variables say: `ENDSTOP__LIMITS__<NAME>`, `ENDSTOP__ON_TRIP`, `…STRICT_TOOLS`, `…REDACT`.

    Values are TOML. Raises PolicyInvalidError that names every variable that cannot be used.
    """
    from endstop.runtime.file_models import PolicyTable

    data: dict[str, object] = {}
    limits: dict[str, object] = {}
    faults: list[str] = []
    for name, text in sorted(environ.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if len(path) == 2 and path[0] == "limits":  # noqa: PLR2004  # the table and the limit's name
            limits[path[1]] = _toml_value(text)
        elif len(path) == 1 and path[0] in _FROM_ENVIRONMENT:
            data[path[0]] = _toml_value(text)
        else:
            faults.append(f"environment variable {name}: only limits, {', '.join(_FROM_ENVIRONMENT)} can be set here")
    table, problems = validate(PolicyTable, {**data, "limits": limits})
    if table is not None and table.on_trip is not None:
        problems += ladder_problems(table.on_trip, ("on_trip",))
    faults += [f"environment variable {_variable(problem.path)}: {problem.message}" for problem in problems]
    if faults or table is None:
        raise PolicyInvalidError("\n".join(faults))
    return PolicyParts(
        limits=limit_fields(table.limits),
        tools=MappingProxyType({}),
        on_trip=None if table.on_trip is None else tuple(table.on_trip),
        strict_tools=table.strict_tools,
        redact=None if table.redact is None else tuple(table.redact),
    )


def _variable(path: tuple[str, ...]) -> str:
    return ENVIRONMENT_PREFIX + "__".join(path).upper()


def _toml_value(text: str) -> object:
    """`text` as TOML reads it after an equals sign, else as plain text."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return found["value"] if found.keys() == {"value"} else text


def _parse_parts(text: str, source: str, folder: Path | None) -> PolicyParts:
    from endstop.runtime.file_models import PolicyTable

    # 1. TOML, and the table of it that is ours.
    whole = parse_toml(text, source, PolicyInvalidError)
    prefix: tuple[str, ...] = ()
    if Path(source).name == PYPROJECT:
        prefix = ("tool", "endstop")
        tools = whole.get("tool")
        found = tools.get("endstop") if isinstance(tools, dict) else None
        if not isinstance(found, dict):
            msg = f"{source}: there is no table [tool.endstop]"
            raise PolicyInvalidError(msg)
        whole = found
    toml = TomlSource(name=source, text=text, error=PolicyInvalidError, prefix=prefix)
    # 2. Shape: unknown keys, wrong types, values out of range.
    table, problems = validate(PolicyTable, whole)
    if table is None:
        raise toml.refusal(problems)
    # 3. Meaning: what only the core knows.
    declared = {name: tool_fields(tool, ("tools", name), folder, problems) for name, tool in table.tools.items()}
    if table.on_trip is not None:
        problems += ladder_problems(table.on_trip, ("on_trip",))
    try:
        Policy(tools=dict.fromkeys(declared, NO_TOOL_POLICY))
    except PolicyInvalidError as fault:
        problems.append(Problem(path=("tools",), message=str(fault)))
    if problems:
        raise toml.refusal(problems)
    return PolicyParts(
        limits=limit_fields(table.limits),
        tools=MappingProxyType(declared),
        on_trip=None if table.on_trip is None else tuple(table.on_trip),
        strict_tools=table.strict_tools,
        redact=None if table.redact is None else tuple(table.redact),
    )


def limit_fields(table: LimitsTable) -> Mapping[str, int]:
    """The limits that a file sets, by name."""
    return MappingProxyType({name: getattr(table, name) for name in sorted(table.model_fields_set)})


def ladder_problems(ladder: Sequence[str], path: tuple[str, ...]) -> list[Problem]:
    """What is wrong with a ladder that stands at `path`; nothing when it is sound."""
    try:
        Policy(on_trip=tuple(ladder))
    except PolicyInvalidError as fault:
        return [Problem(path=path, message=str(fault))]
    return []


def tool_fields(table: ToolTable, path: tuple[str, ...], folder: Path | None, problems: list[Problem]) -> ToolFields:
    """The tool policy fields that `table` (at `path` of its file) sets. What is wrong is added to `problems`."""
    found: ToolFields = {}
    for item in fields(ToolPolicy):
        if item.name not in table.model_fields_set:
            continue
        try:
            value = _field_value(item.name, getattr(table, item.name), folder)
            # Fields are independent of each other, so each can be judged, and blamed, alone.
            _tool_policy({item.name: value})
            found[item.name] = value
        except (PolicyInvalidError, NotCanonicalError) as fault:
            problems.append(Problem(path=(*path, item.name), message=str(fault)))
    return found


def _tool_policy(found: ToolFields) -> ToolPolicy:
    build: Callable[..., ToolPolicy] = ToolPolicy
    return build(**found)


def _field_value(name: str, value: object, folder: Path | None) -> object:
    if name == "result_schema":
        text = _schema_text(value, folder)
        schema_check(text)
        return text
    if name == "idempotency_key" and isinstance(value, str) and is_reference(value):
        return FunctionReference(value, folder)
    if name == "probe":
        if not isinstance(value, str) or not is_reference(value):
            msg = "must name a function: 'module:function'"
            raise PolicyInvalidError(msg)
        return FunctionReference(value, folder)
    return tuple(value) if isinstance(value, list) else value


def _schema_text(value: object, folder: Path | None) -> str:
    """A schema as canonical text, from a table or from the JSON file it names."""
    if not isinstance(value, str):
        return canonical_bytes(value).decode()
    if folder is None:
        msg = f"the schema file {value!r} has no folder to be looked for in: load the policy from a file"
        raise PolicyInvalidError(msg)
    text = read_text(folder / value, PolicyInvalidError, "result schema")
    try:
        return canonical_bytes(json.loads(text)).decode()
    except (ValueError, RecursionError) as fault:
        msg = f"the schema file {value!r} is no valid JSON"
        raise PolicyInvalidError(msg) from fault


# -- What is published for editors and newcomers.


def policy_json_schema() -> str:
    """The JSON Schema (2020-12) of policy files, as the text that is published as `policy.schema.json`."""
    from endstop.runtime.file_models import PolicyTable, published_schema

    return published_schema(PolicyTable, "policy")


def tool_result_json_schema() -> str:
    """The JSON Schema (2020-12) of a tool's structured result, published as `tool_result.schema.json`."""
    from endstop.core.model import ToolResult
    from endstop.runtime.file_models import PlainSchema, published_schema

    return published_schema(ToolResult, "tool_result", PlainSchema)


def policy_template(frameworks: Sequence[str] = ()) -> str:
    """The commented starter policy that `endstop init` writes. As it stands it is the default policy.

    `frameworks` are the names of the agent frameworks that were found; they are mentioned in a comment.
    """
    from endstop.runtime.file_models import LimitsTable

    limits = [
        f"# {name} = {'1_000_000_000' if field.default is None else f'{field.default:_}'}".ljust(36)
        + f"# {field.description}{'; none by default' if field.default is None else ''}"
        for name, field in LimitsTable.model_fields.items()
    ]
    names = [" ".join(name.split())[:FRAMEWORK_CHARS_MAX] for name in frameworks]
    found = [_FRAMEWORKS_FOUND.format(names=", ".join(names))] if any(names) else []
    return _TEMPLATE.format(frameworks="".join(found), limits="\n".join(limits))


_FRAMEWORKS_FOUND: Final = """\
# Found here: {names}. A framework's own cap on turns or steps may stay: whichever is lower ends the run first.
"""

_TEMPLATE: Final = """\
#:schema ./endstop.schema.json
# What every call of a run is judged against. As it stands, this file changes nothing: uncomment a line to set it.
# `endstop policy check` reads this file; `endstop policy schema > endstop.schema.json` writes the schema for editors.
{frameworks}
# What a guard does the first, the second, the next time it trips. ["warn", "block", "stop"] lets a loop go on twice
# with a warning; ["observe"] only writes down what would have happened.
# on_trip = ["stop"]

# Refuse tools that are not declared below.
# strict_tools = false

# Arguments whose values are never shown.
# redact = []

# The values shown are the defaults.
[limits]
{limits}

# One table a tool. Declare the effect of each, and what makes a write one operation.
#
# [tools.search]
# effect = "read"
#
# [tools."crm.update"]                # a name with a dot needs quotes
# effect = "write"
# idempotency_key = "{{contact_id}}:{{version}}"
# scope = "tenant"
# outcome_class = "at_most_once"
#
# [tools.job_status]
# effect = "poll"
# progress = "done_count"             # where the answer says how far it is
"""
