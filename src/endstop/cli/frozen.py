"""A run that is frozen and has no worker does not go on: starting it again would be a retry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from endstop.cli.codes import ExitCode, Refused
from endstop.core.reasons import RunState

if TYPE_CHECKING:
    from endstop.core.records import RunRecord
    from endstop.runtime.guard import Guard

__all__ = ["refuse_frozen"]


def refuse_frozen(guard: Guard, run: RunRecord) -> None:
    """Raise Refused (exit 7) while a freeze of `run`, or of all runs, is in force."""
    orders = [order for order in guard.store.controls().result() if order.kind == "freeze"]
    if any(order.run_id is None for order in orders):
        what = "endstop unfreeze --all"
    elif any(order.run_id == run.root_run_id for order in orders) or run.state is RunState.FROZEN:
        what = f"endstop unfreeze {run.root_run_id}"
    else:
        return
    msg = f"run {run.root_run_id} is frozen and does not go on before `{what}`"
    raise Refused(msg, ExitCode.FROZEN)
