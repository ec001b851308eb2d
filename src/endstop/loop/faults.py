"""What went wrong at a model's provider, in seven words, read from any SDK's exception.

Rule: only machine-readable parts are read (status, headers, error type and code, the exception's class), never the
text of a message: messages change, and they may repeat what was sent. For the same reason no message ends up in ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC
from decimal import ROUND_CEILING, Decimal, InvalidOperation
from email.utils import parsedate_to_datetime
from typing import Final, Literal

from endstop.errors import ProviderError

__all__ = ["FAULTS", "RETRY_AFTER_MS_MAX", "Fault", "fault_of", "provider_error", "retry_after_ms_of"]

Fault = Literal["rate_limit", "outage", "timeout", "auth", "invalid_request", "unreachable", "other"]
FAULTS: Final[tuple[Fault, ...]] = (
    "rate_limit", "outage", "timeout", "auth", "invalid_request", "unreachable", "other",
)  # fmt: skip
# The connection never came to be, so nothing was sent and nothing can have been billed.
_NEVER_CONNECTED: Final = frozenset({"ConnectError", "ConnectTimeout", "ConnectionRefusedError", "gaierror"})

# A provider that asks for more than an hour is not waited for; a wrong clock must not park a run for a day.
RETRY_AFTER_MS_MAX: Final = 3_600_000
CAUSES_MAX: Final = 8

_STATUS: Final[Mapping[int, Fault]] = {
    401: "auth",
    402: "auth",
    403: "auth",
    408: "timeout",
    425: "outage",
    429: "rate_limit",
    504: "timeout",
}
# 409 says nothing about the request itself, so it is no `invalid_request`.
_STATUS_OTHER: Final = frozenset({409})
_CLIENT_ERRORS: Final = range(400, 500)
_SERVER_ERRORS: Final = range(500, 600)

# An account without credit answers with the status of a rate limit, but no wait helps: a person has to act.
_EXHAUSTED: Final = frozenset({"billing_error", "insufficient_quota", "billing_hard_limit_reached"})
_TYPES: Final[Mapping[str, Fault]] = {
    "api_error": "outage",
    "authentication_error": "auth",
    "context_length_exceeded": "invalid_request",
    "invalid_request_error": "invalid_request",
    "not_found_error": "invalid_request",
    "overloaded_error": "outage",
    "permission_error": "auth",
    "rate_limit_error": "rate_limit",
    "rate_limit_exceeded": "rate_limit",
    "request_too_large": "invalid_request",
    "server_error": "outage",
    "timeout_error": "timeout",
}
# Looked up along the class's bases, nearest first: a name tells what neither status nor type does.
_CLASSES: Final[Mapping[str, Fault]] = {
    "APIConnectionError": "outage",
    "APITimeoutError": "timeout",
    "AuthenticationError": "auth",
    "BadRequestError": "invalid_request",
    "ConnectionError": "outage",
    "DeadlineExceeded": "timeout",
    "DeadlineExceededError": "timeout",
    "InternalServerError": "outage",
    "ModelAuthenticationError": "auth",
    "ModelConnectionError": "outage",
    "ModelQuotaExceededError": "auth",
    "ModelRateLimitError": "rate_limit",
    "ModelRequestRejectedError": "invalid_request",
    "ModelRequestTimeout": "timeout",
    "ModelServerError": "outage",
    "ModelTimeoutError": "timeout",
    "ModelUnavailableError": "outage",
    "NotFoundError": "invalid_request",
    "OverloadedError": "outage",
    "PermissionDeniedError": "auth",
    "RateLimitError": "rate_limit",
    "ServiceUnavailableError": "outage",
    "StreamError": "outage",
    "TimeoutError": "timeout",
    "TimeoutException": "timeout",
    "TransportError": "outage",
    "UnprocessableEntityError": "invalid_request",
    "UserError": "invalid_request",
}

_NEXT_STEP: Final[Mapping[Fault, str]] = {
    "rate_limit": "wait and try again",
    "outage": "try again later",
    "timeout": "try again, or allow more time",
    "unreachable": "check that the server runs and that its address is right",
    "auth": "check the key, its rights and the account's credit",
    "invalid_request": "check the model's name, the tools' schemas and the length of the conversation",
    "other": "see the error behind this one",
}
# What of a provider's words may be shown: error names without digits or dashes, so that no key fits in.
_IDENTIFIER: Final = re.compile(r"[A-Za-z][A-Za-z_]{0,47}")


def provider_error(error: BaseException, *, model: str, now_us: int) -> ProviderError:
    """The provider's failure as a ProviderError: its class, its wait, and a message without a word of the provider's.

    `model` is the model's name; `now_us` (microseconds since 1970) is what a wait given as a date is counted from.
    Raise it `from None`, so that a traceback does not print what the provider said; the original stays reachable as
    `__context__`.
    """
    fault = fault_of(error)
    status = _first_status(error)
    said = f"the provider answered {status}" if status is not None else f"{type(error).__name__}"
    words = [word for word in _identifiers(error) if _IDENTIFIER.fullmatch(word)]
    detail = f" ({', '.join(dict.fromkeys(words))})" if words else ""
    msg = f"{model}: {said}{detail} on this model call [{fault}]; {_NEXT_STEP[fault]}"
    return ProviderError(msg, fault, retry_after_ms_of(error, now_us=now_us))


def fault_of(error: BaseException) -> Fault:
    """The class of a provider's failure, from the exception and what caused it."""
    chain = list(_chain(error))
    for link in chain:
        words = _words(link)
        if not _EXHAUSTED.isdisjoint(words) or "ModelQuotaExceededError" in _class_names(link):
            return "auth"
    for link in chain:
        status = _status(link)
        if status is not None and (fault := _by_status(status)) is not None:
            return fault
        for word in _words(link):
            if word in _TYPES:
                return _TYPES[word]
    if any(name in _NEVER_CONNECTED for link in chain for name in _class_names(link)):
        return "unreachable"
    for link in chain:
        for name in _class_names(link):
            if name in _CLASSES:
                return _CLASSES[name]
    return "other"


