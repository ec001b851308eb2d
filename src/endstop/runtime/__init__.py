"""The shell: where the pure core meets clocks, stores and tools."""

from __future__ import annotations
