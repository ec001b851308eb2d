"""What one transaction does for an operation whose outcome is not known: ask, settle, give up, expire.

Each step names the attempt and the fence that its caller read and does nothing when either has moved on. Each change
is one `operation` entry: from, to, attempt, fence, who, and a code; of people's words and of evidence only digests.
A step runs in the run that dispatched the attempt, ended or not: its locks order all that happens to that attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from endstop.core.entries import safe_name
from endstop.core.operation_rules import contradict, note_operation, with_result
from endstop.core.operation_terms import PROBE_WAIT_MS_MAX
from endstop.core.probing import Exclusion, Found
from endstop.core.steps import Step
from endstop.core.transitions import OperationEvent, OperationState, operation_next
from endstop.errors import UsageError

if TYPE_CHECKING:
    from endstop.core.operation_terms import OperationTerms
    from endstop.core.records import OperationRecord, RunTransaction

__all__ = [
    "BeginProbe", "ExpireResults", "GiveUp", "OperationStep", "ProbeBegun", "SettleByHand", "SettleProbe",
    "SettledOperation",
]  # fmt: skip

EXPIRED_MAX: Final = 500
DOUBLINGS_MAX: Final = 20
_UNSURE: Final = (OperationState.UNKNOWN, OperationState.MANUAL)
_KEPT: Final = (OperationState.COMMITTED, OperationState.FAILED_FINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledOperation:
    """What a step left: the operation as it stands (None: not stored), whether it was changed, and a code for why."""

    operation: OperationRecord | None
    changed: bool
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationStep(Step[SettledOperation]):
    """One change of one attempt, by compare-and-set on attempt, fence and state."""

    operation_id: str
    attempt: int
    fence: int
    actor: str = "reconciler"

    @property
    def operation_key(self) -> str | None:
        """The operation."""
        return self.operation_id

    def _read(self, txn: RunTransaction, *states: OperationState) -> OperationRecord | None:
        """The stored operation while it is the attempt that was meant and in one of `states`, else None."""
        stored = txn.operation
        if stored is None or stored.attempt != self.attempt or stored.fence != self.fence:
            return None
        return stored if stored.state in states else None

    def _put(
        self, txn: RunTransaction, before: OperationRecord, after: OperationRecord, code: str, *,
        proof: str = "", why: str = "", probe: int = 0, exclusion: str | None = None,
    ) -> SettledOperation:  # fmt: skip
        note_operation(
            txn, self.now_us, before, after, code, actor=self.actor, proof=proof, why=why, probe=probe,
            exclusion=exclusion,
        )  # fmt: skip
        txn.put_operation(after, before.fence)
        return SettledOperation(operation=after, changed=True, code=code)

    def _given_up(self, txn: RunTransaction, stored: OperationRecord, code: str, probe: int = 0) -> SettledOperation:
        state = operation_next(stored.state, OperationEvent.GIVE_UP)
        after = replace(stored, state=state, reason=safe_name(code), probe_until_us=0)
        return self._put(txn, stored, after, code, probe=probe)


def _moved_on(txn: RunTransaction, code: str = "moved_on") -> SettledOperation:
    return SettledOperation(operation=txn.operation, changed=False, code=code)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeBegun:
    """Whether a question may be put now, and its number. Without one, `code` says why and `not_before_us` when."""

    operation: OperationRecord | None
    number: int = 0
    code: str = ""
    not_before_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginProbe(Step[ProbeBegun]):
    """Write down that the target is being asked, before it is: one question at a time, none too soon, and none beyond
    the budget, which a crashed question counts against. A spent budget makes the operation a person's (MANUAL)."""

    operation_id: str
    attempt: int
    fence: int
    terms: OperationTerms
    until_us: int
    actor: str = "reconciler"

    @property
    def operation_key(self) -> str | None:
        """The operation."""
        return self.operation_id

    def apply(self, txn: RunTransaction) -> ProbeBegun:
        """Count the question, or say why none is put."""
        stored = txn.operation
        if (
            stored is None
            or (stored.attempt, stored.fence) != (self.attempt, self.fence)
            or stored.state is not OperationState.UNKNOWN
        ):
            return ProbeBegun(operation=stored, code="moved_on")
        if stored.probe_until_us > self.now_us:
            return ProbeBegun(operation=stored, code="asked_elsewhere", not_before_us=stored.probe_until_us)
        if stored.probe_count >= self.terms.probes_max:
            state = operation_next(stored.state, OperationEvent.GIVE_UP)
            after = replace(stored, state=state, reason="probes are spent", probe_until_us=0)
            note_operation(txn, self.now_us, stored, after, "probes_spent", actor=self.actor)
            txn.put_operation(after, stored.fence)
            return ProbeBegun(operation=after, code="probes_spent")
        if stored.probe_not_before_us > self.now_us:
            return ProbeBegun(operation=stored, code="not_before", not_before_us=stored.probe_not_before_us)
        number = stored.probe_count + 1
        after = replace(stored, probe_count=number, probe_until_us=self.until_us)
        note_operation(txn, self.now_us, stored, after, "probe_begun", actor=self.actor, probe=number)
        txn.put_operation(after, stored.fence)
        return ProbeBegun(operation=after, number=number, code="probe_begun")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleProbe(OperationStep):
    """The target has answered question `number`, which was put at `began_us`.

    "Applied" commits. "Not applied" re-arms, with an `exclusion` that held before the question was put, and when it
    was put no sooner than the tool's settle time after the attempt had ended. All else leaves the operation UNKNOWN,
    for another question after a back-off, or for a person when the budget is spent.
    """

    number: int
    found: Found
    terms: OperationTerms
    began_us: int
    exclusion: Exclusion | None = None
    retry_after_ms: int | None = None
    data: bytes | None = field(default=None, repr=False)
    kind: str = "none"
    receipt: str | None = None
    result_key: bytes = field(default=b"", repr=False)
    cause: str = ""

    def apply(self, txn: RunTransaction) -> SettledOperation:
        """Settle, or keep the question open."""
        stored = self._read(txn, OperationState.UNKNOWN)
        if stored is None or stored.probe_count != self.number:
            return self._late(txn)
        if self.found is Found.APPLIED:
            after = replace(
                with_result(stored, OperationEvent.APPLIED, self.now_us, self.data, self.kind, self.result_key),
                settled_by="probe", receipt=self.receipt, reason="a probe found it applied",
            )  # fmt: skip
            return self._put(txn, stored, after, "probe_applied", probe=self.number)
        if self.found is Found.NOT_APPLIED:
            settles_us = _ended_us(stored) + self.terms.probe_settle_ms * 1_000
            if self.began_us < settles_us:
                return self._open(txn, stored, "probe_too_early", settles_us)
            if self.exclusion is None:
                return self._open(txn, stored, "probe_not_applied_but_not_excluded", 0)
            after = replace(
                with_result(stored, OperationEvent.NOT_APPLIED, self.now_us, None, "none", b""),
                settled_by="probe", reason=f"a probe found it not applied ({self.exclusion.value})",
            )  # fmt: skip
            return self._put(txn, stored, after, "probe_not_applied", probe=self.number, exclusion=self.exclusion.value)
        return self._open(txn, stored, f"probe_{self.found.value}", 0)

    def _open(self, txn: RunTransaction, stored: OperationRecord, code: str, least_us: int) -> SettledOperation:
        if self.number >= self.terms.probes_max:
            return self._given_up(txn, stored, "probes_spent", self.number)
        backoff_ms = self.terms.probe_backoff_ms << min(self.number - 1, DOUBLINGS_MAX)
        wait_ms = min(max(backoff_ms, self.retry_after_ms or 0), PROBE_WAIT_MS_MAX)
        after = replace(
            stored, probe_until_us=0, probe_not_before_us=max(self.now_us + wait_ms * 1_000, least_us),
            reason=safe_name(self.cause or code),
        )  # fmt: skip
        return self._put(txn, stored, after, code, probe=self.number)

    def _late(self, txn: RunTransaction) -> SettledOperation:
        """The operation was settled while its target was asked, or a later question was put."""
        stored = txn.operation
        event = {Found.APPLIED: OperationEvent.APPLIED, Found.NOT_APPLIED: OperationEvent.NOT_APPLIED}.get(self.found)
        if stored is None or event is None or stored.attempt != self.attempt or stored.state in _UNSURE:
            return _moved_on(txn)
        # "Not there" is no contradiction to "applied later": it was true when it was said.
        if event is OperationEvent.APPLIED and stored.outcome == "not_applied":
            contradict(txn, stored, event, self.now_us, actor=self.actor, probe=self.number)
            return SettledOperation(operation=txn.operation, changed=txn.operation != stored, code="contradiction")
        return _moved_on(txn)


