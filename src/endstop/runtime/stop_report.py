"""What an operator's stop found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from endstop.core.envelope import Envelope

__all__ = ["StopReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopReport:
    """What a stop found: the run's envelope, the calls in flight when it was committed (id and tool), and whether the
    run had ended before."""

    envelope: Envelope
    in_flight: tuple[tuple[str, str], ...]
    already: bool
