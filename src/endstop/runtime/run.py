"""A run as its agents hold it: tool calls, model calls, children, checkpoints and the end.

Every agent of a run, in whatever thread, task or process, shares the root run's state. A `Run` is safe to share
between threads. Once the run has stopped, every call raises RunHalted again: the stop latches.
"""

from __future__ import annotations

import functools
import itertools
import os
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import orjson

from endstop.core.canonical import canonical_bytes, digest_of
from endstop.core.codec import OUTPUT_BYTES_MAX, output_text
from endstop.core.entries import safe_name
from endstop.core.events import Proposal
from endstop.core.messages import message_of
from endstop.core.model import ModelCall, ToolCall, ToolResult
from endstop.core.pipeline import CallRequest, guarded_call, halted
from endstop.core.policy import stricter
from endstop.core.propose import propose
from endstop.core.reasons import TERMINAL_REASONS, Action, Change, Effect, ErrorClass, Reason
from endstop.core.steps_life import CompleteRun, EndRun, NoteUserInput, SaveCheckpoint
from endstop.core.steps_turn import ReserveChild, ReserveHandoff, StepAnswer
from endstop.errors import GuardClosedError, RunHalted, UsageError
from endstop.runtime.binding import bound_arguments, refuse_in_quarantine, signature_of
from endstop.runtime.drivers import ThreadedCall, World, adrive, drive
from endstop.runtime.toolface import declared_of, fits, is_async, refuse_generator
from endstop.runtime.turn import Turn, checked_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from endstop.core.commands import Flow
    from endstop.core.envelope import Envelope
    from endstop.core.model import Counters, Spec, Version
    from endstop.core.policy import Limits, Policy, ToolPolicy
    from endstop.core.records import CheckpointRecord, OperationRecord, RunRecord
    from endstop.runtime.clock import Ids
    from endstop.runtime.declare import ToolOptions
    from endstop.runtime.turn import Prices

__all__ = ["Run", "RunFacts", "operation_id_of"]

GUARDED = "__endstop_guarded__"
P = ParamSpec("P")
T = TypeVar("T")
DATA_CHARS_MAX = 64 * 1024


class RunFacts:
    """What all agents of one run in this process share."""

    def __init__(
        self, *, root_run_id: str, world: World, ids: Ids, policy: Policy, limits: Limits, spec: Spec, run_key: bytes,
        owner_id: str, labels: Mapping[str, str], prices: Prices | None, resumed_checkpoint: CheckpointRecord | None,
        progress_version: Version | None, generation: int,
    ) -> None:  # fmt: skip
        self.root_run_id = root_run_id
        self.world = world
        self.ids = ids
        self.policy = policy if policy.limits == limits else policy.under(limits)
        self.spec = spec
        self.run_key = run_key
        self.owner_id = owner_id
        self.labels = dict(labels)
        self.prices = prices
        self.resumed_checkpoint = resumed_checkpoint
        self.progress_version = progress_version
        self.generation = generation
        self.signal: RunHalted | None = None
        self.has_left = False
        self.pid = os.getpid()
        self._attempts = itertools.count(1)
        self._calls = itertools.count(1)

    def new_attempt_id(self) -> str:
        """A name for one delivery of a call that no other one of this member has."""
        return str(next(self._attempts))

    def new_call_id(self, head: str) -> str:
        """A name that no other call of the run has: the member's own, and a number."""
        return f"{head}-{self.owner_id}-{next(self._calls)}"


