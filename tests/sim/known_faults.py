"""Faults that the simulation has found and that are not mended yet: what the survey meets, and why it goes on.

Each entry goes when its fault does; the list is meant to be empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from endstop.testing.history import Rule, Violation


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFault:
    """A fault: the rule that it breaks and how the report reads, one seed, and what is wrong."""

    rule: Rule
    pattern: str
    seed: int
    what: str


KNOWN: Final[tuple[KnownFault, ...]] = (
    KnownFault(
        rule=Rule.NO_FAULT, pattern=r"in state (COMMITTED|UNKNOWN|EXECUTING) cannot take the event dispatch", seed=1962,
        what="a third copy in a round, let through by a warning or under observe, and a replay that the note of a cap "
        "hides, skip what the operation's state says",
    ),
    KnownFault(
        rule=Rule.ONE_END, pattern=r"was reserved after its crashed in this generation", seed=245,
        what="a worker that was declared dead goes on in the interrupted run",
    ),
    KnownFault(
        rule=Rule.NO_FAULT, pattern=r"a run that is interrupted cannot (complete|pause)", seed=2327,
        what="the same worker ends the interrupted run",
    ),
    KnownFault(
        rule=Rule.BUDGET, pattern=r"used \d+ (tokens|nanos); posted and held are \d+", seed=947,
        what="a model call whose settlement failed is held no longer once the run is entered again, and never posted",
    ),
    KnownFault(
        rule=Rule.BUDGET, pattern=r"has \d+ (tokens|nanos) posted and held, of \d+", seed=223,
        what="a model call that recovery has charged is posted once more when its worker was not dead after all",
    ),
    KnownFault(
        rule=Rule.TRUE_OUTCOME, pattern=r"FAILED_RETRYABLE|not applied", seed=196,
        what="two threads deliver one call id; the one whose refusal's reply was lost says that the other sent nothing",
    ),
)  # fmt: skip


def is_known(violation: Violation) -> bool:
    """Whether a violation is one of these."""
    return any(fault.rule is violation.rule and re.search(fault.pattern, violation.text) for fault in KNOWN)
