"""The shape of policy and task files. This module loads pydantic: import it inside functions only.

The defaults come from the core's records; what stands here beside them is each key's meaning, which the published
JSON Schemas, the starter policy and editors show.
"""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core import core_schema

from endstop.core.policy import LIMIT_VALUE_MAX, Limits

__all__ = [
    "LimitsTable",
    "PlainSchema",
    "PolicyTable",
    "TaskTable",
    "TaskToolTable",
    "TomlSchema",
    "ToolTable",
    "published_schema",
]

_D: Final = Limits()

Whole = Annotated[int, Field(ge=0, le=LIMIT_VALUE_MAX)]
Count = Annotated[int, Field(ge=1, le=LIMIT_VALUE_MAX)]
Remembered = Annotated[int, Field(ge=1, le=64)]
Rung = Literal["warn", "block", "stop", "observe"]


class Table(BaseModel):
    """A table of a file: unknown keys are errors, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LimitsTable(Table):
    """The named maxima of a run. Each unit is in its name; `_nanos` are nano-dollars."""

    steps_max: Whole = Field(default=_D.steps_max, description="tool calls that are let through")
    turns_max: Whole = Field(default=_D.turns_max, description="model calls that are let through")
    tokens_max: Whole = Field(default=_D.tokens_max, description="input and output tokens of all model calls together")
    wall_ms_max: Count = Field(default=_D.wall_ms_max, description="running time in milliseconds")
    retries_max: Whole = Field(default=_D.retries_max, description="new attempts at failed calls")
    handoffs_max: Whole = Field(default=_D.handoffs_max, description="hand-overs from one agent to another")
    depth_max: Whole = Field(default=_D.depth_max, description="child runs inside child runs")
    spend_nanos_max: Whole | None = Field(
        default=None, description="money for model calls in nano-dollars (1 dollar = 1_000_000_000)"
    )
    same_call_max: Count = Field(
        default=_D.same_call_max, description="equal answers of one call; it is refused after them"
    )
    call_window: Remembered = Field(
        default=_D.call_window, description="executed calls in which equal answers are counted"
    )
    cycle_period_max: Annotated[int, Field(ge=0, le=64)] = Field(
        default=_D.cycle_period_max, description="longest cycle of calls that is looked for; 0 looks for none"
    )
    cycle_repeats_max: Count = Field(
        default=_D.cycle_repeats_max, description="laps of a cycle; the next lap is refused"
    )
    no_progress_max: Count = Field(default=_D.no_progress_max, description="results in a row with nothing new")
    same_answer_max: Remembered = Field(
        default=_D.same_answer_max, description="different arguments in a row of a declared read with one answer"
    )
    error_streak_max: Count = Field(default=_D.error_streak_max, description="failures of one kind in a row")
    refused_streak_max: Count = Field(
        default=_D.refused_streak_max,
        description="calls in a row that could not run: unknown tool, bad arguments, denied",
    )
    poll_unchanged_max: Count = Field(default=_D.poll_unchanged_max, description="polls in a row without a change")


class ToolTable(Table):
    """What is declared of one tool. Argument and result fields are dotted paths."""

    effect: Literal["read", "write", "poll", "wait", "unknown"] = Field(
        default="unknown", description="what the tool does to the world outside"
    )
    identity: list[str] | None = Field(default=None, description="the only arguments that make two calls the same")
    volatile_args: list[str] | None = Field(
        default=None, description="arguments that do not count (a trace id, a timestamp)"
    )
    volatile_result: list[str] | None = Field(default=None, description="parts of the answer that do not count")
    progress: str | None = Field(default=None, description="where the progress version stands in the answer")
    progress_scope: list[str] | None = Field(
        default=None, description="arguments that tell one source of progress from another"
    )
    idempotency_key: str | list[str] | None = Field(
        default=None,
        description="what makes a write one operation: a template '{order_id}:{version}', a list of arguments, "
        "or a function 'module:function'",
    )
    scope: Literal["run", "conversation", "object", "tenant"] | None = Field(
        default=None, description="where the idempotency key is unique; tenant when left out"
    )
    outcome_class: Literal["idempotent_by_target", "probeable", "at_most_once"] | None = Field(
        default=None, description="what is known when an attempt's outcome is not; at_most_once when left out"
    )
    owes_data: bool | None = Field(
        default=None, description="whether an empty answer is a failure; true for read and poll"
    )
    result_schema: str | dict[str, object] | None = Field(
        default=None, description="JSON Schema of the answer: a table, or the path of a JSON file beside this one"
    )
    deadline_ms: Count | None = Field(default=None, description="longest time for one attempt in milliseconds")
    probe: str | None = Field(
        default=None, description="function 'module:function' that asks the target for an outcome"
    )
    probes_max: Count | None = Field(
        default=None, description="questions to the target about one attempt; 5 when left out, then a person decides"
    )
    probe_settle_ms: Whole | None = Field(
        default=None, description="milliseconds until an effect is visible to the probe; 0 when left out"
    )
    probe_backoff_ms: Count | None = Field(
        default=None, description="least milliseconds between two questions, doubled each time; 1000 when left out"
    )
    attempts_max: Count | None = Field(
        default=None, description="attempts of one operation that may be proven not applied; 3 when left out"
    )
    waiter: Literal["reject", "wait", "handle"] | None = Field(
        default=None, description="what a second caller of a key in flight gets; reject when left out"
    )
    wait_ms: Count | None = Field(
        default=None, description="longest wait of such a caller in milliseconds; 10000 when left out"
    )
    approve: bool = Field(default=False, description="whether a person approves each call")
    on_committed: Literal["stop", "replay"] | None = Field(
        default=None, description="what a write does that this run has committed; stop when left out"
    )
    poll_unchanged_max: Count | None = Field(default=None, description="overrides the limit of this name for this tool")
    poll_interval_ms_min: Count | None = Field(default=None, description="least time between two polls in milliseconds")


class PolicyTable(Table):
    """A policy file of Endstop: what every call of a run is judged against."""

    model_config = ConfigDict(title="Endstop policy")

    on_trip: list[Rung] | None = Field(
        default=None,
        description="what a guard does the first, second, next time it trips; ['observe'] only writes it down",
    )
    strict_tools: bool | None = Field(default=None, description="whether tools that are not declared are refused")
    redact: list[str] | None = Field(default=None, description="arguments that are never shown")
    limits: LimitsTable = Field(default_factory=LimitsTable)
    tools: dict[str, ToolTable] = Field(default_factory=dict, description="by name, or by pattern such as 'crm.*'")


class SpecTable(Table):
    """What the run is for, in three sentences of a person's."""

    what_it_does: str = Field(description="what the run does")
    what_it_does_not: str = Field(description="what the run does not do")
    done_looks_like: str = Field(description="how a person sees that it is done")