class Run:
    """One agent's hold on a run. Made by `guard.run(...)` and `run.child(...)`."""

    def __init__(self, facts: RunFacts, *, run_id: str, root_run_id: str, agent: str, depth: int = 0) -> None:
        self._facts = facts
        self.run_id = run_id
        self.root_run_id = root_run_id
        self.agent = agent
        self.depth = depth

    # -- What it is

    @property
    def world(self) -> World:
        """What its drivers act on."""
        return self._facts.world

    @property
    def policy(self) -> Policy:
        """What its calls are judged against, with the run's own limits."""
        return self._facts.policy

    @property
    def limits(self) -> Limits:
        """The run's limits."""
        return self._facts.policy.limits

    @property
    def spec(self) -> Spec:
        """What the run is for."""
        return self._facts.spec

    @property
    def prices(self) -> Prices | None:
        """What models cost, where that is known."""
        return self._facts.prices

    @property
    def generation(self) -> int:
        """Which stretch of the run this is: it grows with every resume and restart."""
        return self._facts.generation

    @property
    def resumed_from(self) -> object:
        """The data of the last checkpoint of an earlier stretch, or None."""
        found = self._facts.resumed_checkpoint
        return None if found is None else orjson.loads(found.data)

    @property
    def progress_version(self) -> Version | None:
        """The progress version of the run when this process joined it."""
        return self._facts.progress_version

    @property
    def stop_reason(self) -> Reason | None:
        """Why this process saw the run stop, or None while it has not."""
        signal = self._facts.signal
        return None if signal is None else signal.envelope.terminal_reason

    @property
    def envelope(self) -> Envelope | None:
        """The run's end as this process saw it, or None."""
        signal = self._facts.signal
        return None if signal is None else signal.envelope

    def record(self) -> RunRecord:
        """The run as it is stored now."""
        found = self.world.store.run(self.root_run_id).result()
        if found is None:
            msg = f"run {self.root_run_id} is no longer in the store"
            raise UsageError(msg)
        return found

    @property
    def counters(self) -> Counters:
        """What the whole run has used so far."""
        return self.record().counters

    # -- Tool calls

    def call(
        self,
        function: Callable[..., object],
        args: Mapping[str, object] | str | None = None,
        *,
        tool: str | None = None,
        call_id: str | None = None,
        round_id: str | None = None,
        change: Change | str | None = None,
        fault: ErrorClass | None = None,
        idempotency_key: str | None = None,
    ) -> ToolResult[object]:
        """Call `function(**args)` if the guard allows it, and give its result.

        `tool` is the tool's name (default: the declared or the function's own). `idempotency_key` (1 to 255 bytes)
        names the operation in place of the declared template; it is kept as a digest alone. `fault` says that the host
        already knows the call cannot run. Arguments that `function` cannot take are a malformed call, which is refused
        as a value. Raises UsageError for an async function, RunHalted when the run is over, the tool's own exception
        after it was settled, OutcomeUnknownError after a write whose effect is not proven either way, StoreError when
        the ledger cannot record the call (the tool was not called).
        """
        self.check_open()
        if is_async(function):
            msg = f"{declared_of(function)[0]} is async: call it with `await run.acall(...)`"
            raise UsageError(msg)
        flow = self._guarded(function, args, tool, call_id, round_id, change, fault, idempotency_key, threaded=False)
        try:
            return drive(flow, self.world, self.root_run_id)
        except RunHalted as signal:
            raise self.halt(signal) from signal.__cause__

    async def acall(
        self,
        function: Callable[..., object],
        args: Mapping[str, object] | str | None = None,
        *,
        tool: str | None = None,
        call_id: str | None = None,
        round_id: str | None = None,
        change: Change | str | None = None,
        fault: ErrorClass | None = None,
        idempotency_key: str | None = None,
    ) -> ToolResult[object]:
        """The same as `call` from an event loop; a function that is not async runs in a thread."""
        flow = self._guarded(function, args, tool, call_id, round_id, change, fault, idempotency_key, threaded=True)
        try:
            return await adrive(flow, self.world, self.root_run_id)
        except RunHalted as signal:
            raise self.halt(signal) from signal.__cause__

    def tool(
        self, *, name: str | None = None, **options: Unpack[ToolOptions]
    ) -> Callable[[Callable[P, T]], Callable[P, ToolResult[T]]]:
        """Declare a function as a tool of this run; calling it is then a guarded call that gives a ToolResult.

        `options` are the fields of `ToolPolicy`. An async function stays async.
        """
        from endstop.runtime.declare import tool as declare

        def wrap(function: Callable[P, T]) -> Callable[P, ToolResult[T]]:
            declared = declare(name=name, **options)(function)
            signature = signature_of(function)
            if is_async(function):

                @functools.wraps(function)
                async def guarded_async(*args: P.args, **kwargs: P.kwargs) -> object:
                    return await self.acall(declared, bound_arguments(signature, args, kwargs))

                setattr(guarded_async, GUARDED, declared)
                return cast("Callable[P, ToolResult[T]]", guarded_async)

            @functools.wraps(function)
            def guarded(*args: P.args, **kwargs: P.kwargs) -> ToolResult[T]:
                return cast("ToolResult[T]", self.call(declared, bound_arguments(signature, args, kwargs)))

            setattr(guarded, GUARDED, declared)
            return guarded

        return wrap

    def operation(self, operation_id: str) -> OperationRecord | None:
        """An operation as it stands, for whoever was refused with its id; None when there is none of that id."""
        found = self.world.store.operations(operation_id=operation_id).result()
        return found[0] if found else None

    # -- Model calls

    def model_call(
        self,
        *,
        model: str = "",
        input_tokens_max: int | None = None,
        output_tokens_max: int | None = None,
        is_retry: bool = False,
        input_digest: str = "",
        worst_case: tuple[int, int] | None = None,
    ) -> Turn:
        """A paid model call, as a context manager (sync or async). The bounds are in tokens; record what it used.

        `worst_case` (input and output tokens) is what is priced against a budget, and charged when no usage comes
        back; default: the bounds.
        """
        call = ModelCall(
            model=model,
            input_tokens_max=checked_bound("input_tokens_max", input_tokens_max),
            output_tokens_max=checked_bound("output_tokens_max", output_tokens_max),
            agent=self.agent,
        )
        return Turn(self, call, is_retry=is_retry, input_digest=input_digest, worst_case=worst_case)

    # -- Children and handoffs

    def child(self, *, agent: str, brief: str = "") -> Run:
        """A sub-agent of this run: it shares counters, progress, budget and stop. Raises RunHalted beyond
        `depth_max`, UsageError while the run is frozen."""
        self.check_open()
        run_id = self._facts.ids.new_id()
        answer = self.world.store.transact(
            ReserveChild(
                run_id=self.root_run_id, now_us=self.world.clock.now_us(), policy=self.policy,
                proposal=self._agent_proposal("child", agent, brief), child_run_id=run_id,
                parent_run_id=self.run_id, depth=self.depth + 1, child_agent=agent, generation=self.generation,
            )
        ).result()  # fmt: skip
        self._allowed(answer)
        return Run(self._facts, run_id=run_id, root_run_id=self.root_run_id, agent=agent, depth=self.depth + 1)

    def handoff(self, to: str, *, brief: str = "") -> Run:
        """Hand the run to agent `to`, which goes on at the same depth. Raises RunHalted beyond `handoffs_max` or in a
        cycle of handoffs, UsageError while the run is frozen."""
        self.check_open()
        answer = self.world.store.transact(
            ReserveHandoff(
                run_id=self.root_run_id, now_us=self.world.clock.now_us(), policy=self.policy,
                proposal=self._agent_proposal("handoff", to, brief), generation=self.generation,
            )
        ).result()  # fmt: skip
        self._allowed(answer)
        return Run(self._facts, run_id=self.run_id, root_run_id=self.root_run_id, agent=to, depth=self.depth)

    # -- Life

    def checkpoint(self, data: object) -> None:
        """Keep `data` (JSON values) as the run's last safe state to resume from."""
        self.check_open()
        text = canonical_bytes(data).decode()
        if len(text) > DATA_CHARS_MAX:
            msg = f"a checkpoint holds {DATA_CHARS_MAX} characters of JSON at most; keep a reference instead"
            raise UsageError(msg)
        self.world.store.transact(
            SaveCheckpoint(run_id=self.root_run_id, now_us=self.world.clock.now_us(), data=text)
        ).result()

    def user_input(self) -> None:
        """A real person spoke to this run: a new epoch. Never for text that a host injects."""
        self.check_open()
        self.world.store.transact(NoteUserInput(run_id=self.root_run_id, now_us=self.world.clock.now_us())).result()

    def complete(self, *, output: object = None) -> Envelope:
        """The task is done: end the run as complete and keep `output` (text or JSON values) for review. Raises
        RunHalted when the run had been stopped, UsageError for an output that cannot be kept."""
        self._check_inside()
        text = output_text(output)
        if text is None and output is not None:
            msg = f"an output is text or JSON of at most {OUTPUT_BYTES_MAX} bytes; pass a reference instead"
            raise UsageError(msg)
        envelope = self.world.store.transact(
            CompleteRun(
                run_id=self.root_run_id, now_us=self.world.clock.now_us(), output=text, generation=self.generation
            )
        ).result()
        if envelope.terminal_reason is not Reason.COMPLETE:
            raise self.halt(halted(envelope))
        self._facts.signal = self._facts.signal or halted(envelope)
        return envelope

    def end(self, reason: Reason | str, message: str = "", *, guard: str = "host") -> Envelope:
        """End the run from outside the guards: `framework_cap`, `provider_fault`, `fatal` and their like."""
        ending = Reason(reason)
        if ending not in TERMINAL_REASONS or ending is Reason.CRASHED:
            msg = f"{ending} cannot end a run"
            raise UsageError(msg)
        envelope = self.world.store.transact(
            EndRun(
                run_id=self.root_run_id, now_us=self.world.clock.now_us(), reason=ending, guard=guard,
                message=message, generation=self.generation, actor="host",
            )
        ).result()  # fmt: skip
        self._facts.signal = self._facts.signal or halted(envelope)
        return envelope

    # -- For this package

    def new_call_id(self, head: str) -> str:
        """An id that no other call of the run has."""
        return self._facts.new_call_id(head)

    def check_open(self) -> None:
        """Raise the latched signal when this process has seen the run end; GuardClosedError outside of its block."""
        if self._facts.signal is not None:
            raise RunHalted(str(self._facts.signal), self._facts.signal.envelope)
        self._check_inside()

    def _check_inside(self) -> None:
        facts = self._facts
        if facts.has_left:
            msg = f"the block of run {self.root_run_id} was left: enter the run again by its id"
            raise GuardClosedError(msg)
        if facts.pid != os.getpid():
            msg = f"this process was forked inside run {self.root_run_id}: open the store and enter the run by its id"
            raise GuardClosedError(msg)

    def halt(self, signal: RunHalted) -> RunHalted:
        """Latch `signal`, and give it back to be raised."""
        if self._facts.signal is None:
            self._facts.signal = signal
        return signal

    def _allowed(self, answer: StepAnswer) -> None:
        if answer.verdict.action is Action.STOP:
            raise self.halt(halted(answer.envelope))
        if answer.verdict.action is not Action.EXECUTE:
            raise UsageError(message_of(answer.verdict))

    def _agent_proposal(self, kind: str, agent: str, brief: str) -> Proposal:
        return Proposal(
            tool=safe_name(f"{kind}:{agent}"),
            effect=Effect.UNKNOWN,
            fingerprint=digest_of(kind, self.agent if kind == "handoff" else "", agent, brief, key=self._facts.run_key),
            call_id=self.new_call_id(kind),
            agent=safe_name(self.agent),
        )

    def _guarded(
        self,
        function: Callable[..., object],
        args: Mapping[str, object] | str | None,
        tool: str | None,
        call_id: str | None,
        round_id: str | None,
        change: Change | str | None,
        fault: ErrorClass | None,
        idempotency_key: str | None,
        *,
        threaded: bool,
    ) -> Flow[ToolResult[object]]:
        self.check_open()
        # A tool of a run, passed to a guarded call, is guarded once: by this call.
        function = getattr(function, GUARDED, function)
        refuse_generator(function)
        facts = self._facts
        own_name, declared = declared_of(function)
        name = tool or own_name
        policy = stricter(self.policy.tool(name), declared)
        call = ToolCall(
            tool=name,
            args={} if args is None else args,
            call_id=call_id or self.new_call_id("call"),
            round_id=round_id,
            agent=self.agent,
            change=change,
        )
        complaint = ""
        if fault is None and not isinstance(call.args, str) and not fits(function, call.args):
            fault = ErrorClass.SCHEMA
            complaint = "They do not fit the parameters of the tool's function."
        store = facts.world.store
        refuse_in_quarantine(store, policy, name)
        proposal = propose(
            call, policy, run_key=facts.run_key, store_key=store.store_key, scope_value=self._scope_value(policy),
            fault=fault, given_key=idempotency_key, complaint=complaint,
        )  # fmt: skip
        arguments = proposal.args

        sending = facts.world.sending

        def run_tool() -> object:
            given = arguments if not isinstance(arguments, str) else {}
            if threaded and not is_async(function):
                import asyncio

                return ThreadedCall(asyncio.to_thread(sending.run, function, given))
            return sending.run(function, given)

        return guarded_call(
            CallRequest(
                run_id=self.root_run_id, policy=self.policy, tool=policy, proposal=proposal,
                operation_id=operation_id_of(proposal, self.root_run_id, store.store_key), owner_id=facts.owner_id,
                attempt_id=facts.new_attempt_id(),
                generation=facts.generation, run_key=facts.run_key, call=run_tool, now_us=facts.world.clock.now_us,
                schema_check=_schema_check(policy), input_digest=proposal.operation_fingerprint,
                store_key=store.store_key,
            )
        )  # fmt: skip

    def _scope_value(self, policy: ToolPolicy) -> str:
        labels = self._facts.labels
        match policy.key_scope:
            case "run":
                return self.root_run_id
            case "conversation":
                return labels.get("conversation", self.root_run_id)
            case _:
                return labels.get("tenant", "")


def operation_id_of(proposal: Proposal, run_id: str, store_key: bytes) -> str | None:
    """The operation behind a call: named by the key of a write, else by run, call id and arguments."""
    if proposal.fault is not None:
        return None
    if proposal.key_digest is not None:
        return f"op_{proposal.key_digest}"
    if proposal.effect is Effect.UNKNOWN:
        named = digest_of("call", run_id, proposal.call_id, proposal.operation_fingerprint, key=store_key)
        return f"op_{named}"
    return None


def _schema_check(policy: ToolPolicy) -> Callable[[object], str | None] | None:
    if policy.result_schema is None:
        return None
    from endstop.runtime.schema_check import schema_check

    return schema_check(policy.result_schema)
