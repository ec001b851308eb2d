"""Policies from files: what loads, what is refused and how it is said, and what is only probably wrong."""

from __future__ import annotations

import importlib.resources
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop.core.canonical import canonical_bytes
from endstop.core.model import ToolResult
from endstop.core.policy import RUNGS, SCOPES, Limits, Policy, ToolPolicy
from endstop.core.reasons import LIMIT_OF_REASON, TERMINAL_REASONS, Effect, OutcomeClass
from endstop.errors import PolicyInvalidError, UsageError
from endstop.runtime import policy_file, toml_file
from endstop.runtime.file_models import LimitsTable, PolicyTable, ToolTable
from endstop.runtime.function_reference import FunctionReference, is_reference, resolve_function
from endstop.runtime.policy_file import (
    load_policy,
    parse_policy,
    policy_json_schema,
    policy_template,
    policy_warnings,
    read_policy_parts,
    tool_result_json_schema,
)


def refusal(text: str, name: str = "endstop.toml") -> list[str]:
    """The lines of the refusal of `text`."""
    with pytest.raises(PolicyInvalidError) as caught:
        parse_policy(dedent(text), name)
    return str(caught.value).splitlines()


@pytest.fixture(autouse=True)
def _own_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy's folder joins the import path when one of its functions is resolved."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(path: Path, text: str) -> Path:
    path.write_text(dedent(text), encoding="utf-8")
    return path


# --- what loads -------------------------------------------------------------------------------------------------------


def test_an_empty_file_is_the_default_policy() -> None:
    assert parse_policy("", "endstop.toml") == Policy()


def test_every_field_of_a_tool_policy_can_be_declared(tmp_path: Path) -> None:
    path = write(
        tmp_path / "endstop.toml",
        """
        on_trip = ["warn", "block", "stop"]
        strict_tools = true
        redact = ["token"]

        [limits]
        steps_max = 40
        spend_nanos_max = 1_000_000_000

        [tools."crm.update"]
        effect = "write"
        identity = ["contact_id"]
        volatile_args = ["trace"]
        volatile_result = ["at"]
        progress = "row.version"
        progress_scope = ["contact_id"]
        idempotency_key = "{contact_id}:{version}"
        scope = "object"
        outcome_class = "probeable"
        owes_data = true
        result_schema = { type = "object", required = ["ok"] }
        deadline_ms = 5_000
        probe = "crm_probes:was_updated"
        probes_max = 4
        probe_settle_ms = 0
        probe_backoff_ms = 500
        attempts_max = 2
        waiter = "wait"
        wait_ms = 900
        approve = true
        on_committed = "replay"
        poll_unchanged_max = 7
        poll_interval_ms_min = 250

        [tools.other]
        effect = "write"
        idempotency_key = ["a", "b.c"]
        """,
    )
    policy = load_policy(path)
    assert policy == Policy(
        limits=Limits(steps_max=40, spend_nanos_max=1_000_000_000),
        on_trip=("warn", "block", "stop"),
        strict_tools=True,
        redact=("token",),
        tools={
            "crm.update": ToolPolicy(
                effect=Effect.WRITE,
                identity=("contact_id",),
                volatile_args=("trace",),
                volatile_result=("at",),
                progress="row.version",
                progress_scope=("contact_id",),
                idempotency_key="{contact_id}:{version}",
                scope="object",
                outcome_class=OutcomeClass.PROBEABLE,
                owes_data=True,
                result_schema='{"required":["ok"],"type":"object"}',
                deadline_ms=5_000,
                probe=FunctionReference("crm_probes:was_updated"),
                probes_max=4,
                probe_settle_ms=0,
                probe_backoff_ms=500,
                attempts_max=2,
                waiter="wait",
                wait_ms=900,
                approve=True,
                on_committed="replay",
                poll_unchanged_max=7,
                poll_interval_ms_min=250,
            ),
            "other": ToolPolicy(effect=Effect.WRITE, idempotency_key=("a", "b.c")),
        },
    )
    unset = {item.name for item in fields(ToolPolicy)} - {"declared"}
    shown = {name for name in unset if f"{name} =" in path.read_text(encoding="utf-8")}
    assert shown == unset


