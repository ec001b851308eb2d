"""Asking a target whether an operation happened: what a probe is given and what it may answer.

"Not applied" is only half a proof: a worker that was merely slow may send the call after the target was asked. So it
re-arms a key only together with an exclusion, a reason why the old worker can no longer send.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from endstop.errors import UsageError

__all__ = ["Exclusion", "Found", "ProbeAnswer", "ProbeRequest"]

RECEIPT_CHARS_MAX: Final = 255


class Found(StrEnum):
    """What a probe found at the target."""

    APPLIED = "applied"
    NOT_APPLIED = "not_applied"
    IN_FLIGHT = "in_flight"
    INCONCLUSIVE = "inconclusive"


class Exclusion(StrEnum):
    """Why a late send of the old attempt cannot take effect any more."""

    OWNER_DEAD = "owner_dead"  # the kernel says that its process is gone
    TARGET_DEDUPES = "target_dedupes"  # the target refuses a second call under this key
    KEY_VOIDED = "key_voided"  # the probe claimed or voided the key at the target
    NOT_AFTER = "not_after"  # the request carried a time that the target enforces, and it has passed


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One operation to look for. `args` are its canonical arguments, None where they were not kept; times are
    microseconds since 1970."""

    operation_id: str
    tool: str
    idempotency_key: str | None
    args: Mapping[str, object] | None = field(repr=False)
    attempt: int
    dispatched_at_us: int | None
    deadline_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What a probe says. Make it with `applied`, `not_applied`, `in_flight` or `inconclusive`.

    `receipt` is the target's own name for the effect; `cause` is a word on why an answer is inconclusive.
    """

    found: Found
    value: object = field(default=None, repr=False)
    has_value: bool = False
    exclusion: Exclusion | None = None
    retry_after_ms: int | None = None
    receipt: str | None = None
    cause: str = ""

    def __post_init__(self) -> None:
        wait = self.retry_after_ms
        if wait is not None and (type(wait) is not int or wait < 0):
            msg = "retry_after_ms must be a whole number of milliseconds, 0 or more"
            raise UsageError(msg)
        if self.receipt is not None and len(self.receipt) > RECEIPT_CHARS_MAX:
            msg = f"a receipt has {RECEIPT_CHARS_MAX} characters at most"
            raise UsageError(msg)

    @classmethod
    def applied(cls, value: object = None, *, has_value: bool = True, receipt: str | None = None) -> ProbeAnswer:
        """The effect is there. `value` is the answer to replay; say `has_value=False` when it cannot be read back."""
        return cls(found=Found.APPLIED, value=value, has_value=has_value, receipt=receipt)

    @classmethod
    def not_applied(cls, *, exclusion: Exclusion | str | None = None) -> ProbeAnswer:
        """The effect is not there, with the reason why it cannot come any more, if the target gives one."""
        return cls(found=Found.NOT_APPLIED, exclusion=None if exclusion is None else Exclusion(exclusion))

    @classmethod
    def in_flight(cls, *, retry_after_ms: int | None = None) -> ProbeAnswer:
        """The target is still working on it."""
        return cls(found=Found.IN_FLIGHT, retry_after_ms=retry_after_ms)

    @classmethod
    def inconclusive(cls, *, retry_after_ms: int | None = None, cause: str = "") -> ProbeAnswer:
        """The target cannot tell now; `cause` is one word on why."""
        return cls(found=Found.INCONCLUSIVE, retry_after_ms=retry_after_ms, cause=cause)
