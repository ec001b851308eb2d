"""Declaring tools: what a function does to the world, and what a model may call it with.

Rule: decorating costs nothing. The decorator leaves a note on the function and gives the same function back; the JSON
Schema of its parameters is made, through pydantic, when somebody first asks for it, and then kept.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from endstop.core.policy import NO_TOOL_POLICY, ToolPolicy
from endstop.errors import PolicyInvalidError, UsageError
from endstop.runtime.docstrings import read_docstring
from endstop.runtime.schema_check import schema_check
from endstop.runtime.toml_file import close_to
from endstop.runtime.toolface import MARK, declared_of, is_async

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Unpack

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

__all__ = [
    "ToolDeclaration",
    "ToolOptions",
    "bind_arguments",
    "declaration_of",
    "full_name",
    "schema_check",
    "tool",
]

F = TypeVar("F", bound="Callable[..., object]")

FIELD_CHARS_MAX: Final = 80
FAULTS_SHOWN_MAX: Final = 10
PARAMETERS_MAX: Final = 128


class ToolOptions(TypedDict, total=False):
    """What `tool` takes beside a name and a description: the fields of `ToolPolicy`, in the forms that it accepts."""

    effect: str
    identity: str | tuple[str, ...] | list[str]
    volatile_args: str | tuple[str, ...] | list[str]
    volatile_result: str | tuple[str, ...] | list[str]
    progress: str | None
    progress_scope: str | tuple[str, ...] | list[str]
    idempotency_key: str | tuple[str, ...] | list[str] | Callable[[Mapping[str, object]], str | None] | None
    scope: str | None
    outcome_class: str | None
    owes_data: bool | None
    result_schema: str | Mapping[str, object] | None
    deadline_ms: int | None
    probe: Callable[..., object] | str | None
    probes_max: int | None
    probe_settle_ms: int | None
    probe_backoff_ms: int | None
    attempts_max: int | None
    waiter: str | None
    wait_ms: int | None
    approve: bool
    on_committed: str | None
    poll_unchanged_max: int | None
    poll_interval_ms_min: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDeclaration:
    """All that is known of a tool before it is called. `parameters` is a JSON Schema (2020-12) of its arguments as
    text; `policy` is `NO_TOOL_POLICY` when nothing was declared."""

    name: str
    description: str
    policy: ToolPolicy
    parameters: str
    is_async: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What the decorator leaves on a function."""

    name: str | None
    description: str | None
    policy: ToolPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """A function's parameters as a pydantic model. Fields are numbered, so that no parameter's name can clash with a
    name of pydantic's; `names` maps them back."""

    model: type[BaseModel]
    names: Mapping[str, str]
    schema_text: str


_parameters: WeakKeyDictionary[object, dict[bool, _Parameters]] = WeakKeyDictionary()
_lock: Final = threading.Lock()


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *, name: str | None = None, description: str | None = None, **options: Unpack[ToolOptions]
) -> Callable[[F], F]: ...


def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    **options: Unpack[ToolOptions],
) -> Callable[..., object]:
    """Declare a function, sync or async, as a tool. Gives the same function back, so its signature is unchanged.

    `options` are the fields of `ToolPolicy`. Without any, the function has a name and a description and counts as
    undeclared. Raises PolicyInvalidError for a wrong field and for a key, identity, volatile argument or progress scope
    that names no parameter; UsageError for something that cannot carry a declaration, such as a bound method.
    """
    build: Callable[..., ToolPolicy] = ToolPolicy
    mark = _Mark(name=name, description=description, policy=build(**options) if options else NO_TOOL_POLICY)

    def declare(declared: F) -> F:
        _check_names(declared, mark.policy)
        if mark.policy.result_schema is not None:
            schema_check(mark.policy.result_schema)
        try:
            setattr(declared, MARK, mark)
        except AttributeError as fault:
            msg = f"{full_name(declared)} cannot carry a declaration: decorate the plain function"
            raise UsageError(msg) from fault
        return declared

    return declare if function is None else declare(function)


def full_name(function: Callable[..., object]) -> str:
    """The function's module and qualified name, `module.qualname`."""
    plain = _plain(function)
    return f"{getattr(plain, '__module__', None) or '?'}.{getattr(plain, '__qualname__', type(plain).__qualname__)}"


