"""What every store makes of its rows: the records that readers see, and the orders that apply to a run.

Pure functions. A store that keeps `RunRow` and the records of `endstop.core.records` can answer every read with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.codec import rfc3339
from endstop.core.entries import safe_name
from endstop.core.events import NO_CONTROLS, Controls, DenyRule, Order
from endstop.core.evidence import Evidence
from endstop.core.records import RunRecord
from endstop.errors import StoreCorruptError, UsageError
from endstop.store.port import ROWS_MAX, LedgerRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from endstop.core.envelope import Envelope
    from endstop.core.model import Spec
    from endstop.core.policy import Limits
    from endstop.core.reasons import RunState
    from endstop.core.records import CheckpointRecord, ChildRecord, ControlRecord

__all__ = [
    "CONTROL_KINDS", "RunRow", "applies_to", "bounded", "child_view", "controls_for", "has_labels", "ledger_row",
    "run_view",
]  # fmt: skip

CONTROL_KINDS: Final = ("stop", "kill", "freeze", "deny")
_FAILED_TYPES: Final = frozenset({"call_refused", "turn_refused", "lost", "stop"})
_JUDGED_TYPES: Final = frozenset({"result", "turn"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One root run as a store keeps it. `key` is the store's own name for the row; `evidence` is packed."""

    key: int
    run_id: str
    agent: str
    labels: tuple[tuple[str, str], ...]
    spec: Spec
    policy_digest: str
    run_key: bytes | None
    created_at_us: int
    state: RunState
    generation: int
    limits: Limits
    owners: tuple[str, ...]
    first_seq: int
    checkpoint: CheckpointRecord | None
    envelope: Envelope | None
    output: str | None
    next_seq: int
    updated_at_us: int
    evidence: bytes


def bounded(limit: int) -> int:
    """`limit` when a read may have that many rows. Raises UsageError when it may not."""
    if not 0 <= limit <= ROWS_MAX:
        msg = f"a read gives 0 to {ROWS_MAX} rows, not {limit}: read on from the last position instead"
        raise UsageError(msg)
    return limit


def run_view(row: RunRow, now_us: int) -> RunRecord:
    """A root run as readers see it; its running time is that at `now_us`."""
    evidence = Evidence.unpack(row.evidence)
    return RunRecord(
        run_id=row.run_id, root_run_id=row.run_id, generation=row.generation, state=row.state, agent=row.agent,
        labels=row.labels, spec=row.spec, policy_digest=row.policy_digest, limits=row.limits,
        counters=evidence.counters(now_us), progress_version=evidence.progress_version, checkpoint=row.checkpoint,
        envelope=row.envelope, output=row.output, owners=row.owners,
        in_flight=tuple((call_id, call.tool) for call_id, call in evidence.pending.items()),
        entries=row.next_seq, created_at_us=row.created_at_us, updated_at_us=row.updated_at_us,
    )  # fmt: skip


def child_view(child: ChildRecord, root: RunRecord) -> RunRecord:
    """A child run as readers see it: its own name, place and agent, and all else of its root."""
    return replace(
        root, run_id=child.run_id, root_run_id=child.root_run_id, parent_run_id=child.parent_run_id,
        depth=child.depth, agent=child.agent, created_at_us=child.created_at_us,
    )  # fmt: skip


def has_labels(labels: Sequence[tuple[str, str]], wanted: Iterable[tuple[str, str]]) -> bool:
    """Whether a run carries every wanted label."""
    return all(pair in labels for pair in wanted)


def applies_to(control: ControlRecord, run_id: str, labels: Sequence[tuple[str, str]]) -> bool:
    """Whether an order concerns a run: by its id, by a label (`name=value`, or a name alone), or as one to all."""
    if control.run_id is not None and control.run_id != run_id:
        return False
    if control.label is None:
        return True
    return any(control.label in (name, f"{name}={value}") for name, value in labels)


def controls_for(standing: Iterable[ControlRecord], run_id: str, labels: Sequence[tuple[str, str]]) -> Controls:
    """The orders that concern a run, as a decision reads them; of two of one kind the older one speaks."""
    orders: dict[str, Order] = {}
    denies: list[DenyRule] = []
    for control in standing:
        if not applies_to(control, run_id, labels):
            continue
        if control.kind == "deny":
            denies.append(
                DenyRule(
                    rule_id=control.control_id, tool=control.tool, effect=control.effect, args=control.args,
                    reason=control.reason,
                )
            )  # fmt: skip
        else:
            orders.setdefault(control.kind, Order(reason=control.reason, actor=control.actor))
    if not orders and not denies:
        return NO_CONTROLS
    return Controls(stop=orders.get("stop"), kill=orders.get("kill"), frozen=orders.get("freeze"), denies=tuple(denies))


def ledger_row(leaf: bytes, input_hash: str | None) -> LedgerRow:
    """One row of the view `ledger`. Raises StoreCorruptError when `leaf` is no entry."""
    try:
        body = orjson.loads(leaf)
        kind, tool = body["type"], body.get("tool")
        failed = kind in _FAILED_TYPES or (kind in _JUDGED_TYPES and body.get("ok") is None)
        return LedgerRow(
            session_id=body["run"],
            turn_count=body.get("turn", 0),
            state_origin=kind if tool is None else f"{kind}:{tool}",
            input_hash=input_hash,
            token_delta=body.get("tokens", 0),
            execution_time_ms=body.get("ms", 0),
            pass_fail="fail" if failed else "pass",
            breach_reason=None if kind == "complete" else body.get("reason"),
            created_at=rfc3339(body["ts_us"]) or "",
        )
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        msg = "an entry of the ledger cannot be read: restore the store from a backup"
        raise StoreCorruptError(msg) from error


def control_fields(control: ControlRecord, *, order: str, why: str) -> dict[str, object]:
    """An order as the fields of its entry: names and digests, never an argument or a person's words."""
    return {
        "order": order, "control": safe_name(control.control_id), "tool": _named(control.tool),
        "effect": _named(control.effect), "label": _named(control.label), "args": len(control.args) or None, "why": why,
    }  # fmt: skip


def _named(text: str | None) -> str | None:
    return None if text is None else safe_name(text)
