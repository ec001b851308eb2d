"""Limits, tool policies and ladders: valid from birth, told apart by their digest, merged to the stricter."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product

import pytest

from endstop import Effect, Limits, OutcomeClass, Policy, PolicyInvalidError, Spec, SpecInvalidError, ToolPolicy
from endstop.core.policy import NO_TOOL_POLICY, stricter

# -- Spec


@pytest.mark.parametrize("name", ["what_it_does", "what_it_does_not", "done_looks_like"])
@pytest.mark.parametrize("text", ["", "  \n", None, 5, "x" * 8_001])
def test_a_spec_field_is_some_text_of_fair_length(name: str, text: object) -> None:
    whole: dict[str, object] = {"what_it_does": "a", "what_it_does_not": "b", "done_looks_like": "c"}
    Spec(**whole)  # type: ignore[arg-type]  # keywords from a table
    with pytest.raises(SpecInvalidError, match=name):
        Spec(**{**whole, name: text})  # type: ignore[arg-type]  # the point of the test


def test_a_spec_has_all_three_fields() -> None:
    with pytest.raises(TypeError):
        Spec(what_it_does="a", what_it_does_not="b")  # type: ignore[call-arg]  # the point of the test


# -- Limits


@pytest.mark.parametrize("name", [item.name for item in fields(Limits)])
@pytest.mark.parametrize("value", [-1, True, 1.5, "9", 2**53])
def test_a_limit_is_a_whole_number(name: str, value: object) -> None:
    with pytest.raises(PolicyInvalidError, match=name):
        Limits(**{name: value})  # type: ignore[arg-type]  # the point of the test


def test_only_the_budget_may_be_missing() -> None:
    assert Limits(spend_nanos_max=None).spend_nanos_max is None
    with pytest.raises(PolicyInvalidError, match="steps_max"):
        Limits(steps_max=None)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("name", ["same_call_max", "call_window", "no_progress_max", "wall_ms_max", "error_streak_max"])
def test_a_limit_that_would_let_no_call_run_is_refused(name: str) -> None:
    with pytest.raises(PolicyInvalidError, match="at least 1"):
        Limits(**{name: 0})


@pytest.mark.parametrize("name", ["call_window", "cycle_period_max", "same_answer_max"])
def test_what_memory_must_hold_is_bounded(name: str) -> None:
    Limits(**{name: 64})
    with pytest.raises(PolicyInvalidError, match="memory"):
        Limits(**{name: 65})


# -- Tool policies


@pytest.mark.parametrize(
    "given",
    [
        {"effect": "maybe"},
        {"outcome_class": "twice"},
        {"scope": "galaxy"},
        {"on_committed": "again"},
        {"identity": 5},
        {"identity": [5]},
        {"volatile_args": ("a", "")},
        {"progress_scope": {"a": 1}},
        {"idempotency_key": "no names"},
        {"idempotency_key": "{"},
        {"idempotency_key": "{}"},
        {"idempotency_key": "{a!r}"},
        {"idempotency_key": "{a:>5}"},
        {"idempotency_key": "{a[0]}"},
        {"idempotency_key": ()},
        {"idempotency_key": 5},
        {"deadline_ms": 0},
        {"deadline_ms": True},
        {"poll_unchanged_max": 1.5},
        {"poll_interval_ms_min": -1},
        {"result_schema": object()},
    ],
    ids=str,
)
def test_a_tool_policy_outside_its_bounds_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(PolicyInvalidError):
        ToolPolicy(**given)  # type: ignore[arg-type]  # the point of the test


def test_plain_words_lists_and_schemas_are_taken_as_users_write_them() -> None:
    tool = ToolPolicy(
        effect="write",
        outcome_class="probeable",
        identity="id",  # type: ignore[arg-type]  # the point of the test
        volatile_args=["nonce"],  # type: ignore[arg-type]  # the same
        result_schema={"type": "object"},  # type: ignore[arg-type]  # the same
        idempotency_key=["a.b", "c"],  # type: ignore[arg-type]  # the same
    )
    assert (tool.effect, tool.outcome_class) == (Effect.WRITE, OutcomeClass.PROBEABLE)
    assert (tool.identity, tool.volatile_args) == (("id",), ("nonce",))
    assert tool.result_schema == '{"type":"object"}'
    assert tool.key_fields == ("a.b", "c")
    assert hash(tool) == hash(replace(tool))


def test_the_fields_of_a_key_are_those_its_template_names() -> None:
    assert ToolPolicy(idempotency_key="a {x} b {y.z}").key_fields == ("x", "y.z")
    assert ToolPolicy(idempotency_key=lambda args: "k").key_fields == ()
    assert ToolPolicy().key_fields == ()


def test_what_is_not_declared_has_the_safe_default() -> None:
    tool = ToolPolicy(effect="write")
    assert (tool.key_scope, tool.target_class, tool.replays_committed) == ("tenant", OutcomeClass.AT_MOST_ONCE, False)
    assert ToolPolicy(scope="run", outcome_class="idempotent_by_target").key_scope == "run"
    assert NO_TOOL_POLICY.effect is Effect.UNKNOWN
    assert not NO_TOOL_POLICY.declared


# -- Policies


def test_a_tool_is_found_by_its_name_then_by_the_first_pattern() -> None:
    exact, first, second = (ToolPolicy(effect=effect) for effect in ("write", "read", "poll"))
    policy = Policy(tools={"crm.*": first, "crm.u*": second, "crm.update": exact, "crm.[x]": second})
    assert policy.tool("crm.update") is exact
    assert policy.tool("crm.upsert") is first
    assert policy.tool("crm.[x]") is second
    assert policy.tool("CRM.get") is NO_TOOL_POLICY
    assert policy.tool("mail") is NO_TOOL_POLICY


def test_the_tools_of_a_policy_cannot_be_changed_from_outside() -> None:
    tools = {"a": ToolPolicy(effect="read")}
    policy = Policy(tools=tools)
    tools["b"] = ToolPolicy(effect="write")
    assert policy.tool("b") is NO_TOOL_POLICY
    with pytest.raises(TypeError):
        policy.tools["b"] = tools["b"]  # type: ignore[index]  # the point of the test


@pytest.mark.parametrize(
    "given",
    [
        {"limits": {"steps_max": 9}},
        {"tools": {"a": {"effect": "read"}}},
        {"tools": {"": ToolPolicy()}},
        {"tools": {5: ToolPolicy()}},
        {"tools": {f"t{n}": NO_TOOL_POLICY for n in range(1_001)}},
    ],
    ids=range(5),
)
def test_a_policy_of_something_else_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(PolicyInvalidError):
        Policy(**given)  # type: ignore[arg-type]  # the point of the test


def changed(policy: Policy, **more: object) -> Policy:
    return replace(policy, **more)  # type: ignore[arg-type]  # fields by name


def test_the_digest_of_a_policy_changes_with_everything_that_decides() -> None:
    base = Policy(tools={"t": ToolPolicy(effect="write", idempotency_key="{a}")})
    tool = base.tool("t")

    def made(args: object) -> str:
        return "k"

    variants = [
        base,
        changed(base, on_trip=("warn", "stop")),
        changed(base, strict_tools=True),
        changed(base, redact=("password",)),
        changed(base, tools={"u": tool}),
        *(changed(base, limits=replace(base.limits, **{item.name: 7})) for item in fields(Limits)),
        changed(base, tools={"t": replace(tool, effect="read")}),
        changed(base, tools={"t": replace(tool, idempotency_key="{b}")}),
        changed(base, tools={"t": replace(tool, idempotency_key=made)}),
        changed(base, tools={"t": replace(tool, approve=True)}),
    ]
    assert len({policy.digest() for policy in variants}) == len(variants)
    assert Policy(tools=dict(base.tools)).digest() == base.digest()
    assert Policy(tools=dict(base.tools)) == base


# -- The stricter of two


@pytest.mark.parametrize(("one", "other"), list(product(Effect, Effect)))
def test_the_stricter_effect_wins_and_an_undeclared_one_gives_way(one: Effect, other: Effect) -> None:
    merged = stricter(ToolPolicy(effect=one), ToolPolicy(effect=other)).effect
    assert merged == stricter(ToolPolicy(effect=other), ToolPolicy(effect=one)).effect
    if Effect.WRITE in (one, other):
        assert merged is Effect.WRITE
    elif one is Effect.UNKNOWN:
        assert merged is other
    elif other is Effect.UNKNOWN:
        assert merged is one
    else:
        order = [Effect.WAIT, Effect.POLL, Effect.READ]
        assert merged is order[max(order.index(one), order.index(other))]


def test_what_only_one_of_two_declares_is_taken_from_it() -> None:
    one = ToolPolicy(effect="read", volatile_args=("a", "b"), deadline_ms=500, scope="run")
    assert stricter(one, NO_TOOL_POLICY) is one
    assert stricter(NO_TOOL_POLICY, one) is one
    bare = ToolPolicy(effect="read")
    for merged in (stricter(one, bare), stricter(bare, one)):
        assert merged == one


def test_where_two_differ_the_stricter_is_taken() -> None:
    one = ToolPolicy(
        effect="read", volatile_args=("a", "b"), volatile_result=("x",), deadline_ms=500, poll_unchanged_max=9,
        poll_interval_ms_min=100, scope="run", outcome_class="idempotent_by_target", on_committed="replay",
        owes_data=False,
    )  # fmt: skip
    other = ToolPolicy(
        effect="read", volatile_args=("b", "c"), volatile_result=("y",), deadline_ms=900, poll_unchanged_max=5,
        poll_interval_ms_min=700, scope="tenant", outcome_class="at_most_once", on_committed="stop", approve=True,
    )  # fmt: skip
    for merged in (stricter(one, other), stricter(other, one)):
        assert (merged.volatile_args, merged.volatile_result) == (("b",), ())
        assert (merged.deadline_ms, merged.poll_unchanged_max, merged.poll_interval_ms_min) == (500, 5, 700)
        assert (merged.scope, merged.outcome_class) == ("tenant", OutcomeClass.AT_MOST_ONCE)
        assert (merged.on_committed, merged.approve, merged.owes_data) == ("stop", True, True)


def test_a_key_of_the_policy_goes_before_that_of_the_declaration() -> None:
    one, other = (ToolPolicy(effect="write", idempotency_key=key) for key in ("{a}", "{b}"))
    assert stricter(one, other).idempotency_key == "{a}"
    assert stricter(ToolPolicy(effect="write"), other).idempotency_key == "{b}"
