"""The operations of a replayed run: which idempotency keys were taken, as the bare guard keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from endstop.core.events import OperationView
from endstop.core.steps import operation_event
from endstop.core.transitions import OperationEvent, OperationState

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.model import ToolResult

__all__ = ["OPERATIONS_MAX", "Operations"]

OPERATIONS_MAX = 10_000


class Operations:
    """The newest `OPERATIONS_MAX` keys of one run and their states."""

    def __init__(self) -> None:
        self._known: dict[str, OperationView] = {}

    def view(self, key: str) -> OperationView | None:
        """What is known of the operation under `key`."""
        return self._known.get(key)

    def begun(self, key: str, proposal: Proposal, generation: int) -> None:
        """A write is on its way: from now on its key is taken."""
        self._put(key, proposal, OperationState.EXECUTING, generation)
        if len(self._known) > OPERATIONS_MAX:
            del self._known[next(iter(self._known))]

    def settled(self, key: str, proposal: Proposal, result: ToolResult[object], generation: int) -> None:
        """A write has an outcome. A late second answer never un-commits it."""
        known = self._known.get(key)
        if known is not None and known.state == OperationState.COMMITTED:
            return
        match operation_event(result):
            case OperationEvent.APPLIED:
                self._put(key, proposal, OperationState.COMMITTED, generation)
            case OperationEvent.LOST:
                self._put(key, proposal, OperationState.UNKNOWN, generation)
            case OperationEvent.REFUSED:
                self._put(key, proposal, OperationState.FAILED_FINAL, generation)
            case _:
                self._known.pop(key, None)

    def _put(self, key: str, proposal: Proposal, state: OperationState, generation: int) -> None:
        self._known[key] = OperationView(
            operation_id=key, state=state.value, fingerprint=proposal.fingerprint, call_id=proposal.call_id,
            same_run=True, generation=generation,
        )  # fmt: skip