def _ended_us(stored: OperationRecord) -> int:
    """When the attempt was over for certain: when somebody wrote down that it was lost."""
    return max(stored.dispatched_at_us or 0, stored.settled_at_us or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp(OperationStep):
    """Automation may not settle this one: UNKNOWN becomes MANUAL. `code` says why."""

    code: str = "no_probe"

    def apply(self, txn: RunTransaction) -> SettledOperation:
        """Hand it to a person."""
        stored = self._read(txn, OperationState.UNKNOWN)
        return _moved_on(txn) if stored is None else self._given_up(txn, stored, self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleByHand(OperationStep):
    """A person found out at the target what happened. `why` and `proof` are digests of his reason and evidence.

    Raises UsageError, and changes nothing, for an operation that is not in doubt, and for "not applied" without a
    reason why the old attempt cannot take effect any more.
    """

    applied: bool
    exclusion: Exclusion | None = None
    why: str
    proof: str
    receipt: str | None = None

    def apply(self, txn: RunTransaction) -> SettledOperation:
        """Settle it for good, or for another attempt."""
        stored = self._read(txn, *_UNSURE)
        if stored is None:
            now = txn.operation
            stands = "is not stored" if now is None else f"is {now.state} in attempt {now.attempt}"
            msg = f"operation {self.operation_id} {stands}: only one in doubt (UNKNOWN, MANUAL) is settled by hand"
            raise UsageError(msg)
        if self.applied:
            event, code, said = OperationEvent.APPLIED, "hand_applied", "a person found it applied"
        else:
            event, code, said = OperationEvent.NOT_APPLIED, "hand_not_applied", "a person found it not applied"
            if self.exclusion is None:
                msg = (
                    f"operation {self.operation_id} cannot be called not applied yet: its worker {stored.owner_id} is "
                    "not proven dead and could still send it; end that worker, or name why a late send has no effect "
                    f"(exclusion: {', '.join(item.value for item in Exclusion)})"
                )
                raise UsageError(msg)
        kind = "applied_without_result" if self.applied else "none"
        after = replace(
            with_result(stored, event, self.now_us, None, kind, b""), settled_by="person", reason=said,
            receipt=self.receipt,
        )  # fmt: skip
        return self._put(
            txn, stored, after, code, why=self.why, proof=self.proof,
            exclusion=None if self.exclusion is None else self.exclusion.value,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpireResults(Step[int]):
    """Retention: remove the results of this run's operations that were settled before `before_us`. Key, fingerprint,
    digest and receipt stay, so the operation is never run again. Gives how many; operations in doubt never expire."""

    before_us: int
    actor: str = "retention"

    def apply(self, txn: RunTransaction) -> int:
        """Make tombstones, `EXPIRED_MAX` at most."""
        count = 0
        for stored in txn.load_operations():
            settled_us = stored.settled_at_us
            if stored.state not in _KEPT or settled_us is None or settled_us >= self.before_us:
                continue
            state = operation_next(stored.state, OperationEvent.EXPIRE)
            after = replace(stored, state=state, result=None, result_kind="expired", args=None)
            note_operation(txn, self.now_us, stored, after, "result_expired", actor=self.actor)
            txn.put_operation(after, stored.fence)
            count += 1
            if count >= EXPIRED_MAX:
                break
        return count
