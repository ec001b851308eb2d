"""Policies from files: parsed once at the edge, complained about as a whole, frozen from then on.

A file's own words are kept apart (`PolicyParts`) from the policy they make, so that a task file can be laid over a
policy file field by field: what a file does not say, it does not change.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from endstop.core.policy import Limits, Policy, ToolPolicy
from endstop.errors import NotCanonicalError, PolicyInvalidError
from endstop.runtime.function_reference import FunctionReference, is_reference
from endstop.runtime.schema_check import schema_check
from endstop.runtime.toml_file import Problem, TomlSource, close_to, parse_toml, read_text, shown_path, validate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from endstop.runtime.file_models import LimitsTable, PolicyTable, ToolTable

__all__ = [
    "ENVIRONMENT_PREFIX",
    "PolicyParts",
    "environment_overrides",
    "limit_fields",
    "load_policy",
    "parse_policy",
    "policy_json_schema",
    "policy_of",
    "policy_template",
    "read_policy_parts",
    "schema_text",
    "tool_fields",
    "tool_result_json_schema",
]

ENVIRONMENT_PREFIX: Final = "ENDSTOP__"
PYPROJECT: Final = "pyproject.toml"
_PYPROJECT_TABLE: Final = ("tool", "endstop")
# Only these may come from the environment: a tool's declaration belongs beside the code that keeps it.
_FROM_ENVIRONMENT: Final = ("on_trip", "redact", "strict_tools")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """What a file says, and nothing of what it does not: fields by name, tools by name and then field."""

    limits: Mapping[str, int]
    tools: Mapping[str, Mapping[str, object]]
    on_trip: tuple[str, ...] | None = None
    strict_tools: bool | None = None
    redact: tuple[str, ...] | None = None

    def over(self, base: PolicyParts) -> PolicyParts:
        """These parts laid over `base`: each field that is said here wins, everything else is the base's.

        A tool that only a pattern of the base names starts from that pattern's fields.
        """
        tools = {name: {**_fields_of(base.tools, name), **own} for name, own in self.tools.items()}
        return PolicyParts(
            limits=MappingProxyType({**base.limits, **self.limits}),
            tools=MappingProxyType({**base.tools, **tools}),
            on_trip=base.on_trip if self.on_trip is None else self.on_trip,
            strict_tools=base.strict_tools if self.strict_tools is None else self.strict_tools,
            redact=base.redact if self.redact is None else self.redact,
        )


NO_PARTS: Final = PolicyParts(limits=MappingProxyType({}), tools=MappingProxyType({}))


def load_policy(path: str | Path, *, environ: Mapping[str, str] | None = None) -> Policy:
    """The policy in the TOML file `path`; of a `pyproject.toml`, the table `[tool.endstop]`.

    `environ` may override limits and top-level settings: `ENDSTOP__LIMITS__STEPS_MAX=40`. Raises PolicyInvalidError
    that names every problem with file, line and key.
    """
    return policy_of(read_policy_parts(path, environ=environ))


def parse_policy(text: str, source: str, *, folder: Path | None = None) -> Policy:
    """The policy in `text`; `source` is the name that errors show, and `pyproject.toml` means `[tool.endstop]`.

    Paths of schema files are relative to `folder`. Raises PolicyInvalidError as `load_policy` does.
    """
    return policy_of(_parse_parts(text, source, folder, {}))


def read_policy_parts(path: str | Path, *, environ: Mapping[str, str] | None = None) -> PolicyParts:
    """What the policy file `path` says. Raises PolicyInvalidError as `load_policy` does."""
    path = Path(path)
    text = read_text(path, PolicyInvalidError, "policy file")
    return _parse_parts(text, str(path), path.resolve().parent, environ or {})


def policy_of(parts: PolicyParts) -> Policy:
    """The policy that `parts` make; what they do not say has its default. Raises PolicyInvalidError."""
    said: dict[str, Callable[[Policy], Policy]] = {}
    del said
    return Policy(
        limits=Limits(**parts.limits),
        tools={name: _tool_policy(own) for name, own in parts.tools.items()},
        on_trip=("stop",) if parts.on_trip is None else parts.on_trip,
        strict_tools=bool(parts.strict_tools),
        redact=parts.redact or (),
    )
