"""Sample runs and probing steps for the store contract and for benchmarks: small, deterministic, without a clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.events import Controls
from endstop.core.model import Spec, ToolCall
from endstop.core.observe import as_result, measure
from endstop.core.policy import Limits, Policy, ToolPolicy
from endstop.core.propose import propose
from endstop.core.records import OperationRecord
from endstop.core.steps import CallReserved, ReserveCall, SettleCall, Step
from endstop.core.steps_life import NewRun
from endstop.core.transitions import OperationState
from endstop.errors import UsageError

if TYPE_CHECKING:
    from endstop.core.records import RunTransaction

__all__ = [
    "OWNER", "POLICY", "RUN_KEY", "SPEC", "AddStep", "BreakOff", "SeeControls", "SeeOperation", "WriteOperation",
    "new_run", "reserve", "sample_policy", "settle",
]  # fmt: skip

SPEC: Final = Spec(
    what_it_does="Updates the rows that it is given.",
    what_it_does_not="It deletes nothing.",
    done_looks_like="Every row carries its new value, « ready ».",
)
RUN_KEY: Final = b"k" * 32
OWNER: Final = "owner-1"
START_US: Final = 1_700_000_000_000_000
_STORE_KEY: Final = b"s" * 32


def sample_policy(steps_max: int = 1_000_000) -> Policy:
    """A policy with a write that has a key and a read, and no cap but the one given."""
    limits = Limits(
        steps_max=steps_max, wall_ms_max=10**12, tokens_max=10**12, turns_max=10**6, retries_max=10**6,
        handoffs_max=10**6,
    )  # fmt: skip
    tools = {
        "row.update": ToolPolicy(effect="write", idempotency_key="{row}"), "row.read": ToolPolicy(effect="read"),
    }  # fmt: skip
    return Policy(limits=limits, tools=tools)


POLICY: Final = sample_policy()


def new_run(
    run_id: str,
    *,
    spec: Spec = SPEC,
    policy: Policy = POLICY,
    labels: tuple[tuple[str, str], ...] = (),
    owner_id: str = OWNER,
    now_us: int = START_US,
) -> NewRun:
    """A run that may start."""
    return NewRun(
        run_id=run_id, spec=spec, policy_digest=policy.digest(), limits=policy.limits, agent="main", labels=labels,
        owner_id=owner_id, now_us=now_us, run_key=RUN_KEY,
    )  # fmt: skip


def reserve(run_id: str, row: int | str, *, policy: Policy = POLICY, now_us: int = START_US) -> ReserveCall:
    """The reservation of one update of `row`, under a key that only this row has."""
    call = ToolCall(tool="row.update", args={"row": row, "value": "ready"}, call_id=f"call-{row}")
    proposal = propose(call, policy.tool(call.tool), run_key=RUN_KEY, store_key=_STORE_KEY)
    return ReserveCall(
        run_id=run_id, now_us=now_us, policy=policy, proposal=proposal, operation_id=f"op-{proposal.key_digest}",
        owner_id=OWNER, input_digest=f"{abs(hash(str(row))) % 16**8:032x}",
    )  # fmt: skip


def settle(asked: ReserveCall, reserved: CallReserved, *, now_us: int = START_US) -> SettleCall:
    """The settlement of a reservation that was let through, with a success."""
    result = as_result({"row": asked.proposal.call_id, "ok": True})
    tool = asked.policy.tool(asked.proposal.tool)
    return SettleCall(
        run_id=asked.run_id, now_us=now_us, policy=asked.policy, tool=tool, proposal=asked.proposal, result=result,
        measured=measure(result, asked.proposal, tool, key=RUN_KEY), operation=reserved.operation, took_us=1_500,
    )  # fmt: skip


# -- Steps that look into a transaction, or misbehave in one


@dataclass(frozen=True, slots=True, kw_only=True)
class AddStep(Step[int]):
    """Count one step more and note it. Gives the count: two that read the same one would show."""

    def apply(self, txn: RunTransaction) -> int:
        """Read, add, write."""
        txn.evidence.steps += 1
        txn.evidence_changed = True
        txn.append("user_input", self.now_us, {"step": txn.evidence.steps})
        return txn.evidence.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakOff(Step[None]):
    """Change everything that a step can change, then raise UsageError."""

    operation_id: str = "op-broken-off"

    @property
    def operation_key(self) -> str | None:
        """The operation that it will not write after all."""
        return self.operation_id

    def apply(self, txn: RunTransaction) -> None:
        """Change, then break."""
        txn.evidence.steps += 1_000
        txn.owners = ()
        txn.generation += 1
        txn.output = "never"
        txn.append("user_input", self.now_us, {"step": txn.evidence.steps})
        txn.put_operation(operation(self.operation_id, txn.run_id), 0)
        txn.row_changed = txn.evidence_changed = True
        msg = "broken off on purpose"
        raise UsageError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeControls(Step[Controls]):
    """Give the orders that the transaction sees. Writes nothing."""

    def apply(self, txn: RunTransaction) -> Controls:
        """Look."""
        return txn.controls


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeOperation(Step["tuple[OperationRecord | None, tuple[OperationRecord, ...]]"]):
    """Give the named operation and all of the run. Writes nothing."""

    operation_id: str

    @property
    def operation_key(self) -> str | None:
        """The one to look at."""
        return self.operation_id

    def apply(self, txn: RunTransaction) -> tuple[OperationRecord | None, tuple[OperationRecord, ...]]:
        """Look."""
        return txn.operation, txn.load_operations()


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOperation(Step[None]):
    """Write `record` at the fence that it claims to have read, with an entry."""

    record: OperationRecord = field(repr=False)
    expected_fence: int

    def apply(self, txn: RunTransaction) -> None:
        """Write."""
        txn.append("operation", self.now_us, {"op": self.record.operation_id})
        txn.put_operation(self.record, self.expected_fence)


def operation(operation_id: str, run_id: str, *, fence: int = 1, created_at_us: int = START_US) -> OperationRecord:
    """An operation in flight."""
    return OperationRecord(
        operation_id=operation_id, tool="row.update", key_digest="key", fingerprint="fp", run_id=run_id, generation=1,
        state=OperationState.EXECUTING, call_id="call", owner_id=OWNER, fence=fence, created_at_us=created_at_us,
        dispatched_at_us=created_at_us,
    )  # fmt: skip
