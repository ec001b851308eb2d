"""Declaring tools: the decorator, the schema of parameters, arguments, and answers under a schema."""

from __future__ import annotations

import asyncio
import datetime
import enum
import functools
import gc
import inspect
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal, get_type_hints

import jsonschema
import pytest
from pydantic import BaseModel, Field, field_validator

from endstop.core.policy import NO_TOOL_POLICY, ToolPolicy
from endstop.core.reasons import Effect
from endstop.errors import PolicyInvalidError, UsageError
from endstop.runtime import schema_check as schema_check_module
from endstop.runtime.declare import (
    ToolOptions,
    bind_arguments,
    declaration_of,
    full_name,
    schema_check,
    tool,
)
from endstop.runtime.docstrings import DESCRIPTION_CHARS_MAX, read_docstring
from endstop.runtime.toolface import declared_of

if TYPE_CHECKING:
    from decimal import Decimal


class Size(enum.Enum):
    """A closed set."""

    SMALL = "small"
    LARGE = "large"


class Order(BaseModel):
    """A model with a validator that quotes the value."""

    order_id: int
    note: str = ""

    @field_validator("note")
    @classmethod
    def refuses(cls, note: str) -> str:
        """Refuse the word no."""
        if note == "no":
            msg = f"refused: {note}"
            raise ValueError(msg)
        return note


@dataclass
class Place:
    """A record."""

    street: str
    number: int


@tool(effect="write", idempotency_key="{order.order_id}:{day}")
async def send(
    order: Order,
    day: datetime.date,
    place: Place,
    size: Size,
    copy: list[int],
    json: Literal["x", "y"] = "x",
    schema: Annotated[int, Field(ge=3, description="near")] = 4,
    marker: object = object(),
) -> str:
    """Send one order.

    Once only.

    Args:
        order: what is sent,
            in two lines
        day (date): when
        schema: far

    Returns:
        nothing much
    """
    return f"{order}{day}{place}{size}{copy}{json}{schema}{marker}"


def plain(q: str, limit: int = 5) -> str:
    """Look something up."""
    return q * limit


def tool_name(function: Callable[..., object]) -> str:
    return declared_of(function)[0]


def policy_of(function: Callable[..., object]) -> ToolPolicy:
    return declared_of(function)[1]


# --- the decorator ----------------------------------------------------------------------------------------------------


def test_the_decorator_gives_the_same_function_back() -> None:
    def function(q: str) -> str:
        return q

    assert tool(function) is function
    assert tool(effect="read")(function) is function
    assert list(inspect.signature(function).parameters) == ["q"]


def test_a_bare_decorator_declares_no_policy() -> None:
    @tool
    def look(q: str) -> str:
        """Look."""
        return q

    @tool(name="renamed", description="Said here.")
    def other(q: str) -> str:
        """Said there."""
        return q

    assert policy_of(look) is NO_TOOL_POLICY
    assert policy_of(other) is NO_TOOL_POLICY
    assert declaration_of(look).name == "look"
    assert (tool_name(other), declaration_of(other).description) == ("renamed", "Said here.")


def test_the_options_are_the_fields_of_a_tool_policy() -> None:
    names = [item.name for item in fields(ToolPolicy) if item.name != "declared"]
    assert list(ToolOptions.__annotations__) == names


def test_declared_options_become_the_policy() -> None:
    assert policy_of(send) == ToolPolicy(effect=Effect.WRITE, idempotency_key="{order.order_id}:{day}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (ToolOptions(idempotency_key="{order_id}:{q}"), "idempotency_key names 'order_id'"),
        (ToolOptions(identity=["x.y"]), "identity names 'x'"),
        (ToolOptions(volatile_args="trace"), "volatile_args names 'trace'"),
        (ToolOptions(progress_scope=("tenant",)), "progress_scope names 'tenant'"),
        (ToolOptions(effect="raed"), "unknown value"),
        (ToolOptions(result_schema={"type": "strng"}), "no valid JSON Schema"),
    ],
)
def test_a_declaration_that_cannot_hold_is_refused_where_it_is_written(options: ToolOptions, said: str) -> None:
    def function(q: str) -> str:
        return q

    with pytest.raises(PolicyInvalidError, match=said):
        tool(**options)(function)


def test_a_function_of_any_arguments_may_have_any_key() -> None:
    @tool(effect="write", idempotency_key="{order_id}")
    def forward(**more: object) -> object:
        return more

    assert policy_of(forward).key_fields == ("order_id",)


