"""From a call to what the guards see: fingerprints, idempotency keys, safe names, and what is never kept."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop import ErrorClass, Policy, ToolCall, ToolPolicy, UsageError
from endstop.core.evidence import NAME_CHARS_KEPT, short_name
from endstop.core.propose import (
    NOTED_ARGS_MAX,
    WORD_CHARS_MAX,
    argument_note,
    fingerprint_of,
    idempotency_key_of,
    parsed_args,
    propose,
)
from tests.core.test_canonical import ONE_FORM, shuffled

NONE = Policy().tool("t")


def fingerprint(args: Mapping[str, object] | str, tool: ToolPolicy = NONE, name: str = "t", key: bytes = b"") -> str:
    return fingerprint_of(name, args, tool, key)


# -- Arguments


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ("  \n", {}),
        ('{"n": 18446744073709551616}', {"n": 18446744073709551616}),
        ('{"n": 1234567890123456789}', {"n": 1234567890123456789}),
        ("[1]", "[1]"),
        ("7", "7"),
        ('{"a": ', '{"a": '),
        ('{"a": NaN}', '{"a": NaN}'),
        ('{"a": NaN, "n": 1234567890123456789}', '{"a": NaN, "n": 1234567890123456789}'),
        ('"\ud800"', '"\ud800"'),
        ("[" * 100_000, "[" * 100_000),
        ("1234567890123456789" + "[" * 100_000, "1234567890123456789" + "[" * 100_000),
    ],
    ids=range(13),
)
def test_argument_text_is_an_object_or_stays_text(text: str, args: object) -> None:
    assert parsed_args(text) == args


def test_two_long_numbers_that_differ_at_their_end_are_two_arguments() -> None:
    """A parser that makes floats of them would give two orders one key."""
    tool = ToolPolicy(effect="write", idempotency_key="{order}")
    one, other = ('{"order": 184467440737095516161}', '{"order": 184467440737095516162}')
    first, second = (propose(ToolCall(tool="t", args=text), tool) for text in (one, other))
    assert first.fingerprint != second.fingerprint
    assert first.key_digest != second.key_digest


def test_text_that_is_an_object_is_the_same_call_as_the_object() -> None:
    assert propose(ToolCall(tool="t", args='{"b": 2, "a": 1}'), NONE).fingerprint == fingerprint({"a": 1, "b": 2})


# -- Fingerprints


@given(st.dictionaries(st.text(st.characters(codec="ascii"), max_size=5), ONE_FORM, max_size=4))
def test_a_fingerprint_does_not_depend_on_the_order_of_keys(args: dict[str, object]) -> None:
    turned = shuffled(args)
    assert isinstance(turned, dict)
    assert fingerprint(turned) == fingerprint(args)


def test_a_fingerprint_depends_on_tool_arguments_types_and_key() -> None:
    found = {
        fingerprint({"x": 1}),
        fingerprint({"x": 1.0}),
        fingerprint({"x": True}),
        fingerprint({"x": "1"}),
        fingerprint({"y": 1}),
        fingerprint({}),
        fingerprint({"x": 1}, name="u"),
        fingerprint({"x": 1}, key=b"k"),
        fingerprint('{"x": 1}'),
        fingerprint("x"),
    }
    assert len(found) == 10


def test_a_name_and_arguments_do_not_run_together() -> None:
    assert fingerprint("b", name="a") != fingerprint("", name="ab")


def test_only_declared_fields_are_left_out() -> None:
    args = {"id": 7, "nonce": "x", "meta": {"at": 1, "by": "ann"}}
    volatile = ToolPolicy(volatile_args=("nonce", "meta.at"))
    assert fingerprint({**args, "nonce": "y", "meta": {"at": 2, "by": "ann"}}, volatile) == fingerprint(args, volatile)
    assert fingerprint({**args, "meta": {"at": 1, "by": "bob"}}, volatile) != fingerprint(args, volatile)
    identity = ToolPolicy(identity=("id",))
    assert fingerprint({"id": 7}, identity) == fingerprint(args, identity)
    both = ToolPolicy(identity=("id", "nonce"), volatile_args=("nonce",))
    assert fingerprint({"id": 7, "nonce": 1}, both) == fingerprint({"id": 7, "nonce": 2}, both)


def test_an_identity_that_selects_nothing_falls_back_to_all_arguments() -> None:
    """Else every such call would be the same call."""
    identity = ToolPolicy(identity=("id",))
    assert fingerprint({"name": "a"}, identity) != fingerprint({"name": "b"}, identity)


def test_any_mapping_is_an_object() -> None:
    assert fingerprint(MappingProxyType({"a": 1})) == fingerprint({"a": 1})


def test_raw_text_is_compared_in_nfc_and_lone_surrogates_stay_two() -> None:
    assert fingerprint("caf\u00e9") == fingerprint("cafe\u0301")
    assert fingerprint("\ud800") != fingerprint("\udfff")


def test_arguments_without_a_form_make_a_malformed_call_and_no_error() -> None:
    for args in ({"x": object()}, {"x": float("nan")}, {1: 2}):
        proposal = propose(ToolCall(tool="t", args=args), NONE)  # type: ignore[arg-type]  # the point of the test
        assert proposal.fault is ErrorClass.SCHEMA
    assert propose(ToolCall(tool="t", args="{"), NONE).fault is ErrorClass.SCHEMA
    assert propose(ToolCall(tool="t", args="{"), NONE, fault=ErrorClass.DENIED).fault is ErrorClass.DENIED


# -- Idempotency keys


def key_of(args: Mapping[str, object] | str, tool: ToolPolicy, **more: object) -> str | None:
    return idempotency_key_of("t", args, tool, **more)[0]  # type: ignore[arg-type]  # keywords from the test


def test_a_key_is_a_digest_of_scope_tool_template_and_values_and_never_of_joined_text() -> None:
    pair = ToolPolicy(effect="write", idempotency_key="{a}:{b}")
    assert key_of({"a": "x:y", "b": "z"}, pair) != key_of({"a": "x", "b": "y:z"}, pair)
    assert key_of({"a": 1, "b": 2}, pair) != key_of({"a": "1", "b": "2"}, pair)
    assert key_of({"a": 1, "b": 2, "c": 3}, pair) == key_of({"a": 1, "b": 2}, pair)
    fields = ToolPolicy(effect="write", idempotency_key=("a", "b"))
    runs = ToolPolicy(effect="write", idempotency_key="{a}:{b}", scope="run")
    args = {"a": 1, "b": 2}
    found = {
        key_of(args, pair),
        key_of(args, fields),
        key_of(args, runs),
        key_of(args, runs, scope_value="r1"),
        key_of(args, pair, key=b"store"),
        idempotency_key_of("u", args, pair)[0],
    }
    assert len(found) == 6


def test_a_key_may_come_from_a_function() -> None:
    tool = ToolPolicy(effect="write", idempotency_key=lambda args: f"order-{args['id']}")
    assert key_of({"id": 1}, tool) != key_of({"id": 2}, tool)
    assert key_of({"id": 1, "n": 1}, tool) == key_of({"id": 1, "n": 2}, tool)


@pytest.mark.parametrize("made", ["", "k" * 256, None, 5, ValueError("x")])
def test_a_function_that_makes_no_key_makes_none(made: object) -> None:
    def function(args: Mapping[str, object]) -> str | None:
        if isinstance(made, Exception):
            raise made
        return made  # type: ignore[return-value]  # the point of the test

    found, missing = idempotency_key_of("t", {}, ToolPolicy(effect="write", idempotency_key=function))
    assert found is None
    assert "key function" in (missing or "")


@pytest.mark.parametrize("value", [None, "", " \t"])
def test_a_blank_value_is_no_key(value: object) -> None:
    found, missing = idempotency_key_of("t", {"a": value}, ToolPolicy(effect="write", idempotency_key="{a}"))
    assert (found, missing) == (None, "a value for a")


@pytest.mark.parametrize("value", [0, False, [], "0"])
def test_zero_is_a_key(value: object) -> None:
    assert key_of({"a": value}, ToolPolicy(effect="write", idempotency_key="{a}"))


def test_a_key_needs_an_object_and_plain_text() -> None:
    tool = ToolPolicy(effect="write", idempotency_key="{a}")
    assert idempotency_key_of("t", "text", tool) == (None, "arguments that are a JSON object")
    assert idempotency_key_of("\ud800", {"a": 1}, tool)[0] is None


def test_only_writes_have_a_key_and_the_stores_fingerprint_needs_the_stores_key() -> None:
    read = ToolPolicy(effect="read", idempotency_key="{a}")
    write = ToolPolicy(effect="write", idempotency_key="{a}")
    call = ToolCall(tool="t", args={"a": 1})
    assert propose(call, read).key_digest is None
    assert propose(call, write).operation_fingerprint == ""
    keyed = propose(call, write, run_key=b"r", store_key=b"s")
    assert keyed.operation_fingerprint not in ("", keyed.fingerprint)


# -- Names


@pytest.mark.parametrize(
    "name",
    ["search", "crm.update", "call_0123", "a-b", "x" * WORD_CHARS_MAX, "é", "x" * 200, "a\nb", "\ud800", "名前"],
)
def test_names_and_ids_are_made_safe_and_two_stay_two(name: str) -> None:
    call = ToolCall(tool=name, call_id=name, round_id=name, agent=name)
    proposal = propose(call, NONE)
    other = propose(ToolCall(tool=name + "x" if len(name) < 200 else "y", call_id=name + "x"), NONE)
    for safe in (proposal.tool, proposal.call_id, proposal.round_id or "", proposal.agent):
        assert safe.isascii()
        assert len(safe) <= WORD_CHARS_MAX
    assert (proposal.raw_tool or proposal.tool) == name
    assert proposal.call_id != other.call_id
    assert "raw_tool" not in repr(proposal)


def test_long_names_are_kept_short_and_apart() -> None:
    assert short_name("x" * NAME_CHARS_KEPT) == "x" * NAME_CHARS_KEPT
    one, other = short_name("x" * 79 + "1"), short_name("x" * 79 + "2")
    assert len(one) == NAME_CHARS_KEPT
    assert one != other


@pytest.mark.parametrize("tool", ["", "x" * 201])
def test_a_tool_needs_a_name_of_fair_length(tool: str) -> None:
    with pytest.raises(UsageError, match="tool name"):
        ToolCall(tool=tool)


@pytest.mark.parametrize("args", [None, [1], 5, b"{}"])
def test_arguments_are_an_object_or_text(args: object) -> None:
    with pytest.raises(UsageError, match="args"):
        ToolCall(tool="t", args=args)  # type: ignore[arg-type]  # the point of the test


# -- Notes


def test_a_note_on_arguments_has_names_types_and_sizes_and_no_value() -> None:
    args = {"text": "secret", "rows": [1, 2], "n": 5, "none": None, "map": {"a": 1}}
    assert argument_note(args) == (
        ("map", "dict[1]"),
        ("n", "int"),
        ("none", "NoneType"),
        ("rows", "list[2]"),
        ("text", "str[6]"),
    )
    assert argument_note("secret") == (("(unparsed text)", "6 characters"),)


def test_a_note_is_bounded_and_takes_names_that_are_no_text() -> None:
    many: dict[str, object] = {f"n{number}": number for number in range(NOTED_ARGS_MAX + 9)}
    assert len(argument_note(many)) == NOTED_ARGS_MAX
    odd = {1: "a", None: "b", "x" * 500: "c"}
    note = argument_note(odd)  # type: ignore[arg-type]  # what a malformed call may hold
    assert all(len(name) <= WORD_CHARS_MAX for name, _ in note)
