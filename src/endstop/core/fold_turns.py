"""How model calls change a run's evidence: held before, posted after; charged where nobody reports what was used.

Rules of this file:

1. What was used is always covered: a hold is given back only together with a posting of the same call.
2. Nothing is posted twice: a hold that had to be charged is remembered (`TURNS_CHARGED_MAX` of them), and a late
   report of such a call posts only what exceeds the charge. A report of a call that is neither open nor remembered
   posts in full.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from endstop.core.evidence import TURNS_CHARGED_MAX, TURNS_OPEN_MAX, short_name
from endstop.errors import InvariantError

if TYPE_CHECKING:
    from endstop.core.events import TurnProposal
    from endstop.core.evidence import Evidence
    from endstop.core.model import Usage

__all__ = ["turn_charged", "turn_excess", "turn_let_through", "turn_settled", "turns_charged"]


def turn_let_through(evidence: Evidence, proposal: TurnProposal) -> None:
    """A model call may leave: the turn counts, and its worst case is held."""
    if len(evidence.turns_open) >= TURNS_OPEN_MAX:
        msg = f"more than {TURNS_OPEN_MAX} model calls of one run are in flight"
        raise InvariantError(msg)
    evidence.turns += 1
    if proposal.is_retry:
        evidence.retries += 1
    held = (proposal.tokens_bound or 0, proposal.nanos_bound or 0)
    evidence.turns_open[short_name(proposal.call_id)] = held
    evidence.held_tokens += held[0]
    evidence.held_nanos += held[1]


def turn_excess(evidence: Evidence, call_id: str, usage: Usage, spend_nanos: int) -> tuple[Usage, int]:
    """What is left to post of a call that used `usage` and `spend_nanos`: all of it, or what exceeds its charge."""
    charged = evidence.turns_charged.get(short_name(call_id)) if evidence.turns_charged else None
    if charged is None:
        return usage, spend_nanos
    tokens = max(0, usage.total_tokens - charged[0])
    read = min(usage.input_tokens, tokens)
    return replace(usage, input_tokens=read, output_tokens=tokens - read), max(0, spend_nanos - charged[1])


def turn_settled(evidence: Evidence, call_id: str, usage: Usage, spend_nanos: int) -> None:
    """A model call has ended: the hold is given back, and what `turn_excess` gave of its use is posted."""
    name = short_name(call_id)
    tokens, nanos = evidence.turns_open.pop(name, (0, 0))
    if evidence.turns_charged:
        evidence.turns_charged.pop(name, None)
    evidence.held_tokens -= tokens
    evidence.held_nanos -= nanos
    evidence.input_tokens += usage.input_tokens
    evidence.output_tokens += usage.output_tokens
    evidence.cache_read_tokens += usage.cache_read_tokens
    evidence.cache_write_tokens += usage.cache_write_tokens
    evidence.reasoning_tokens += usage.reasoning_tokens
    evidence.spend_nanos += spend_nanos


def turn_charged(evidence: Evidence, call_id: str) -> None:
    """Nobody is expected to report this open call: what was held for it is posted as used, and remembered."""
    name = short_name(call_id)
    tokens, nanos = evidence.turns_open.pop(name, (0, 0))
    if not tokens and not nanos:
        return
    evidence.held_tokens -= tokens
    evidence.held_nanos -= nanos
    evidence.output_tokens += tokens
    evidence.spend_nanos += nanos
    evidence.turns_charged[name] = (tokens, nanos)
    if len(evidence.turns_charged) > TURNS_CHARGED_MAX:
        del evidence.turns_charged[next(iter(evidence.turns_charged))]
        evidence.evictions += 1


def turns_charged(evidence: Evidence) -> None:
    """The same for every open call."""
    for name in list(evidence.turns_open):
        turn_charged(evidence, name)
