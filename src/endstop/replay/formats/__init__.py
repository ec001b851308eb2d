"""Trace formats, one file each. `endstop.replay.recognise` holds the list."""

from __future__ import annotations
