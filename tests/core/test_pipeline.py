"""The life of one guarded call as a generator: what it asks for, and what it does when an answer does not come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import endstop as es
from endstop.core.commands import CallCut, Command, Execute, Recall, RecoverOwner, Remember, Returned, Transact
from endstop.core.pipeline import CallRequest, guarded_call, halted
from endstop.core.propose import propose
from endstop.core.steps import LoseCall
from endstop.core.transitions import OperationState
from endstop.errors import CommitUnknownError, InvariantError, StoreUnavailableError
from tests.core.stage import KEY, STORE_KEY, Stage


class Player:
    """Answers a flow's commands on a stage; `plays` may answer in its place or raise."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.asked: list[str] = []
        self.plays: Callable[[Command[Any]], object] = lambda command: None
        self.remembered: dict[tuple[str, str], es.ToolResult[object]] = {}

    def flow(self, tool: str = "save", call_id: str = "c1", round_id: str | None = None, **args: object) -> Any:
        stage = self.stage
        call = es.ToolCall(tool=tool, args=args or {"n": 1}, call_id=call_id, round_id=round_id)
        policy = stage.policy.tool(tool)
        proposal = propose(call, policy, run_key=KEY, store_key=STORE_KEY)
        return guarded_call(
            CallRequest(
                run_id="r1", policy=stage.policy, tool=policy, proposal=proposal, owner_id="w1", run_key=KEY,
                operation_id=None if proposal.key_digest is None else f"op_{proposal.key_digest}",
                call=lambda: "done", now_us=stage.at,
            )
        )  # fmt: skip

    def run(self, flow: Any) -> es.ToolResult[object]:
        answer: object = None
        error: BaseException | None = None
        try:
            while True:
                command = flow.send(answer) if error is None else flow.throw(error)
                answer, error = None, None
                try:
                    answer = self.answer(command)
                except BaseException as broken:
                    error = broken
        except StopIteration as done:
            result: es.ToolResult[object] = done.value
            return result

    def answer(self, command: Command[Any]) -> object:
        step = command.step if isinstance(command, Transact) else None
        self.asked.append(type(step or command).__name__)
        played = self.plays(command)
        if played is not None:
            return played
        match command:
            case Transact(step=step):
                return self.stage.apply(step)
            case Execute():
                return Returned(value=command.call(), took_us=2_000)
            case Recall():
                return self.remembered.get((command.round_id, command.fingerprint))
            case Remember():
                self.remembered[command.round_id, command.fingerprint] = command.result
                return None
            case RecoverOwner():
                return False
        raise AssertionError(command)

    def states(self) -> list[OperationState]:
        return [operation.state for operation in self.stage.operations.values()]


@pytest.fixture
def player() -> Player:
    return Player(Stage())


def playing(name: str, answer: Callable[[], object]) -> Callable[[Command[Any]], object]:
    """Answer the first command (or step) of that name in this way."""
    left = [name]

    def plays(command: Command[Any]) -> object:
        step = command.step if isinstance(command, Transact) else command
        if left and type(step).__name__ == left[0]:
            left.clear()
            return answer()
        return None

    return plays


def broken(error: BaseException) -> Callable[[], object]:
    def play() -> object:
        raise error

    return play


def test_a_call_is_reserved_executed_and_settled_in_this_order(player: Player) -> None:
    result = player.run(player.flow())
    assert result.value == "done"
    assert [name for name in player.asked if name in ("ReserveCall", "Execute", "SettleCall")] == [
        "ReserveCall", "Execute", "SettleCall",
    ]  # fmt: skip
    assert player.states() == [OperationState.COMMITTED]


def test_a_read_in_a_round_is_remembered_and_shared(player: Player) -> None:
    first = player.run(player.flow("look", "c1", "m1", q=1))
    second = player.run(player.flow("look", "c2", "m1", q=1))
    assert player.asked.count("Execute") == 1
    assert (first.value, second.value, second.replayed) == ("done", "done", True)


def test_a_twin_whose_answer_is_not_known_here_is_told_so(player: Player) -> None:
    player.run(player.flow("look", "c1", "m1", q=1))
    player.remembered.clear()
    second = player.run(player.flow("look", "c2", "m1", q=1))
    assert second.reason is es.Reason.ROUND_DUPLICATE
    assert second.replayed


