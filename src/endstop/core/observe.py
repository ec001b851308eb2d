"""From a tool's answer to what is folded.

In two steps, so that the work on the answer itself happens outside any transaction: `measure` turns a result into
digests (it may be slow for large results), `observe` compares them with the run's evidence (a few look-ups).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from endstop.core import likeness, loops
from endstop.core.canonical import canonical_bytes, digest, drop_paths, value_at
from endstop.core.events import Observation
from endstop.core.evidence import NEEDS_CHANGE
from endstop.core.model import ToolResult, Version
from endstop.core.propose import progress_source
from endstop.core.reasons import ErrorClass, Status
from endstop.errors import NotCanonicalError

if TYPE_CHECKING:
    from endstop.core.events import Proposal
    from endstop.core.evidence import Evidence
    from endstop.core.likeness import Sketch
    from endstop.core.policy import ToolPolicy

__all__ = ["Measured", "as_result", "checked", "measure", "observe"]

VERSION_CHARS_MAX: Final = 200
ERROR_TEXT_CHARS_MAX: Final = 200
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


def as_result(value: object) -> ToolResult[object]:
    """A tool's return value as a result: results as they are, anything else as progress with that value."""
    if isinstance(value, ToolResult):
        return value
    return ToolResult(value=value)


def checked(result: ToolResult[object], tool: ToolPolicy, schema_error: str | None = None) -> ToolResult[object]:
    """The result, or the explicit failure that it is: a tool that owes data gave none, or broke its schema.

    `0`, `False`, `[]` and `{}` are data. A write's emptiness never un-commits it, so writes are not judged here.
    """
    if result.failed or result.status is Status.COMPLETE:
        return result
    if schema_error is not None:
        return replace(
            result,
            status=Status.RETRYABLE,
            error_class=ErrorClass.ANSWER_SCHEMA,
            message=f"the tool's answer breaks its declared schema: {schema_error}",
        )
    if not tool.owes_data:
        return result
    value = result.value
    if value is None or (isinstance(value, str) and not value.strip()):
        return replace(
            result,
            status=Status.RETRYABLE,
            error_class=ErrorClass.EMPTY_ANSWER,
            message="the tool answered with nothing: treat it as failed, not as an empty finding",
        )
    return result


def measure(
    result: ToolResult[object], proposal: Proposal, tool: ToolPolicy, *, key: bytes = b"", sketched: bool = False
) -> Measured:
    """`result` as digests under `key`. `sketched` also makes the sketch that a stored state needs (undeclared only)."""
    data = _answer_bytes(result, tool)
    explicit_retry = result.status is Status.RETRYABLE and result.error_class is None
    transport = result.error_class in loops.UNCOUNTED_CLASSES
    text: str | bytes | None = None
    if not tool.declared:
        text = result.value if isinstance(result.value, str) and not result.failed else data
        if len(text) > likeness.MASKED_CHARS_MAX:
            text = None
    version = _version(result, tool)
    return Measured(
        status=result.status,
        failed=result.failed,
        answer=digest(data, key),
        evidence=not (explicit_retry or transport),
        error_class=result.error_class,
        error_symbol=_error_symbol(result, key),
        version=version,
        version_source=None if version is None else progress_source(proposal.tool, proposal.args, tool, key),
        retry_after_ms=_retry_after(result, explicit_retry=explicit_retry, transport=transport),
        sketch=likeness.sketch(text) if sketched and text is not None else None,
        text=text,
    )


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
        news = known is None or known.get(answer, 0) < 2  # noqa: PLR2004  # the rule: it gave that answer twice
        changed = known is not None and answer not in known
    wait_ms = measured.retry_after_ms
    not_before_us = wait_ms if wait_ms is None or wait_ms == NEEDS_CHANGE else now_us + wait_ms * 1_000
    return Observation(
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
    known = evidence.versions.get(source)
    if isinstance(version, int):
        if isinstance(known, int):
            return version > known
        floor = evidence.version_floor
        return known is not None or floor is None or version > floor
    if isinstance(known, list):
        return version not in known
    return version != evidence.seeded


def _answer_bytes(result: ToolResult[object], tool: ToolPolicy) -> bytes:
    """What the answer's digest is made of: status and value, less the declared volatile fields."""
    value: object = result.value
    if tool.volatile_result:
        value = drop_paths(value, tool.volatile_result)
    try:
        data = canonical_bytes(value)
    except NotCanonicalError:
        # Not JSON: its printed form without object addresses is the best identity there is, and never leaves memory.
        data = b"opaque\0" + _ADDRESSES.sub("0x", repr(value)).encode("utf-8", "replace")
    if result.status is Status.PROGRESS and result.error_class is None:
        return data
    head = f"{result.status}\0{result.error_class or ''}\0{result.message or ''}\0"
    return head.encode("utf-8", "replace") + data


def _version(result: ToolResult[object], tool: ToolPolicy) -> Version | None:
    version: object = result.progress_version
    if version is None and tool.progress is not None:
        version = value_at(result.value, tool.progress)
    if isinstance(version, bool) or not isinstance(version, int | str):
        return None
    return version if isinstance(version, int) else version[:VERSION_CHARS_MAX]


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
