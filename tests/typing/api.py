"""Never run, only type-checked: what this file writes, a user may write, and it means what it says here."""

from __future__ import annotations

from typing import assert_never, assert_type

import endstop as es

# --- a spec, limits and a policy --------------------------------------------------------------------------------------

spec = es.Spec(
    what_it_does="updates one contact", what_it_does_not="deletes", done_looks_like="the version grew by one"
)
assert_type(spec.done_looks_like, str)

limits = es.Limits(
    steps_max=20,
    turns_max=5,
    tokens_max=15_000,
    wall_ms_max=60_000,
    retries_max=3,
    handoffs_max=8,
    depth_max=4,
    spend_nanos_max=None,
    same_call_max=2,
    call_window=8,
    cycle_period_max=8,
    cycle_repeats_max=2,
    no_progress_max=3,
    same_answer_max=8,
    error_streak_max=3,
    poll_unchanged_max=30,
)
assert_type(limits.wall_ms_max, int)
assert_type(limits.spend_nanos_max, int | None)

policy = es.Policy(
    limits=limits,
    tools={"crm.update": es.ToolPolicy(effect="write", idempotency_key="{contact_id}:{version}")},
    on_trip=("warn", "block", "stop"),
)
assert_type(es.Policy(), es.Policy)
assert_type(es.load_policy("endstop.toml"), es.Policy)


# --- the bare guard ---------------------------------------------------------------------------------------------------


def clock_us() -> int:
    return 0


guard = es.LoopGuard(policy, initial_progress_version=0, clock=clock_us)
bare = es.LoopGuard()

call = es.ToolCall(tool="search", args={"q": "x"}, call_id="c1")
before = guard.before(call)
after = guard.after(call, es.ToolResult(status="progress", value={"hits": 3}, progress_version=7))
assert_type(before, es.Decision)
assert_type(after, es.Decision)
assert_type(guard.before_turn(), es.Decision)
guard.after_turn(input_tokens=1_200, output_tokens=80)


def told(decision: es.Decision) -> str:
    """A decision's action is a closed set: a `match` over it needs no last case."""
    match decision.action:
        case es.Action.EXECUTE:
            return "go on"
        case es.Action.REPLAY | es.Action.WAIT:
            return "not now"
        case es.Action.BLOCK | es.Action.STOP:
            assert_type(decision.reason, es.Reason | None)
            return decision.message
        case unreachable:
            assert_never(unreachable)


# --- errors -----------------------------------------------------------------------------------------------------------


def caught() -> None:
    try:
        es.Spec(what_it_does="", what_it_does_not="x", done_looks_like="x")
    except es.SpecInvalidError as error:
        assert_type(error.code, str)
    except es.EndstopError:
        pass


def is_a_signal(halt: es.RunHalted, end: es.RunStopped) -> tuple[BaseException, Exception]:
    return halt, end
