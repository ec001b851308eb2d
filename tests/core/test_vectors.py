"""The published vectors of loop detection, each as one test: V loops, N legitimate work, B behaviour.

Where nothing else is said, caps are out of the way, so that the guard under test is the one that speaks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Final

import pytest

from endstop import (
    Action,
    Effect,
    ErrorClass,
    Limits,
    LoopGuard,
    Policy,
    Reason,
    ToolCall,
    ToolPolicy,
    ToolResult,
)
from endstop.core import fold
from endstop.core.decide import decide_child, decide_handoff
from endstop.core.events import Proposal
from endstop.core.evidence import CALLS_MAX, PACKED_BYTES_MAX, Evidence
from endstop.core.propose import fingerprint_of
from endstop.core.reasons import ENDINGS
from tests.core.shapes import POLL, READ, WAIT, failed, reads, rounds
from tests.fixtures.driver import Step, Story, drive, progress

NO_CAPS: Final = Limits(steps_max=100_000, turns_max=100_000, tokens_max=10**9, wall_ms_max=10**9)


def play(steps: list[Step], tools: dict[str, ToolPolicy] | None = None, limits: Limits = NO_CAPS) -> Story:
    return drive(LoopGuard(Policy(limits=limits, tools=tools or {})), steps)


# -- V: loops


def test_v1_one_search_with_one_empty_answer() -> None:
    story = play([Step(tool="search", args={"q": "x"}, answer=[])] * 5)
    assert (story.stopped_at, story.ended) == (3, Reason.SAME_CALL_REPEAT)


def test_v2_two_calls_in_turn() -> None:
    story = play([Step(tool="get", args={"id": 1}, answer="a"), Step(tool="list", args={"p": 1}, answer="b")] * 5)
    assert (story.stopped_at, story.ended) == (4, Reason.SHORT_CYCLE)


def test_v3_three_calls_in_turn() -> None:
    story = play(reads("abc") * 5)
    assert (story.stopped_at, story.ended) == (7, Reason.SHORT_CYCLE)


@pytest.mark.parametrize(
    ("names", "stopped_at", "reason"),
    [
        ("abcdef", 13, Reason.SHORT_CYCLE),
        ("abcdefghijkl", 28, Reason.NO_PROGRESS),
        ("abcdefghijklmnopqrstuvwxyz", 56, Reason.NO_PROGRESS),
    ],
)
def test_v4_a_cycle_of_six_is_named_and_longer_ones_are_stalls(names: str, stopped_at: int, reason: Reason) -> None:
    story = play(reads(names) * 4)
    assert (story.stopped_at, story.ended) == (stopped_at, reason)


def test_v5_a_failing_test_with_a_new_read_between() -> None:
    test = Step(tool="test", answer="1 failed")
    story = play(list(chain.from_iterable((test, *reads(name)) for name in "abcde")))
    assert (story.stopped_at, story.ended) == (5, Reason.SAME_CALL_REPEAT)


def test_v6_a_process_id_in_the_answer_hides_no_repeat() -> None:
    story = play([Step(tool="exec", args={"cmd": "x"}, answer=f"started the worker, pid {n}") for n in (4312, 977, 51)])
    assert (story.stopped_at, story.ended) == (3, Reason.SAME_CALL_REPEAT)


def test_v7_a_request_id_in_the_arguments_hides_no_repeat_once_it_is_declared_volatile() -> None:
    tool = ToolPolicy(effect="read", volatile_args=("request_id",))
    steps = [Step(tool="lookup", args={"k": 1, "request_id": f"{n:032x}"}, answer={"found": None}) for n in range(5)]
    assert play(steps, {"lookup": tool}).stopped_at == 3


def test_v8_a_message_with_a_nonce_is_sent_once_whatever_the_nonce() -> None:
    tool = ToolPolicy(effect="write", idempotency_key="{to}:{text}", volatile_args=("nonce",))
    steps = [Step(tool="send", args={"to": "ann", "text": "hi", "nonce": n}, answer={"id": n}) for n in range(3)]
    story = play(steps, {"send": tool})
    assert story.ran("send") == 1
    assert (story.stopped_at, story.ended) == (2, Reason.ALREADY_COMMITTED)


def test_v9_ever_new_wordings_that_find_nothing() -> None:
    story = play([Step(tool="search", args={"q": n}, answer=[]) for n in range(10)], {"search": READ})
    assert (story.stopped_at, story.ended) == (9, Reason.SAME_ANSWER)


def test_v10_ever_new_ids_that_are_not_found() -> None:
    steps = [Step(tool="get", args={"id": n}, answer=failed(ErrorClass.NOT_FOUND, f"no {n}")) for n in range(5)]
    story = play(steps)
    assert (story.stopped_at, story.ended) == (4, Reason.ERROR_STREAK)


def test_v11_an_unknown_tool_is_refused_once_and_then_ends_the_run() -> None:
    story = play([Step(tool="no_such", args={"n": n}, fault=ErrorClass.UNKNOWN_TOOL) for n in range(3)])
    assert story.executed == []
    assert story.decisions[0].reason is Reason.UNKNOWN_TOOL
    assert (story.stopped_at, story.ended) == (2, Reason.ERROR_STREAK)


def test_v12_a_denial_is_one_class_however_it_is_worded() -> None:
    steps = [Step(tool="write", args={"path": n}, answer=failed(ErrorClass.DENIED, f"no: path {n}")) for n in range(3)]
    story = play(steps)
    assert (story.stopped_at, story.ended) == (3, Reason.ERROR_STREAK)


def test_v13_arguments_that_break_the_schema_or_do_not_parse_are_attempts_too() -> None:
    empty = play([Step(tool="read", args={}, fault=ErrorClass.SCHEMA)] * 3)
    assert (empty.stopped_at, empty.executed) == (2, [])
    unparsable = play([Step(tool="read", args='{"path": ')] * 3)
    assert unparsable.decisions[0].reason is Reason.MALFORMED_CALL
    assert (unparsable.stopped_at, unparsable.executed) == (2, [])


def test_v14_a_success_of_another_tool_launders_no_failure() -> None:
    make = Step(tool="make", answer=failed(ErrorClass.TOOL_FAILED, "no rule to make target"))
    steps = list(chain.from_iterable((make, Step(tool="echo", args={"n": n}, answer=f"ok {n}")) for n in range(5)))
    assert play(steps).stopped_at == 5


def test_v15_key_order_makes_no_difference_and_types_do() -> None:
    tool = Policy().tool("t")
    assert fingerprint_of("t", {"a": 1, "b": 2}, tool) == fingerprint_of("t", {"b": 2, "a": 1}, tool)
    assert len({fingerprint_of("t", {"x": x}, tool) for x in (1, 1.0, True)}) == 3


def test_v16_the_same_fan_out_in_every_message() -> None:
    assert play(rounds(*[reads("abc")] * 5)).stopped_at == 7


def test_v17_an_anchor_in_every_message_is_refused_and_the_new_reads_before_it_have_run() -> None:
    story = play(rounds(*[[*reads("a"), *reads(name)] for name in "bcdef"]))
    assert story.stopped_at == 5
    assert len(story.executed) == 4


def test_v18_eight_identical_calls_in_one_message_run_once() -> None:
    story = play(rounds(reads("a") * 8), {"read": READ})
    assert len(story.executed) == 1
    assert [decision.action for decision in story.decisions] == [Action.EXECUTE, Action.REPLAY, Action.STOP]


def test_v19_a_second_shifted_sweep_is_no_progress_when_the_line_reached_is_the_version() -> None:
    tool = ToolPolicy(effect="read", progress="reached")
    starts = [*range(1, 401, 40), *range(21, 401, 40)]
    steps = [Step(tool="lines", args={"at": n}, answer={"text": f"t{n}", "reached": n + 39}) for n in starts]
    story = play(steps, {"lines": tool})
    assert (story.stopped_at, story.ended) == (14, Reason.NO_PROGRESS)


def test_v20_a_version_that_goes_back_and_forth_is_no_progress() -> None:
    steps = [Step(tool="write", args={"f": n % 2}, answer=progress("ok", f"state-{n % 2}")) for n in range(12)]
    story = play(steps)
    assert (story.stopped_at, story.ended) == (5, Reason.SHORT_CYCLE)


def handoff(source: str, target: str, number: int) -> Proposal:
    fingerprint = fingerprint_of("handoff", {"from": source, "to": target}, Policy().tool("handoff"))
    return Proposal(tool="handoff", effect=Effect.UNKNOWN, fingerprint=fingerprint, call_id=f"h{number}")


def test_v21_a_run_handed_back_and_forth_is_a_cycle_of_handoffs() -> None:
    policy, evidence = Policy(), Evidence()
    edges = [handoff("a", "b", 1), handoff("b", "a", 2), handoff("a", "b", 3)]
    for edge in edges:
        verdict = decide_handoff(policy, evidence, edge, 1)
        assert verdict.action is Action.EXECUTE
        fold.handed_off(evidence, edge, verdict, policy.limits)
    verdict = decide_handoff(policy, evidence, handoff("b", "a", 4), 1)
    assert (verdict.action, verdict.reason) == (Action.STOP, Reason.SHORT_CYCLE)


def test_v22_a_brief_delegated_again_by_its_own_child_is_stopped_at_the_third_level() -> None:
    """No level has an answer yet: calls in flight count as the same."""
    guard = LoopGuard(Policy(limits=NO_CAPS))
    decisions = [
        guard.before(ToolCall(tool="delegate", args={"brief": "audit"}, call_id=f"level-{n}", agent=f"agent-{n}"))
        for n in range(3)
    ]
    assert [decision.action for decision in decisions] == [Action.EXECUTE, Action.EXECUTE, Action.STOP]
    assert decisions[-1].reason is Reason.SAME_CALL_REPEAT


def test_v22_a_chain_of_children_ends_at_the_depth_cap() -> None:
    policy = Policy()
    depths = [decide_child(policy, Evidence(), depth, 1) for depth in range(1, 6)]
    assert [verdict.action for verdict in depths] == [Action.EXECUTE] * 4 + [Action.STOP]
    assert depths[-1].reason is Reason.DEPTH_CAP


def test_v23_going_from_tool_to_tool_is_no_way_out_of_a_refusal() -> None:
    steps = [Step(tool=name, args={"n": 1}, fault=ErrorClass.DENIED) for name in ("mail", "chat", "sms")]
    story = play(steps)
    assert (story.stopped_at, story.ended) == (3, Reason.ERROR_STREAK)


def test_v24_empty_replies_with_nudges_of_the_host_between_run_into_the_turn_ceiling() -> None:
    guard = LoopGuard()
    for _ in range(5):
        assert guard.before_turn().action is Action.EXECUTE
        guard.after_turn(input_tokens=10)
    decision = guard.before_turn()
    assert (decision.action, decision.reason) == (Action.STOP, Reason.TURN_CEILING)


def test_v25_answers_are_compared_to_their_very_end() -> None:
    body = "line of text\n" * 8_000
    same = play([Step(tool="cat", answer=body + "end")] * 3)
    assert same.stopped_at == 3
    differs_at_the_end = play([Step(tool="cat", answer=f"{body} end {n}") for n in range(6)])
    assert differs_at_the_end.stopped_at is None


# -- N: legitimate work


def test_n1_a_status_that_changes_fifteen_times() -> None:
    assert play([Step(tool="status", answer=f"{n * 6} % done") for n in range(15)]).stopped_at is None


def test_n2_a_declared_poll_that_is_unchanged_twelve_times() -> None:
    steps = [*[Step(tool="status", answer="running")] * 12, Step(tool="status", answer="done")]
    assert play(steps, {"status": POLL}).stopped_at is None


def test_n3_looking_and_sleeping_in_turn() -> None:
    sleep = Step(tool="sleep", answer="ok")
    steps = list(chain.from_iterable((Step(tool="status", answer=f"{n} of 9"), sleep) for n in range(9)))
    assert play(steps).stopped_at is None
    assert play(steps, {"status": POLL, "sleep": WAIT}).stopped_at is None


def test_n4_twenty_pages_by_cursor() -> None:
    steps = [Step(tool="page", args={"cursor": n}, answer=[f"row {n}"]) for n in range(20)]
    assert play(steps, {"page": READ}).stopped_at is None


def test_n5_four_files_attached() -> None:
    assert play([Step(tool="attach", args={"file": name}, answer=True) for name in "abcd"]).stopped_at is None


def test_n6_edit_and_test_with_a_better_result_each_time() -> None:
    steps = list(
        chain.from_iterable(
            (Step(tool="edit", args={"n": n}, answer="ok"), Step(tool="test", answer=f"{9 - n} failed"))
            for n in range(9)
        )
    )
    assert play(steps).stopped_at is None


def test_n6_an_unchanged_result_with_a_new_workspace_hash_is_progress() -> None:
    steps = list(
        chain.from_iterable(
            (
                Step(tool="edit", args={"n": n}, answer=progress("ok", f"tree-{n}")),
                Step(tool="test", answer=progress("2 failed", f"tree-{n}")),
            )
            for n in range(9)
        )
    )
    assert play(steps).stopped_at is None


def test_n7_twenty_reads_in_one_message() -> None:
    story = play(rounds(reads("abcdefghijklmnopqrst")), {"read": READ})
    assert len(story.executed) == 20


def test_n8_clicks_and_an_argumentless_look_at_a_page_that_changes() -> None:
    steps = list(
        chain.from_iterable(
            (Step(tool="click", args={"n": n}, answer="ok"), Step(tool="snapshot", answer=f"page {n}: a form"))
            for n in range(10)
        )
    )
    assert play(steps).stopped_at is None


def test_n9_a_new_list_each_time_with_one_acknowledgement() -> None:
    assert play([Step(tool="todo", args={"items": [n]}, answer="saved") for n in range(12)]).stopped_at is None


def test_n10_twenty_rows_updated() -> None:
    tool = ToolPolicy(effect="write", idempotency_key="{row}")
    steps = [Step(tool="update", args={"row": n}, answer="OK") for n in range(20)]
    assert play(steps, {"update": tool}).stopped_at is None


def test_n11_the_same_call_for_five_messages_of_the_user_and_in_five_ticks_of_a_timer() -> None:
    asked = [Step(tool="balance", answer="12.00", user_speaks=True)] * 5
    assert play(asked).stopped_at is None
    assert all(play([Step(tool="heartbeat", answer="alive")]).stopped_at is None for _ in range(5))


def test_n12_one_re_read_of_each_file() -> None:
    assert play([*reads("abcdefgh"), *reads("abcdefgh")]).stopped_at is None


def test_n13_grep_move_and_edit_for_each_file() -> None:
    steps = [
        Step(tool=tool, args={"file": name}, answer="" if tool == "mv" else f"{tool} {name}")
        for name in "abcdef"
        for tool in ("grep", "mv", "edit")
    ]
    assert play(steps).stopped_at is None


def test_n14_five_different_queries_in_one_message() -> None:
    steps = rounds([Step(tool="metric", args={"name": name}, answer=0) for name in "abcde"])
    assert len(play(steps, {"metric": READ}).executed) == 5


def test_n15_six_rate_limits_are_an_outage_and_no_loop() -> None:
    limited: ToolResult[object] = ToolResult(status="retryable", error_class=ErrorClass.RATE_LIMIT)
    steps = [*[Step(tool="api", answer=limited)] * 6, Step(tool="api", answer="ok")]
    story = play(steps, limits=replace(NO_CAPS, retries_max=6))
    assert story.stopped_at is None
    assert story.ran("api") == 7


def test_n16_three_transport_retries_of_one_operation_are_one_attempt_at_it() -> None:
    late: ToolResult[object] = ToolResult(status="retryable", error_class=ErrorClass.TIMEOUT)
    steps = [Step(tool="api", answer=late, call_id="c1")] * 3 + [Step(tool="api", answer="ok", call_id="c1")]
    guard = LoopGuard(Policy(limits=NO_CAPS))
    assert drive(guard, steps).stopped_at is None
    assert guard.counters.retries == 3
    assert len(guard.evidence.trail) == 1


def test_n17_a_pause_for_approval_between_identical_calls_neither_hides_nor_invents_a_loop() -> None:
    now = [1_000_000]
    guard = LoopGuard(clock=lambda: now[0])
    look = Step(tool="look", answer="same")
    drive(guard, [look])
    fold.paused(guard.evidence, now[0])
    now[0] += 3_600_000_000  # a person takes an hour
    fold.continued(guard.evidence, now[0])
    story = drive(guard, [look, look])
    assert story.ran("look") == 1
    assert guard.counters.elapsed_ms == 0
    assert story.stopped_at == 2


def test_n18_a_tool_that_waits_for_a_person_may_be_asked_again_and_again() -> None:
    assert play([Step(tool="ask_user", answer="no answer yet")] * 25, {"ask_user": WAIT}).stopped_at is None


# -- B: behaviour

LADDER: Final = ("warn", "block", "stop")


def climber(**limits: int) -> LoopGuard:
    return LoopGuard(Policy(limits=replace(NO_CAPS, no_progress_max=100, **limits), on_trip=LADDER))


def test_b1_a_blocked_attempt_climbs_the_ladder() -> None:
    story = drive(climber(), [Step(tool="look", answer="same")] * 6)
    actions = [decision.action for decision in story.decisions]
    assert actions == [Action.EXECUTE, Action.EXECUTE, Action.EXECUTE, Action.BLOCK, Action.STOP]
    assert story.decisions[2].warning is not None


def test_b2_after_a_stop_every_call_is_answered_with_that_stop() -> None:
    guard = LoopGuard()
    drive(guard, [Step(tool="look", answer="same")] * 3)
    for name in ("look", "read", "other"):
        decision = guard.before(ToolCall(tool=name))
        assert (decision.action, decision.reason) == (Action.STOP, Reason.SAME_CALL_REPEAT)
        assert decision.message
    assert guard.before_turn().action is Action.STOP


def test_b3_a_stop_by_a_guard_is_no_success() -> None:
    guards = [reason for reason, ending in ENDINGS.items() if ending.exit_code == 0]
    assert guards == [Reason.COMPLETE]


def test_b4_what_is_packed_between_attempt_and_outcome_comes_back_with_the_same_counts() -> None:
    """The crash itself, with a real process and a real store, is tested with the store."""
    guard = LoopGuard()
    guard.before(ToolCall(tool="look", call_id="c1"))
    back = Evidence.unpack(guard.evidence.pack())
    assert back.steps == 1
    assert back.pending.keys() == {"c1"}
    assert back.counters(0) == guard.evidence.counters(0)


@pytest.mark.skip(reason="two processes share a run through a store: tests/store")
def test_b5_two_processes_on_one_run_get_one_decision() -> None:
    """Here so that no vector is missing from the list."""


def test_b6_what_a_host_does_to_its_transcript_changes_nothing_here() -> None:
    """The guard is fed with calls and whole answers alone; there is no way to tell it of a compaction."""
    guard = LoopGuard()
    drive(guard, [Step(tool="look", answer="x" * 50_000)])
    before = guard.evidence.pack()
    guard.before_turn()
    guard.after_turn(input_tokens=5)
    assert guard.evidence.calls == Evidence.unpack(before).calls
    assert drive(guard, [Step(tool="look", answer="x" * 50_000, call_id="again")] * 2).stopped_at == 2


def test_b7_turns_open_no_epoch_and_a_real_person_does() -> None:
    guard = LoopGuard()
    guard.before_turn()
    guard.after_turn(input_tokens=1)
    assert guard.evidence.epoch == 0
    guard.user_input()
    assert guard.evidence.epoch == 1


def test_b8_a_warning_that_was_obeyed_is_forgotten_and_a_new_loop_is_warned_first() -> None:
    guard = climber()
    look = Step(tool="look", answer="same")
    drive(guard, [look] * 3)
    drive(guard, [Step(tool="read", args={"n": n}, answer=f"text {n}") for n in range(20)])
    again = drive(guard, [look] * 3)
    assert [decision.warning is not None for decision in again.decisions] == [False, False, True]
    other = drive(guard, [Step(tool="other", answer="same")] * 3)
    assert [decision.warning is not None for decision in other.decisions] == [False, False, True]


def test_b8_all_loops_together_get_three_warnings() -> None:
    guard = climber()
    for name in "abc":
        story = drive(guard, [Step(tool=name, answer="same")] * 3)
        assert story.decisions[-1].warning is not None
    story = drive(guard, [Step(tool="d", answer="same")] * 5)
    assert [decision.action for decision in story.decisions[2:]] == [Action.BLOCK, Action.BLOCK, Action.STOP]


def test_b9_a_named_change_lets_one_attempt_through() -> None:
    guard = LoopGuard(Policy(limits=NO_CAPS))
    again: ToolResult[object] = ToolResult(status="retryable")
    call = ToolCall(tool="api", args={"n": 1})
    changed = replace(call, change="authorisation")
    guard.before(call)
    guard.after(call, again)
    assert guard.before(call).action is Action.BLOCK
    assert guard.before(changed).action is Action.EXECUTE
    guard.after(changed, again)
    assert guard.before(call).action is Action.BLOCK


def test_b10_a_fault_inside_the_guard_lets_nothing_through_and_changes_nothing() -> None:
    def broken() -> int:
        raise OSError("no clock")

    guard = LoopGuard(clock=broken)
    with pytest.raises(OSError, match="no clock"):
        guard.before(ToolCall(tool="look"))
    assert guard.evidence == Evidence()


def test_b11_ten_thousand_calls_stay_in_bounds_and_what_is_forgotten_is_counted() -> None:
    guard = LoopGuard(Policy(limits=NO_CAPS))
    drive(guard, [Step(tool="read", args={"n": n}, answer=f"text {n}") for n in range(10_000)])
    assert len(guard.evidence.pack()) <= PACKED_BYTES_MAX
    assert guard.evidence.evictions == 10_000 - CALLS_MAX


def test_b11_noise_cannot_push_a_count_out_of_the_window() -> None:
    """Sixty-four remembered calls are more than any window holds."""
    limits = replace(NO_CAPS, call_window=32)
    noise = [Step(tool="read", args={"n": n}, answer=f"text {n}") for n in range(30)]
    look = Step(tool="look", answer="same")
    story = play([look, *noise[:15], look, *noise[15:], look], limits=limits)
    assert (story.stopped_at, story.ended) == (33, Reason.SAME_CALL_REPEAT)


def test_b12_no_argument_and_no_answer_stands_in_evidence_or_message() -> None:
    guard = LoopGuard()
    story = drive(guard, [Step(tool="look", args={"password": "hunter2"}, answer="the secret answer is plugh")] * 3)
    told = " ".join(decision.message for decision in story.decisions)
    assert story.decisions[-1].message
    for secret in ("hunter2", "password", "plugh"):
        assert secret not in told
        assert secret.encode() not in guard.evidence.pack()
