"""What a tool's policy says of its operations: how often they are tried, and how their target is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from endstop.core.canonical import canonical_bytes
from endstop.core.reasons import Effect, OutcomeClass
from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from endstop.core.policy import ToolPolicy

__all__ = [
    "ATTEMPTS_MAX", "DEFAULT_TERMS", "KEPT_ARGS_BYTES_MAX", "PROBES_MAX", "PROBE_BACKOFF_MS", "PROBE_DEADLINE_MS",
    "PROBE_WAIT_MS_MAX", "WAIT_MS", "OperationTerms", "asks_probe", "terms_of",
]  # fmt: skip

ATTEMPTS_MAX: Final = 3
PROBES_MAX: Final = 5
PROBE_BACKOFF_MS: Final = 1_000
PROBE_WAIT_MS_MAX: Final = 24 * 3_600_000
PROBE_DEADLINE_MS: Final = 10_000
WAIT_MS: Final = 10_000
KEPT_ARGS_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTerms:
    """The terms of one operation. `target_dedupes`: the target refuses a second call under one key, so an unknown
    attempt may be sent again. `kept_args` are canonical JSON, for a probe. Times are milliseconds."""

    attempts_max: int = ATTEMPTS_MAX
    target_dedupes: bool = False
    asks_probe: bool = False
    probes_max: int = PROBES_MAX
    probe_settle_ms: int = 0
    probe_backoff_ms: int = PROBE_BACKOFF_MS
    kept_args: bytes | None = field(default=None, repr=False)


DEFAULT_TERMS: Final = OperationTerms()


def asks_probe(tool: ToolPolicy) -> bool:
    """Whether an unknown outcome of this tool is settled by its probe."""
    return tool.probe is not None and tool.target_class is not OutcomeClass.AT_MOST_ONCE


def terms_of(tool: ToolPolicy, args: Mapping[str, object] | str = "") -> OperationTerms:
    """The terms of an operation of `tool`. Arguments too large to keep are not kept: a probe then gets none."""
    if tool.effect not in (Effect.WRITE, Effect.UNKNOWN):
        return DEFAULT_TERMS
    if tool.probe is None and tool.outcome_class is None and tool.attempts_max is None:
        return DEFAULT_TERMS
    asks = asks_probe(tool)
    return OperationTerms(
        attempts_max=tool.attempts_max or ATTEMPTS_MAX,
        target_dedupes=tool.target_class is OutcomeClass.IDEMPOTENT_BY_TARGET,
        asks_probe=asks,
        probes_max=tool.probes_max or PROBES_MAX,
        probe_settle_ms=tool.probe_settle_ms or 0,
        probe_backoff_ms=tool.probe_backoff_ms or PROBE_BACKOFF_MS,
        kept_args=_kept(args) if asks else None,
    )


def _kept(args: Mapping[str, object] | str) -> bytes | None:
    if isinstance(args, str):
        return None
    try:
        data = canonical_bytes(dict(args))
    except NotCanonicalError:
        return None
    return data if len(data) <= KEPT_ARGS_BYTES_MAX else None
