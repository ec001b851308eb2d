"""Endstop keeps AI agents inside their bounds.

It stands before every tool call and every paid model call of a run and answers one question: may the next call of
this run happen? See README.md for the promise and its limit.
"""

from __future__ import annotations

from endstop.core.envelope import Envelope
from endstop.core.model import (
    Block, Counters, Decision, Detail, Execute, ModelCall, Replay, Spec, Stop, ToolCall, ToolResult, Usage, Wait,
)  # fmt: skip
from endstop.core.policy import Limits, Policy, ToolPolicy
from endstop.core.reasons import Action, Change, Effect, ErrorClass, NextAction, OutcomeClass, Reason, RunState, Status
from endstop.runtime.bare import LoopGuard
