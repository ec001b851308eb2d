"""Adapters: each translates between Endstop and one library, and does nothing else."""

from __future__ import annotations