class ModelTable(Table):
    """The model that is called."""

    name: str = Field(description="scripted:FILE, anthropic:MODEL, openai:MODEL, ollama:MODEL, …")
    base_url: str | None = Field(default=None, description="address of an OpenAI-compatible server")
    api_key_env: str | None = Field(default=None, description="environment variable that holds the key")
    max_output_tokens: Count | None = Field(default=None, description="output tokens of one call")
    timeout_ms: Count | None = Field(default=None, description="longest time for one model call in milliseconds")
    options: dict[str, object] | None = Field(
        default=None, description="further settings, passed to the provider as they are"
    )


class BasePolicyTable(Table):
    """The policy that the task's own limits and tools are laid over."""

    file: str | None = Field(default=None, description="policy file, relative to the task file")
    on_trip: list[Rung] | None = Field(default=None, description="as in a policy file")
    strict_tools: bool | None = Field(default=None, description="as in a policy file")
    redact: list[str] | None = Field(default=None, description="as in a policy file")


class TaskToolTable(ToolTable):
    """One tool of the task: its function, and what is declared of it."""

    function: str = Field(description="module:function")


class RunTable(Table):
    """How the run is named."""

    key: str | None = Field(
        default=None,
        description="the same key never starts a second run; {iso_week}, {date}, {month} and {hour} are filled in",
    )
    agent: str | None = Field(default=None, description="name of the agent; main when left out")
    labels: dict[str, str] | None = Field(default=None, description="names and values to find runs by")


class TaskTable(Table):
    """A task file of Endstop: what `endstop run` carries out."""

    model_config = ConfigDict(title="Endstop task")

    task: str = Field(description="what the agent is told to do")
    spec: SpecTable | None = None
    model: ModelTable
    limits: LimitsTable = Field(default_factory=LimitsTable)
    policy: BasePolicyTable = Field(default_factory=BasePolicyTable)
    tools: dict[str, TaskToolTable] = Field(default_factory=dict)
    run: RunTable = Field(default_factory=RunTable)


class PlainSchema(GenerateJsonSchema):
    """JSON Schema without titles made from key names, and silent on defaults that JSON cannot show."""

    # The base class declares it as a plain attribute, and so it is here.
    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002  # the base class gives it
        """Never: the key is the title."""
        return False


class TomlSchema(PlainSchema):
    """JSON Schema as an editor of TOML needs it: without null, which TOML lacks."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """The schema of the value; its absence is what null means."""
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """No default where the default is to say nothing."""
        if schema.get("default") is None:
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)


def published_schema(shape: type[object], name: str, generator: type[GenerateJsonSchema] = TomlSchema) -> str:
    """The JSON Schema of a file model or record, as the text that is published under `name`."""
    schema = TypeAdapter(shape).json_schema(schema_generator=generator)
    # Not every version of pydantic takes the description of a dataclass from its docstring.
    said = {"description": inspect.getdoc(shape)}
    head = {"$schema": generator.schema_dialect, "$id": f"urn:endstop:schema:{name}"}
    return json.dumps(head | schema | said, indent=2, ensure_ascii=False) + "\n"
