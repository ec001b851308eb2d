"""What a tool's answer means: terminal statuses, explicit failures, retries and their waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, ErrorClass, Reason, Status, ToolCall, ToolPolicy, ToolResult, UsageError
from endstop.core import loops
from endstop.core.canonical import digest
from endstop.core.observe import as_result, checked, measure
from endstop.core.steps import operation_event
from endstop.core.transitions import OperationEvent
from tests.core.kit import NO_CAPS, Clock, guard_of, proposal_of
from tests.core.shapes import READ, failed
from tests.fixtures.driver import Step, drive


def retryable(wait_ms: int | None = None, error_class: str | None = None) -> ToolResult[object]:
    return ToolResult(status="retryable", retry_after_ms=wait_ms, error_class=error_class)


# -- Status


@pytest.mark.parametrize("status", ["complete", "fatal", "permission_denied", "policy_blocked", "human_required"])
def test_a_terminal_status_ends_the_run_with_its_own_name(status: str) -> None:
    story = drive(guard_of(), [Step(tool="t", answer=ToolResult(status=status))] * 2)
    assert len(story.executed) == 1
    assert story.ended == status


@pytest.mark.parametrize("status", list(Status))
def test_the_flags_of_a_result_follow_from_its_status(status: Status) -> None:
    for retry in (True, False):
        for terminal in (True, False):
            result: ToolResult[object] = ToolResult(status=status, retryable=retry, terminal=terminal)
            assert result.retryable is (status is Status.RETRYABLE)
            assert result.terminal is (status not in (Status.PROGRESS, Status.RETRYABLE))


def test_a_refusal_by_the_guard_ends_its_call_and_not_the_run() -> None:
    refusal: ToolResult[object] = ToolResult(status="policy_blocked", reason=Reason.KEY_MISSING)
    assert not refusal.terminal


def test_a_result_has_failed_by_its_status_or_its_class() -> None:
    assert not ToolResult(value=1).failed
    assert not ToolResult(status="complete", value=1).failed
    assert ToolResult(value=1, error_class="conflict").failed
    assert ToolResult(status="fatal", value=1).failed


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "nearly"},
        {"error_class": "bad_luck"},
        {"retry_after_ms": -1},
        {"retry_after_ms": 1.5},
        {"retry_after_ms": True},
    ],
)
def test_a_result_outside_the_closed_sets_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        ToolResult(**fields)  # type: ignore[arg-type]  # the point of the test


def test_a_plain_value_is_progress_with_that_value() -> None:
    assert as_result(5) == ToolResult(value=5)
    made: ToolResult[object] = ToolResult(value=5)
    assert as_result(made) is made


# -- Owed data


@pytest.mark.parametrize("value", [None, "", "   ", "\n\t"])
def test_a_tool_that_owes_data_and_gives_nothing_has_failed(value: object) -> None:
    result = checked(ToolResult(value=value), READ)
    assert (result.status, result.error_class) == (Status.RETRYABLE, ErrorClass.EMPTY_ANSWER)
    assert result.message


@pytest.mark.parametrize("value", [0, False, [], {}, 0.0, "0", b""])
def test_zero_false_and_empty_containers_are_data(value: object) -> None:
    result: ToolResult[object] = ToolResult(value=value)
    assert checked(result, READ) is result


def test_reads_and_polls_owe_data_by_default_and_others_do_not() -> None:
    owing = {effect: ToolPolicy(effect=effect).owes_data for effect in ("read", "poll", "write", "wait", "unknown")}
    assert owing == {"read": True, "poll": True, "write": False, "wait": False, "unknown": False}
    silent: ToolResult[object] = ToolResult(value="")
    assert checked(silent, ToolPolicy(effect="read", owes_data=False)) is silent


def test_a_finished_or_failed_result_owes_nothing() -> None:
    for result in (ToolResult(status="complete"), failed(ErrorClass.NOT_FOUND, "no")):
        assert checked(result, READ) is result
        assert checked(result, READ, "not an object") is result


def test_an_answer_that_breaks_its_schema_has_failed() -> None:
    result = checked(ToolResult(value={"a": 1}), ToolPolicy(effect="unknown"), "b is missing")
    assert (result.status, result.error_class) == (Status.RETRYABLE, ErrorClass.ANSWER_SCHEMA)
    assert "b is missing" in (result.message or "")


@pytest.mark.parametrize("effect", ["write", "unknown"])
def test_a_bad_answer_never_un_commits_a_write(effect: str) -> None:
    tool = ToolPolicy(effect=effect, owes_data=True)
    for result in (checked(ToolResult(value=""), tool), checked(ToolResult(value=1), tool, "no object")):
        assert result.failed
        assert operation_event(result) is OperationEvent.APPLIED
    denied = checked(ToolResult(value="", side_effect_committed=False), tool)
    assert operation_event(denied) is OperationEvent.NOT_APPLIED


# -- Retries


def test_a_retryable_answer_needs_its_wait_to_have_passed() -> None:
    clock = Clock()
    guard = guard_of(clock=clock)
    call = ToolCall(tool="api", call_id="c1")
    guard.before(call)
    guard.after(call, retryable(2_500))
    early = guard.before(call)
    assert (early.action, early.reason) == (Action.WAIT, Reason.NOT_BEFORE)
    assert early.retry_after_ms == 2_500  # type: ignore[attr-defined]  # a Wait, as asserted above
    assert early.until_us == clock.now_us + 2_500_000  # type: ignore[attr-defined]  # the same
    clock.pass_ms(2_499)
    assert guard.before(call).action is Action.WAIT
    clock.pass_ms(1)
    assert guard.before(call).action is Action.EXECUTE
    assert guard.counters.retries == 1


def test_being_put_off_is_no_refusal() -> None:
    guard = guard_of()
    call = ToolCall(tool="api", call_id="c1", round_id="m1")
    guard.before(call)
    guard.after(call, retryable(2_500))
    for _ in range(9):
        assert guard.before(call).action is Action.WAIT
    assert guard.evidence.streaks == {}
    assert guard.counters.blocked == 0


def test_a_retryable_answer_without_a_wait_needs_a_named_change() -> None:
    guard = guard_of()
    call = ToolCall(tool="api", call_id="c1")
    guard.before(call)
    guard.after(call, retryable())
    refused = guard.before(call)
    assert (refused.action, refused.reason) == (Action.BLOCK, Reason.NOT_BEFORE)
    assert guard.before(replace(call, change="cursor")).action is Action.EXECUTE


@pytest.mark.parametrize("change", ["cursor", "args", "authorisation", "strategy", "retry_after"])
def test_every_named_change_lets_one_attempt_through_and_counts_as_a_retry(change: str) -> None:
    guard = guard_of()
    call = ToolCall(tool="api", call_id="c1")
    guard.before(call)
    guard.after(call, retryable(60_000))
    assert guard.before(replace(call, change=change)).action is Action.EXECUTE
    assert guard.counters.retries == 1


def test_an_unknown_change_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown change"):
        ToolCall(tool="api", change="hope")


def test_trying_again_without_a_change_ends_the_run_after_three_refusals() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="api", answer=retryable())])
    story = drive(guard, [Step(tool="api", call_id="again")] * 5)
    assert story.executed == []
    assert (story.stopped_at, story.ended) == (3, Reason.ERROR_STREAK)


def test_corrected_arguments_are_another_call_and_need_no_change() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="api", args={"n": 1}, answer=retryable())])
    assert drive(guard, [Step(tool="api", args={"n": 2})]).decisions[0].action is Action.EXECUTE


def test_the_third_retry_is_allowed_and_the_next_refused() -> None:
    story = drive(guard_of(), [Step(tool="api", answer=retryable(0))] * 9)
    assert len(story.executed) == 4
    assert (story.stopped_at, story.ended) == (5, Reason.RETRY_CAP)


def test_a_retryable_answer_is_no_evidence_of_a_loop() -> None:
    guard = guard_of(replace(NO_CAPS, retries_max=9))
    drive(guard, [Step(tool="api", answer=retryable(0))] * 5)
    assert guard.evidence.trail == []


def test_transport_failures_may_be_tried_again_at_once_within_the_cap() -> None:
    for error_class in loops.UNCOUNTED_CLASSES - {ErrorClass.OUTCOME_UNKNOWN}:
        story = drive(guard_of(), [Step(tool="api", answer=retryable(None, error_class))] * 9)
        assert (len(story.executed), story.ended) == (4, Reason.RETRY_CAP)


def test_a_failure_with_a_class_of_its_own_is_judged_by_the_loop_guards_and_not_made_to_wait() -> None:
    story = drive(guard_of(), [Step(tool="api", answer=retryable(None, "conflict"))] * 9)
    assert (len(story.executed), story.ended) == (2, Reason.SAME_CALL_REPEAT)


def test_an_answer_that_comes_through_ends_the_wait() -> None:
    guard = guard_of()
    drive(guard, [Step(tool="api", answer=retryable(0)), Step(tool="api", answer="done")])
    assert guard.evidence.waits == {}


def test_a_second_proposal_of_a_call_still_open_is_a_retry() -> None:
    guard = guard_of()
    call = ToolCall(tool="api", call_id="c1")
    guard.before(call)
    assert guard.before(call).action is Action.EXECUTE
    assert guard.counters.retries == 1
    other = replace(call, args={"another": "call under the same id"})
    assert guard.before(other).action is Action.EXECUTE
    assert guard.counters.retries == 1


# -- The answer's identity


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no printed form")


class Plain:
    """An object without a printed form of its own: its repr holds its address."""


def answer_of(value: object, tool: ToolPolicy = READ) -> str:
    return measure(as_result(value), proposal_of(), tool).answer


def test_an_answer_is_the_digest_of_the_whole_result_less_what_is_volatile() -> None:
    assert answer_of({"a": 1}) == digest(b'{"a":1}')
    assert answer_of({"b": 2, "a": 1}) == answer_of({"a": 1, "b": 2})
    assert answer_of(1) != answer_of(1.0)
    volatile = ToolPolicy(effect="read", volatile_result=("at", "rows.*.id"))
    one = {"at": "10:01", "rows": [{"id": 1, "x": "a"}]}
    other = {"at": "10:02", "rows": [{"id": 2, "x": "a"}]}
    assert answer_of(one, volatile) == answer_of(other, volatile)
    assert answer_of(one) != answer_of(other)


def test_a_failures_answer_covers_status_class_and_message() -> None:
    answers = {
        answer_of(result)
        for result in (
            ToolResult(value=1),
            ToolResult(status="fatal", value=1),
            failed(ErrorClass.CONFLICT, "a"),
            failed(ErrorClass.CONFLICT, "b"),
            failed(ErrorClass.AUTH, "b"),
        )
    }
    assert len(answers) == 5


def test_what_is_no_json_is_known_by_its_printed_form_without_addresses() -> None:
    assert answer_of(Plain()) == answer_of(Plain())
    assert answer_of({1: "a"}) == answer_of({1: "a"})
    assert answer_of({1: "a"}) != answer_of({1: "b"})
    assert answer_of("\ud800") != answer_of("\udfff")


def test_a_result_whose_repr_breaks_is_still_an_outcome() -> None:
    assert answer_of(Broken()) == answer_of(Broken())
    guard = guard_of()
    call = ToolCall(tool="t", call_id="c1")
    guard.before(call)
    guard.after(call, Broken())
    assert not guard.evidence.pending


def test_digests_under_another_key_have_nothing_in_common() -> None:
    result = as_result({"a": 1})
    keyed = [measure(result, proposal_of(), READ, key=key).answer for key in (b"", b"one", b"two")]
    assert len(set(keyed)) == 3


def test_a_sketch_is_made_early_only_when_asked_and_only_for_undeclared_tools() -> None:
    undeclared = guard_of().policy.tool("t")
    text = as_result("some words of an answer")
    assert measure(text, proposal_of(), undeclared).sketch is None
    assert measure(text, proposal_of(), undeclared, sketched=True).sketch is not None
    assert measure(text, proposal_of(), READ, sketched=True).sketch is None
    huge = measure(as_result("x" * 40_000), proposal_of(), undeclared, sketched=True)
    assert (huge.text, huge.sketch) == (None, None)
