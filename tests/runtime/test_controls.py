"""What an operator may order: freeze, deny, kill, resume; and that nothing else happens than what was ordered."""

from __future__ import annotations

import json

import pytest

import endstop as es
from endstop.core.transitions import OperationState
from tests.runtime.scenes import READ, SPEC, WIDE, WRITE, Scene, StillClock, counting, stops

TOOLS = {"save": WRITE, "look": READ, "crm.update": WRITE}


# -- Freeze


def test_a_freeze_refuses_retries_children_and_handoffs_and_nothing_else(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    look, looked = counting(lambda number: number)
    later: es.ToolResult[object] = es.ToolResult(status="retryable", retry_after_ms=0)
    with guard.run(SPEC, run_id="r1") as run:
        run.call(counting(later)[0], {"q": "again"}, tool="look")
        scene.another(guard).freeze("r1", reason="target is degraded", actor="ops")
        assert guard.show("r1").state is es.RunState.FROZEN
        # Ordinary calls, writes and model calls go on.
        assert run.call(look, {"q": 1}, tool="look").value == 1
        assert run.call(look, {"key": "a"}, tool="save").value == 2
        with run.model_call() as turn:
            turn.record(input_tokens=1)
        # A retry of a tool, a retry of a model call, a child and a handoff do not.
        refused = run.call(look, {"q": "again"}, tool="look")
        assert refused.reason is es.Reason.FROZEN
        with pytest.raises(es.NotAuthorisedError, match="frozen"), run.model_call(is_retry=True):
            pytest.fail("sent")
        with pytest.raises(es.UsageError, match="frozen"):
            run.child(agent="a")
        with pytest.raises(es.UsageError, match="frozen"):
            run.handoff("b")
        assert guard.unfreeze("r1") == 1
        assert guard.show("r1").state is es.RunState.RUNNING
        assert run.call(look, {"q": "again"}, tool="look").value == 3
        run.child(agent="a")
    assert len(looked) == 3


def test_a_freeze_of_all_holds_runs_that_start_later(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1"):
        guard.freeze(reason="all hands")
        assert guard.show("r1").state is es.RunState.FROZEN
        with guard.run(SPEC, run_id="r2") as later:
            assert guard.show("r2").state is es.RunState.FROZEN
            with pytest.raises(es.UsageError, match="frozen"):
                later.child(agent="a")
            guard.unfreeze()
            assert {run.state for run in guard.runs()} == {es.RunState.RUNNING}
            later.child(agent="a")


def test_one_runs_unfreeze_lifts_no_freeze_of_all(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1") as run:
        guard.freeze()
        guard.freeze("r1")
        assert guard.unfreeze("r1") == 1
        assert guard.show("r1").state is es.RunState.FROZEN
        with pytest.raises(es.UsageError, match="frozen"):
            run.child(agent="a")


def test_a_freeze_outlives_a_restart_and_a_resume(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1"):
        guard.freeze("r1")
    with guard.run(run_id="r1"):
        assert guard.show("r1").state is es.RunState.FROZEN
    guard.stop("r1")
    guard.resume("r1", change="strategy", reason="r")
    assert guard.show("r1").state is es.RunState.FROZEN
    guard.stop("r1")
    guard.unfreeze("r1")
    guard.resume("r1", change="strategy", reason="r")
    assert guard.show("r1").state is es.RunState.RUNNING


# -- Deny


@pytest.mark.parametrize(
    ("rule", "denied", "allowed"),
    [
        ({"tool": "crm.*"}, ("crm.update", {"key": "a"}), ("look", {"key": "a"})),
        ({"effect": "write"}, ("save", {"key": "a"}), ("look", {"key": "a"})),
        ({"effect": "write"}, ("undeclared", {"key": "a"}), ("look", {"key": "a"})),
        ({"args": {"to.host": "*.example.org"}}, ("look", {"to": {"host": "a.example.org"}}), ("look", {"to": "b"})),
        ({"tool": "look", "args": {"n": "1*"}}, ("look", {"n": 12}), ("look", {"n": 21})),
    ],
)
def test_a_deny_rule_refuses_what_fits_it_and_the_run_goes_on(
    scene: Scene, rule: dict[str, object], denied: tuple[str, dict[str, object]], allowed: tuple[str, dict[str, object]]
) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    tool, calls = counting()
    with guard.run(SPEC) as run:
        order = scene.another(guard).deny(**rule)  # type: ignore[arg-type]  # parts of a rule
        refused = run.call(tool, denied[1], tool=denied[0])
        assert (refused.reason, refused.error_class) == (es.Reason.DENY_RULE, es.ErrorClass.DENIED)
        assert refused.status is es.Status.POLICY_BLOCKED
        assert not calls
        run.call(tool, allowed[1], tool=allowed[0])
        assert len(calls) == 1
        assert guard.undeny(rule_id=order.control_id) == 1
        run.call(tool, denied[1], tool=denied[0])
    assert len(calls) == 2


def test_a_deny_rule_of_one_run_binds_that_run_and_its_children(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    tool, _ = counting()
    with guard.run(SPEC, run_id="r1") as run, guard.run(SPEC, run_id="r2") as other:
        child = run.child(agent="a")
        guard.deny(run_id=child.run_id, effect="write")
        assert child.call(tool, {"key": "a"}, tool="save").reason is es.Reason.DENY_RULE
        assert run.call(tool, {"key": "b"}, tool="look").reason is None
        assert other.call(tool, {"key": "a"}, tool="save").reason is None


def test_an_agent_that_is_denied_twice_is_stopped(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    tool, calls = counting()
    guard.deny(tool="save", reason="planted-secret", args={"key": "planted*"})
    with stops() as stopped, guard.run(SPEC) as run:
        for number in range(5):
            run.call(tool, {"key": f"planted-{number}"}, tool="save")
    envelope = stopped.value.envelope
    assert envelope.terminal_reason is es.Reason.DENY_RULE
    assert run.record().counters.blocked == 1
    assert calls == []
    assert "planted" not in str(envelope)


def test_a_deny_rule_names_something(scene: Scene) -> None:
    with pytest.raises(es.UsageError, match="names a tool"):
        scene.open().deny(reason="everything")


# -- Kill


def test_kill_ends_every_run_and_refuses_new_ones_until_it_is_withdrawn(scene: Scene) -> None:
    guard = scene.open()
    tool, calls = counting()
    with stops() as stopped, guard.run(SPEC, run_id="r1") as run:
        assert scene.another(guard).kill(all=True, reason="on fire", actor="ops") == ("r1",)
        run.call(tool, {})
    assert stopped.value.envelope.terminal_reason is es.Reason.KILL_SWITCH
    assert stopped.value.envelope.message == "on fire"
    with stops() as refused, guard.run(SPEC, run_id="r2"):
        pytest.fail("entered")
    assert refused.value.envelope.terminal_reason is es.Reason.KILL_SWITCH
    assert guard.show("r2").owners == ()
    with pytest.raises(es.ResumeRefusedError, match="unkill"):
        guard.resume("r1", change="strategy", reason="r")
    assert guard.unkill(reason="out") == 1
    assert guard.resume("r1", change="strategy", reason="r") == 2
    with guard.run(run_id="r1") as run, guard.run(SPEC, run_id="r3"):
        run.call(tool, {})
    assert len(calls) == 1


def test_kill_by_label_ends_the_runs_that_carry_it(scene: Scene) -> None:
    guard = scene.open()
    for run_id, labels in (("r1", {"team": "seo"}), ("r2", {"team": "crm"}), ("r3", {})):
        with guard.run(SPEC, run_id=run_id, labels=labels):
            pass
    assert guard.kill(label="team=seo") == ("r1",)
    assert guard.kill(label="team") == ("r2",)
    assert guard.show("r3").state is es.RunState.RUNNING
    with stops(), guard.run(SPEC, labels={"team": "new"}):
        pytest.fail("entered")
    with guard.run(SPEC, labels={"squad": "seo"}):
        pass
    assert guard.unkill(label="team") == 1
    with stops(), guard.run(SPEC, labels={"team": "seo"}):
        pytest.fail("entered")


def test_kill_says_whom(scene: Scene) -> None:
    guard = scene.open()
    for more in ({}, {"label": "a", "all": True}):
        with pytest.raises(es.UsageError, match="names a label"):
            guard.kill(**more)  # type: ignore[arg-type]  # neither, or both


# -- Resume


def test_a_run_that_a_cap_ended_needs_that_limit_raised(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=es.Limits(steps_max=2, wall_ms_max=600_000), tools=TOOLS))
    tool, calls = counting(lambda number: number)
    with stops(), guard.run(SPEC, run_id="r1") as run:
        for number in range(3):
            run.call(tool, {"n": number}, tool="look")
    before = guard.show("r1")
    for change in (
        "strategy", "limit:turns_max=40", "limit:steps_max=2", "limit:steps_max=1", "limit:steps_max=²",
        "limit:steps_max=99999999999999999999", "limit:steps_max=x", "limit:bogus=3", "limit:",
        "limit:spend_nanos_max=5", "again", "",
    ):  # fmt: skip
        with pytest.raises(es.ResumeRefusedError):
            guard.resume("r1", change=change, reason="please")
    with pytest.raises(es.ResumeRefusedError, match="reason"):
        guard.resume("r1", change="limit:steps_max=4", reason=" ")
    assert guard.show("r1") == before
    assert guard.resume("r1", change="limit:steps_max=4", reason="the list is longer") == 2
    with stops() as stopped, guard.run(run_id="r1") as run:
        assert (run.generation, run.limits.steps_max) == (2, 4)
        for number in range(10):
            run.call(tool, {"n": number + 10}, tool="look")
    assert len(calls) == 4
    assert stopped.value.envelope.generation == 2
    assert stopped.value.envelope.counters.steps == 4


def test_a_budget_that_nobody_set_cannot_be_raised(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1"):
        pass
    guard.stop("r1")
    with pytest.raises(es.ResumeRefusedError, match="no maximum"):
        guard.resume("r1", change="limit:spend_nanos_max=5", reason="r")


def test_a_run_that_lives_or_is_complete_is_not_resumed(scene: Scene) -> None:
    guard = scene.open()
    with guard.run(SPEC, run_id="r1") as run:
        with pytest.raises(es.ResumeRefusedError, match="running"):
            guard.resume("r1", change="strategy", reason="r")
        run.complete()
    with pytest.raises(es.ResumeRefusedError, match="complete"):
        guard.resume("r1", change="strategy", reason="r")
    with pytest.raises(es.RunNotFoundError):
        guard.resume("r9", change="strategy", reason="r")


def test_a_resumed_run_keeps_its_totals_its_checkpoint_and_its_progress_version(scene: Scene) -> None:
    clock = StillClock()
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS), clock=clock)
    with stops(), guard.run(SPEC, run_id="r1", initial_progress_version=40) as run:
        answer: es.ToolResult[object] = es.ToolResult(value="x", progress_version=41)
        run.call(counting(answer)[0], {"n": 1}, tool="look")
        with run.model_call() as turn:
            turn.record(input_tokens=5, output_tokens=6, spend_nanos=7)
        run.checkpoint({"cursor": [1, "é"]})
        clock.pass_ms(1_234)
        guard.stop("r1")
    clock.pass_ms(99_999)
    guard.resume("r1", change="cursor", reason="moved on")
    with stops("no_progress"), guard.run(run_id="r1") as run:
        assert run.resumed_from == {"cursor": [1, "é"]}
        assert run.progress_version == 41
        counters = run.counters
        assert (counters.steps, counters.turns, counters.input_tokens, counters.output_tokens) == (1, 1, 5, 6)
        assert (counters.spend_nanos, counters.elapsed_ms) == (7, 1_234)
        # The saved version again, three times, is nothing new.
        for number in range(9):
            run.call(counting(answer)[0], {"look": number}, tool="look")
    assert guard.show("r1").counters.steps == 4


def test_a_person_is_waited_for_durably(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    asks: es.ToolResult[object] = es.ToolResult(status="human_required", message="approve the payout of 300 EUR")
    with stops() as stopped, guard.run(SPEC, run_id="r1") as run:
        run.checkpoint({"paid": 0})
        run.call(counting(asks)[0], {"key": "a"}, tool="save")
    envelope = stopped.value.envelope
    assert envelope.terminal_reason is es.Reason.HUMAN_REQUIRED
    assert envelope.next_allowed_action is es.NextAction.HUMAN_REVIEW
    assert envelope.message == "approve the payout of 300 EUR"
    assert envelope.last_safe_checkpoint == '{"paid":0}'
    assert guard.show("r1").state is es.RunState.PAUSED
    with stops(), guard.run(run_id="r1"):
        pytest.fail("entered")
    guard.resume("r1", change="authorisation", reason="approved by a person")
    pay, paid = counting()
    with guard.run(run_id="r1") as run:
        # The write was proven not applied, and the resume named what has changed.
        assert run.call(pay, {"key": "a"}, tool="save").reason is None
        run.complete()
    assert len(paid) == 1
    assert guard.operations()[0].state is OperationState.COMMITTED


def test_an_operation_in_doubt_blocks_its_key_after_a_resume_too(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))

    def save(key: str) -> None:
        raise RuntimeError(key)

    with stops(), guard.run(SPEC, run_id="r1") as run:
        with pytest.raises(es.OutcomeUnknownError):
            run.call(save, {"key": "a"})
        guard.stop("r1")
    guard.resume("r1", change="args", reason="r")
    tool, calls = counting()
    with guard.run(run_id="r1") as run:
        assert run.call(tool, {"key": "a"}, tool="save").reason is es.Reason.OUTCOME_UNKNOWN
    assert calls == []


# -- What is written down


def test_orders_are_entries_without_a_persons_words(scene: Scene) -> None:
    guard = scene.open(es.Policy(limits=WIDE, tools=TOOLS))
    with stops(), guard.run(SPEC, run_id="r1"):
        guard.freeze("r1", reason="planted-1", actor="ops")
        guard.unfreeze("r1", reason="planted-2", actor="ops")
        guard.deny(run_id="r1", tool="save", args={"to": "planted-3"}, reason="planted-4", actor="ops")
        guard.undeny(run_id="r1", reason="planted-5", actor="ops")
        guard.stop("r1", reason="planted-6", actor="ops")
    guard.resume("r1", change="strategy", reason="planted-7", actor="ops")
    guard.kill(all=True, reason="planted-8")
    leaves = [entry.leaf for entry in guard.store.entries(limit=1_000).result()]
    assert not [leaf for leaf in leaves if b"planted" in leaf]
    orders = [body["order"] for body in map(json.loads, leaves) if body["type"] == "control" and "control" in body]
    assert orders == ["freeze", "unfreeze", "deny", "undeny", "kill"]
    ends = [body for body in map(json.loads, leaves) if body["type"] in ("stop", "resume")]
    assert {body["actor"] for body in ends} == {"ops", "operator"}


def test_a_list_of_interrupted_runs_is_not_cut_short_by_living_ones(scene: Scene) -> None:
    guard = scene.open()
    for number in range(6):
        with guard.run(SPEC, run_id=f"r{number}") as run:
            if number < 2:
                run.complete()
    assert {run.run_id for run in guard.runs(states=["complete"], limit=2)} == {"r0", "r1"}
    assert len(guard.runs(limit=3)) == 3
