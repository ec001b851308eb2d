"""The only place that reads a clock or draws a random number.

Everything else takes `Clock` and `Ids`, so that tests and the simulator decide what time it is.
"""

from __future__ import annotations

import os
import secrets
import time
from typing import Protocol

__all__ = ["Clock", "Ids", "SystemClock", "SystemIds", "environment"]


def environment(name: str) -> str | None:
    """A setting from the process environment, None when it is unset or blank."""
    return os.environ.get(name) or None


class Clock(Protocol):
    """Time in microseconds since 1970, UTC."""

    def now_us(self) -> int:
        """The time now, in microseconds."""
        ...

    def sleep_ms(self, duration_ms: int) -> None:
        """Let `duration_ms` milliseconds pass."""
        ...


class Ids(Protocol):
    """Names that nobody else has, and keys that nobody can guess."""

    def new_id(self) -> str:
        """A UUIDv7 as text: sortable by time of creation (RFC 9562, section 5.7)."""
        ...

    def new_key(self) -> bytes:
        """32 random bytes."""
        ...


class SystemClock:
    """The machine's clock, which never runs backwards within one process."""

    def __init__(self) -> None:
        # A wall clock that is stepped backwards must not lengthen a run's allowance: steps are counted on the
        # monotonic clock from one reading of the wall clock.
        self._offset_us = time.time_ns() // 1_000 - time.monotonic_ns() // 1_000

    def now_us(self) -> int:
        """The time now, in microseconds since 1970, UTC."""
        return time.monotonic_ns() // 1_000 + self._offset_us

    def sleep_ms(self, duration_ms: int) -> None:
        """Sleep for `duration_ms` milliseconds."""
        time.sleep(duration_ms / 1_000)


class SystemIds:
    """UUIDv7 and the operating system's randomness."""

    def new_id(self) -> str:
        """A UUIDv7 as text."""
        millis = time.time_ns() // 1_000_000
        tail = int.from_bytes(os.urandom(10), "big")
        value = (millis & (2**48 - 1)) << 80 | 0x7 << 76 | (tail >> 68 & 0xFFF) << 64 | 0b10 << 62 | tail & (2**62 - 1)
        text = f"{value:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def new_key(self) -> bytes:
        """32 random bytes."""
        return secrets.token_bytes(32)
