"""From a tool call to what the guards see: fingerprint, idempotency key, source of progress.

Rule: only declared fields are left out of a fingerprint, and a key is a digest of separate canonical parts, never of
text joined together.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import orjson

from endstop.core.canonical import canonical_bytes, digest, digest_of, drop_paths, pick_paths, value_at
from endstop.core.entries import safe_name
from endstop.core.events import Proposal
from endstop.core.evidence import short_name
from endstop.core.reasons import Effect, ErrorClass
from endstop.core.slots import open_twin, sealed
from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from collections.abc import Callable

    from endstop.core.model import ToolCall
    from endstop.core.policy import ToolPolicy

__all__ = [
    "argument_note", "fingerprint_of", "given_key_of", "idempotency_key_of", "parsed_args", "progress_source",
    "propose",
]  # fmt: skip

KEY_CHARS_MAX: Final = 255
NOTED_ARGS_MAX: Final = 32
WORD_CHARS_MAX: Final = 80
_WRITE: Final = Effect.WRITE
_KEYED: Final = (Effect.WRITE, Effect.UNKNOWN)
_OPEN_PROPOSAL: Final = open_twin(Proposal)
_LONG_NUMBER: Final = re.compile(r"\d{19}")
# Names of tools, agents and rounds come again and again.
_known_name: Final = lru_cache(maxsize=1_024)(safe_name)


def parsed_args(args: Mapping[str, object] | str) -> Mapping[str, object] | str:
    """Argument text as an object when it is a JSON object; else the text as it is (a malformed call)."""
    if not isinstance(args, str):
        return args
    try:
        if not args.strip():
            return {}
        # orjson makes a float of a whole number beyond 64 bits, so that two ids could become one.
        value = _exact(args) if _LONG_NUMBER.search(args) else orjson.loads(args)
    except (ValueError, RecursionError):
        return args
    return value if isinstance(value, dict) else args


def _exact(text: str) -> object:
    """`text` as JSON with whole numbers of any size. Raises ValueError for what is no JSON, NaN and infinity."""
    value: object = json.loads(text, parse_constant=_no_constant)
    return value


def _no_constant(name: str) -> object:
    msg = f"{name} is no JSON"
    raise ValueError(msg)


def fingerprint_of(name: str, args: Mapping[str, object] | str, tool: ToolPolicy, key: bytes = b"") -> str:
    """The digest of a call: its tool and the canonical arguments that count.

    `tool.identity` names the only arguments that count, `tool.volatile_args` those that do not; an identity that
    selects nothing falls back to all arguments. Text that is no JSON object counts as raw text. `key` makes the digest
    an HMAC. Raises NotCanonicalError when the arguments have no canonical form.
    """
    return digest(_counted_bytes(name, args, tool), key)


def _counted_bytes(name: str, args: Mapping[str, object] | str, tool: ToolPolicy) -> bytes:
    """What a fingerprint is a digest of."""
    if isinstance(args, str):
        return b"raw\0" + _utf8(name) + b"\0" + _utf8(unicodedata.normalize("NFC", args))
    counted: object = args
    if tool.identity:
        counted = pick_paths(args, tool.identity) or args
    if tool.volatile_args:
        counted = drop_paths(counted, tool.volatile_args)
    plain = counted if type(counted) is dict or not isinstance(counted, Mapping) else dict(counted)
    return b"call\0" + _utf8(name) + b"\0" + canonical_bytes(plain)


def _utf8(text: str) -> bytes:
    """The bytes of any text, also of one with lone surrogates, so that two texts stay two."""
    return text.encode("utf-8", "surrogatepass")


def idempotency_key_of(
    name: str, args: Mapping[str, object] | str, tool: ToolPolicy, *, key: bytes = b"", scope_value: str = ""
) -> tuple[str | None, str | None]:
    """The digest of this call's idempotency key, and what is missing when there is none.

    The digest covers the scope and its value, the tool, the template and the canonical field values under `key`.
    """
    declared = tool.idempotency_key
    values: list[object]
    if declared is None:
        return None, "declare idempotency_key for this tool"
    if isinstance(args, str):
        return None, "arguments that are a JSON object"
    if callable(declared):
        made = _made_key(declared, args)
        if isinstance(made, Exception):
            return None, f"a key from the declared key function, which raised {type(made).__name__}"
        if not isinstance(made, str) or not made or len(made) > KEY_CHARS_MAX:
            return None, f"a key of 1 to {KEY_CHARS_MAX} characters from the declared key function"
        template, values = "function", [made]
    else:
        fields = tool.key_fields
        found = [value_at(args, field) for field in fields]
        absent = [field for field, value in zip(fields, found, strict=True) if _is_blank(value)]
        if absent:
            return None, "a value for " + ", ".join(absent)
        values = found
        template = declared if isinstance(declared, str) else ",".join(fields)
    try:
        return digest_of("key", tool.key_scope, scope_value, name, template, values, key=key), None
    except NotCanonicalError:
        return None, "a tool name and a key that are plain text"


def given_key_of(
    name: str, given: object, tool: ToolPolicy, *, key: bytes = b"", scope_value: str = ""
) -> tuple[str | None, str | None]:
    """The digest of a key that the caller gives, and what is missing when it is none."""
    if not isinstance(given, str) or not given.strip() or len(_utf8(given)) > KEY_CHARS_MAX:
        return None, f"an idempotency_key of 1 to {KEY_CHARS_MAX} bytes of text"
    try:
        return digest_of("key", tool.key_scope, scope_value, name, "given", [given], key=key), None
    except NotCanonicalError:
        return None, "an idempotency_key that is plain text"


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _made_key(function: Callable[[Mapping[str, object]], object], args: Mapping[str, object]) -> object:
    """What the declared key function makes of `args`, or the exception it raised: no key is a refusal, not a crash."""
    try:
        return function(args)
    except Exception as error:
        return error


def progress_source(name: str, args: Mapping[str, object] | str, tool: ToolPolicy, key: bytes = b"") -> str:
    """The source whose progress version a result of this call carries: the tool and its declared scope fields."""
    if not tool.progress_scope or isinstance(args, str):
        return short_name(name)
    scoped = [value_at(args, path) for path in tool.progress_scope]
    return f"{short_name(name)}#{digest_of('source', scoped, key=key)}"


def propose(
    call: ToolCall,
    tool: ToolPolicy,
    *,
    run_key: bytes = b"",
    store_key: bytes = b"",
    scope_value: str = "",
    call_id: str = "",
    fault: ErrorClass | None = None,
    given_key: str | None = None,
    complaint: str = "",
) -> Proposal:
    """The proposal for `call`. Arguments without a canonical form make a malformed call, never an error here.

    `given_key` is a caller's own idempotency key, which goes before the declared one. `complaint` says what is wrong
    with a malformed call, without its values.
    """
    args = parsed_args(call.args)
    try:
        counted = _counted_bytes(call.tool, args, tool)
    except NotCanonicalError as error:
        counted = b"unreadable\0" + _utf8(call.tool)
        fault = fault or ErrorClass.SCHEMA
        complaint = complaint or str(error)
    if isinstance(args, str):
        fault = fault or ErrorClass.SCHEMA
    key_digest: str | None = None
    missing: str | None = None
    operation_fingerprint = ""
    if given_key is not None and tool.effect in _KEYED and fault is None:
        key_digest, missing = given_key_of(call.tool, given_key, tool, key=store_key, scope_value=scope_value)
    elif tool.effect is _WRITE and fault is None:
        key_digest, missing = idempotency_key_of(call.tool, args, tool, key=store_key, scope_value=scope_value)
    if store_key and fault is None:
        operation_fingerprint = digest(counted, store_key)
    name = _known_name(call.tool)
    made = _OPEN_PROPOSAL(
        tool=name,
        effect=tool.effect,
        fingerprint=digest(counted, run_key),
        call_id=_safe_id(call_id or call.call_id),
        round_id=None if call.round_id is None else _known_name(call.round_id),
        agent=_known_name(call.agent),
        key_digest=key_digest,
        operation_fingerprint=operation_fingerprint,
        key_missing=missing,
        replays_committed=tool.replays_committed,
        change=call.change,
        fault=fault,
        declared=tool.declared,
        poll_interval_ms_min=tool.poll_interval_ms_min,
        raw_tool="" if name == call.tool else call.tool,
        args=args,
        complaint=complaint,
    )
    return sealed(made, Proposal)


def _safe_id(text: str) -> str:
    """`safe_name` for the ids of calls, most of which are one short word and new each time."""
    if len(text) <= WORD_CHARS_MAX and text.isascii() and text.isidentifier():
        return text
    return safe_name(text)


def argument_note(args: Mapping[str, object] | str) -> tuple[tuple[str, str], ...]:
    """The arguments as an envelope may show them: each name with its value's type and size, never the value."""
    if isinstance(args, str):
        return (("(unparsed text)", f"{len(args)} characters"),)
    # A malformed call may have names that are no text.
    named = sorted((safe_name(str(name)), _size_note(value)) for name, value in args.items())
    return tuple(named[:NOTED_ARGS_MAX])


def _size_note(value: object) -> str:
    kind = type(value).__name__
    return f"{kind}[{len(value)}]" if isinstance(value, str | bytes | list | tuple | dict) else kind