def retry_after_ms_of(error: BaseException, *, now_us: int) -> int | None:
    """The wait that the provider asked for, in milliseconds, rounded up and at most RETRY_AFTER_MS_MAX; else None.

    Read from `retry-after-ms`, then `Retry-After` as seconds or as an HTTP date (RFC 9110, section 10.2.3), then
    from the exception's own `retry_after` in seconds.
    """
    for link in _chain(error):
        headers = _headers(link)
        if (wait := _scaled(headers.get("retry-after-ms"), 1)) is not None:
            return wait
        raw = headers.get("retry-after")
        if (wait := _scaled(raw, 1_000)) is not None:
            return wait
        if (wait := _until(raw, now_us)) is not None:
            return wait
        if (wait := _scaled(getattr(link, "retry_after", None), 1_000)) is not None:
            return wait
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception and its causes, at most CAUSES_MAX of them."""
    link: BaseException | None = error
    for _ in range(CAUSES_MAX):
        if link is None:
            return
        yield link
        link = link.__cause__


def _class_names(error: BaseException) -> Iterator[str]:
    return (base.__name__ for base in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The HTTP status on an exception, however its SDK names it. Only error statuses count."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value in range(400, 600):
                return value
    return None


def _first_status(error: BaseException) -> int | None:
    return next((status for link in _chain(error) if (status := _status(link)) is not None), None)


def _by_status(status: int) -> Fault | None:
    if status in _STATUS:
        return _STATUS[status]
    if status in _STATUS_OTHER:
        return "other"
    if status in _CLIENT_ERRORS:
        return "invalid_request"
    return "outage" if status in _SERVER_ERRORS else None


def _words(error: BaseException) -> list[str]:
    """The provider's machine-readable error type and code, wherever the SDK left them."""
    found: list[object] = [
        getattr(error, name, None) for name in ("provider_error_type", "provider_error_code", "type", "code")
    ]
    body = getattr(error, "body", None)
    for level in (body, body.get("error") if isinstance(body, dict) else None):
        if isinstance(level, dict):
            found += [level.get("type"), level.get("code")]
    return [word for word in found if isinstance(word, str)]


def _identifiers(error: BaseException) -> list[str]:
    # "error" is the type of every error envelope and says nothing.
    return [word for link in _chain(error) for word in _words(link) if word != "error"]


def _headers(error: BaseException) -> Mapping[str, str]:
    for holder in (error, getattr(error, "response", None)):
        headers = getattr(holder, "headers", None)
        items = getattr(headers, "items", None)
        if callable(items):
            return {str(key).lower(): str(value) for key, value in items()}
    return {}


def _scaled(value: object, unit_ms: int) -> int | None:
    """`value` units of `unit_ms` milliseconds as whole milliseconds, clamped; None when it is no number."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = Decimal(str(value).strip())
    except InvalidOperation:
        return None
    if not number.is_finite():
        return None
    # Clamped first: a number with a huge exponent must not become a huge integer.
    wait = min(max(number, Decimal(0)), Decimal(RETRY_AFTER_MS_MAX)) * unit_ms
    return min(int(wait.to_integral_value(rounding=ROUND_CEILING)), RETRY_AFTER_MS_MAX)


def _until(value: str | None, now_us: int) -> int | None:
    if not value:
        return None
    try:
        moment = parsedate_to_datetime(value)
        # A date without a zone is UTC (RFC 9110, section 5.6.7).
        then_ms = int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()) * 1_000
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(then_ms - now_us // 1_000, 0), RETRY_AFTER_MS_MAX)
