"""What is judged and what is folded: proposals, verdicts, observations and controls.

These carry digests, not texts, so that the same records drive the bare guard, the store and the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.model import NO_DETAIL, Detail
from endstop.core.reasons import Action

if TYPE_CHECKING:
    from collections.abc import Mapping

    from endstop.core.likeness import Sketch
    from endstop.core.model import Version
    from endstop.core.reasons import Change, Effect, ErrorClass, Reason, Status

__all__ = [
    "GO",
    "NO_CONTROLS",
    "RETRY",
    "Controls",
    "DenyRule",
    "Observation",
    "OperationView",
    "Order",
    "Proposal",
    "TurnProposal",
    "Verdict",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A tool call as the guards see it.

    `key_digest` is the idempotency key of a write, None where there is none. `fault` is set when the host already
    knows that the call cannot run (an unknown tool, malformed arguments, its own refusal). `raw_tool` and `args` serve
    deny rules only; they are never stored.
    """

    tool: str
    effect: Effect
    fingerprint: str
    call_id: str
    round_id: str | None = None
    agent: str = "main"
    key_digest: str | None = None
    operation_fingerprint: str = ""
    key_missing: str | None = None
    replays_committed: bool = False
    change: Change | None = None
    fault: ErrorClass | None = None
    declared: bool = True
    poll_interval_ms_min: int | None = None
    raw_tool: str = field(default="", compare=False, repr=False)
    args: Mapping[str, object] | str = field(default_factory=dict, compare=False, repr=False)
    complaint: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProposal:
    """A model call as the guards see it. `tokens_bound` and `nanos_bound` are the worst case, None where unknown."""

    call_id: str
    model: str = ""
    agent: str = "main"
    tokens_bound: int | None = None
    nanos_bound: int | None = None
    is_retry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `decide` says of a proposal or a result. `loop` is the identity of the loop that a guard saw."""

    action: Action = Action.EXECUTE
    reason: Reason | None = None
    guard: str | None = None
    detail: Detail = NO_DETAIL
    loop: str | None = None
    until_us: int = 0
    is_retry: bool = False
    warn: bool = False
    observed: bool = False


GO: Final = Verdict()
RETRY: Final = Verdict(is_retry=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A settled call as it is folded: made once by `observe`, written to the ledger, read back by replay.

    `answer` is the identity that the folds compare (an earlier one when `same` was found by likeness). `evidence` is
    False for outcomes that say nothing about a loop: transport failures, waits for a retry, open outcomes. `news` is
    what the stall counts, `changed` what empties the window, `progress` what opens an epoch.
    """

    tool: str
    effect: Effect
    fingerprint: str
    call_id: str
    status: Status
    answer: str
    round_id: str | None = None
    agent: str = "main"
    evidence: bool = True
    news: bool = True
    changed: bool = False
    progress: bool = False
    error_class: ErrorClass | None = None
    error_symbol: str = ""
    version_source: str | None = None
    version: Version | None = None
    declared: bool = True
    failed: bool = False
    not_before_us: int | None = None
    sketch: Sketch | None = field(default=None, compare=False, repr=False)
    text: str | bytes | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationView:
    """What is known of the operation behind a proposal's key."""

    operation_id: str
    state: str
    fingerprint: str
    call_id: str
    same_run: bool
    generation: int
    attempt: int = 1
    not_before_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A standing order of an operator: stop, kill or freeze."""

    reason: str
    actor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DenyRule:
    """Calls that an operator refuses. Every part that is set must fit; patterns are shell patterns."""

    rule_id: str
    tool: str | None = None
    effect: str | None = None
    args: tuple[tuple[str, str], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """The operators' orders that apply to one run, read inside the reserve transaction."""

    stop: Order | None = None
    kill: Order | None = None
    frozen: Order | None = None
    denies: tuple[DenyRule, ...] = ()


NO_CONTROLS: Final = Controls()
