"""Standing orders as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from endstop.core.codec import rfc3339

if TYPE_CHECKING:
    from endstop.core.records import ControlRecord

__all__ = ["control_json"]


def control_json(order: ControlRecord) -> dict[str, object]:
    """An order as the command line publishes it."""
    return {
        "control_id": order.control_id,
        "kind": order.kind,
        "run_id": order.run_id,
        "label": order.label,
        "tool": order.tool,
        "effect": order.effect,
        "args": dict(order.args),
        "reason": order.reason,
        "actor": order.actor,
        "created_at": rfc3339(order.created_at_us),
        "withdrawn_at": rfc3339(order.withdrawn_at_us),
    }