def test_the_file_models_have_exactly_the_fields_of_the_records() -> None:
    assert list(LimitsTable.model_fields) == [item.name for item in fields(Limits)]
    assert list(ToolTable.model_fields) == [item.name for item in fields(ToolPolicy) if item.name != "declared"]
    assert set(PolicyTable.model_fields) == {item.name for item in fields(Policy) if item.init}


@pytest.mark.parametrize("name", LimitsTable.model_fields)
def test_a_limit_of_a_file_has_the_default_and_the_bounds_of_the_core(name: str) -> None:
    schema = json.loads(policy_json_schema())["$defs"]["LimitsTable"]["properties"][name]
    assert LimitsTable().model_dump()[name] == getattr(Limits(), name)
    make: Callable[..., Limits] = Limits
    for bound, step in (("minimum", -1), ("maximum", 1)):
        assert getattr(make(**{name: schema[bound]}), name) == schema[bound]
        with pytest.raises(PolicyInvalidError):
            make(**{name: schema[bound] + step})
        assert refusal(f"[limits]\n{name} = {schema[bound] + step}")[0].startswith(
            f"endstop.toml:2: limits.{name}: must"
        )


def test_the_table_of_a_pyproject_is_read_and_its_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pyproject.toml",
        """
        [project]
        name = "x"
        [tool.endstop.limits]
        turns_max = 9
        """,
    )
    assert load_policy(path) == Policy(limits=Limits(turns_max=9))
    write(path, '[project]\nname = "x"\n[tool.endstop.limits]\nturn_max = 9\n')
    with pytest.raises(PolicyInvalidError, match=r"pyproject\.toml:4: tool\.endstop\.limits\.turn_max: unknown key"):
        load_policy(path)


@pytest.mark.parametrize("text", ["", '[project]\nname = "x"', "tool = 3", "[tool]\nendstop = 3"])
def test_a_pyproject_without_the_table_is_refused(text: str) -> None:
    assert refusal(text, "pyproject.toml") == ["pyproject.toml: there is no table [tool.endstop]"]


def test_a_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "endstop.toml"
    path.write_bytes(b"\xef\xbb\xbf[limits]\r\nsteps_max = 3\r\n")
    assert load_policy(path).limits.steps_max == 3


# --- functions --------------------------------------------------------------------------------------------------------


def test_a_named_function_is_imported_at_its_first_call_and_not_before(tmp_path: Path) -> None:
    write(tmp_path / "key_functions_a.py", "def key(args):\n    return 'order-' + args['id']\n")
    path = write(tmp_path / "endstop.toml", '[tools.pay]\neffect = "write"\nidempotency_key = "key_functions_a:key"\n')
    key = load_policy(path).tool("pay").idempotency_key
    assert "key_functions_a" not in sys.modules
    assert callable(key)
    assert key({"id": "7"}) == "order-7"
    assert "key_functions_a" in sys.modules


