"""Pure decisions: no clock, no randomness, no I/O; standard library and orjson only."""

from __future__ import annotations
