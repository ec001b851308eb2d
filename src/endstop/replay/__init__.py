"""Recorded runs judged by the live core: formats, the replayer, reports and plots."""

from __future__ import annotations