def test_a_policy_with_a_named_function_has_the_digest_of_one_with_the_function_itself(tmp_path: Path) -> None:
    write(tmp_path / "key_functions_b.py", "def key(args):\n    return 'k'\n\ndef other(args):\n    return 'k'\n")
    named = parse_policy('[tools.pay]\neffect = "write"\nidempotency_key = "key_functions_b:key"', "x", folder=tmp_path)
    reference = named.tool("pay").idempotency_key
    assert isinstance(reference, FunctionReference)
    direct = Policy(tools={"pay": ToolPolicy(effect=Effect.WRITE, idempotency_key=reference.resolve())})
    assert named.digest() == direct.digest()
    other = parse_policy('[tools.pay]\neffect = "write"\nidempotency_key = "key_functions_b:other"', "x")
    assert other.digest() != named.digest()
    assert other != named


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_module_x:key", "there is no module 'no_such_module_x'"),
        ("json:no_such_function", "module 'json' has no function 'no_such_function'"),
        ("string:digits", "has no function 'digits'"),
        ("broken_module_x:key", "importing 'broken_module_x' raised ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_used_is_a_policy_error_that_names_it(
    tmp_path: Path, reference: str, said: str
) -> None:
    write(tmp_path / "broken_module_x.py", "1 / 0\n")
    policy = parse_policy(f'[tools.pay]\neffect = "write"\nidempotency_key = "{reference}"', "x", folder=tmp_path)
    key = policy.tool("pay").idempotency_key
    assert callable(key)
    with pytest.raises(PolicyInvalidError, match=re.escape(said)):
        key({})


def test_a_reference_is_equal_to_one_of_the_same_name_only() -> None:
    one, same, other = (FunctionReference(name) for name in ("json:loads", "json:loads", "json:dumps"))
    assert one == same
    assert len({one, same, other}) == 2
    assert one != "json:loads"
    assert repr(one) == "FunctionReference('json:loads')"
    assert one("[1]") == [1]


@pytest.mark.parametrize("reference", ["json", "json:", ":loads", "json loads", "{a}:b"])
def test_text_that_names_no_function_is_refused(reference: str) -> None:
    assert not is_reference(reference)
    with pytest.raises(UsageError, match="write module:function"):
        resolve_function(reference)


# --- result schemas ---------------------------------------------------------------------------------------------------


def test_a_result_schema_can_stand_in_a_file_beside_the_policy(tmp_path: Path) -> None:
    write(tmp_path / "answer.json", '{"type": "object"}')
    path = write(tmp_path / "endstop.toml", '[tools.a]\neffect = "read"\nresult_schema = "answer.json"\n')
    assert load_policy(path).tool("a").result_schema == '{"type":"object"}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{", "is no valid JSON"),
        ("[" * 100_000, "is no valid JSON"),
        ('{"type": "strng"}', "no valid JSON Schema"),
        ('{"$ref": "https://example.org/x.json"}', "which is not in it"),
    ],
)
def test_a_bad_result_schema_is_refused_when_the_policy_is_loaded(
    tmp_path: Path, content: str | None, said: str
) -> None:
    if content is not None:
        write(tmp_path / "answer.json", content)
    path = write(tmp_path / "endstop.toml", '[tools.a]\neffect = "read"\nresult_schema = "answer.json"\n')
    with pytest.raises(PolicyInvalidError) as caught:
        load_policy(path)
    assert f"{path}:3: tools.a.result_schema: " in str(caught.value)
    assert said in str(caught.value)


