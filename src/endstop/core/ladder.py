"""What happens when a guard trips: the rungs of a policy's ladder.

A loop has an identity (the guard and the calls in it). Each trip of one identity climbs one rung: `warn` lets the call
go on with a note, `block` refuses this call only, `stop` ends the run. Another loop starts at the bottom again, and so
does one that stayed away for a while, but all loops of an epoch together get at most `WARNINGS_MAX` warnings. A result
cannot be blocked any more: where a loop is seen in a result, the rung after `warn` is `stop`. A cap has no rungs: it
stops at once, because a limit that may be passed once is none.

Under `observe` no loop guard and no cap refuses anything; the verdict says what would have happened. Operators' orders,
keys, committed operations and calls that cannot run are refused all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from endstop.core.events import Verdict
from endstop.core.model import Detail
from endstop.core.reasons import Action

if TYPE_CHECKING:
    from endstop.core.evidence import Evidence
    from endstop.core.policy import Policy
    from endstop.core.reasons import Reason

__all__ = ["WARNINGS_MAX", "Trip", "cap_verdict", "climb"]

WARNINGS_MAX: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trip:
    """A guard saw a loop. `loop` is the loop's identity."""

    reason: Reason
    guard: str
    detail: Detail
    loop: str


def climb(policy: Policy, evidence: Evidence, trip: Trip) -> Verdict:
    """The verdict of the rung that this loop stands on now."""
    if policy.observes:
        return Verdict(reason=trip.reason, guard=trip.guard, detail=trip.detail, loop=trip.loop, observed=True)
    ladder = policy.on_trip
    climbed = evidence.rungs_climbed(trip.loop)
    if climbed == 0 and ladder[0] == "warn" and evidence.warned >= WARNINGS_MAX:
        climbed = 1
    rung = ladder[min(climbed, len(ladder) - 1)]
    if rung == "warn":
        return Verdict(reason=trip.reason, guard=trip.guard, detail=trip.detail, loop=trip.loop, warn=True)
    action = Action.BLOCK if rung == "block" else Action.STOP
    return Verdict(action=action, reason=trip.reason, guard=trip.guard, detail=trip.detail, loop=trip.loop)


def cap_verdict(policy: Policy, reason: Reason, limit_name: str, limit: int, value: int | None) -> Verdict:
    """A stop for a cap that was met; under `observe` a note of it."""
    detail = Detail(limit_name=limit_name, limit=limit, value=value)
    if policy.observes:
        return Verdict(reason=reason, guard=limit_name, detail=detail, observed=True)
    return Verdict(action=Action.STOP, reason=reason, guard=limit_name, detail=detail)
