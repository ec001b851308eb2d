"""Durable state behind one small port: every method is one transaction and one sentence of contract."""

from __future__ import annotations