def declaration_of(function: Callable[..., object]) -> ToolDeclaration:
    """The declaration of `function`, decorated or not.

    The name is the decorator's or the function's own, the description the decorator's or the docstring's. Raises
    UsageError when its parameters cannot be described: a type without a JSON form, type hints that do not resolve, or
    parameters without a name.
    """
    name, policy = declared_of(function)
    plain = _plain(function)
    mark = getattr(function, MARK, None) or getattr(plain, MARK, None)
    said = mark.description if isinstance(mark, _Mark) else None
    return ToolDeclaration(
        name=name,
        description=read_docstring(inspect.getdoc(plain)).description if said is None else said,
        policy=policy,
        parameters=_parameters_of(function).schema_text,
        is_async=is_async(function),
    )


def bind_arguments(function: Callable[..., object], args: Mapping[str, object]) -> dict[str, object]:
    """`args` checked and converted by the function's type hints, ready for `function(**bound)`.

    Only what was given is returned, so the function's own defaults hold. Raises UsageError that names every argument
    that is missing, unknown or does not fit, and never a value.
    """
    from pydantic import ValidationError

    found = _parameters_of(function)
    try:
        bound = found.model.model_validate(dict(args))
    except ValidationError as fault:
        said = [_said(item, found) for item in fault.errors(include_url=False, include_input=False)[:FAULTS_SHOWN_MAX]]
        msg = f"the arguments of {declared_of(function)[0]} do not fit: {'; '.join(dict.fromkeys(said))}"
        # The cause would carry the values.
        raise UsageError(msg) from None
    given = bound.model_fields_set
    named = {name: getattr(bound, field) for field, name in found.names.items() if field in given}
    return {**named, **(bound.model_extra or {})}


# -- Functions in their disguises.


def _plain(function: object) -> object:
    """The function inside partial objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _check_names(function: Callable[..., object], policy: ToolPolicy) -> None:
    """Every argument that a policy names is a parameter: a misspelt key field would refuse each call only when made."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    named = {
        "idempotency_key": policy.key_fields,
        "identity": policy.identity,
        "volatile_args": policy.volatile_args,
        "progress_scope": policy.progress_scope,
    }
    for field, paths in named.items():
        for path in paths:
            head = path.split(".")[0]
            if head != "*" and head not in parameters:
                known = ", ".join(parameters) or "none"
                msg = f"{full_name(function)}: {field} names {head!r}, which is no parameter of it (it has: {known})"
                raise PolicyInvalidError(msg)


# -- Parameters.


def _parameters_of(function: Callable[..., object]) -> _Parameters:
    """The parameters, from the cache where there is one: bound and unbound methods of one function differ by `self`."""
    holder = getattr(function, "__func__", function)
    bound = holder is not function
    with _lock:
        try:
            known = _parameters.setdefault(holder, {})
        except TypeError:  # neither hashable nor weakly referable: made anew each time
            known = {}
        if bound not in known:
            known[bound] = _describe(function)
        return known[bound]


def _describe(function: Callable[..., object]) -> _Parameters:
    from pydantic import ConfigDict, create_model
    from pydantic.errors import PydanticUserError

    name = full_name(function)
    signature = _signature(function, name)
    texts = read_docstring(inspect.getdoc(_plain(function))).parameters
    names: dict[str, str] = {}
    fields: dict[str, tuple[object, object]] = {}
    more = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            msg = f"{name}: parameter {parameter.name!r} has no name for a caller; take the '/' out of the signature"
            raise UsageError(msg)
        if parameter.kind is parameter.VAR_POSITIONAL:
            msg = f"{name}: a tool is called with named arguments; take *{parameter.name} out of the signature"
            raise UsageError(msg)
        if parameter.kind is parameter.VAR_KEYWORD:
            more = True
            continue
        field = f"p{len(fields)}"
        names[field] = parameter.name
        fields[field] = _field(parameter, texts.get(parameter.name))
    create: Callable[..., type[BaseModel]] = create_model
    try:
        model = create("Arguments", __config__=ConfigDict(extra="allow" if more else "forbid"), **fields)
        text = _schema_text(model)
    except PydanticUserError as fault:
        blamed = [names[field] for field, (hint, _) in fields.items() if not _has_schema(hint)]
        place = f"parameter {blamed[0]!r} has a type" if blamed else "its parameters are of types"
        msg = f"{name}: {place} that JSON cannot carry ({fault.code}): use a JSON type, a dataclass or a model"
        raise UsageError(msg) from fault
    return _Parameters(model=model, names=names, schema_text=text)


