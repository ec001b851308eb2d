"""The key over real HTTP, to a target that keeps the IETF draft's rules, through httpx and requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

import endstop as es
from endstop.adapters import http_keys
from endstop.adapters.http_keys import HEADER, KeyAuth, KeyInUseError, TargetUncertainError
from endstop.core.transitions import OperationState
from tests.operations.scenes import SPEC, Place, only, states

requests = pytest.importorskip("requests")
WRITE = es.ToolPolicy(effect="write", idempotency_key="{order}")


class Target(ThreadingHTTPServer):
    """Keeps one payment per key; what it answers next can be set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.payments: dict[str, str] = {}
        self.keys: list[str | None] = []
        self.next: list[tuple[int, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/pay"


class Handler(BaseHTTPRequestHandler):
    server: Target

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get(HEADER))
        self.say(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        key = self.headers.get(HEADER)
        self.server.keys.append(key)
        if self.server.next:
            self.say(*self.server.next.pop(0))
        elif key is None:
            self.say(400, {})
        elif self.server.payments.setdefault(key, body) != body:
            self.say(422, {})
        else:
            self.say(201, {})

    def say(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        data = json.dumps({"status": status}).encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def target() -> Iterator[Target]:
    found = Target()
    yield found
    found.shutdown()
    found.server_close()


def by_httpx(target: Target, **more: Any) -> Callable[..., object]:
    def pay(order: str, amount: int = 1) -> object:
        with httpx.Client(event_hooks=http_keys.httpx_hooks(**more)) as client:
            return client.post(target.url, json={"order": order, "amount": amount}).json()

    return pay


def by_requests(target: Target, **more: Any) -> Callable[..., object]:
    def pay(order: str, amount: int = 1) -> object:
        with requests.Session() as session:
            session.auth = KeyAuth(**more)
            return session.post(target.url, json={"order": order, "amount": amount}, timeout=10).json()

    return pay


CLIENTS = pytest.mark.parametrize("make", [by_httpx, by_requests])


@CLIENTS
def test_the_target_gets_the_operations_own_key(place: Place, target: Target, make: Callable[..., Any]) -> None:
    guard = place.open(WRITE)
    with guard.run(SPEC) as run:
        assert run.call(make(target), {"order": "a"}, tool="pay").value == {"status": 201}
    assert target.keys == [only(guard).key_digest]


def test_an_async_client_sends_it_too(place: Place, target: Target) -> None:
    guard = place.open(WRITE)

    async def pay(order: str) -> object:
        async with httpx.AsyncClient(event_hooks=http_keys.async_httpx_hooks()) as client:
            answer = await client.post(target.url, json={"order": order})
            return answer.json()

    async def main() -> None:
        async with guard.run(SPEC) as run:
            await run.acall(pay, {"order": "a"}, tool="pay")
            target.next.append((409, {}))
            with pytest.raises(es.OutcomeUnknownError):
                await run.acall(pay, {"order": "b"}, tool="pay")

    asyncio.run(main())
    assert target.keys[0] in [item.key_digest for item in guard.operations()]


@CLIENTS
@pytest.mark.parametrize(
    ("status", "headers", "raised", "state"),
    [
        (400, {}, es.NotAppliedError, OperationState.FAILED_FINAL),
        (404, {}, es.NotAppliedError, OperationState.FAILED_FINAL),
        (422, {}, es.NotAppliedError, OperationState.FAILED_FINAL),
        (429, {"Retry-After": "7"}, es.NotAppliedError, OperationState.FAILED_RETRYABLE),
        (409, {}, es.OutcomeUnknownError, OperationState.UNKNOWN),
        (408, {}, es.OutcomeUnknownError, OperationState.UNKNOWN),
        (425, {}, es.OutcomeUnknownError, OperationState.UNKNOWN),
        (500, {}, es.OutcomeUnknownError, OperationState.UNKNOWN),
        (503, {"Retry-After": "7"}, es.OutcomeUnknownError, OperationState.UNKNOWN),
    ],
)
def test_an_answer_means_to_the_operation_what_it_proves(
    place: Place, target: Target, make: Callable[..., Any], status: int, headers: dict[str, str],
    raised: type[Exception], state: OperationState,
) -> None:  # fmt: skip
    guard = place.open(WRITE)
    target.next.append((status, headers))
    with guard.run(SPEC) as run, pytest.raises(raised):
        run.call(make(target), {"order": "a"}, tool="pay")
    assert states(guard) == [state]
    assert target.payments == {}


@CLIENTS
def test_a13_the_targets_wait_is_kept_before_the_next_attempt_under_the_same_key(
    place: Place, target: Target, make: Callable[..., Any]
) -> None:
    guard = place.open(WRITE)
    target.next.append((429, {"Retry-After": "7"}))
    with guard.run(SPEC) as run:
        with pytest.raises(es.NotAppliedError):
            run.call(make(target), {"order": "a"}, tool="pay")
        waits = run.call(make(target), {"order": "a"}, tool="pay")
        assert (waits.reason, waits.retry_after_ms) == (es.Reason.NOT_BEFORE, 7_000)
        place.clock.pass_ms(7_000)
        assert run.call(make(target), {"order": "a"}, tool="pay").value == {"status": 201}
    assert (len(target.keys), len(set(target.keys))) == (2, 1)


@CLIENTS
def test_a_definite_refusal_is_the_answer_for_ever(place: Place, target: Target, make: Callable[..., Any]) -> None:
    guard = place.open(WRITE)
    target.next.append((404, {}))
    with guard.run(SPEC, run_id="one") as run, pytest.raises(es.NotAppliedError):
        run.call(make(target), {"order": "a"}, tool="pay")
    with guard.run(SPEC, run_id="two") as run:
        again = run.call(make(target), {"order": "a"}, tool="pay")
    assert (again.replayed, again.failed, again.side_effect_committed) == (True, True, False)
    assert len(target.keys) == 1


@CLIENTS
def test_503_is_a_refusal_where_the_target_documents_it(place: Place, target: Target, make: Callable[..., Any]) -> None:
    guard = place.open(WRITE)
    target.next.append((503, {"Retry-After": "1"}))
    with guard.run(SPEC) as run, pytest.raises(es.NotAppliedError):
        run.call(make(target, not_processed=frozenset({429, 503})), {"order": "a"}, tool="pay")
    assert states(guard) == [OperationState.FAILED_RETRYABLE]


@CLIENTS
def test_outside_a_guarded_write_nothing_is_added_and_nothing_raised(
    place: Place, target: Target, make: Callable[..., Any]
) -> None:
    target.next.append((500, {}))
    assert make(target)("a") == {"status": 500}
    guard = place.open(es.ToolPolicy(effect="read"))
    target.next.append((500, {}))
    with guard.run(SPEC) as run:
        assert run.call(make(target), {"order": "a"}, tool="pay").value == {"status": 500}
    assert target.keys == [None, None]


def test_a_safe_request_and_a_tools_own_key_are_left_alone(place: Place, target: Target) -> None:
    guard = place.open(WRITE)

    def pay(order: str) -> object:
        with httpx.Client(event_hooks=http_keys.httpx_hooks()) as client:
            client.get(target.url)
            target.next.append((500, {}))
            return client.post(target.url, headers={HEADER: "own"}, json={}).status_code

    with guard.run(SPEC) as run:
        assert run.call(pay, {"order": "a"}, tool="pay").value == 500
    assert target.keys == [None, "own"]


def test_another_authentication_of_requests_is_kept(place: Place, target: Target) -> None:
    guard = place.open(WRITE)
    seen = []

    def other(request: Any) -> Any:
        request.headers["Authorization"] = "Token t"
        return request

    def pay(order: str) -> object:
        for inner in (("user", "word"), other):
            answer = requests.post(target.url, json={"order": order}, auth=KeyAuth(inner), timeout=10)
            seen.append(answer.request.headers["Authorization"])
        return None

    with guard.run(SPEC) as run:
        run.call(pay, {"order": "a"}, tool="pay")
    assert seen == ["Basic dXNlcjp3b3Jk", "Token t"]


@CLIENTS
def test_a_target_that_was_never_reached_got_nothing(place: Place, target: Target, make: Callable[..., Any]) -> None:
    guard = place.open(WRITE)
    target.shutdown()
    target.server_close()
    inner = make(target)

    def pay(order: str) -> object:
        with http_keys.nothing_was_sent():
            return inner(order)

    # Of requests only the time-out of the connection says so: its ConnectionError may come later, too.
    expected = es.NotAppliedError if make is by_httpx else es.OutcomeUnknownError
    with guard.run(SPEC) as run, pytest.raises(expected):
        run.call(pay, {"order": "a"}, tool="pay")


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [
        ({"Retry-After": "0"}, 0), ({"retry-after": " 12 "}, 12_000), ({"Retry-After": "-5"}, 0),
        ({"Retry-After": "9" * 50}, http_keys.RETRY_AFTER_MS_MAX), ({"Retry-After": "soon"}, None), ({}, None),
        ({"Retry-After": "1.5"}, None), ({"Retry-After": "\u0661"}, None), ({"Retry-After": "--1"}, None),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 30_000),
        ({"Retry-After": "Wed, 21 Oct 2026 07:27:00 GMT", "Date": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0),
        ({"Retry-After": "Wed, 21 Oct 2026 07:28:30 GMT"}, None),
    ],
)  # fmt: skip
def test_a13_a_wait_is_read_in_all_its_forms_and_clamped(headers: dict[str, str], wait_ms: int | None) -> None:
    assert http_keys.retry_after_ms(headers) == wait_ms


@pytest.mark.parametrize("status", range(100, 600))
def test_every_status_means_something(status: int) -> None:
    if status < 400:
        http_keys.check_answer(status, {})
        return
    with pytest.raises((es.NotAppliedError, KeyInUseError, TargetUncertainError)) as raised:
        http_keys.check_answer(status, {})
    definite = status < 500 and status not in (408, 409, 425)
    assert isinstance(raised.value, es.NotAppliedError) is definite
