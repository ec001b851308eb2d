"""From a tool's answer to what is folded.

In two steps, so that the work on the answer itself happens outside any transaction: `measure` turns a result into
digests (it may be slow for large results), `observe` compares them with the run's evidence (a few look-ups).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from endstop.core import likeness, loops
from endstop.core.canonical import canonical_bytes, digest, drop_paths, plain_value, value_at
from endstop.core.events import Observation
from endstop.core.evidence import ANSWER_CHARS_KEPT, NEEDS_CHANGE, kept_version
from endstop.core.model import COUNT_MAX, ToolResult, Version
from endstop.core.propose import progress_source
from endstop.core.reasons import Effect, ErrorClass, Status
from endstop.core.slots import open_twin, sealed
from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.evidence import Evidence
    from endstop.core.likeness import Sketch
    from endstop.core.policy import ToolPolicy

__all__ = ["Measured", "as_result", "checked", "measure", "observe"]

VERSION_CHARS_MAX: Final = 200
ERROR_TEXT_CHARS_MAX: Final = 200
_PROGRESS: Final = Status.PROGRESS
_DIGITS: Final = re.compile(r"\d+")
_ADDRESSES: Final = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A result as digests. `retry_after_ms` is None when no retry is meant, or `NEEDS_CHANGE`."""

    status: Status
    failed: bool
    answer: str
    evidence: bool
    error_class: ErrorClass | None = None
    error_symbol: str = ""
    version: Version | None = None
    version_source: str | None = None
    retry_after_ms: int | None = None
    sketch: Sketch | None = field(default=None, repr=False)
    text: str | bytes | None = field(default=None, repr=False)


_OPEN_MEASURED: Final = open_twin(Measured)
_OPEN_OBSERVATION: Final = open_twin(Observation)


def as_result(value: object) -> ToolResult[object]:
    """A tool's return value as a result: results as they are, anything else as progress with that value."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value=value)


def checked(result: ToolResult[object], tool: ToolPolicy, schema_error: str | None = None) -> ToolResult[object]:
    """The result, or the explicit failure that it is: a tool that owes data gave none, or broke its schema.

    `0`, `False`, `[]` and `{}` are data. A bad answer never un-commits what may have been written.
    """
    if not tool.owes_data and schema_error is None:
        return result
    if result.failed or result.status is Status.COMPLETE:
        return result
    if schema_error is not None:
        message = f"the tool's answer breaks its declared schema: {schema_error}"
        return _bad_answer(result, tool, ErrorClass.ANSWER_SCHEMA, message)
    value = result.value
    if value is not None and not (isinstance(value, str) and not value.strip()):
        return result
    message = "the tool answered with nothing: treat it as failed, not as an empty finding"
    return _bad_answer(result, tool, ErrorClass.EMPTY_ANSWER, message)


def _bad_answer(
    result: ToolResult[object], tool: ToolPolicy, error_class: ErrorClass, message: str
) -> ToolResult[object]:
    committed = result.side_effect_committed
    if committed is None and tool.effect in (Effect.WRITE, Effect.UNKNOWN):
        committed = True
    return replace(
        result,
        status=Status.RETRYABLE,
        error_class=error_class,
        message=message,
        side_effect_committed=committed,
    )


def measure(
    result: ToolResult[object], proposal: Proposal, tool: ToolPolicy, *, key: bytes = b"", sketched: bool = False
) -> Measured:
    """`result` as digests under `key`. `sketched` also makes the sketch that a stored state needs (undeclared only)."""
    data = _answer_bytes(result, tool)
    error_class = result.error_class
    failed = result.failed
    explicit_retry = failed and result.status is Status.RETRYABLE and error_class is None
    transport = error_class is not None and error_class in loops.UNCOUNTED_CLASSES
    text: str | bytes | None = None
    if not tool.declared:
        text = result.value if isinstance(result.value, str) and not failed else data
        if len(text) > likeness.MASKED_CHARS_MAX:
            text = None
    version = None
    if result.progress_version is not None or tool.progress is not None:
        version = _version(result, tool)
    made = _OPEN_MEASURED(
        status=result.status,
        failed=failed,
        answer=digest(data, key),
        evidence=not (explicit_retry or transport),
        error_class=error_class,
        error_symbol="" if error_class is None else _error_symbol(result, key),
        version=version,
        version_source=None if version is None else progress_source(proposal.tool, proposal.args, tool, key),
        retry_after_ms=_retry_after(result, explicit_retry=explicit_retry, transport=transport) if failed else None,
        sketch=likeness.sketch(text) if sketched and text is not None else None,
        text=text,
    )
    return sealed(made, Measured)


def observe(evidence: Evidence, proposal: Proposal, measured: Measured, now_us: int) -> Observation:
    """What this answer is to the run as it stands: new, a change, progress, or the same again."""
    answer = _identity(evidence, proposal, measured)
    progress = (
        measured.version is not None
        and measured.version_source is not None
        and not measured.failed
        and _grows(evidence, measured.version_source, measured.version)
    )
    known = evidence.calls.get(proposal.fingerprint)
    if measured.version is not None:
        news, changed = progress, False
    else:
        head = answer[:ANSWER_CHARS_KEPT]
        news = known is None or known.get(head, 0) < 2  # noqa: PLR2004  # the rule: it gave that answer twice
        changed = known is not None and head not in known
    wait_ms = measured.retry_after_ms
    not_before_us = wait_ms if wait_ms is None or wait_ms == NEEDS_CHANGE else now_us + wait_ms * 1_000
    made = _OPEN_OBSERVATION(
        tool=proposal.tool,
        effect=proposal.effect,
        fingerprint=proposal.fingerprint,
        call_id=proposal.call_id,
        status=measured.status,
        answer=answer,
        round_id=proposal.round_id,
        agent=proposal.agent,
        evidence=measured.evidence,
        news=news,
        changed=changed,
        progress=progress,
        error_class=measured.error_class,
        error_symbol=measured.error_symbol,
        version_source=measured.version_source,
        version=measured.version,
        declared=proposal.declared,
        failed=measured.failed,
        not_before_us=not_before_us,
        sketch=measured.sketch,
        text=measured.text,
    )
    return sealed(made, Observation)


def _identity(evidence: Evidence, proposal: Proposal, measured: Measured) -> str:
    """The answer's digest, or the last answer's when one undeclared call, repeated back to back, says the same."""
    last = evidence.last
    if (
        last is None
        or measured.text is None
        or not measured.evidence
        or last.fingerprint != proposal.fingerprint
        or last.answer == measured.answer
    ):
        return measured.answer
    older = last.sketch
    if older is None and last.text is not None:
        older = likeness.sketch(last.text)
    newer = measured.sketch or likeness.sketch(measured.text)
    if older is not None and newer is not None and likeness.alike(older, newer):
        return last.answer
    return measured.answer


def _grows(evidence: Evidence, source: str, version: Version) -> bool:
    """Whether `version` is one that this source has not shown before: a higher number, or opaque text not seen yet."""
    known = evidence.versions.get(source)
    if isinstance(version, int) and not isinstance(known, list):
        start = evidence.version_floor if known is None else known
        return start is None or version > start
    symbol = kept_version(version)
    if symbol == evidence.seeded:
        return False
    return symbol not in known if isinstance(known, list) else known is None or symbol != kept_version(known)


def _answer_bytes(result: ToolResult[object], tool: ToolPolicy) -> bytes:
    """What the answer's digest is made of: status and value, less the declared volatile fields."""
    try:
        value: object = result.value
        if tool.volatile_result:
            value = drop_paths(plain_value(value), tool.volatile_result)
        data = canonical_bytes(value)
    except NotCanonicalError:
        data = b"opaque\0" + _printed(result.value).encode("utf-8", "surrogatepass")
    if result.error_class is None and result.status is _PROGRESS:
        return data
    head = f"{result.status}\0{result.error_class or ''}\0{result.message or ''}\0"
    return head.encode("utf-8", "replace") + data


