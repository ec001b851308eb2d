"""Asking for a call's reservation until the answer is final: what stands in its way may be cleared first.

A dead worker is recovered, another caller's outcome awaited where the tool's policy says so, and the target asked what
became of an earlier attempt. Each is tried once; then the answer stands. Nobody turns into an executor but by a
reservation of his own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from endstop.core.commands import AwaitOutcome, Flow, RecoverOwner, perform
from endstop.core.operation_terms import WAIT_MS, asks_probe
from endstop.core.probe_flow import ProbeJob, probed
from endstop.core.reasons import Action, Reason
from endstop.core.transitions import OperationState

if TYPE_CHECKING:
    from endstop.core.policy import ToolPolicy
    from endstop.core.steps import CallReserved

__all__ = ["admitted"]

_IN_FLIGHT: Final = (OperationState.RESERVED, OperationState.EXECUTING)


def admitted(
    reserve: Callable[[], Flow[CallReserved]], tool: ToolPolicy, *, now_us: Callable[[], int], store_key: bytes
) -> Flow[CallReserved]:
    """The final answer to a reservation. `reserve` asks once; it is a call's own and may own an operation."""
    until_us = now_us() + (tool.wait_ms or WAIT_MS) * 1_000
    may_recover, may_probe, may_wait = True, asks_probe(tool), tool.waiter == "wait"
    while True:
        reserved = yield from reserve()
        blocker, reason = reserved.stored, reserved.verdict.reason
        if blocker is None or reserved.verdict.action is not Action.BLOCK:
            return reserved
        in_flight = reason is Reason.IN_PROGRESS and blocker.state in _IN_FLIGHT
        if in_flight and may_recover and (yield from perform(RecoverOwner(operation=blocker))):
            may_recover = False
        elif in_flight and may_wait:
            may_wait = False
            if not (yield from perform(AwaitOutcome(operation=blocker, until_us=until_us))):
                return reserved
        elif reason is Reason.OUTCOME_UNKNOWN and may_probe and blocker.state is OperationState.UNKNOWN:
            may_probe = False
            report = yield from probed(
                ProbeJob(operation=blocker, tool=tool, now_us=now_us, store_key=store_key, actor="caller")
            )
            if not report.changed:
                return reserved
        else:
            return reserved
