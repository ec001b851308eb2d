"""Operators' orders and the host's own refusals: what they stop, what they let pass, and that they add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from endstop import Action, ErrorClass, Policy, Reason, ToolCall, ToolPolicy
from endstop.core import fold
from endstop.core.decide import decide_call, decide_child, decide_handoff, decide_turn
from endstop.core.events import GO, Controls, DenyRule, Order, Proposal, Verdict
from endstop.core.evidence import Evidence
from endstop.core.propose import propose
from tests.core.kit import NO_CAPS, guard_of, proposal_of, turn_of, write_of
from tests.fixtures.driver import Step, drive

ORDER = Order(reason="looks wrong", actor="ann")
POLICY = Policy(limits=NO_CAPS)


def denied(rule: DenyRule, proposal: Proposal) -> bool:
    verdict = decide_call(POLICY, Evidence(), proposal, 1, controls=Controls(denies=(rule,)))
    return verdict.reason is Reason.DENY_RULE


def call(tool: str, args: dict[str, object] | str, policy: ToolPolicy | None = None) -> Proposal:
    return propose(ToolCall(tool=tool, args=args, call_id="c1"), policy or Policy().tool(tool))


# -- Stop and kill


@pytest.mark.parametrize(
    ("controls", "reason"),
    [
        (Controls(stop=ORDER), Reason.OPERATOR_CANCELLED_LOOP),
        (Controls(kill=ORDER), Reason.KILL_SWITCH),
        (Controls(stop=ORDER, kill=ORDER, frozen=ORDER), Reason.KILL_SWITCH),
    ],
)
def test_a_stop_and_a_kill_refuse_everything(controls: Controls, reason: Reason) -> None:
    evidence = Evidence()
    verdicts = [
        decide_call(POLICY, evidence, proposal_of(), 1, controls=controls),
        decide_turn(POLICY, evidence, turn_of(), 1, controls=controls),
        decide_handoff(POLICY, evidence, proposal_of("handoff"), 1, controls=controls),
        decide_child(POLICY, evidence, 1, 1, controls=controls),
    ]
    assert [(verdict.action, verdict.reason) for verdict in verdicts] == [(Action.STOP, reason)] * 4


def test_the_end_of_a_run_goes_before_every_order() -> None:
    evidence = Evidence(ended="step_cap")
    verdict = decide_call(POLICY, evidence, proposal_of(), 1, controls=Controls(kill=ORDER))
    assert (verdict.reason, verdict.guard) == (Reason.STEP_CAP, "latch")


def test_controls_go_before_the_wall_clock_and_the_wall_clock_before_steps() -> None:
    policy = Policy(limits=replace(NO_CAPS, wall_ms_max=1, steps_max=0))
    late = Evidence(running_since_us=1)
    rule = DenyRule(rule_id="r", tool="look")
    both = Controls(denies=(rule,))
    assert decide_call(policy, late, proposal_of(), 10**9, controls=both).reason is Reason.DENY_RULE
    assert decide_call(policy, late, proposal_of(), 10**9).reason is Reason.WALL_CLOCK_CAP
    assert decide_call(policy, late, proposal_of(), 2).reason is Reason.STEP_CAP


# -- Freeze


def test_a_freeze_refuses_retries_children_and_handoffs_and_lets_ordinary_calls_pass() -> None:
    frozen, evidence = Controls(frozen=ORDER), Evidence()
    assert decide_call(POLICY, evidence, proposal_of(), 1, controls=frozen).action is Action.EXECUTE
    assert decide_turn(POLICY, evidence, turn_of(), 1, controls=frozen).action is Action.EXECUTE
    refused = [
        decide_turn(POLICY, evidence, turn_of(retry=True), 1, controls=frozen),
        decide_handoff(POLICY, evidence, proposal_of("handoff"), 1, controls=frozen),
        decide_child(POLICY, evidence, 1, 1, controls=frozen),
    ]
    fold.let_through(evidence, proposal_of(), GO, 1, None)
    refused.append(decide_call(POLICY, evidence, proposal_of(), 1, controls=frozen))
    assert [(verdict.action, verdict.reason) for verdict in refused] == [(Action.BLOCK, Reason.FROZEN)] * 4


# -- Deny


def test_a_deny_rule_fits_by_tool_pattern() -> None:
    assert denied(DenyRule(rule_id="r", tool="crm.*"), call("crm.update", {}))
    assert not denied(DenyRule(rule_id="r", tool="crm.*"), call("mail.send", {}))
    assert not denied(DenyRule(rule_id="r", tool="CRM.*"), call("crm.update", {}))
    assert denied(DenyRule(rule_id="r"), call("anything", {}))


def test_a_deny_rule_fits_names_that_evidence_keeps_in_another_form() -> None:
    assert denied(DenyRule(rule_id="r", tool="büro.*"), call("büro.öffnen", {}))
    assert denied(DenyRule(rule_id="r", tool="bu\u0308ro.*"), call("b\u00fcro.x", {}))
    assert denied(DenyRule(rule_id="r", tool="x" * 150), call("x" * 150, {}))


def test_a_ban_on_writes_covers_effects_that_nobody_declared() -> None:
    rule = DenyRule(rule_id="r", effect="write")
    assert denied(rule, write_of())
    assert denied(rule, call("undeclared", {}))
    assert not denied(rule, call("read", {}, ToolPolicy(effect="read")))
    assert not denied(DenyRule(rule_id="r", effect="read"), call("undeclared", {}))


@pytest.mark.parametrize(
    ("path", "pattern", "fits"),
    [
        ("to", "*@example.org", True),
        ("to", "*@example.com", False),
        ("absent", "*", False),
        ("nothing", "*", False),
        ("amount", "500", True),
        ("deep.flag", "true", True),
        ("deep.list.0", "a", True),
        ("deep.list", '*"a","b"*', True),
        ("odd", "*", True),
        ("odd", "nothing like it", True),
    ],
)
def test_a_deny_rule_fits_by_argument(path: str, pattern: str, fits: bool) -> None:
    args: dict[str, object] = {
        "to": "ann@example.org", "nothing": None, "amount": 500, "deep": {"flag": True, "list": ["a", "b"]},
        "odd": object(),
    }  # fmt: skip
    assert denied(DenyRule(rule_id="r", args=((path, pattern),)), call("mail", args)) is fits


def test_every_part_of_a_deny_rule_must_fit() -> None:
    rule = DenyRule(rule_id="r", tool="mail", effect="unknown", args=(("to", "a*"), ("cc", "b*")))
    assert denied(rule, call("mail", {"to": "ann", "cc": "bob"}))
    assert not denied(rule, call("mail", {"to": "ann", "cc": "ann"}))
    assert not denied(rule, call("post", {"to": "ann", "cc": "bob"}))


def test_arguments_that_cannot_be_read_fit_every_rule_on_arguments() -> None:
    assert denied(DenyRule(rule_id="r", args=(("to", "nobody"),)), call("mail", "{broken"))


def test_the_first_rule_that_fits_is_named() -> None:
    rules = (DenyRule(rule_id="r1", tool="x"), DenyRule(rule_id="r2"), DenyRule(rule_id="r3"))
    verdict = decide_call(POLICY, Evidence(), proposal_of(), 1, controls=Controls(denies=rules))
    assert verdict.detail.rule == "r2"


def propose_denied(evidence: Evidence, tool: str, number: int, policy: Policy = POLICY) -> Verdict:
    proposal = replace(proposal_of(tool, n=number), call_id=f"c{number}")
    controls = Controls(denies=(DenyRule(rule_id="r", tool="mail*"),))
    verdict = decide_call(policy, evidence, proposal, 1, controls=controls)
    if verdict.action is Action.BLOCK:
        fold.refused(evidence, proposal, verdict)
    return verdict


def test_a_denied_call_is_blocked_once_and_the_second_in_a_row_ends_the_run() -> None:
    evidence = Evidence()
    assert propose_denied(evidence, "mail", 1).action is Action.BLOCK
    second = propose_denied(evidence, "mail", 2)
    assert (second.action, second.reason) == (Action.STOP, Reason.DENY_RULE)
    assert evidence.blocked == 1


def test_denied_calls_of_several_tools_end_the_run_at_the_third() -> None:
    evidence = Evidence()
    actions = [propose_denied(evidence, f"mail{n}", n).action for n in range(3)]
    assert actions == [Action.BLOCK, Action.BLOCK, Action.STOP]


def test_denials_end_an_observed_run_too() -> None:
    policy, evidence = Policy(on_trip=("observe",)), Evidence()
    propose_denied(evidence, "mail", 1, policy)
    assert propose_denied(evidence, "mail", 2, policy).reason is Reason.DENY_RULE


# -- The host's refusals


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (ErrorClass.UNKNOWN_TOOL, Reason.UNKNOWN_TOOL),
        (ErrorClass.SCHEMA, Reason.MALFORMED_CALL),
        (ErrorClass.DENIED, Reason.HOST_DENIED),
        (ErrorClass.AUTH, Reason.HOST_DENIED),
    ],
)
def test_a_call_that_the_host_refuses_is_blocked_by_its_name(fault: ErrorClass, reason: Reason) -> None:
    decision = guard_of().before(ToolCall(tool="t"), fault=fault)
    assert (decision.action, decision.reason) == (Action.BLOCK, reason)
    assert decision.detail.error_class is fault


def test_a_success_of_the_tool_between_forgives() -> None:
    bad, good = Step(tool="t", fault=ErrorClass.SCHEMA), Step(tool="t", answer="ok")
    steps = [replace(step, args={"n": n}) for n, step in enumerate([bad, good, bad, good, bad])]
    assert drive(guard_of(), steps).stopped_at is None


def test_refusals_of_one_round_count_once() -> None:
    steps = [Step(tool="t", args={"n": n}, fault=ErrorClass.SCHEMA, round_id="m1") for n in range(5)]
    story = drive(guard_of(), steps)
    assert {decision.action for decision in story.decisions} == {Action.BLOCK}
    more = drive(guard_of(), [*steps, Step(tool="t", fault=ErrorClass.SCHEMA, round_id="m2")])
    assert (more.stopped_at, more.ended) == (6, Reason.ERROR_STREAK)


def test_strict_tools_refuse_what_is_not_declared() -> None:
    guard = guard_of(tools={"known": ToolPolicy(effect="read")}, strict_tools=True)
    assert guard.before(ToolCall(tool="known")).action is Action.EXECUTE
    decision = guard.before(ToolCall(tool="other"))
    assert (decision.action, decision.reason) == (Action.BLOCK, Reason.UNDECLARED_TOOL)


def test_different_kinds_of_refusal_are_streaks_of_their_own() -> None:
    guard = guard_of(tools={"w": ToolPolicy(effect="write", idempotency_key="{id}")})
    steps = [
        Step(tool="w", fault=ErrorClass.SCHEMA),
        Step(tool="w", args={"n": 1}),
        Step(tool="w", args={"n": 2}, fault=ErrorClass.DENIED),
    ]
    assert drive(guard, steps).stopped_at is None
