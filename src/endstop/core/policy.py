"""What calls are judged against: limits, tool policies and the ladder. Validated once, then frozen.

Reading a policy from a file is the runtime's work (`endstop.load_policy`); this module never opens one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, TypeVar

from endstop.core.canonical import canonical_bytes, digest_of
from endstop.core.reasons import Effect, OptionalWord, OutcomeClass, Word
from endstop.errors import NotCanonicalError, PolicyInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


__all__ = ["NO_TOOL_POLICY", "RUNGS", "SCOPES", "WAITERS", "Limits", "Policy", "ToolPolicy", "stricter"]

S = TypeVar("S", bound=str)

RUNGS: Final = ("warn", "block", "stop")
SCOPES: Final = ("run", "conversation", "object", "tenant")
TOOLS_MAX: Final = 1_000
LIMIT_VALUE_MAX: Final = 2**53 - 1
WAITERS: Final = ("handle", "wait", "reject")  # from the freest to the strictest
_COUNTS: Final = (
    "deadline_ms", "poll_unchanged_max", "poll_interval_ms_min", "probes_max", "probe_settle_ms", "probe_backoff_ms",
    "attempts_max", "wait_ms",
)  # fmt: skip

# What a limit may be at least. Zero means "none at all" and is allowed where that makes sense.
_AT_LEAST_ONE: Final = frozenset(
    {
        "same_call_max", "call_window", "cycle_repeats_max", "no_progress_max", "same_answer_max",
        "error_streak_max", "refused_streak_max", "poll_unchanged_max", "wall_ms_max",
    }
)  # fmt: skip
_MEMORY_BOUNDS: Final = {"call_window": 64, "cycle_period_max": 64, "same_answer_max": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The named maxima of a run. `wall_ms_max` is in milliseconds of running time, `spend_nanos_max` in nano-dollars.

    Raises PolicyInvalidError for a value that is no whole number, negative, or beyond what bounded memory allows.
    """

    steps_max: int = 20
    turns_max: int = 5
    tokens_max: int = 15_000
    wall_ms_max: int = 60_000
    retries_max: int = 3
    handoffs_max: int = 8
    depth_max: int = 4
    spend_nanos_max: int | None = None
    same_call_max: int = 2
    call_window: int = 8
    cycle_period_max: int = 8
    cycle_repeats_max: int = 2
    no_progress_max: int = 3
    same_answer_max: int = 8
    error_streak_max: int = 3
    refused_streak_max: int = 2
    poll_unchanged_max: int = 30

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None and item.name == "spend_nanos_max":
                continue
            if type(value) is not int or value < 0 or value > LIMIT_VALUE_MAX:
                msg = f"limit {item.name} must be a whole number from 0 to {LIMIT_VALUE_MAX}"
                raise PolicyInvalidError(msg)
            if value == 0 and item.name in _AT_LEAST_ONE:
                msg = f"limit {item.name} must be at least 1: with 0 no call could ever run"
                raise PolicyInvalidError(msg)
            if value > _MEMORY_BOUNDS.get(item.name, value):
                msg = f"limit {item.name} may be {_MEMORY_BOUNDS[item.name]} at most: a run's memory is bounded"
                raise PolicyInvalidError(msg)

    def raised(self, name: str, value: int) -> Limits:
        """These limits with `name` set to `value`. Raises PolicyInvalidError for an unknown name or a bad value."""
        if name not in {item.name for item in fields(self)}:
            msg = f"there is no limit named {name!r}"
            raise PolicyInvalidError(msg)
        changed: dict[str, int] = {name: value}
        return replace(self, **changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPolicy:
    """What is declared of one tool. Everything has a safe default; nothing is guessed from the tool's name.

    `idempotency_key` is a template (`"{contact_id}:{version}"`), a tuple of argument names, or a function from the
    arguments to text. `progress` is the dotted place of the progress version in the answer. `result_schema` is a JSON
    Schema (kept as canonical text). Times are milliseconds. `attempts_max` counts attempts that were proven not
    applied; the `probe*` fields say how a target is asked, `waiter` what a second caller of a key in flight gets.
    """

    effect: Word[Effect] = Effect.UNKNOWN  # type: ignore[assignment]  # see Word
    identity: tuple[str, ...] = ()
    volatile_args: tuple[str, ...] = ()
    volatile_result: tuple[str, ...] = ()
    progress: str | None = None
    progress_scope: tuple[str, ...] = ()
    idempotency_key: str | tuple[str, ...] | Callable[[Mapping[str, object]], str | None] | None = None
    scope: str | None = None
    outcome_class: OptionalWord[OutcomeClass] = None  # type: ignore[assignment]  # see Word
    owes_data: bool | None = None
    result_schema: str | None = None
    deadline_ms: int | None = None
    probe: Callable[..., object] | str | None = None
    probes_max: int | None = None
    probe_settle_ms: int | None = None
    probe_backoff_ms: int | None = None
    attempts_max: int | None = None
    waiter: str | None = None
    wait_ms: int | None = None
    approve: bool = False
    on_committed: str | None = None
    poll_unchanged_max: int | None = None
    poll_interval_ms_min: int | None = None
    declared: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__
        # 1. Closed sets, written as plain strings by users.
        try:
            put(self, "effect", Effect(self.effect))
            if self.outcome_class is not None:
                put(self, "outcome_class", OutcomeClass(self.outcome_class))
        except ValueError as error:
            msg = f"a tool policy has an unknown value: {error}"
            raise PolicyInvalidError(msg) from error
        if self.scope is not None and self.scope not in SCOPES:
            msg = f"scope {self.scope!r} is unknown; one of {', '.join(SCOPES)}"
            raise PolicyInvalidError(msg)
        if self.on_committed not in (None, "stop", "replay"):
            msg = f"on_committed {self.on_committed!r} is unknown; one of stop, replay"
            raise PolicyInvalidError(msg)
        # 2. Lists of names.
        for name in ("identity", "volatile_args", "volatile_result", "progress_scope"):
            put(self, name, _names(name, getattr(self, name)))
        self._check_key()
        # 3. Times and counts.
        if self.waiter not in (None, *WAITERS):
            msg = f"waiter {self.waiter!r} is unknown; one of {', '.join(WAITERS)}"
            raise PolicyInvalidError(msg)
        for name in _COUNTS:
            value = getattr(self, name)
            least = 0 if name == "probe_settle_ms" else 1
            if value is not None and (type(value) is not int or value < least):
                msg = f"tool policy field {name} must be a whole number, {least} or more"
                raise PolicyInvalidError(msg)
        # 4. A schema is kept as canonical text, so that a policy stays hashable and comparable.
        schema: object = self.result_schema
        if schema is not None and not isinstance(schema, str):
            put(self, "result_schema", _schema_text(schema))
        if self.owes_data is None:
            put(self, "owes_data", self.effect in (Effect.READ, Effect.POLL))

    def _check_key(self) -> None:
        key = self.idempotency_key
        if key is None or callable(key):
            return
        if isinstance(key, str):
            names = _template_names(key)
            if not names:
                msg = f"idempotency_key {key!r} names no argument: write a template such as '{{order_id}}'"
                raise PolicyInvalidError(msg)
            return
        object.__setattr__(self, "idempotency_key", _names("idempotency_key", key))
        if not self.idempotency_key:
            msg = "idempotency_key is an empty list: name the arguments that make the operation one"
            raise PolicyInvalidError(msg)

    @property
    def key_scope(self) -> str:
        """Where the idempotency key is unique: as declared, else in the whole tenant (the safe default)."""
        return self.scope or "tenant"

    @property
    def target_class(self) -> OutcomeClass:
        """The outcome class: as declared; else probeable with a probe, and at most once without."""
        if self.outcome_class is not None:
            return self.outcome_class
        return OutcomeClass.AT_MOST_ONCE if self.probe is None else OutcomeClass.PROBEABLE

    @property
    def replays_committed(self) -> bool:
        """Whether a write committed in this generation is answered from the ledger instead of ending the run."""
        return self.on_committed == "replay"

    @property
    def key_fields(self) -> tuple[str, ...]:
        """The argument paths that a template or a list of fields names; empty for a function or no key."""
        key = self.idempotency_key
        if isinstance(key, str):
            return _template_names(key)
        return key if isinstance(key, tuple) else ()


def _names(field_name: str, value: object) -> tuple[str, ...]:
    found: tuple[object, ...] = ()
    if isinstance(value, str):
        found = (value,)
    elif isinstance(value, list | tuple):
        found = tuple(value)
    names = tuple(name for name in found if isinstance(name, str) and name)
    if len(names) != len(found) or not isinstance(value, str | list | tuple):
        msg = f"tool policy field {field_name} must be a list of names"
        raise PolicyInvalidError(msg)
    return names


def _schema_text(schema: object) -> str:
    try:
        return canonical_bytes(schema).decode()
    except NotCanonicalError as error:
        msg = f"tool policy field result_schema is no JSON Schema: {error}"
        raise PolicyInvalidError(msg) from error


@lru_cache(maxsize=TOOLS_MAX)
def _template_names(template: str) -> tuple[str, ...]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        msg = f"idempotency_key {template!r} is no valid template: {error}"
        raise PolicyInvalidError(msg) from error
    names = []
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or spec or conversion or any(sign in name for sign in "[]()"):
            msg = f"idempotency_key {template!r}: only plain argument names in braces are allowed"
            raise PolicyInvalidError(msg)
        names.append(name)
    return tuple(names)


NO_TOOL_POLICY: Final = ToolPolicy(declared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits, tool policies by name (or shell pattern) and the ladder of what happens when a guard trips.

    `on_trip` is `("stop",)`, a climb such as `("warn", "block", "stop")`, or `("observe",)`, which only writes down
    what would have happened. `strict_tools` refuses tools that are not declared. `redact` names arguments that are
    never shown. Raises PolicyInvalidError when the ladder has no stop, or a rung that could never be reached.
    """

    limits: Limits = Limits()
    tools: Mapping[str, ToolPolicy] = field(default_factory=dict)
    on_trip: tuple[str, ...] = ("stop",)
    strict_tools: bool = False
    redact: tuple[str, ...] = ()
    _patterns: tuple[str, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        given: object = self.on_trip
        ladder = (given,) if isinstance(given, str) else tuple(self.on_trip)
        object.__setattr__(self, "on_trip", ladder)
        limits: object = self.limits
        if not isinstance(limits, Limits):
            msg = "policy field limits must be a Limits record"
            raise PolicyInvalidError(msg)
        # 1. The ladder: observe stands alone; otherwise it climbs and ends in stop.
        if ladder != ("observe",):
            for rung in ladder:
                if rung not in RUNGS:
                    msg = f"on_trip rung {rung!r} is unknown; one of observe (alone), {', '.join(RUNGS)}"
                    raise PolicyInvalidError(msg)
            if "stop" not in ladder:
                msg = "on_trip has no 'stop': a guard that never stops a run is no guard; add it, or use ['observe']"
                raise PolicyInvalidError(msg)
            if list(ladder) != sorted(ladder, key=RUNGS.index) or ladder[-1] != "stop" or ladder.count("stop") > 1:
                msg = f"on_trip {list(ladder)} has a rung that is never reached: climb from warn over block to stop"
                raise PolicyInvalidError(msg)
        # 2. The tools.
        if len(self.tools) > TOOLS_MAX:
            msg = f"a policy declares at most {TOOLS_MAX} tools"
            raise PolicyInvalidError(msg)
        tools: list[tuple[object, object]] = list(self.tools.items())
        for name, tool in tools:
            if not isinstance(name, str) or not name or not isinstance(tool, ToolPolicy):
                msg = "policy field tools must map tool names to ToolPolicy records"
                raise PolicyInvalidError(msg)
        object.__setattr__(self, "tools", MappingProxyType(dict(self.tools)))
        object.__setattr__(self, "_patterns", tuple(name for name in self.tools if any(sign in name for sign in "*?[")))

    @property
    def observes(self) -> bool:
        """Whether guards only write down what they would have done."""
        return self.on_trip == ("observe",)

    def tool(self, name: str) -> ToolPolicy:
        """The policy of the tool called `name`: by its exact name, else the first pattern that fits, else none."""
        found = self.tools.get(name)
        if found is not None:
            return found
        for pattern in self._patterns:
            if fnmatchcase(name, pattern):
                return self.tools[pattern]
        return NO_TOOL_POLICY

    def under(self, limits: Limits) -> Policy:
        """This policy with other limits."""
        return replace(self, limits=limits)

    def digest(self) -> str:
        """A digest of everything in this policy that decides, for joining a run and for every ledger entry."""
        return digest_of(
            "policy",
            {item.name: getattr(self.limits, item.name) for item in fields(self.limits)},
            {name: _facts(tool) for name, tool in self.tools.items()},
            list(self.on_trip),
            self.strict_tools,
            list(self.redact),
        )


def _facts(tool: ToolPolicy) -> dict[str, object]:
    facts: dict[str, object] = {}
    for item in fields(tool):
        value = getattr(tool, item.name)
        facts[item.name] = _function_name(value) if callable(value) else value
    return facts


def _function_name(value: object) -> str:
    return f"{getattr(value, '__module__', '?')}:{getattr(value, '__qualname__', type(value).__name__)}"


# From the freest to the strictest; what a policy and a declaration say apart, the stricter wins.
_EFFECT_ORDER: Final = (Effect.WAIT, Effect.POLL, Effect.READ, Effect.UNKNOWN, Effect.WRITE)


def stricter(policy: ToolPolicy, declaration: ToolPolicy) -> ToolPolicy:
    """The tool policy that keeps the stricter word of both; what only one of them declares is taken from that one.

    Effects: write is stricter than read, poll and wait; an undeclared effect gives way to a declared one. Counts and
    times: the smaller. `approve` and `owes_data`: true wins. Volatile fields are ignored only when both (or the only
    one that names any) agree.
    """
    if not policy.declared:
        return declaration
    if not declaration.declared:
        return policy
    effect = max(policy.effect, declaration.effect, key=_EFFECT_ORDER.index)
    if Effect.UNKNOWN in (policy.effect, declaration.effect) and effect is not Effect.WRITE:
        effect = declaration.effect if policy.effect is Effect.UNKNOWN else policy.effect
    return replace(
        policy,
        effect=effect,
        identity=policy.identity or declaration.identity,
        volatile_args=_agreed(policy.volatile_args, declaration.volatile_args),
        volatile_result=_agreed(policy.volatile_result, declaration.volatile_result),
        progress=policy.progress or declaration.progress,
        progress_scope=policy.progress_scope or declaration.progress_scope,
        idempotency_key=policy.idempotency_key if policy.idempotency_key is not None else declaration.idempotency_key,
        scope=_last_of(SCOPES, policy.scope, declaration.scope),
        outcome_class=_last_of(tuple(OutcomeClass), policy.outcome_class, declaration.outcome_class),
        owes_data=policy.owes_data or declaration.owes_data,
        result_schema=policy.result_schema or declaration.result_schema,
        deadline_ms=_smaller(policy.deadline_ms, declaration.deadline_ms),
        probe=policy.probe or declaration.probe,
        probes_max=_smaller(policy.probes_max, declaration.probes_max),
        probe_settle_ms=_larger(policy.probe_settle_ms, declaration.probe_settle_ms),
        probe_backoff_ms=_larger(policy.probe_backoff_ms, declaration.probe_backoff_ms),
        attempts_max=_smaller(policy.attempts_max, declaration.attempts_max),
        waiter=_last_of(WAITERS, policy.waiter, declaration.waiter),
        wait_ms=_smaller(policy.wait_ms, declaration.wait_ms),
        approve=policy.approve or declaration.approve,
        on_committed=_last_of(("replay", "stop"), policy.on_committed, declaration.on_committed),
        poll_unchanged_max=_smaller(policy.poll_unchanged_max, declaration.poll_unchanged_max),
        poll_interval_ms_min=_larger(policy.poll_interval_ms_min, declaration.poll_interval_ms_min),
    )


def _agreed(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    if not one or not other:
        return one or other
    return tuple(name for name in one if name in other)


def _last_of(order: tuple[S, ...], one: S | None, other: S | None) -> S | None:
    """The stricter of two words, where `order` climbs from free to strict."""
    known = [value for value in (one, other) if value is not None]
    return max(known, key=order.index) if known else None


def _smaller(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return min(known) if known else None


def _larger(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return max(known) if known else None