def test_a_bound_method_cannot_carry_a_declaration() -> None:
    class Crm:
        def update(self, contact_id: str) -> str:
            return contact_id

    with pytest.raises(UsageError, match=r"Crm\.update cannot carry a declaration"):
        tool(Crm().update)


def test_a_declaration_is_seen_through_methods_partials_and_wrappers() -> None:
    class Crm:
        @tool(effect="read")
        def find(self, contact_id: str) -> str:
            return contact_id

    @functools.wraps(plain)
    def wrapped(*args: object, **more: object) -> object:
        return plain(*args, **more)  # type: ignore[arg-type]  # a wrapper hands on what it got

    read = ToolPolicy(effect=Effect.READ)
    assert policy_of(Crm().find) == read
    assert list(parameters(Crm().find)) == ["contact_id"]
    assert list(parameters(Crm.find)) == ["self", "contact_id"]
    assert bind_arguments(Crm().find, {"contact_id": "c"}) == {"contact_id": "c"}
    assert policy_of(functools.partial(send, json="y")) == policy_of(send)
    assert declaration_of(functools.partial(send, json="y")).is_async
    assert list(parameters(wrapped)) == ["q", "limit"]


def test_decorating_and_naming_load_no_pydantic() -> None:
    program = (
        "import sys\n"
        "from endstop.runtime.declare import tool, full_name\n"
        "from endstop.runtime.toolface import declared_of\n"
        "@tool(effect='write', idempotency_key='{q}')\n"
        "def f(q: str) -> str: return q\n"
        "declared_of(f), full_name(f)\n"
        "print(sorted({'pydantic', 'pydantic_core', 'jsonschema'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "[]\n"


# --- names ------------------------------------------------------------------------------------------------------------


class Callee:
    """An object that is called like a function."""

    async def __call__(self, q: str) -> str:
        """Answer."""
        return q


@pytest.mark.parametrize(
    ("function", "short", "full"),
    [
        (plain, "plain", f"{__name__}.plain"),
        (functools.partial(functools.partial(plain, "x"), limit=1), "plain", f"{__name__}.plain"),
        (json.loads, "loads", "json.loads"),
        (Callee(), "Callee", f"{__name__}.Callee"),
    ],
)
def test_every_callable_has_a_name(function: Callable[..., object], short: str, full: str) -> None:
    assert tool_name(function) == short
    assert full_name(function) == full


def test_what_must_be_awaited_is_known() -> None:
    assert declaration_of(send).is_async
    assert declaration_of(Callee()).is_async
    assert not declaration_of(plain).is_async


# --- parameters -------------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., object]) -> Mapping[str, Mapping[str, object]]:
    schema = json.loads(declaration_of(function).parameters)
    jsonschema.Draft202012Validator.check_schema(schema)
    properties: Mapping[str, Mapping[str, object]] = schema["properties"]
    return properties


def test_the_schema_comes_from_type_hints_and_docstring() -> None:
    declared = declaration_of(send)
    schema = json.loads(declared.parameters)
    assert declared.description == "Send one order.\n\nOnce only."
    assert schema["required"] == ["order", "day", "place", "size", "copy"]
    assert schema["additionalProperties"] is False
    properties = parameters(send)
    assert properties["order"] == {"$ref": "#/$defs/Order", "description": "what is sent, in two lines"}
    assert properties["day"] == {"type": "string", "format": "date", "description": "when"}
    assert properties["copy"] == {"type": "array", "items": {"type": "integer"}}
    assert properties["json"] == {"type": "string", "enum": ["x", "y"], "default": "x"}
    assert properties["schema"] == {"type": "integer", "minimum": 3, "default": 4, "description": "near"}
    assert properties["marker"] == {}


def test_a_tool_without_parameters_has_an_empty_object() -> None:
    schema = json.loads(declaration_of(lambda: None).parameters)
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}


def test_a_parameter_without_a_hint_takes_anything() -> None:
    def loose(value, more=None):  # type: ignore[no-untyped-def]  # that is what is tested
        return value, more

    assert parameters(loose)["value"] == {}
    assert bind_arguments(loose, {"value": [1, "a"]}) == {"value": [1, "a"]}


def test_further_keywords_are_open_when_the_function_takes_them() -> None:
    def forward(q: str, **more: object) -> object:
        return q, more

    assert json.loads(declaration_of(forward).parameters)["additionalProperties"] is True
    assert bind_arguments(forward, {"q": "a", "x": 1}) == {"q": "a", "x": 1}


