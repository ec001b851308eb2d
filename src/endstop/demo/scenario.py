"""The demonstration: three acts, each of them checked against the CRM's own table.

1. Without a guard, the model's repetition becomes as many writes as the iteration cap allows.
2. Under the guard there is one write, and the run is stopped before the next one leaves.
3. The same after a kill -9 in mid-call: nobody knows whether the write happened, so it is not sent again.

Everything is real: the CRM is a process with a file of its own, the store is the embedded SQLite store, the killed
agent is a process. Only the model is scripted.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.reasons import Reason, RunState
from endstop.core.transitions import OperationState
from endstop.demo import agent
from endstop.demo.crm import recorded_writes
from endstop.demo.facts import Check, Facts, Guarded, KilledRun, Told, Unguarded
from endstop.demo.processes import Place, crm_process, ends_on_sigterm, kill, wait_for_write, worker_process
from endstop.demo.story import Story
from endstop.errors import UsageError
from endstop.loop.conversation import ToolAnswers
from endstop.runtime.clock import SystemClock, SystemIds
from endstop.runtime.guard import open_guard
from endstop.runtime.policy_file import load_policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from endstop.loop.agent import LoopResult
    from endstop.runtime.guard import Guard

__all__ = ["main", "play"]

CONTACTS: Final = ("C-1001", "C-1002", "C-1003")


def main(*, keep: Path | None, json: bool, plain: bool) -> int:
    """Play the demonstration on stdout; 0 when every check held, else 1.

    `keep` is a folder, new or empty, that the files are left in; None uses a temporary one. `json` prints one JSON
    object at the end, `plain` text without colour or drawing. Raises UsageError for a folder that is not empty,
    DemoFailedError when a process cannot be started. Processes and the temporary folder are gone afterwards, whatever
    happens.
    """
    with ends_on_sigterm(), _place(keep) as place:
        story = Story(is_silent=json, is_plain=plain)
        facts = play(place, story)
        if keep is not None:
            story.kept(place, facts)
    if json:
        sys.stdout.write(orjson.dumps(facts.to_json(), option=orjson.OPT_INDENT_2).decode() + "\n")
    return 0 if facts.held else 1


def play(place: Place, story: Story) -> Facts:
    """Play all acts in `place` and tell them as they happen."""
    clock = SystemClock()
    began_us = clock.now_us()
    place.policy.write_text(agent.POLICY_TOML, encoding="utf-8")
    with crm_process(place) as crm_url, open_guard(place.store_url, policy=load_policy(place.policy)) as guard:
        story.opening(crm_url)
        first = _without_guard(place, crm_url)
        story.first(first)
        second = _with_guard(place, crm_url, guard)
        story.second(second)
        third = _after_a_kill(place, crm_url, guard, clock)
        story.third(third)
    facts = Facts(
        crm_url=crm_url, without_guard=first, with_guard=second, after_kill=third,
        took_ms=(clock.now_us() - began_us) // 1_000,
    )  # fmt: skip
    story.closing(facts)
    return facts


@contextmanager
def _place(keep: Path | None) -> Iterator[Place]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="endstop-demo-") as folder:
            yield Place(folder=Path(folder))
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        msg = f"{keep} is not empty: name a new folder, so that the counts are those of this demonstration"
        raise UsageError(msg)
    keep.mkdir(parents=True, exist_ok=True)
    place = Place(folder=keep)
    yield place
    if place.log.stat().st_size == 0:
        place.log.unlink()


# -- The acts


def _without_guard(place: Place, crm_url: str) -> Unguarded:
    turns = agent.run_without_guard(crm_url, CONTACTS[0])
    writes = len(recorded_writes(place.crm_db, CONTACTS[0]))
    claim = f"the CRM's own table holds {agent.ITERATIONS_MAX} writes of one update"
    return Unguarded(
        writes=writes, model_turns=turns, ended="iteration cap",
        checks=(Check(claim=claim, expected=agent.ITERATIONS_MAX, found=writes),),
    )  # fmt: skip


def _with_guard(place: Place, crm_url: str, guard: Guard) -> Guarded:
    result = agent.run_guarded(guard, crm_url, CONTACTS[1])
    written = recorded_writes(place.crm_db, CONTACTS[1])
    rows = guard.store.ledger_rows(run_id=result.run_id).result()
    operations = guard.operations(result.run_id)
    refused = tuple(row.breach_reason for row in rows if row.state_origin == f"call_refused:{agent.TOOL}")
    keys = tuple(operation.key_digest for operation in operations)
    checks = (
        Check(claim="the CRM's own table holds 1 write", expected=1, found=len(written)),
        Check(
            claim="the write carries the key of the run's one operation", expected=keys,
            found=tuple(write.idempotency_key for write in written),
        ),
        Check(
            claim="the next write was refused before it was sent, and that ended the run",
            expected=((Reason.ALREADY_COMMITTED.value,), Reason.ALREADY_COMMITTED.value),
            found=(refused, result.terminal_reason.value),
        ),
    )  # fmt: skip
    return Guarded(
        writes=len(written), model_turns=result.turns, ended=result.terminal_reason.value, run_id=result.run_id,
        envelope=result.envelope, operations=operations, ledger=rows, checks=checks,
    )  # fmt: skip


def _after_a_kill(place: Place, crm_url: str, guard: Guard, clock: SystemClock) -> KilledRun:
    contact_id, run_id = CONTACTS[2], SystemIds().new_id()
    # 1. A worker dies between the effect and its answer.
    with worker_process(place, crm_url, contact_id, run_id) as worker:
        wait_for_write(place, contact_id, worker, clock)
        states_before = tuple(operation.state.value for operation in guard.operations(run_id))
        killed = kill(worker)
    # 2. What an operator sees.
    seen = tuple(run.state.value for run in guard.runs() if run.run_id == run_id)
    in_doubt = guard.operations(run_id)
    # 3. Another worker enters the run, and its model proposes the same update under a new call id.
    result = agent.run_guarded(guard, crm_url, contact_id, run_id=run_id, first_call_id="call-after-restart")
    writes = len(recorded_writes(place.crm_db, contact_id))
    answer = _first_answer(result)
    states = tuple(operation.state.value for operation in in_doubt)
    checks = (
        Check(
            claim="while the call was under way, the store held its intent",
            expected=(OperationState.EXECUTING.value,), found=states_before,
        ),
        Check(
            claim="killed, the run shows as interrupted and its operation as in doubt",
            expected=("SIGKILL", (RunState.INTERRUPTED.value,), (OperationState.UNKNOWN.value,)),
            found=(killed.signal, seen, states),
        ),
        Check(
            claim="the next worker's same update was refused as outcome_unknown", expected=Reason.OUTCOME_UNKNOWN.value,
            found=None if answer is None else answer.reason,
        ),
        Check(claim="the CRM's own table still holds 1 write", expected=1, found=writes),
    )  # fmt: skip
    return KilledRun(
        writes=writes, model_turns=result.turns, ended=result.terminal_reason.value, run_id=run_id, killed=killed,
        state_after_kill=", ".join(seen), operations=in_doubt, answer=answer, envelope=result.envelope, checks=checks,
    )  # fmt: skip


def _first_answer(result: LoopResult) -> Told | None:
    """What the model was told when it first proposed the update again."""
    for item in result.conversation:
        if isinstance(item, ToolAnswers):
            told = orjson.loads(item.answers[0].content)
            return Told(
                status=told["status"], reason=told.get("reason"), next_allowed_action=told.get("next_allowed_action")
            )
    return None
