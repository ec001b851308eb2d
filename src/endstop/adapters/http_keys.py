"""The operation's key to an HTTP target, and the target's answers back, for httpx and requests.

A tool that writes over HTTP hands its client the hooks of this module; inside a guarded write each unsafe request then
carries `Idempotency-Key`, the same in every attempt, and an answer that proves something is raised as what it proves:

| answer | raised | the operation |
|---|---|---|
| 2xx, 3xx | nothing | the tool's own word |
| 400, 404, 422 and other definite 4xx | NotAppliedError, final | FAILED_FINAL |
| 429, and 503 where the target documents it | NotAppliedError with the wait | FAILED_RETRYABLE |
| 409 | KeyInUseError | UNKNOWN: an earlier send is being processed, ask with a probe |
| 408, 425, other 5xx | TargetUncertainError | UNKNOWN |

That follows https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header-07, section 2.7: 400 without the
key, 409 while the first request is under way, 422 for a key with another payload. One tool makes one effect: two
different writes under one key would be refused by the target. Neither library is imported here.

    client = httpx.Client(event_hooks=httpx_hooks())
    session = requests.Session(); session.auth = KeyAuth(session.auth)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, Protocol

from endstop.errors import NotAppliedError, OperationError, UsageError
from endstop.runtime.context import current

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "HEADER", "RETRY_AFTER_MS_MAX", "KeyAuth", "KeyInUseError", "TargetUncertainError", "async_httpx_hooks",
    "check_answer", "current_key", "httpx_hooks", "nothing_was_sent", "retry_after_ms",
]  # fmt: skip

HEADER: Final = "Idempotency-Key"
RETRY_AFTER_MS_MAX: Final = 24 * 3_600_000
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
NOT_PROCESSED: Final = frozenset({429})
_OPEN_4XX: Final = frozenset({408, 409, 425, 429})
_CONFLICT: Final = 409
_SECONDS: Final = re.compile(r"-?[0-9]+")
_UNPROCESSABLE: Final = 422
_FIRST_ERROR, _FIRST_SERVER_ERROR = 400, 500
# Raised by the libraries before the first byte of a request has left.
_UNSENT: Final = frozenset({("httpx", "ConnectError"), ("httpx", "ConnectTimeout"), ("httpx", "PoolTimeout"),
                            ("requests", "ConnectTimeout")})  # fmt: skip


class KeyInUseError(OperationError):
    """The target is still processing an earlier request under this key: whether it takes effect is not known yet."""

    code = "key_in_use"
    acts = "operator"
    effect = "possible"


class TargetUncertainError(OperationError):
    """The target's answer says neither that the effect happened nor that it did not."""

    code = "target_uncertain"
    acts = "operator"
    effect = "possible"


class HttpRequest(Protocol):
    """What of a request the hooks use; both libraries' requests have it."""

    method: Any
    headers: Any


def current_key() -> str | None:
    """The key of the guarded write that this code runs in, None outside of one."""
    try:
        return current().idempotency_key
    except UsageError:
        return None


# -- Answers


def retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """The wait that `Retry-After` asks for in milliseconds, 0 to `RETRY_AFTER_MS_MAX`; None without a readable one.

    A date is measured from the answer's own `Date`, so that no clock of this machine plays a part.
    """
    text = (headers.get("Retry-After") or headers.get("retry-after") or "").strip()
    if _SECONDS.fullmatch(text):
        wait_ms = int(text[:20]) * 1_000
    else:
        try:
            since = parsedate_to_datetime(headers.get("Date") or headers.get("date") or "")
            wait_ms = int((parsedate_to_datetime(text) - since).total_seconds()) * 1_000
        except (TypeError, ValueError):
            return None
    return min(max(wait_ms, 0), RETRY_AFTER_MS_MAX)


def check_answer(status: int, headers: Mapping[str, str], *, not_processed: frozenset[int] = NOT_PROCESSED) -> None:
    """Raise what the answer to a keyed request proves; nothing for one that is no error.

    `not_processed` are the statuses with which the target documents that it did nothing (503 where it does).
    """
    if status < _FIRST_ERROR:
        return
    if status in not_processed:
        wait_ms = retry_after_ms(headers)
        msg = f"the target answered {status}: it did nothing, and may be asked again"
        raise NotAppliedError(msg, retry_after_ms=wait_ms)
    if status == _CONFLICT:
        msg = "the target answered 409: an earlier request under this key is being processed"
        raise KeyInUseError(msg)
    if status < _FIRST_SERVER_ERROR and status not in _OPEN_4XX:
        said = "this key was used with another payload" if status == _UNPROCESSABLE else "it refused the request"
        msg = f"the target answered {status}: {said}, and nothing was done"
        raise NotAppliedError(msg, final=True)
    msg = f"the target answered {status}: whether it did anything is not known"
    raise TargetUncertainError(msg)


@contextmanager
def nothing_was_sent() -> Iterator[None]:
    """Raise NotAppliedError for what httpx or requests raise before the first byte of a request has left."""
    try:
        yield
    except Exception as error:
        kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(error).__mro__}
        if kinds & _UNSENT:
            msg = f"the target was not reached ({type(error).__name__}): nothing was sent"
            raise NotAppliedError(msg) from error
        raise


# -- Requests


def _sign(request: HttpRequest) -> None:
    """Add the key to an unsafe request of a guarded write, unless the tool has set one."""
    headers: MutableMapping[str, str] = request.headers
    key = current_key()
    if key is not None and str(request.method).upper() not in SAFE_METHODS and HEADER not in headers:
        headers[HEADER] = key


def _is_ours(request: HttpRequest) -> bool:
    key = current_key()
    return key is not None and request.headers.get(HEADER) == key


def httpx_hooks(*, not_processed: frozenset[int] = NOT_PROCESSED) -> dict[str, list[Callable[..., None]]]:
    """`event_hooks` for `httpx.Client`: the key on requests, and what answers prove."""

    def check(response: Any) -> None:
        if _is_ours(response.request):
            check_answer(response.status_code, response.headers, not_processed=not_processed)

    return {"request": [_sign], "response": [check]}


def async_httpx_hooks(
    *, not_processed: frozenset[int] = NOT_PROCESSED
) -> dict[str, list[Callable[..., Coroutine[Any, Any, None]]]]:
    """`event_hooks` for `httpx.AsyncClient`."""

    async def sign(request: Any) -> None:
        _sign(request)

    async def check(response: Any) -> None:
        if _is_ours(response.request):
            check_answer(response.status_code, response.headers, not_processed=not_processed)

    return {"request": [sign], "response": [check]}


class KeyAuth:
    """`auth` for requests, alone or around another one: the key on the request, and what the answer proves."""

    def __init__(self, inner: Any = None, *, not_processed: frozenset[int] = NOT_PROCESSED) -> None:
        self._inner = inner
        self._not_processed = not_processed

    def __call__(self, request: Any) -> Any:
        """Sign the prepared request and watch its answer."""
        if isinstance(self._inner, tuple):
            from base64 import b64encode

            user, password = self._inner
            request.headers["Authorization"] = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}"
        elif self._inner is not None:
            request = self._inner(request)
        _sign(request)
        if _is_ours(request):
            request.register_hook("response", self._check)
        return request

    def _check(self, response: Any, **_: object) -> None:
        try:
            check_answer(response.status_code, response.headers, not_processed=self._not_processed)
        except BaseException:
            response.close()  # nobody else gets hold of it
            raise
