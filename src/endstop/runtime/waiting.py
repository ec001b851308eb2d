"""Waiting that a stop can end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from endstop.core.pipeline import halted
from endstop.runtime.halts import WATCH_MS

if TYPE_CHECKING:
    from endstop.runtime.drivers import World

__all__ = ["sleep_watched"]


async def sleep_watched(world: World, wait_ms: int, run_id: str) -> None:
    """Let `wait_ms` milliseconds pass. Raises RunHalted within `WATCH_MS` when the run is stopped meanwhile."""
    until_us = world.clock.now_us() + wait_ms * 1_000
    while True:
        envelope = world.halts.envelope_of(run_id)
        if envelope is not None:
            raise halted(envelope)
        left_us = until_us - world.clock.now_us()
        if left_us <= 0:
            return
        await asyncio.sleep(min(left_us / 1_000_000, WATCH_MS / 1_000))  # noqa: TID251  # bounded by the run's clock
