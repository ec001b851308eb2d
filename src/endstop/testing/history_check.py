"""The judge of a history: every rule at every prefix, from what was durable and what was real.

It knows none of the code that it judges but the folds of `endstop.core.refold`: which state may follow which, and what
an outcome means, is written down here a second time and on purpose.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final, NoReturn

import orjson

from endstop.core.evidence import Evidence
from endstop.core.transitions import OperationState
from endstop.store.rows import applies_to
from endstop.testing.history import Applied, Committed, Replayed, Returned, Rule, Sent, Spent, Violation
from endstop.testing.history_fold import OperationFold, RunFold

if TYPE_CHECKING:
    from collections.abc import Mapping

    from endstop.core.records import ControlRecord, OperationRecord, RunRecord
    from endstop.testing.history import Event

__all__ = ["HistoryChecker"]

_S: Final = OperationState
# What may follow what, for one attempt. A state may also be written again as it is.
_FOLLOWS: Final[Mapping[OperationState, frozenset[OperationState]]] = {
    _S.RESERVED: frozenset({_S.EXECUTING, _S.CANCELLED}),
    _S.EXECUTING: frozenset({_S.COMMITTED, _S.FAILED_RETRYABLE, _S.FAILED_FINAL, _S.UNKNOWN}),
    _S.UNKNOWN: frozenset({_S.COMMITTED, _S.FAILED_RETRYABLE, _S.FAILED_FINAL, _S.MANUAL}),
    _S.MANUAL: frozenset({_S.COMMITTED, _S.FAILED_RETRYABLE, _S.FAILED_FINAL}),
    _S.FAILED_RETRYABLE: frozenset({_S.EXECUTING, _S.POISONED}),
    _S.FAILED_FINAL: frozenset({_S.TOMBSTONE}),
    _S.COMMITTED: frozenset({_S.TOMBSTONE}),
    _S.POISONED: frozenset(),
    _S.CANCELLED: frozenset(),
    _S.TOMBSTONE: frozenset(),
}
_OPEN: Final = frozenset({_S.EXECUTING, _S.UNKNOWN, _S.MANUAL})
_FINAL: Final = frozenset({_S.COMMITTED, _S.FAILED_FINAL, _S.POISONED, _S.CANCELLED, _S.TOMBSTONE})
_NOT_APPLIED: Final = frozenset({_S.FAILED_RETRYABLE, _S.FAILED_FINAL})
_ENDED: Final = frozenset({"stopped", "complete", "paused"})
_CRASHED: Final = "crashed"
_INTENTS: Final = frozenset({"call_intent", "turn_intent", "handoff", "child"})


class _BrokenError(Exception):
    def __init__(self, rule: Rule, text: str) -> None:
        super().__init__(text)
        self.rule = rule


def _broken(rule: Rule, text: str) -> NoReturn:
    raise _BrokenError(rule, text)


class HistoryChecker:
    """Reads a history event by event. `see` gives the first rule that the history breaks with this event, or None.

    `enforces` False is for a policy that only observes: its caps let through what they note. `folds` False leaves out
    that the entries give the tables and the evidence.
    """

    def __init__(self, *, enforces: bool = True, folds: bool = True) -> None:
        self._enforces = enforces
        self._folds = folds
        self._runs: dict[str, RunFold] = {}
        self._operations: dict[str, OperationRecord] = {}
        self._states = OperationFold()
        self._next_index: int | None = None
        self._leaves: list[bytes] = []
        self._intents: set[tuple[str, str, str]] = set()  # run, call, owner
        self._attempts: set[tuple[str, int, str]] = set()  # operation, attempt, owner
        self._proven: set[tuple[str, int]] = set()
        self._effects: dict[str, list[int]] = defaultdict(list)
        self._sent: dict[str, list[int]] = defaultdict(list)
        self._values: dict[tuple[str, int], str] = {}
        self._spent: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._bounds: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._posted: dict[str, Evidence] = {}
        self._orders: tuple[ControlRecord, ...] = ()
        self._labels: dict[str, tuple[tuple[str, str], ...]] = {}

    def see(self, event: Event) -> Violation | None:
        """Judge one more event."""
        try:
            match event:
                case Committed():
                    self._committed(event)
                case Sent():
                    self._called(event)
                case Applied():
                    self._applied(event)
                case Returned():
                    self._values[event.operation_id, event.attempt] = event.value
                case Replayed():
                    self._replayed(event)
                case Spent():
                    tokens, nanos = self._spent[event.run_id]
                    self._spent[event.run_id] = (tokens + event.tokens, nanos + event.nanos)
                    self._covered(event.run_id)
                case _:
                    pass
        except _BrokenError as broken:
            return Violation(rule=broken.rule, number=event.number, text=str(broken))
        return None

    def unchanged(self, leaves: tuple[bytes, ...], number: int) -> Violation | None:
        """At the end: the stored entries are those that were seen when they were written."""
        if list(leaves) == self._leaves:
            return None
        return Violation(rule=Rule.NO_GAPS, number=number, text="stored entries differ from those that were written")

    # -- What left for the world

    def _called(self, event: Sent) -> None:
        name = f"call {event.call_id} of {event.run_id}"
        if event.operation_id is None:
            if (event.run_id, event.call_id, event.who) not in self._intents:
                _broken(Rule.INTENT_FIRST, f"{name} was sent without a durable intent of {event.who}")
            return
        if (event.operation_id, event.attempt, event.who) not in self._attempts:
            _broken(Rule.INTENT_FIRST, f"{name} was sent without a durable intent of attempt {event.attempt}")
        if event.attempt in self._sent[event.operation_id]:
            _broken(Rule.ONE_EFFECT, f"{name} was sent twice under one attempt")
        for earlier in self._sent[event.operation_id]:
            if (event.operation_id, earlier) not in self._proven:
                _broken(Rule.ONE_EFFECT, f"{name} was sent again while the outcome of attempt {earlier} was open")
        self._sent[event.operation_id].append(event.attempt)

    def _applied(self, event: Applied) -> None:
        effects = self._effects[event.operation_id]
        effects.append(event.attempt)
        if event.attempt not in self._sent[event.operation_id]:
            _broken(Rule.INTENT_FIRST, f"{event.operation_id} had an effect without a call")
        if len(effects) > 1:
            _broken(Rule.ONE_EFFECT, f"{event.operation_id} had {len(effects)} effects, of attempts {effects}")
        stored = self._operations.get(event.operation_id)
        if stored is not None and stored.attempt == event.attempt and stored.state in _NOT_APPLIED:
            _broken(Rule.TRUE_OUTCOME, f"{event.operation_id} was declared not applied and had its effect afterwards")
        if (event.operation_id, event.attempt) in self._proven:
            _broken(Rule.TRUE_OUTCOME, f"{event.operation_id}: attempt {event.attempt} was proven not applied")

    def _replayed(self, event: Replayed) -> None:
        stored = self._operations.get(event.operation_id)
        if stored is None or stored.state not in _FINAL:
            state = "absent" if stored is None else stored.state
            _broken(Rule.FINAL, f"{event.operation_id} was answered from the ledger while it is {state}")
        value = self._values.get((event.operation_id, stored.attempt))
        if value is not None and value != event.value:
            _broken(Rule.FINAL, f"{event.operation_id} was answered with {event.value}, but its call gave {value}")

    # -- What was durable

    def _committed(self, event: Committed) -> None:
        for record in event.entries:
            if self._next_index is not None and record.index != self._next_index:
                _broken(Rule.NO_GAPS, f"the entry after position {self._next_index - 1} has position {record.index}")
            self._next_index = record.index + 1
            self._leaves.append(record.leaf)
            self._entry(record.leaf, event)
        for before, after in event.operations:
            self._operation(before, after, event)
        if event.orders is not None:
            self._orders = event.orders
        if self._folds:
            self._told(event)
        if event.run is not None:
            self._run(event.run, event.evidence, event)

    def _told(self, event: Committed) -> None:
        """The entries and the table of operations say the same."""
        written = [after.operation_id for _, after in event.operations]
        for operation_id in dict.fromkeys([*self._states.moved(), *written]):
            told, stored = self._states.state_of(operation_id), self._operations.get(operation_id)
            if stored is None or stored.state is not told:
                shown = "nothing" if stored is None else stored.state
                _broken(Rule.FOLD, f"the entries say that {operation_id} is {told}; stored is {shown}")

    def _entry(self, leaf: bytes, event: Committed) -> None:
        entry: dict[str, object] = orjson.loads(leaf)
        run_id, kind = str(entry["run"]), str(entry["type"])
        if kind == "ledger_open":
            return
        fold = self._runs.setdefault(run_id, RunFold())
        if entry["seq"] != fold.next_seq:
            _broken(Rule.NO_GAPS, f"entry {entry['seq']} of {run_id} follows entry {fold.next_seq - 1}")
        if kind in _INTENTS:
            self._reserved(fold, run_id, kind, entry)
        if kind in ("stop", "complete"):
            ended = fold.ends.get(fold.generation)
            if ended not in (None, _CRASHED):
                _broken(Rule.ONE_END, f"{run_id} ended twice in generation {fold.generation}: {ended}, then {kind}")
        limits = None if event.run is None or event.run.run_id != run_id else event.run.limits
        fold.add(entry, limits)
        self._states.add(entry)
        if entry["gen"] != fold.generation and kind != "control" and run_id != "-":
            _broken(Rule.FOLD, f"{kind} of {run_id} says generation {entry['gen']}; the entries say {fold.generation}")

    def _reserved(self, fold: RunFold, run_id: str, kind: str, entry: dict[str, object]) -> None:
        call = str(entry.get("call", ""))
        ended = fold.ends.get(fold.generation)
        if ended is not None:
            _broken(Rule.ONE_END, f"{kind} {call} of {run_id} was reserved after its {ended} in this generation")
        self._obeyed(run_id, kind, entry)
        if kind == "turn_intent":
            tokens, nanos = self._bounds[run_id]
            self._bounds[run_id] = tokens + _whole(entry, "tokens_bound"), nanos + _whole(entry, "nanos_bound")
        if kind != "call_intent":
            return
        self._intents.add((run_id, call, str(entry.get("owner", ""))))

    def _obeyed(self, run_id: str, kind: str, entry: dict[str, object]) -> None:
        for order in self._orders:
            if not applies_to(order, run_id, self._labels.get(run_id, ())):
                continue
            hit = order.kind in ("kill", "stop")
            if order.kind == "deny" and kind == "call_intent":
                hit = order.tool is not None and fnmatchcase(str(entry.get("tool")), order.tool)
            if order.kind == "freeze":
                hit = "retry" in entry or kind in ("handoff", "child")
            if hit:
                _broken(Rule.ORDERS, f"{kind} of {run_id} was reserved against the {order.kind} {order.control_id}")

    def _operation(self, before: OperationRecord | None, after: OperationRecord, event: Committed) -> None:
        named = after.operation_id
        self._operations[named] = after
        if after.state is _S.EXECUTING and (before is None or before.attempt != after.attempt):
            self._attempts.add((named, after.attempt, after.owner_id))
        if before is None:
            if after.attempt != 1 or after.state not in (_S.EXECUTING, _S.RESERVED):
                _broken(Rule.INTENT_FIRST, f"{named} starts as {after.state}, attempt {after.attempt}")
            return
        self._may_follow(before, after)
        # Who settles must own what is settled.
        claimed = event.claimed
        settles = before.state in _OPEN and after.state not in _OPEN
        if settles and claimed is not None and (claimed.attempt, claimed.fence) != (before.attempt, before.fence):
            _broken(
                Rule.SETTLED_ONCE,
                f"{named} at attempt {before.attempt}, fence {before.fence} was settled by an owner of attempt "
                f"{claimed.attempt}, fence {claimed.fence}",
            )
        if after.state is _S.COMMITTED and after.attempt not in self._effects[named]:
            _broken(Rule.TRUE_OUTCOME, f"{named} is {after.state}, but the target had no effect")
        if after.state in _NOT_APPLIED:
            self._proven.add((named, after.attempt))
            if after.attempt in self._effects[named]:
                _broken(Rule.TRUE_OUTCOME, f"{named} is {after.state}, but the target had its effect")

    def _may_follow(self, before: OperationRecord, after: OperationRecord) -> None:
        named, old, new = after.operation_id, before.state, after.state
        if old in _FINAL and not (new is _S.TOMBSTONE and old in (_S.COMMITTED, _S.FAILED_FINAL)):
            _broken(Rule.FINAL, f"{named} was {old} and was written again as {new}")
        same_try = (before.attempt, before.owner_id) == (after.attempt, after.owner_id)
        if old in _OPEN and new is _S.EXECUTING and not same_try:
            _broken(Rule.ONE_EFFECT, f"{named} was {old} and was dispatched again as attempt {after.attempt}")
        if new is not old and new not in _FOLLOWS[old]:
            _broken(Rule.SETTLED_ONCE, f"{named} went from {old} to {new}")
        if after.fence < before.fence or after.attempt < before.attempt:
            _broken(Rule.SETTLED_ONCE, f"{named} went back from fence {before.fence} to {after.fence}")
        if after.attempt != before.attempt and (old is not _S.FAILED_RETRYABLE or after.fence <= before.fence):
            _broken(Rule.SETTLED_ONCE, f"{named} has a new attempt after {old}, fence {after.fence}")

    def _run(self, run: RunRecord, packed: bytes | None, event: Committed) -> None:
        fold = self._runs.setdefault(run.run_id, RunFold())
        self._labels[run.run_id] = run.labels
        if run.entries != fold.next_seq:
            _broken(Rule.NO_GAPS, f"{run.run_id} counts {run.entries} entries; {fold.next_seq} were written")
        # 1. The tables.
        if self._folds and (run.state, run.generation) != (fold.state, fold.generation):
            _broken(
                Rule.FOLD,
                f"{run.run_id} is stored as {run.state} in generation {run.generation}; the entries say {fold.state} "
                f"in generation {fold.generation}",
            )
        self._envelope(run, fold)
        # 2. The evidence.
        if packed is None:
            _broken(Rule.FOLD, f"{run.run_id} has no stored evidence")
        stored = Evidence.unpack(packed)
        difference = fold.difference(stored) if self._folds else None
        if difference is not None:
            _broken(Rule.FOLD, f"{run.run_id} after {event.step}: {difference}")
        # 3. The budget.
        self._posted[run.run_id] = stored
        tokens = stored.input_tokens + stored.output_tokens + stored.held_tokens
        if self._enforces and tokens > run.limits.tokens_max:
            _broken(Rule.BUDGET, f"{run.run_id} has {tokens} tokens posted and held, of {run.limits.tokens_max}")
        nanos, budget = stored.spend_nanos + stored.held_nanos, run.limits.spend_nanos_max
        if self._enforces and budget is not None and nanos > budget:
            _broken(Rule.BUDGET, f"{run.run_id} has {nanos} nanos posted and held, of {budget}")
        # No call uses more than its bound here, so more than all bounds means that one was posted twice.
        if tokens > self._bounds[run.run_id][0] or nanos > self._bounds[run.run_id][1]:
            bounds = self._bounds[run.run_id]
            _broken(Rule.BUDGET, f"{run.run_id} has ({tokens}, {nanos}) posted and held for calls of at most {bounds}")
        self._covered(run.run_id)

    def _covered(self, run_id: str) -> None:
        stored = self._posted.get(run_id)
        tokens, nanos = self._spent[run_id]
        if stored is None or not tokens:
            return
        posted = stored.input_tokens + stored.output_tokens + stored.held_tokens
        if tokens > posted:
            _broken(Rule.BUDGET, f"{run_id} used {tokens} tokens; posted and held are {posted}")
        if stored.held_nanos + stored.spend_nanos < nanos:
            held = stored.held_nanos + stored.spend_nanos
            _broken(Rule.BUDGET, f"{run_id} used {nanos} nanos; posted and held are {held}")

    def _envelope(self, run: RunRecord, fold: RunFold) -> None:
        envelope = run.envelope
        if envelope is None:
            if run.state in _ENDED or run.state == "interrupted":
                _broken(Rule.ONE_END, f"{run.run_id} is {run.state} without an envelope")
            return
        if envelope.generation != run.generation:
            _broken(Rule.ONE_END, f"{run.run_id} keeps an envelope of generation {envelope.generation}")
        if run.state not in _ENDED and run.state != "interrupted":
            _broken(Rule.ONE_END, f"{run.run_id} is {run.state} and has an envelope")
        known = fold.envelopes.setdefault(run.generation, envelope)
        if known.terminal_reason == _CRASHED:
            # Nobody said that an interrupted run is over: an operator may still stop it in the same generation.
            known = fold.envelopes[run.generation] = envelope
        if known != envelope:
            _broken(
                Rule.ONE_END,
                f"{run.run_id} ended in generation {run.generation} by {known.terminal_reason}; its envelope was "
                f"replaced by one of {envelope.terminal_reason}",
            )
        if fold.ends.get(run.generation) != envelope.terminal_reason.value:
            told = fold.ends.get(run.generation)
            _broken(Rule.ONE_END, f"{run.run_id}: the envelope says {envelope.terminal_reason}, the entries {told}")


def _whole(entry: Mapping[str, object], name: str) -> int:
    value = entry.get(name, 0)
    return value if isinstance(value, int) else 0
