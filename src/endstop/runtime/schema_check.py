"""Does a tool's answer keep its declared JSON Schema?

Rules of this file: an answer that cannot be judged has failed; a schema is judged when it is loaded, not when it is
first needed; nothing is fetched, so a schema refers to itself alone; a finding names place and rule, never the value.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol, cast

import orjson

from endstop.errors import PolicyInvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["schema_check"]

SCHEMAS_CACHED_MAX: Final = 256
SCHEMA_CHARS_MAX: Final = 262_144
FINDING_CHARS_MAX: Final = 300
# Keywords whose value is data, not a schema: a "$ref" in there refers to nothing.
_DATA_KEYWORDS: Final = frozenset({"const", "enum", "default", "examples"})


class _SchemaError(Protocol):
    """What this module reads of the validator's error."""

    absolute_path: Sequence[str | int]
    validator: str
    validator_value: object
    instance: object


class _Validator(Protocol):
    def iter_errors(self, instance: object) -> Iterator[_SchemaError]: ...


@lru_cache(maxsize=SCHEMAS_CACHED_MAX)
def schema_check(schema_text: str) -> Callable[[object], str | None]:
    """A function that tells what is wrong with an answer under the JSON Schema `schema_text`, or None.

    Drafts 3 to 2020-12, by `$schema`; without one, 2020-12. `format` is not judged. Compiled once for each text, the
    `SCHEMAS_CACHED_MAX` used last are kept. Raises PolicyInvalidError for text that is no valid schema, for an unknown
    `$schema` and for a reference out of the schema.
    """
    schema = _parsed(schema_text)
    validator = _validator(schema)
    names = frozenset(_property_names(schema))

    def check(value: object) -> str | None:
        return _finding(validator, names, value)

    return check


def _parsed(schema_text: str) -> Mapping[str, object] | bool:
    if len(schema_text) > SCHEMA_CHARS_MAX:
        msg = f"a result schema has {len(schema_text)} characters; at most {SCHEMA_CHARS_MAX} are allowed"
        raise PolicyInvalidError(msg)
    try:
        schema: object = orjson.loads(schema_text)
    except orjson.JSONDecodeError as fault:
        msg = f"a result schema is no valid JSON: {fault.msg} (line {fault.lineno})"
        raise PolicyInvalidError(msg) from fault
    if not isinstance(schema, dict | bool):
        msg = "a result schema must be a JSON object"
        raise PolicyInvalidError(msg)
    return schema


def _validator(schema: Mapping[str, object] | bool) -> _Validator:
    import referencing
    import referencing.exceptions
    import referencing.jsonschema
    from jsonschema import validators  # type: ignore[import-untyped]  # jsonschema ships no types
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]  # the same

    # 1. Which draft: an unknown one is refused, because its rules would be ignored in silence.
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    kind = validators.Draft202012Validator
    if dialect is not None:
        kind = validators.validator_for(schema, default=None)
        if kind is None:
            msg = "a result schema names an unknown $schema: use a published draft, or leave it out"
            raise PolicyInvalidError(msg)
    # 2. Is it a schema?
    try:
        kind.check_schema(schema)
    except SchemaError as fault:
        place = ".".join(str(part) for part in fault.absolute_path) or "its top"
        msg = f"a result schema is no valid JSON Schema: rule {fault.validator!r} is broken at {place}"
        raise PolicyInvalidError(msg) from fault
    # 3. Do its references lead somewhere in it? An empty registry fetches nothing.
    specification = referencing.jsonschema.specification_with(kind.META_SCHEMA["$schema"])
    registry: referencing.Registry[object] = referencing.Registry()
    resolver = registry.resolver_with_root(specification.create_resource(schema))
    for reference in _references(schema):
        try:
            resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, referencing.exceptions.Unretrievable) as fault:
            msg = f"a result schema refers to {reference!r}, which is not in it: put what it needs under $defs"
            raise PolicyInvalidError(msg) from fault
    return cast("_Validator", kind(schema, registry=registry))


def _references(schema: object) -> Iterator[str]:
    for name, value in _entries(schema):
        if name in ("$ref", "$dynamicRef") and isinstance(value, str):
            yield value
        yield from _references(value)


def _property_names(schema: object) -> Iterator[str]:
    for name, value in _entries(schema):
        if name == "properties" and isinstance(value, dict):
            yield from value
        yield from _property_names(value)


def _entries(schema: object) -> Iterator[tuple[str, object]]:
    if isinstance(schema, dict):
        yield from ((name, value) for name, value in schema.items() if name not in _DATA_KEYWORDS)
    elif isinstance(schema, list):
        yield from (("", value) for value in schema)


def _finding(validator: _Validator, names: frozenset[str], value: object) -> str | None:
    from jsonschema.exceptions import best_match
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    try:
        plain = to_jsonable_python(value)
    except (PydanticSerializationError, ValueError, RecursionError):
        return "the answer has no JSON form"
    try:
        error = cast("_SchemaError | None", best_match(validator.iter_errors(plain)))
    except Exception as fault:  # whatever a schema or a value does to the validator, it is no proof
        return f"the answer could not be judged ({type(fault).__name__})"
    if error is None:
        return None
    # A key that the schema does not name is data, and stays out of the finding.
    parts = [str(part) if isinstance(part, int) or part in names else "*" for part in error.absolute_path]
    return f"{'.'.join(parts) or 'the answer'} {_rule(error)}"[:FINDING_CHARS_MAX]


def _rule(error: _SchemaError) -> str:
    """What the schema says, in words. Everything in it comes from the schema."""
    rule, wanted, found = error.validator, error.validator_value, error.instance
    if rule == "type":
        kinds = wanted if isinstance(wanted, list) else [wanted]
        return "must be of type " + " or ".join(str(kind) for kind in kinds)
    if rule == "required" and isinstance(wanted, list) and isinstance(found, dict):
        return "has no " + ", ".join(repr(name) for name in wanted if name not in found)
    if rule == "additionalProperties" and wanted is False:
        return "has properties that are not allowed"
    if isinstance(wanted, int | float | str) and not isinstance(wanted, bool):
        return f"breaks {rule} {wanted}"
    return f"breaks {rule}"