def test_a_signal_before_the_tool_was_called_proves_that_nothing_was_sent(player: Player) -> None:
    player.plays = playing("Execute", broken(CallCut(KeyboardInterrupt(), sent=False)))
    with pytest.raises(KeyboardInterrupt):
        player.run(player.flow())
    assert player.states() == [OperationState.FAILED_RETRYABLE]
    assert player.stage.txn.evidence.pending == {}


@pytest.mark.parametrize("cut", [KeyboardInterrupt(), CallCut(GeneratorExit(), sent=True)], ids=repr)
def test_a_signal_in_the_tool_leaves_its_write_unknown(player: Player, cut: BaseException) -> None:
    player.plays = playing("Execute", broken(cut))
    with pytest.raises((KeyboardInterrupt, GeneratorExit)):
        player.run(player.flow())
    assert player.states() == [OperationState.UNKNOWN]


def test_a_dropped_flow_asks_for_nothing_more(player: Player) -> None:
    """As after a crash: what was reserved stays as it was."""
    flow = player.flow()
    command = next(flow)
    while not isinstance(command, Execute):
        command = flow.send(player.answer(command))
    flow.close()
    assert player.states() == [OperationState.EXECUTING]


@pytest.mark.parametrize("name", ["ReserveCall", "SettleCall"])
def test_a_signal_at_a_transaction_is_followed_by_the_record_that_fits(player: Player, name: str) -> None:
    player.plays = playing(name, broken(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        player.run(player.flow())
    assert player.asked[-1] == "LoseCall"
    assert player.states() == ([] if name == "ReserveCall" else [OperationState.UNKNOWN])


def test_a_store_that_refuses_the_reservation_is_told_as_it_is(player: Player) -> None:
    player.plays = playing("ReserveCall", broken(StoreUnavailableError("busy")))
    with pytest.raises(StoreUnavailableError):
        player.run(player.flow())
    assert "Execute" not in player.asked
    assert "LoseCall" not in player.asked


def test_a_reservation_of_unknown_commit_is_taken_back(player: Player) -> None:
    player.plays = playing("ReserveCall", broken(CommitUnknownError("dead line")))
    with pytest.raises(CommitUnknownError):
        player.run(player.flow())
    assert player.asked[-1] == "LoseCall"
    assert "Execute" not in player.asked


def test_a_settlement_is_tried_once_more_when_nothing_was_written(player: Player) -> None:
    player.plays = playing("SettleCall", broken(StoreUnavailableError("busy")))
    assert player.run(player.flow()).value == "done"
    assert player.asked.count("SettleCall") == 2
    assert player.states() == [OperationState.COMMITTED]


@pytest.mark.parametrize(("tool", "raised"), [("save", es.OutcomeUnknownError), ("look", CommitUnknownError)])
def test_an_outcome_that_cannot_be_recorded_is_unknown_for_a_write(
    player: Player, tool: str, raised: type[Exception]
) -> None:
    player.plays = playing("SettleCall", broken(CommitUnknownError("dead line")))
    with pytest.raises(raised):
        player.run(player.flow(tool))
    assert player.asked[-1] == "LoseCall"


def test_a_loss_that_cannot_be_recorded_is_a_note_on_what_caused_it(player: Player) -> None:
    def plays(command: Command[Any]) -> object:
        if isinstance(command, Execute):
            raise KeyboardInterrupt
        if isinstance(command, Transact) and isinstance(command.step, LoseCall):
            raise StoreUnavailableError("gone")
        return None

    player.plays = plays
    with pytest.raises(KeyboardInterrupt) as raised:
        player.run(player.flow())
    assert "could not record" in raised.value.__notes__[0]
    assert player.states() == [OperationState.EXECUTING]


def test_a_tools_exception_is_settled_before_it_is_raised(player: Player) -> None:
    error = LookupError("x")
    player.plays = playing("Execute", lambda: Returned(error=error))
    with pytest.raises(LookupError) as raised:
        player.run(player.flow("look", q=1))
    assert raised.value is error
    assert "SettleCall" in player.asked


def test_a_halt_has_an_envelope() -> None:
    with pytest.raises(InvariantError):
        halted(None)