def _signature(function: Callable[..., object], name: str) -> inspect.Signature:
    try:
        signature = inspect.signature(function, eval_str=True)
    except (TypeError, ValueError) as fault:
        msg = f"{name}: its parameters cannot be read; wrap it in a Python function"
        raise UsageError(msg) from fault
    except Exception as fault:
        msg = f"{name}: a type hint cannot be read ({fault}): import what it names outside TYPE_CHECKING"
        raise UsageError(msg) from fault
    if len(signature.parameters) > PARAMETERS_MAX:
        msg = f"{name}: a tool has at most {PARAMETERS_MAX} parameters"
        raise UsageError(msg)
    return signature


def _field(parameter: inspect.Parameter, text: str | None) -> tuple[object, object]:
    """One parameter as pydantic takes it. A description in the type hint is nearer than one in the docstring."""
    from pydantic import Field
    from pydantic.fields import FieldInfo

    hint: object = object if parameter.annotation is parameter.empty else parameter.annotation
    default = ... if parameter.default is parameter.empty else parameter.default
    notes = getattr(hint, "__metadata__", ())
    if text and not any(isinstance(note, FieldInfo) and note.description for note in notes):
        return hint, Field(default, alias=parameter.name, description=text)
    return hint, Field(default, alias=parameter.name)


def _has_schema(hint: object) -> bool:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        TypeAdapter(cast("type[object]", hint)).json_schema()
    except PydanticUserError:
        return False
    return True


def _schema_text(model: type[BaseModel]) -> str:
    from endstop.runtime.file_models import PlainSchema

    schema = model.model_json_schema(schema_generator=PlainSchema)
    schema.pop("title", None)
    schema.setdefault("properties", {})
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


# -- What is wrong with arguments, without a word of theirs: pydantic's messages may quote a value, so none is used.

_PHRASES: Final = {
    "missing": "is missing",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "bytes_type": "must be text",
    "date_from_datetime_parsing": "must be a date such as 2026-01-31",
    "date_parsing": "must be a date such as 2026-01-31",
    "datetime_from_date_parsing": "must be a time such as 2026-01-31T12:00:00Z",
    "datetime_parsing": "must be a time such as 2026-01-31T12:00:00Z",
    "decimal_parsing": "must be a number",
    "dict_type": "must be an object",
    "dataclass_type": "must be an object",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
    "set_type": "must be a list",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "uuid_parsing": "must be a UUID",
}
# Rules whose figures come from the type hint alone.
_BOUNDS: Final = {
    "enum": ("must be one of {expected}", "expected"),
    "greater_than": ("must be greater than {gt}", "gt"),
    "greater_than_equal": ("must be at least {ge}", "ge"),
    "less_than": ("must be less than {lt}", "lt"),
    "less_than_equal": ("must be at most {le}", "le"),
    "literal_error": ("must be one of {expected}", "expected"),
    "multiple_of": ("must be a multiple of {multiple_of}", "multiple_of"),
    "string_pattern_mismatch": ("must match {pattern}", "pattern"),
    "string_too_long": ("must have at most {max_length} characters", "max_length"),
    "string_too_short": ("must have at least {min_length} characters", "min_length"),
    "too_long": ("must have at most {max_length} items", "max_length"),
    "too_short": ("must have at least {min_length} items", "min_length"),
}


def _said(item: ErrorDetails, found: _Parameters) -> str:
    kind = item["type"]
    place = ".".join(str(part)[:FIELD_CHARS_MAX] for part in item["loc"])
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        meant = close_to(place, found.names.values()) if len(item["loc"]) == 1 else None
        return f"{place!r} is no parameter" + (f" (did you mean {meant!r}?)" if meant else "")
    if kind in _BOUNDS:
        phrase, figure = _BOUNDS[kind]
        return f"{place!r} " + phrase.format(**{figure: item.get("ctx", {}).get(figure)})
    return f"{place!r} " + _PHRASES.get(kind, f"does not fit its type ({kind})")
