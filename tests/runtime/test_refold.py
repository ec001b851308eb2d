"""Folding a run's entries gives the evidence that the store keeps, whatever happened in the run."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest

import endstop as es
from endstop.core.canonical import canonical_bytes
from endstop.core.evidence import Evidence
from endstop.core.propose import propose
from endstop.core.reasons import RunState
from endstop.core.refold import refold
from endstop.core.steps import LoseCall, ReserveCall
from endstop.core.steps_life import RecoverRun
from endstop.runtime.guard import Guard
from tests.runtime.scenes import SPEC, Scene, StillClock

TOOLS = {
    "look": es.ToolPolicy(effect="read"),
    "stamped": es.ToolPolicy(effect="read", volatile_result=("at",)),
    "page": es.ToolPolicy(effect="read", progress="cursor", progress_scope=("file",)),
    "poll": es.ToolPolicy(effect="poll", poll_interval_ms_min=5),
    "sleep": es.ToolPolicy(effect="wait"),
    "save": es.ToolPolicy(effect="write", idempotency_key="{n}"),
    "note": es.ToolPolicy(effect="write", idempotency_key="{n}", on_committed="replay"),
}
ROOMY = es.Limits(
    steps_max=10_000, turns_max=10_000, tokens_max=10**9, wall_ms_max=10**9, retries_max=10_000, handoffs_max=10_000
)
TIGHT = es.Limits(steps_max=60, turns_max=30, tokens_max=5_000, wall_ms_max=4_000, retries_max=6)
POLICIES = {
    "strict": es.Policy(limits=ROOMY, tools=TOOLS),
    "tight": es.Policy(limits=TIGHT, tools=TOOLS, strict_tools=True),
    "ladder": es.Policy(limits=ROOMY, tools=TOOLS, on_trip=("warn", "block", "stop")),
    "warned": es.Policy(limits=ROOMY, tools=TOOLS, on_trip=("warn", "stop")),
    "observed": es.Policy(limits=TIGHT, tools=TOOLS, on_trip=("observe",)),
}
# What no entry carries, by design; see `endstop.core.refold`.
LEFT_OUT = {"ended_message"}


def plain(evidence: Evidence) -> dict[str, object]:
    """Evidence as comparable values, without what entries do not carry."""
    found: dict[str, object] = {
        item.name: getattr(evidence, item.name) for item in fields(evidence) if item.name not in LEFT_OUT
    }
    last = evidence.last
    found["last"] = None if last is None else (last.fingerprint, last.answer, last.count)
    found["pending"] = {
        name: [getattr(call, item.name) for item in fields(call)] for name, call in evidence.pending.items()
    }
    # Opaque progress versions stand in entries as digests.
    found["versions"] = {
        source: f"{len(version)} opaque" if isinstance(version, list) else version
        for source, version in evidence.versions.items()
    }
    if isinstance(evidence.progress_version, str):
        found["progress_version"] = "opaque"
    # The order in which a bounded memory forgets is part of what it is.
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = [(key, list(part.items()) if isinstance(part, dict) else part) for key, part in value.items()]
    return found


def assert_folds_back(guard: Guard, run_id: str) -> None:
    stored = guard.store.evidence_of(run_id).result()
    assert stored is not None
    leaves, after = [], -1
    while page := guard.store.entries(run_id=run_id, after_index=after, limit=5_000).result():
        leaves += [entry.leaf for entry in page]
        after = page[-1].index
    folded = plain(refold(leaves, guard.show(run_id).limits))
    kept = plain(Evidence.unpack(stored))
    for name, value in kept.items():
        assert folded[name] == value, f"{name} differs after {len(leaves)} entries; the last is {leaves[-1]!r}"


class Agent:
    """Somebody who does everything that can be done to a run, by the dice."""

    def __init__(self, guard: Guard, clock: StillClock, seed: int) -> None:
        self.guard = guard
        self.clock = clock
        self.dice = random.Random(seed)
        self.run_id = f"r{seed}"
        self.round = 0
        self.ghosts = 0
        self.serial = 0
        self.did: set[str] = set()

    def play(self, moves: int) -> None:
        """Enter the run again and again until the moves are used up."""
        left = moves
        while left > 0:
            stretch = self.dice.randint(1, 40)
            left -= stretch
            try:
                with self.guard.run(
                    SPEC, run_id=self.run_id, initial_progress_version=self.dice.choice([None, 3])
                ) as run:
                    self.agents = [run]
                    for _ in range(stretch):
                        self.move()
            except es.RunStopped:
                self.did.add("stopped")
                if not self.resumed():
                    return
            except Quit:
                self.did.add("left by an error")
            self.clock.pass_ms(self.dice.choice([0, 1, 1_000]))
            assert_folds_back(self.guard, self.run_id)

    def resumed(self) -> bool:
        record = self.guard.show(self.run_id)
        if record.state is RunState.COMPLETE:
            return False
        assert record.envelope is not None
        from endstop.core.reasons import LIMIT_OF_REASON

        limit = LIMIT_OF_REASON.get(record.envelope.terminal_reason)
        change = self.dice.choice(["cursor", "strategy", "retry_after", "limit:call_window=20"])
        if change.startswith("limit") and record.limits.call_window >= 20:
            change = "args"
        if limit is not None:
            change = f"limit:{limit}={getattr(record.limits, limit) + 5_000}"
        self.guard.resume(self.run_id, change=change, reason="the dice say so")
        self.did.add("resumed")
        return True

    def move(self) -> None:
        moves: list[tuple[int, Callable[[], None]]] = [
            (50, self.call), (6, self.turn), (4, self.child), (4, self.hand_off), (2, self.user), (2, self.checkpoint),
            (2, self.freeze), (2, self.deny), (3, self.ghost), (1, self.stop), (1, self.quit), (4, self.rest),
            (2, self.late), (2, self.model_fault), (2, self.lose),
        ]  # fmt: skip
        chosen = self.dice.choices([move for _, move in moves], [weight for weight, _ in moves])[0]
        self.did.add(chosen.__name__)
        chosen()

    def agent(self) -> es.Run:
        return self.dice.choice(self.agents)

    # -- Moves

    def call(self) -> None:
        dice = self.dice
        tool = dice.choice([*TOOLS, "undeclared", "odd wörd"])
        if dice.random() < 0.3:
            self.round += 1
        args: dict[str, object] = {"n": dice.randrange(4), "file": dice.choice("ab")}
        fault = dice.choice([None] * 20 + list(es.ErrorClass)[:3])
        try:
            self.agent().call(
                self.tool, args if dice.random() < 0.97 else "{not json", tool=tool,
                call_id=dice.choice([None, None, f"c{dice.randrange(20)}"]),
                round_id=dice.choice([None, f"m{self.round}"]), change=dice.choice([None] * 5 + list(es.Change)),
                fault=fault,
            )  # fmt: skip
        except (LookupError, ConnectionError, TimeoutError, es.NotAppliedError, es.OutcomeUnknownError):
            self.did.add("a tool raised")
        except KeyboardInterrupt:
            self.did.add("interrupted")

    def tool(self, **args: object) -> object:
        dice = self.dice
        self.clock.pass_ms(dice.choice([0, 0, 1, 7]))
        answers: list[object] = [
            "ok", "ok", f"new {dice.randrange(10**6)}", "", None, {"at": dice.random(), "v": 1}, [],
            {"cursor": dice.randrange(12)}, {"cursor": "opaque"}, b"bytes",
            "a longer text with 14 words of 2 kinds in it",
            f"a longer text with {dice.randrange(99)} words of 2 kinds in it",
            es.ToolResult(value="x", progress_version=dice.randrange(9)),
            es.ToolResult(value="x", progress_version=2**60 + dice.randrange(3)),
            es.ToolResult(status="retryable"), es.ToolResult(status="retryable", retry_after_ms=dice.randrange(30)),
            es.ToolResult(error_class=dice.choice(list(es.ErrorClass)), message=f"said {dice.randrange(3)}"),
            es.ToolResult(error_class="not_found", progress_version=dice.randrange(9)),
        ]  # fmt: skip
        errors: list[BaseException] = [
            LookupError("gone"), ConnectionError("reset"), TimeoutError("late"), es.NotAppliedError("no"),
            KeyboardInterrupt(),
        ]  # fmt: skip
        ends = ["fatal", "permission_denied", "policy_blocked", "human_required"]
        if dice.random() < 0.01:
            return es.ToolResult(status=dice.choice(ends))
        if dice.random() < 0.08:
            raise dice.choice(errors)
        return dice.choice(answers)

    def turn(self) -> None:
        dice = self.dice
        model = dice.choice(["", "m", "größer"])
        with self.agent().model_call(
            model=model, output_tokens_max=dice.choice([None, 50]), input_tokens_max=dice.choice([None, 90])
        ) as turn:
            if dice.random() < 0.8:
                turn.record(
                    input_tokens=dice.randrange(90), output_tokens=dice.randrange(50),
                    cache_read_tokens=dice.randrange(9), cache_write_tokens=dice.randrange(2),
                    reasoning_tokens=dice.randrange(2), spend_nanos=dice.randrange(9),
                )  # fmt: skip

    def model_fault(self) -> None:
        try:
            with self.agent().model_call(output_tokens_max=9, is_retry=self.dice.random() < 0.5) as turn:
                turn.fail(self.dice.choice(["rate_limit", "outage"]))
                raise ConnectionError
        except (ConnectionError, es.NotAuthorisedError):
            pass

    def child(self) -> None:
        parent = self.agent()
        if parent.depth < 4:
            try:
                self.agents.append(parent.child(agent=self.dice.choice("xyzß")))
            except es.UsageError:
                self.did.add("frozen")

    def hand_off(self) -> None:
        try:
            self.agents.append(self.agent().handoff(self.dice.choice("xyz"), brief=str(self.dice.randrange(2))))
        except es.UsageError:
            self.did.add("frozen")

    def user(self) -> None:
        self.agent().user_input()

    def checkpoint(self) -> None:
        self.agent().checkpoint({"n": self.dice.randrange(9)})

    def freeze(self) -> None:
        run_id = self.dice.choice([None, self.run_id])
        if self.dice.random() < 0.5:
            self.guard.freeze(run_id)
        else:
            self.guard.unfreeze()

    def deny(self) -> None:
        if self.dice.random() < 0.5:
            self.guard.deny(tool=self.dice.choice(["look", "s*"]), run_id=self.dice.choice([None, self.run_id]))
        else:
            self.guard.undeny()

    def stop(self) -> None:
        self.guard.stop(self.run_id)

    def quit(self) -> None:
        raise Quit

    def rest(self) -> None:
        self.clock.pass_ms(self.dice.randrange(200))

    def reserved(self, owner: str) -> ReserveCall:
        """A call of a worker that is about to be lost."""
        self.serial += 1
        store, policy = self.guard.store, self.guard.policy
        key = store.run_key(self.run_id).result()
        assert key is not None
        call = es.ToolCall(tool="save", args={"n": f"lost{self.serial}"}, call_id=f"lost{self.serial}")
        proposal = propose(call, policy.tool("save"), run_key=key, store_key=store.store_key)
        return ReserveCall(
            run_id=self.run_id, now_us=self.clock.now_us(), policy=policy, proposal=proposal,
            operation_id=f"op_{proposal.key_digest}", owner_id=owner,
        )  # fmt: skip

    def lose(self) -> None:
        """A call that is let through and cut off."""
        step = self.reserved("nobody")
        answer = self.guard.store.transact_now(step)
        if answer.operation is not None:
            self.guard.store.transact_now(
                LoseCall(
                    run_id=self.run_id, now_us=self.clock.now_us(), proposal=step.proposal, operation=answer.operation,
                    sent=self.dice.random() < 0.5,
                )
            )  # fmt: skip

    def late(self) -> None:
        """A turn is open while the run ends, and settles afterwards."""
        with self.agent().model_call(output_tokens_max=7) as turn:
            if self.dice.random() < 0.3:
                self.guard.stop(self.run_id)
            turn.record(output_tokens=3)

    def ghost(self) -> None:
        """Another worker enters, has calls in flight, and dies; now and then as the last one inside."""
        self.ghosts += 1
        owner = f"ghost{self.ghosts}"
        guard = self.guard
        if guard.show(self.run_id).envelope is not None:
            return
        guard.store.open_run(
            guard.new_run(
                spec=SPEC, run_id=self.run_id, labels={}, agent="ghost", initial_progress_version=None, owner_id=owner
            )
        ).result()
        for _ in range(self.dice.randrange(3)):
            guard.store.transact_now(self.reserved(owner))
        everybody = frozenset(guard.store.run(self.run_id).result().owners)  # type: ignore[union-attr]  # it is there
        dead = everybody if self.dice.random() < 0.1 else frozenset({owner})
        self.clock.pass_ms(3)
        guard.store.transact_now(RecoverRun(run_id=self.run_id, now_us=self.clock.now_us(), dead_owners=dead))
        self.did.add("crashed" if dead == everybody else "recovered")


class Quit(Exception):
    """The agent leaves its block."""


# Both stores take the same steps; one seed of each policy shows that the file keeps them whole.
@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("kind", "seed"), [("sqlite", 0), *(("memory", seed) for seed in range(1, 6))])
def test_folding_the_entries_gives_the_stored_evidence(tmp_path: Path, kind: str, name: str, seed: int) -> None:
    scene = Scene(kind, tmp_path)
    clock = StillClock()
    guard = scene.open(POLICIES[name], clock=clock)
    guard.world.board.is_alive = lambda owner: not owner.startswith("ghost")  # type: ignore[method-assign]  # they are dead
    agent = Agent(guard, clock, seed)
    agent.play(500)
    assert_folds_back(guard, agent.run_id)
    assert len(guard.store.evidence_of(agent.run_id).result() or b"") <= 64 * 1024
    scene.close()


def test_the_dice_do_everything() -> None:
    did: set[str] = set()
    for policy in POLICIES.values():
        for seed in range(3):
            clock = StillClock()
            with es.open("memory:", policy=policy, clock=clock) as guard:
                guard.world.board.is_alive = lambda owner: not owner.startswith("ghost")  # type: ignore[method-assign]  # dead
                agent = Agent(guard, clock, seed)
                agent.play(300)
                did |= agent.did
                entries = guard.store.entries(limit=9_000).result()
                did |= {f"entry {orjson.loads(entry.leaf)['type']}" for entry in entries}
    wanted = {
        "stopped", "resumed", "crashed", "recovered", "frozen", "a tool raised", "interrupted", "left by an error",
        *(f"entry {kind}" for kind in (
            "run_open", "run_join", "run_leave", "call_intent", "call_refused", "call_replayed", "result", "lost",
            "turn_intent", "turn_refused", "turn", "handoff", "child", "checkpoint", "user_input", "control", "stop",
            "resume", "recover",
        )),
    }  # fmt: skip
    assert wanted - did == set()


def test_no_entry_holds_an_argument_an_answer_or_a_word_of_the_spec(scene: Scene) -> None:
    """Secrets are planted wherever an agent or a tool can put text."""
    secret = "planted-Gå"  # in two spellings: as it is and escaped
    spec = es.Spec(what_it_does=f"{secret}1", what_it_does_not=f"{secret}2", done_looks_like=f"{secret}3")
    tools = {"save": es.ToolPolicy(effect="write", idempotency_key="{n}"), "look": es.ToolPolicy(effect="read")}
    guard = scene.open(es.Policy(limits=ROOMY, tools=tools))
    answers: list[object] = [
        f"{secret}4", {f"{secret}5": [f"{secret}6"]}, es.ToolResult(value=f"{secret}7", message=f"{secret}8"),
        es.ToolResult(status="retryable", message=f"{secret}9", next_allowed_action=f"{secret}10"),
        es.ToolResult(error_class="tool_failed", message=f"{secret}11"),
        es.ToolResult(error_class="auth", message=secret),
    ]  # fmt: skip
    endings: list[object] = [
        es.ToolResult(status=status, message=f"{secret}12", value=f"{secret}13")
        for status in ("fatal", "permission_denied", "policy_blocked", "complete")
    ]
    errors = [PermissionError(f"{secret}14"), LookupError(f"{secret}15"), ConnectionError(f"{secret}16")]
    envelopes = []
    for number, end in enumerate([*endings, errors[0]]):
        with pytest.raises((es.RunStopped, Quit)) as raised, guard.run(spec, run_id=f"r{number}") as run:
            for place, answer in enumerate([*answers, *errors[1:], end]):
                for tool in ("look", "save", "undeclared"):
                    _try(run, answer, tool, {"n": f"{secret}{number}.{place}", f"{secret}": {"deep": f"{secret}17"}})
            _try(run, "ok", "look", f"{{{secret}18")
            run.checkpoint({"n": number})
            run.child(agent="a", brief=f"{secret}19").handoff("b", brief=f"{secret}20")
            with run.model_call(model="m", input_digest=canonical_bytes([1]).hex()) as turn:
                turn.record(input_tokens=1)
            raise Quit
        if isinstance(raised.value, es.RunStopped):
            envelopes.append(raised.value.envelope)
    assert len(envelopes) == len(endings) + 1
    leaves = [entry.leaf for entry in guard.store.entries(limit=9_000).result()]
    assert len(leaves) > 100
    for leaf in leaves:
        assert b"planted" not in leaf, leaf
    for envelope in envelopes:
        # Names of arguments are shown, with the sizes of their values; no value is.
        shown = str(envelope).replace("planted-G?~", "")
        assert "planted" not in shown, shown
    for row in guard.store.ledger_rows(limit=9_000).result():
        assert "planted" not in str(row)


def _try(run: es.Run, answer: object, tool: str, args: Any) -> None:
    def told(**_: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with suppress(LookupError, ConnectionError, es.OutcomeUnknownError, PermissionError):
        run.call(told, args, tool=tool)