def _printed(value: object) -> str:
    """The printed form of what is no JSON, without addresses: the best identity there is. It never leaves memory."""
    try:
        return _ADDRESSES.sub("0x", repr(value))
    except Exception as error:  # a broken repr must not lose a call's outcome
        return f"{type(value).__name__} {type(error).__name__}"


def _version(result: ToolResult[object], tool: ToolPolicy) -> Version | None:
    version: object = result.progress_version
    if tool.progress is not None and version is None:
        version = value_at(_readable(result.value), tool.progress)
    if isinstance(version, bool) or not isinstance(version, int | str):
        return None
    if isinstance(version, int) and abs(version) <= COUNT_MAX:
        return version
    # Opaque: text, and numbers beyond what a stored state and an entry can hold.
    text = str(version)
    return text if len(text) <= VERSION_CHARS_MAX else digest(text.encode("utf-8", "surrogatepass"))


def _readable(value: object) -> object:
    """A record as the object that paths lead into; JSON values as they are."""
    if value is None or isinstance(value, dict | list | tuple | str | int):
        return value
    try:
        return plain_value(value)
    except NotCanonicalError:
        return None


def _error_symbol(result: ToolResult[object], key: bytes) -> str:
    """Plain tool failures are told apart by message: the first 200 characters, digits masked."""
    if result.error_class is not ErrorClass.TOOL_FAILED:
        return ""
    text = _DIGITS.sub("0", (result.message or "")[:ERROR_TEXT_CHARS_MAX])
    return digest(b"error\0" + text.encode("utf-8", "replace"), key)[:16]


def _retry_after(result: ToolResult[object], *, explicit_retry: bool, transport: bool) -> int | None:
    if result.retry_after_ms is not None and result.status is Status.RETRYABLE:
        return result.retry_after_ms
    if explicit_retry:
        return NEEDS_CHANGE
    return 0 if transport else None
