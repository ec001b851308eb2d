"""One run without a store: its working copy, and steps applied to it one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import orjson

import endstop as es
from endstop.core.events import Controls, Proposal
from endstop.core.observe import as_result, measure
from endstop.core.propose import propose
from endstop.core.records import OperationRecord, RunTransaction
from endstop.core.steps import CallReserved, CallSettled, ReserveCall, SettleCall, Step
from endstop.core.steps_life import NewRun, open_run

A = TypeVar("A")
KEY, STORE_KEY = b"k" * 32, b"s" * 32
SPEC = es.Spec(what_it_does="a", what_it_does_not="b", done_looks_like="c")
POLICY = es.Policy(
    limits=es.Limits(steps_max=50, turns_max=50, tokens_max=10**6, wall_ms_max=10**6),
    tools={"save": es.ToolPolicy(effect="write", idempotency_key="{n}"), "look": es.ToolPolicy(effect="read")},
)


class Stage:
    """A run, its operations, and a clock that moves one millisecond a step."""

    def __init__(self, policy: es.Policy = POLICY, *, version: int | None = None) -> None:
        self.policy = policy
        self.now_us = 1_000_000
        self.operations: dict[str, OperationRecord] = {}
        self.txn: RunTransaction = open_run(
            NewRun(
                run_id="r1", spec=SPEC, policy_digest=policy.digest(), limits=policy.limits, agent="main", labels=(),
                owner_id="w1", now_us=self.now_us, run_key=KEY, initial_progress_version=version,
            ),
            ledger="l",
        )  # fmt: skip
        self.txn.load_spec = lambda: SPEC
        self.txn.load_operations = lambda: tuple(self.operations.values())
        self.leaves: list[bytes] = []
        self._keep()

    def apply(self, step: Step[A]) -> A:
        """Run one step as a store would."""
        key = step.operation_key
        self.txn.operation = None if key is None else self.operations.get(key)
        answer = step.apply(self.txn)
        self._keep()
        self.txn.updated_at_us = step.now_us
        return answer

    def at(self) -> int:
        self.now_us += 1_000
        return self.now_us

    def controls(self, **orders: Any) -> None:
        self.txn.controls = replace(Controls(), **orders)

    def reserve(
        self,
        tool: str = "save",
        call_id: str = "c1",
        *,
        owner: str = "w1",
        generation: int | None = None,
        attempt: str = "",
        **args: object,
    ) -> tuple[Proposal, CallReserved]:
        call = es.ToolCall(tool=tool, args=args or {"n": 1}, call_id=call_id)
        proposal = propose(call, self.policy.tool(tool), run_key=KEY, store_key=STORE_KEY)
        step = ReserveCall(
            run_id="r1", now_us=self.at(), policy=self.policy, proposal=proposal, owner_id=owner, generation=generation,
            operation_id=None if proposal.key_digest is None else f"op_{proposal.key_digest}", attempt_id=attempt,
        )  # fmt: skip
        return proposal, self.apply(step)

    def settle(
        self, proposal: Proposal, operation: OperationRecord | None, value: object = "ok", *, lost: bool = False,
        generation: int | None = None,
    ) -> CallSettled:  # fmt: skip
        tool = self.policy.tool(proposal.tool)
        result = as_result(value)
        return self.apply(
            SettleCall(
                run_id="r1", now_us=self.at(), policy=self.policy, tool=tool, proposal=proposal, result=result,
                measured=measure(result, proposal, tool, key=KEY), operation=operation, lost=lost,
                generation=generation,
            )
        )  # fmt: skip

    @property
    def last(self) -> dict[str, object]:
        """The newest entry."""
        found: dict[str, object] = orjson.loads(self.leaves[-1])
        return found

    @property
    def kinds(self) -> list[object]:
        return [orjson.loads(leaf)["type"] for leaf in self.leaves]

    def _keep(self) -> None:
        self.leaves += self.txn.entries
        for record, fence in self.txn.operations:
            stored = self.operations.get(record.operation_id)
            assert (0 if stored is None else stored.fence) == fence
            self.operations[record.operation_id] = record
        self.txn.entries, self.txn.operations, self.txn.children = [], [], []
        self.txn.row_changed = self.txn.evidence_changed = False