def test_a_schema_file_needs_a_folder() -> None:
    assert "load the policy from a file" in refusal('[tools.a]\nresult_schema = "a.json"')[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once_in_the_order_of_the_file() -> None:
    assert refusal(
        """\
        on_trip = ["wrn"]
        strict = true
        [limits]
        step_max = 3
        steps_max = -1
        turns_max = true
        tokens_max = "many"
        call_window = 65
        wall_ms_max = 1.5
        [tools.a]
        efect = "read"
        effect = "raed"
        steps_max = 4
        identity = "x"
        idempotency_key = 4
        result_schema = 4
        deadline_ms = 0
        redact = []
        """
    ) == [
        "endstop.toml:1: on_trip: must be a list, each item one of warn, block, stop, observe; did you mean 'warn'?",
        "endstop.toml:2: strict: unknown key; did you mean 'strict_tools'?",
        "endstop.toml:4: limits.step_max: unknown key; did you mean 'steps_max'?",
        "endstop.toml:5: limits.steps_max: must be at least 0",
        "endstop.toml:6: limits.turns_max: must be a whole number",
        "endstop.toml:7: limits.tokens_max: must be a whole number",
        "endstop.toml:8: limits.call_window: must be at most 64",
        "endstop.toml:9: limits.wall_ms_max: must be a whole number",
        "endstop.toml:11: tools.a.efect: unknown key; did you mean 'effect'?",
        "endstop.toml:12: tools.a.effect: must be one of read, write, poll, wait, unknown; did you mean 'read'?",
        "endstop.toml:13: tools.a.steps_max: unknown key here; it belongs into [limits]",
        "endstop.toml:14: tools.a.identity: must be a list of texts",
        "endstop.toml:15: tools.a.idempotency_key: must be text or a list of texts",
        "endstop.toml:16: tools.a.result_schema: must be text or a table",
        "endstop.toml:17: tools.a.deadline_ms: must be at least 1",
        "endstop.toml:18: tools.a.redact: unknown key here; it stands on top",
    ]


def test_what_only_the_core_knows_is_told_with_its_line_too() -> None:
    assert refusal(
        """\
        on_trip = ["warn", "block"]
        [tools.a]
        idempotency_key = "id"
        probe = "nothing"
        [tools.b]
        idempotency_key = "{0[x]}"
        identity = [""]
        """
    ) == [
        f"endstop.toml:{line}"
        for line in (
            "1: on_trip: on_trip has no 'stop': a guard that never stops a run is no guard; add it, or use ['observe']",
            "3: tools.a.idempotency_key: idempotency_key 'id' names no argument: write a template such as '{order_id}'",
            "4: tools.a.probe: must name a function: 'module:function'",
            "6: tools.b.idempotency_key: idempotency_key '{0[x]}': only plain argument names in braces are allowed",
            "7: tools.b.identity: tool policy field identity must be a list of names",
        )
    ]


@pytest.mark.parametrize("ladder", [[], ["warn"], ["block", "warn", "stop"], ["stop", "stop"], ["observe", "stop"]])
def test_a_ladder_that_never_stops_or_has_a_dead_rung_is_refused(ladder: list[str]) -> None:
    [line] = refusal(f"on_trip = {ladder}")
    assert line.startswith("endstop.toml:1: on_trip: ")


def test_a_tool_name_with_dots_and_no_quotes_is_explained() -> None:
    assert refusal('[tools.crm.update]\neffect = "write"') == [
        'endstop.toml:1: tools.crm.update: unknown key; a tool name with dots needs quotes: [tools."crm.update"]'
    ]


def test_a_problem_in_an_inline_table_is_told_at_its_line() -> None:
    assert refusal('\ntools = { a = { effect = "read", x = 1 } }')[0].startswith(
        "endstop.toml:2: tools.a.x: unknown key"
    )


def test_a_list_of_tables_where_one_belongs_is_told_at_its_line() -> None:
    assert refusal("\n[[limits]]\nsteps_max = 1") == ["endstop.toml:2: limits: must be a table"]
    assert refusal("\n[tools]\na = 3") == ["endstop.toml:3: tools.a: must be a table"]


def test_lines_that_only_look_like_keys_or_tables_are_passed_over() -> None:
    text = "redact = [\n  'a = 1',\n[1][0] = 2\n]\n"
    assert refusal(text)[0].startswith("endstop.toml:3: this is no valid TOML")
    nested = "redact = [\n[ 'x' ],\n['limits']\n]\n[limits]\nstep_max = 1\n"
    assert [line.split(": ")[0] for line in refusal(nested)] == ["endstop.toml:1", "endstop.toml:6"]
    rows = "redact = [\n['a', 'b']\n]\n[limits]\nstep_max = 1\n"
    assert [line.split(": ")[0] for line in refusal(rows)] == ["endstop.toml:1", "endstop.toml:5"]


def test_a_key_that_looks_like_one_inside_a_long_text_is_not_taken_for_it() -> None:
    lines = refusal("redact = ['''\n[limits]\nstep_max = 3\n''']\n[limits]\nstep_max = 3\n")
    assert lines == ["endstop.toml:6: limits.step_max: unknown key; did you mean 'steps_max'?"]


def test_quoted_keys_have_lines_too() -> None:
    lines = refusal('[tools."crm.update"]\n"efect" = "read"\n')
    assert lines == ["endstop.toml:2: tools.\"crm.update\".efect: unknown key; did you mean 'effect'?"]


def test_text_that_is_no_toml_is_refused_with_its_line() -> None:
    [line] = refusal("[limits]\nsteps_max = \n")
    assert line.startswith("endstop.toml:2: this is no valid TOML: ")


def test_nesting_without_end_is_refused() -> None:
    [line] = refusal("x = " + "[" * 50_000)
    assert line.startswith("endstop.toml")


def test_no_value_of_the_file_is_repeated() -> None:
    lines = refusal('[limits]\nsteps_max = "sk-secret"\n[tools.a]\neffect = "sk-secret"\nsk = "sk-secret"\n')
    assert len(lines) == 3
    assert "secret" not in "".join(lines)


def test_a_flood_of_problems_is_cut() -> None:
    lines = refusal("[limits]\n" + "".join(f"x{number} = 1\n" for number in range(80)))
    assert len(lines) == toml_file.PROBLEMS_SHOWN_MAX + 1
    assert lines[-1] == "endstop.toml: and 30 more problems"


def test_more_tools_than_a_policy_holds_are_refused() -> None:
    assert "at most 1000 tools" in refusal("".join(f"[tools.t{number}]\n" for number in range(1_001)))[0]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (toml_file.TOML_BYTES_MAX + 1)], ids=["no UTF-8", "too large"])
