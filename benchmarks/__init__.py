"""Benchmarks: ratios measured side by side in one run, on the machine at hand."""

from __future__ import annotations