def unresolved(amount: Decimal) -> str:
    return str(amount)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda *rest: rest, r"take \*rest out of the signature"),
        (lambda a, /: a, "parameter 'a' has no name for a caller"),
        (unresolved, "a type hint cannot be read .*Decimal"),
        (type, "its parameters cannot be read"),
    ],
)
def test_a_function_that_no_model_can_call_is_refused(function: Callable[..., object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        declaration_of(function)


def test_a_function_of_endless_parameters_is_refused() -> None:
    names = ", ".join(f"a{number}" for number in range(129))
    with pytest.raises(UsageError, match="at most 128 parameters"):
        declaration_of(eval(f"lambda {names}: 0"))


def test_a_function_that_shows_no_parameters_may_be_declared_and_not_described() -> None:
    class Opaque:
        __signature__ = "none"

        def __call__(self, q: str) -> str:
            return q

    opaque = tool(effect="read", identity="q")(Opaque())
    assert policy_of(opaque).identity == ("q",)
    with pytest.raises(UsageError, match="its parameters cannot be read"):
        declaration_of(opaque)


def test_an_object_that_no_cache_can_hold_is_described_all_the_same() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]  # that is what is tested

        def __call__(self, q: str) -> str:
            return q

    assert list(parameters(Unhashable())) == ["q"]


def test_a_parameter_without_a_json_form_is_named() -> None:
    def locked(q: str, lock: asyncio.Lock) -> object:
        return q, lock

    with pytest.raises(UsageError, match="parameter 'lock' has a type that JSON cannot carry"):
        declaration_of(locked)


def test_the_schema_is_made_once_and_let_go_with_its_function() -> None:
    def passing(q: str) -> str:
        return q

    assert declaration_of(passing).parameters is declaration_of(passing).parameters
    seen = weakref.ref(passing)
    del passing
    gc.collect()
    assert seen() is None


def test_the_type_hints_of_this_file_are_text() -> None:
    """Otherwise the tests above would not show that hints are evaluated."""
    assert plain.__annotations__["q"] == "str"
    assert get_type_hints(plain)["q"] is str


# --- arguments --------------------------------------------------------------------------------------------------------

SECRET = "sk-secret"
GOOD: dict[str, object] = {
    "order": {"order_id": "7"},
    "day": "2026-01-31",
    "place": {"street": "a", "number": 1},
    "size": "small",
    "copy": ["1", 2],
}


def test_arguments_are_converted_and_only_those_given_are_handed_on() -> None:
    bound = bind_arguments(send, GOOD)
    assert bound == {
        "order": Order(order_id=7),
        "day": datetime.date(2026, 1, 31),
        "place": Place("a", 1),
        "size": Size.SMALL,
        "copy": [1, 2],
    }
    assert list(bound) == list(GOOD)
    assert asyncio.run(send(**bound)).startswith("order_id=7")  # type: ignore[arg-type]  # checked by binding
    assert GOOD["copy"] == ["1", 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"order": {"order_id": SECRET}}, "'order.order_id' must be a whole number"),
        ({"order": {"order_id": 1, "note": "no"}}, "'order.note' does not fit its type (value_error)"),
        ({"day": SECRET}, "'day' must be a date such as 2026-01-31"),
        ({"place": {"street": "a", SECRET[:2]: 1, "number": 1}}, "'place.sk' is no parameter"),
        ({"size": SECRET}, "'size' must be one of 'small' or 'large'"),
        ({"copy": [1, SECRET]}, "'copy.1' must be a whole number"),
        ({"copy": SECRET}, "'copy' must be a list"),
        ({"json": SECRET}, "'json' must be one of 'x' or 'y'"),
        ({"schema": 2}, "'schema' must be at least 3"),
        ({"jsn": SECRET}, "'jsn' is no parameter (did you mean 'json'?)"),
        ({"p0": SECRET}, "'p0' is no parameter"),
    ],
)
def test_arguments_that_do_not_fit_are_named_without_their_values(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        bind_arguments(send, GOOD | change)
    assert str(caught.value) == f"the arguments of send do not fit: {said}"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_everything_that_does_not_fit_is_told_at_once() -> None:
    with pytest.raises(UsageError, match=r"'q' is missing; 'limit' must be a whole number; 'x' is no parameter"):
        bind_arguments(plain, {"limit": "many", "x": 1})


def test_a_long_name_from_a_model_is_cut() -> None:
    with pytest.raises(UsageError) as caught:
        bind_arguments(plain, {"q": "a", "x" * 10_000: 1})
    assert len(str(caught.value)) < 200


# --- docstrings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Do.\n\nMore.\n\nArgs:\n    a: one\n        and more\n    *b (int): two\n\nReturns:\n    x: y\n",
        "Do.\n\nMore.\n\nParameters\n----------\na : str\n    one\n    and more\nb\n    two\n\nReturns\n-------\nx\n",
        "Do.\n\nMore.\n\n:param str a: one\n    and more\n:param b: two\n:returns: x\n:raises ValueError: y\n",
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_three_customs_of_docstrings_are_read_alike(text: str) -> None:
    found = read_docstring(text)
    assert found.description == "Do.\n\nMore."
    assert dict(found.parameters) == {"a": "one and more", "b": "two"}


@pytest.mark.parametrize("text", [None, "", "   \n\n", "Args:", "Parameters\n---", ":param", "Args:\n    no item here"])
def test_a_docstring_without_use_is_no_error(text: str | None) -> None:
    assert dict(read_docstring(text).parameters) == {}


def test_a_long_description_is_cut() -> None:
    assert len(read_docstring("x" * 10_000).description) == DESCRIPTION_CHARS_MAX


# --- answers under a schema -------------------------------------------------------------------------------------------

SCHEMA = json.dumps(
    {
        "type": "object",
        "required": ["rows", "next"],
        "additionalProperties": {"type": "integer"},
        "properties": {
            "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}, "maxItems": 2},
            "next": {"type": ["string", "null"]},
            "closed": {"additionalProperties": False},
        },
        "$defs": {"row": {"enum": ["a", "b"]}},
    }
)


@pytest.mark.parametrize(
    ("value", "finding"),
    [
        ({"rows": ["a"], "next": None}, None),
        ({"rows": ("a", "b"), "next": "x", "more": 1}, None),
        ({}, "the answer has no 'rows', 'next'"),
        ("text", "the answer must be of type object"),
        ({"rows": ["a", SECRET], "next": None}, "rows.1 breaks enum"),
        ({"rows": ["a"] * 3, "next": None}, "rows breaks maxItems 2"),
        ({"rows": [], "next": 4}, "next must be of type string or null"),
        ({"rows": [], "next": None, SECRET: "x"}, "* must be of type integer"),
        ({"rows": [], "next": None, "closed": {SECRET: 1}}, "closed has properties that are not allowed"),
        (object(), "the answer has no JSON form"),
    ],
)
def test_a_finding_names_place_and_rule_and_never_the_value(value: object, finding: str | None) -> None:
    assert schema_check(SCHEMA)(value) == finding


def test_records_and_dates_are_judged_in_their_json_form() -> None:
    check = schema_check('{"properties": {"street": {"type": "string"}, "number": {"type": "integer"}}}')
    assert check(Place("a", 1)) is None
    assert check(Place("a", SECRET)) == "number must be of type integer"  # type: ignore[arg-type]  # what is tested
    assert schema_check('{"type": "string"}')(datetime.date(2026, 1, 31)) is None


def test_an_answer_that_contains_itself_has_no_json_form() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert schema_check("true")(loop) == "the answer has no JSON form"


def test_a_schema_without_end_fails_closed() -> None:
    assert schema_check('{"$ref": "#"}')(1) == "the answer could not be judged (RecursionError)"


def test_an_older_draft_is_judged_by_its_own_rules() -> None:
    text = '{"$schema": "%s", "items": [{"type": "integer"}]}'
    assert schema_check(text % "http://json-schema.org/draft-07/schema#")(["x"]) == "0 must be of type integer"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "no valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"type": "strng"}', "rule 'anyOf' is broken at type"),
        ('{"$schema": "urn:unknown"}', "unknown \\$schema"),
        ('{"$ref": "https://example.org/x"}', "refers to 'https://example.org/x'"),
        ('{"items": [1]}', "no valid JSON Schema"),
        ('{"anyOf": [{"$ref": "#/$defs/none"}]}', "refers to '#/\\$defs/none'"),
        (f'{{"const": "{"x" * 300_000}"}}', "at most 262144"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_before_it_is_needed(text: str, said: str) -> None:
    with pytest.raises(PolicyInvalidError, match=said):
        schema_check(text)


def test_data_that_looks_like_a_reference_is_none() -> None:
    assert schema_check('{"const": {"$ref": "#/nowhere"}}')({"$ref": "#/nowhere"}) is None


def test_a_schema_is_compiled_once_and_the_cache_is_bounded() -> None:
    assert schema_check(SCHEMA) is schema_check(SCHEMA)
    assert schema_check_module.schema_check.cache_info().maxsize == schema_check_module.SCHEMAS_CACHED_MAX
