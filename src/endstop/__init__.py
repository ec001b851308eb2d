"""Endstop keeps AI agents inside their bounds.

It stands before every tool call and every paid model call of a run and answers one question: may the next call of
this run happen? See README.md for the promise and its limit.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from endstop.core.envelope import Envelope
from endstop.core.model import (
    Block,
    Counters,
    Decision,
    Detail,
    Execute,
    ModelCall,
    Replay,
    Spec,
    Stop,
    ToolCall,
    ToolResult,
    Usage,
    Wait,
)
from endstop.core.policy import Limits, Policy, ToolPolicy
from endstop.core.probing import Exclusion, Found, ProbeAnswer, ProbeRequest
from endstop.core.reasons import (
    Action,
    Change,
    Effect,
    ErrorClass,
    NextAction,
    OutcomeClass,
    Reason,
    RunState,
    Status,
)
from endstop.errors import (
    CommitUnknownError,
    EndstopError,
    GuardClosedError,
    InvariantError,
    ModelError,
    ModelNotFoundError,
    NotAppliedError,
    NotAuthorisedError,
    NotCanonicalError,
    OperationError,
    OutcomeUnknownError,
    OutputWithheldError,
    PolicyInvalidError,
    ProviderError,
    ResumeRefusedError,
    RunHalted,
    RunJoinError,
    RunNotFoundError,
    RunStopped,
    SchemaVersionError,
    SpecInvalidError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    StoreQuarantinedError,
    StoreUnavailableError,
    TaskInvalidError,
    UsageError,
)
from endstop.runtime.bare import LoopGuard
from endstop.runtime.context import CallContext, current
from endstop.runtime.guard import Guard
from endstop.runtime.guard import open_guard as open  # noqa: A004  # the contract's name, always written es.open
from endstop.runtime.run import Run

if _typing.TYPE_CHECKING:
    from endstop.loop.agent import AgentLoop, LoopResult
    from endstop.runtime.declare import tool
    from endstop.runtime.policy_file import load_policy

__all__ = [
    "Action",
    "AgentLoop",
    "Block",
    "CallContext",
    "Change",
    "CommitUnknownError",
    "Counters",
    "Decision",
    "Detail",
    "Effect",
    "EndstopError",
    "Envelope",
    "ErrorClass",
    "Exclusion",
    "Execute",
    "Found",
    "Guard",
    "GuardClosedError",
    "InvariantError",
    "Limits",
    "LoopGuard",
    "LoopResult",
    "ModelCall",
    "ModelError",
    "ModelNotFoundError",
    "NextAction",
    "NotAppliedError",
    "NotAuthorisedError",
    "NotCanonicalError",
    "OperationError",
    "OutcomeClass",
    "OutcomeUnknownError",
    "OutputWithheldError",
    "Policy",
    "PolicyInvalidError",
    "ProbeAnswer",
    "ProbeRequest",
    "ProviderError",
    "Reason",
    "Replay",
    "ResumeRefusedError",
    "Run",
    "RunHalted",
    "RunJoinError",
    "RunNotFoundError",
    "RunState",
    "RunStopped",
    "SchemaVersionError",
    "Spec",
    "SpecInvalidError",
    "Status",
    "Stop",
    "StoreCorruptError",
    "StoreError",
    "StoreFullError",
    "StoreQuarantinedError",
    "StoreUnavailableError",
    "TaskInvalidError",
    "ToolCall",
    "ToolPolicy",
    "ToolResult",
    "Usage",
    "UsageError",
    "Wait",
    "current",
    "load_policy",
    "open",
    "tool",
]

__version__ = "0.1.0"

# Loaded at the first use, because they bring pydantic or the model layer with them.
_LATER = {
    "AgentLoop": "endstop.loop.agent",
    "LoopResult": "endstop.loop.agent",
    "load_policy": "endstop.runtime.policy_file",
    "tool": "endstop.runtime.declare",
}


def __getattr__(name: str) -> object:
    module = _LATER.get(name)
    if module is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value: object = getattr(_importlib.import_module(module), name)
    globals()[name] = value
    return value