def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "endstop.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyInvalidError, match="policy file"):
        load_policy(path)


@pytest.mark.parametrize("name", ["no-such.toml", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_a_policy_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(PolicyInvalidError, match="cannot be read"):
        load_policy(tmp_path / name)


TOML_VALUES = st.recursive(
    st.booleans() | st.integers(-5, 100) | st.text("abc{}:.", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abx", min_size=1, max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from([*LimitsTable.model_fields, *ToolTable.model_fields, *PolicyTable.model_fields, "x"])


@given(st.dictionaries(KEYS, TOML_VALUES, max_size=3), st.sampled_from(["", "[limits]", "[tools.a]", "[tools.'b.*']"]))
def test_whatever_stands_in_a_file_it_is_a_policy_or_a_policy_error(document: dict[str, object], header: str) -> None:
    lines = [header, *(f"{name} = {_toml(value)}" for name, value in document.items())]
    try:
        policy = parse_policy("\n".join(lines), "endstop.toml")
    except PolicyInvalidError as error:
        assert str(error).startswith("endstop.toml")  # noqa: PT017  both ends are right
    else:
        assert isinstance(policy, Policy)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value)


# --- the environment --------------------------------------------------------------------------------------------------


def test_the_environment_overrides_only_when_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDSTOP__LIMITS__STEPS_MAX", "40")
    path = write(tmp_path / "endstop.toml", "strict_tools = true\n[limits]\nsteps_max = 3\nturns_max = 4\n")
    assert load_policy(path).limits.steps_max == 3
    environ = {
        "ENDSTOP__LIMITS__STEPS_MAX": "40",
        "ENDSTOP__ON_TRIP": '["warn", "stop"]',
        "ENDSTOP__STRICT_TOOLS": "false",
        "ENDSTOP_STORE": "memory:",
        "HOME": "x",
    }
    assert load_policy(path, environ=environ) == Policy(
        limits=Limits(steps_max=40, turns_max=4), on_trip=("warn", "stop"), strict_tools=False
    )


def test_every_wrong_variable_is_told_and_no_value_is(tmp_path: Path) -> None:
    path = write(tmp_path / "endstop.toml", "")
    environ = {
        "ENDSTOP__LIMITS__STEP_MAX": "40",
        "ENDSTOP__LIMITS__TURNS_MAX": "secret",
        "ENDSTOP__ON_TRIP": '["warn"]',
        "ENDSTOP__REDACT": "[]\nstrict_tools = true",
        "ENDSTOP__TOOLS__A__EFFECT": "read",
    }
    with pytest.raises(PolicyInvalidError) as caught:
        load_policy(path, environ=environ)
    said = str(caught.value)
    for name in environ:
        if name != "ENDSTOP__ON_TRIP":
            assert f"environment variable {name}: " in said
    assert "did you mean 'steps_max'" in said
    assert "secret" not in said
    with pytest.raises(PolicyInvalidError, match="environment variable ENDSTOP__ON_TRIP: on_trip has no 'stop'"):
        load_policy(path, environ={"ENDSTOP__ON_TRIP": '["warn"]'})


# --- laying one file over another -------------------------------------------------------------------------------------


def test_parts_find_a_tool_as_a_policy_does(tmp_path: Path) -> None:
    path = write(
        tmp_path / "endstop.toml",
        """
        [tools."crm.*"]
        deadline_ms = 1
        [tools."*"]
        deadline_ms = 2
        [tools."crm.read"]
        deadline_ms = 3
        """,
    )
    parts = read_policy_parts(path)
    policy = load_policy(path)
    for name in ("crm.read", "crm.update", "other"):
        assert parts.tool(name)["deadline_ms"] == policy.tool(name).deadline_ms


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_the_default_policy_has_nothing_to_warn_of() -> None:
    assert policy_warnings(Policy()) == ()


WELL_DECLARED = ToolPolicy(effect=Effect.WRITE, idempotency_key="{a}", outcome_class=OutcomeClass.AT_MOST_ONCE)
POLL = ToolPolicy(effect=Effect.POLL, poll_unchanged_max=5)


def test_a_well_declared_tool_has_nothing_to_warn_of() -> None:
    assert policy_warnings(Policy(tools={"a": WELL_DECLARED, "b": POLL, "c": ToolPolicy(effect=Effect.READ)})) == ()


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(steps_max=0), "steps_max is 0"),
        (Limits(turns_max=0), "turns_max is 0"),
        (Limits(tokens_max=0), "tokens_max is 0"),
        (Limits(same_call_max=20), "same_call_max = 20 can never fire"),
        (Limits(no_progress_max=21), "no_progress_max = 21 can never fire"),
        (Limits(same_answer_max=21), "same_answer_max = 21 can never fire"),
        (Limits(error_streak_max=21), "error_streak_max = 21 can never fire"),
        (Limits(same_call_max=9), "same_call_max = 9 is greater than call_window = 8"),
        (Limits(cycle_period_max=1), "no cycle is looked for"),
        (Limits(cycle_period_max=10), "before periods beyond 9 are found"),
        (Limits(cycle_repeats_max=20), "before most cycles are found"),
        (Limits(cycle_repeats_max=1), "is taken for a cycle"),
    ],
)
def test_a_limit_that_cannot_fire_or_fires_too_soon_is_named(limits: Limits, said: str) -> None:
    found = policy_warnings(Policy(limits=limits))
    assert any(said in line for line in found), found


@pytest.mark.parametrize(
    "limits",
    [
        Limits(same_call_max=7, steps_max=8),
        Limits(same_call_max=8),
        Limits(no_progress_max=20),
        Limits(same_answer_max=20),
        Limits(error_streak_max=20),
        Limits(cycle_period_max=9),
        Limits(cycle_period_max=2),
        Limits(steps_max=17),
    ],
)
def test_a_limit_that_can_just_fire_is_not_named(limits: Limits) -> None:
    assert [line for line in policy_warnings(Policy(limits=limits)) if not line.startswith("cycle")] == []
    if limits.steps_max != 8:
        assert policy_warnings(Policy(limits=limits)) == ()


def test_a_poll_limit_that_can_just_fire_is_not_named() -> None:
    for unchanged, warned in ((19, False), (20, True)):
        tool = ToolPolicy(effect=Effect.POLL, poll_unchanged_max=unchanged)
        assert bool(policy_warnings(Policy(tools={"x": tool}))) is warned


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (ToolPolicy(), "declares no effect"),
        (ToolPolicy(effect=Effect.WRITE), "is a write without idempotency_key: every call of it is refused"),
        (ToolPolicy(effect=Effect.WRITE, idempotency_key="{a}"), "is a write without outcome_class"),
        (ToolPolicy(effect=Effect.READ, idempotency_key="{a}"), "sets idempotency_key, which only a write uses"),
        (ToolPolicy(effect=Effect.READ, poll_interval_ms_min=5), "sets poll_interval_ms_min, which only a poll uses"),
        (ToolPolicy(effect=Effect.WRITE, outcome_class=OutcomeClass.PROBEABLE), "is probeable and names no probe"),
        (
            ToolPolicy(effect=Effect.WRITE, probe="m:f", outcome_class=OutcomeClass.AT_MOST_ONCE),
            "names a probe, and its outcome_class is at_most_once",
        ),
        (ToolPolicy(effect=Effect.WRITE, probes_max=3), "sets probes_max and names no probe"),
        (ToolPolicy(effect=Effect.WRITE, wait_ms=3), "sets wait_ms, which only waiter = 'wait' uses"),
        (ToolPolicy(effect=Effect.POLL), "poll_unchanged_max = 30 can never fire"),
        (
            ToolPolicy(effect=Effect.POLL, poll_unchanged_max=7, poll_interval_ms_min=10_000),
            "7 polls of 10000 ms never fit into wall_ms_max = 60000",
        ),
        (ToolPolicy(effect=Effect.READ, identity=("a",), volatile_args=("a",)), "names a in identity and in volatile"),
        (ToolPolicy(effect=Effect.READ, deadline_ms=60_001), "one call may outlast the whole run"),
    ],
)
def test_what_is_wrong_with_a_tool_is_named_with_it(tool: ToolPolicy, said: str) -> None:
    found = policy_warnings(Policy(tools={"x": tool}))
    assert any(line.startswith("tool 'x' ") and said in line for line in found), found


def test_a_pattern_behind_a_wider_one_is_named() -> None:
    read = ToolPolicy(effect=Effect.READ)
    assert policy_warnings(Policy(tools={"crm.*": read, "crm.get_*": read, "crm.exact": read})) == (
        "tool 'crm.get_*' is never reached: the earlier pattern 'crm.*' takes every name that it fits",
    )


def test_the_ladder_that_only_observes_is_named() -> None:
    assert len(policy_warnings(Policy(on_trip=("observe",)))) == 1
    assert len(policy_warnings(Policy(strict_tools=True))) == 1


# --- what is published ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frameworks", [[], ["langgraph", "crewai"], ["a\nsteps_max = 1", ""]])
def test_the_starter_policy_is_the_default_policy(frameworks: list[str]) -> None:
    text = policy_template(frameworks)
    assert parse_policy(text, "endstop.toml") == Policy()
    assert text.startswith("#:schema ./endstop.schema.json\n")
    assert all(name in text for name in frameworks if name.isalpha())
    assert all(f"# {item.name} = " in text for item in fields(Limits))


def test_the_lines_of_the_starter_policy_load_when_they_are_uncommented() -> None:
    lines = policy_template().splitlines()
    pattern = re.compile(r"# (\w+ = |\[)")
    opened = [line.removeprefix("# ") if pattern.match(line) else line for line in lines]
    policy = parse_policy("\n".join(opened), "endstop.toml")
    assert policy.limits == Limits(spend_nanos_max=1_000_000_000)
    assert set(policy.tools) == {"search", "crm.update", "job_status"}
    assert policy.tool("crm.update").idempotency_key == "{contact_id}:{version}"


@pytest.mark.parametrize(
    ("name", "generate"), [("policy", policy_json_schema), ("tool_result", tool_result_json_schema)]
)
def test_the_published_schema_is_the_one_that_the_models_give(name: str, generate: Callable[[], str]) -> None:
    published = importlib.resources.files("endstop.runtime").joinpath(f"schema/{name}.schema.json")
    assert json.loads(published.read_text(encoding="utf-8")) == json.loads(generate())
    jsonschema.Draft202012Validator.check_schema(json.loads(generate()))


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        ({}, True),
        ({"limits": {"steps_max": 3}, "tools": {"a.b": {"effect": "read"}}, "on_trip": ["stop"]}, True),
        ({"limits": {"step_max": 3}}, False),
        ({"tools": {"a": {"effect": "raed"}}}, False),
        ({"limits": {"steps_max": True}}, False),
    ],
)
def test_the_published_policy_schema_says_what_the_loader_says(document: dict[str, object], valid: bool) -> None:
    checker = jsonschema.Draft202012Validator(json.loads(policy_json_schema()))
    assert checker.is_valid(document) is valid


def test_every_result_fits_the_published_result_schema() -> None:
    checker = jsonschema.Draft202012Validator(json.loads(tool_result_json_schema()))
    for status, value in itertools.product(("progress", "retryable", "fatal"), (None, 0, {"a": [1]})):
        result = ToolResult(status=status, value=value, progress_version=7)  # type: ignore[arg-type]  # plain text, as users write it
        assert checker.is_valid(json.loads(canonical_bytes(result)))
    assert not checker.is_valid({"status": "done"})
    assert not checker.is_valid({"progress_version": 1.5})


def test_every_name_of_the_module_is_there() -> None:
    assert all(hasattr(policy_file, name) for name in policy_file.__all__)


# --- the documentation ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    """The page on policies."""
    return (repository / "docs" / "policy.md").read_text(encoding="utf-8")


def rows(page: str, heading: str) -> dict[str, list[str]]:
    """The table under a heading: the other cells by the name in the first."""
    table = page.split(f"\n{heading}\n", 1)[1].split("\n#", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:2] == "| "]
    return {row[0].strip("`"): row[1:] for row in cells[1:]}


def test_the_examples_of_the_page_load_without_a_warning(page: str) -> None:
    blocks = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        policy = parse_policy(block, "docs/policy.md")
        assert policy != Policy()
        assert [line for line in policy_warnings(policy) if "observe" not in line] == []


def test_the_page_has_every_limit_with_its_default_and_its_least_value(page: str) -> None:
    found = rows(page, "## Limits")
    schema = json.loads(policy_json_schema())["$defs"]["LimitsTable"]["properties"]
    assert list(found) == [item.name for item in fields(Limits)]
    for name, cells in found.items():
        assert cells[0] == str(getattr(Limits(), name)).lower(), name
        assert cells[1] == str(schema[name]["minimum"]), name
        assert f"{schema[name]['maximum']} at most" in cells[2] or schema[name]["maximum"] > 64, name


def test_the_page_has_every_field_of_a_tool_with_every_word_it_takes(page: str) -> None:
    found = rows(page, "## Tools")
    assert list(found) == list(ToolTable.model_fields)
    assert all(f"`{effect}`" in found["effect"][0] for effect in Effect)
    assert all(f"`{scope}`" in found["scope"][0] for scope in SCOPES)
    assert all(f"`{kind}`" in page for kind in OutcomeClass)
    assert f"`{ToolPolicy().key_scope}`" in found["scope"][1]
    assert f"`{ToolPolicy().target_class}`" in found["outcome_class"][1]


def test_the_page_has_every_rung_and_every_reason_of_a_limit(page: str) -> None:
    assert list(rows(page, "## The ladder")) == list(RUNGS)
    told = {cells[3].strip("`") for cells in rows(page, "## Limits").values() if cells[3]}
    assert {str(reason) for reason in LIMIT_OF_REASON} <= told
    assert told <= {str(reason) for reason in TERMINAL_REASONS}
