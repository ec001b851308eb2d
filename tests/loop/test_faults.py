"""A provider's failure is classed by status, type and class, never by its words, and its wait is read and clamped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from endstop.errors import ProviderError
from endstop.loop.faults import FAULTS, RETRY_AFTER_MS_MAX, fault_of, provider_error, retry_after_ms_of

NOW_US = 1_700_000_000_000_000  # Tue, 14 Nov 2023 22:13:20 GMT


class StatusError(Exception):
    """The shape of the SDKs' status errors."""

    def __init__(self, status: int, headers: dict[str, str] | None = None, body: object = None) -> None:
        super().__init__("the key sk-live-123 is bad: rate limit, timeout, overloaded")
        self.status_code = status
        self.response = SimpleNamespace(status_code=status, headers=headers or {})
        self.body = body


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("status", "fault"),
    [
        (400, "invalid_request"), (401, "auth"), (402, "auth"), (403, "auth"), (404, "invalid_request"),
        (408, "timeout"), (409, "other"), (413, "invalid_request"), (422, "invalid_request"), (429, "rate_limit"),
        (500, "outage"), (502, "outage"), (503, "outage"), (504, "timeout"), (529, "outage"), (599, "outage"),
    ],
)  # fmt: skip
def test_the_status_names_the_fault(status: int, fault: str) -> None:
    assert fault_of(StatusError(status)) == fault
    assert fault_of(caused(RuntimeError(), StatusError(status))) == fault


def test_an_error_inside_an_open_stream_is_classed_by_its_type() -> None:
    body = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    assert fault_of(StatusError(200, body=body)) == "outage"
    assert fault_of(StatusError(200, body={"error": {"type": "rate_limit_error"}})) == "rate_limit"


def test_an_account_without_credit_is_no_rate_limit_because_no_wait_helps() -> None:
    assert fault_of(StatusError(429, body={"error": {"code": "insufficient_quota"}})) == "auth"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("APITimeoutError", "timeout"),
        ("APIConnectionError", "outage"),
        ("ModelTimeoutError", "timeout"),
        ("ModelConnectionError", "outage"),
        ("RateLimitError", "rate_limit"),
        ("ModelAuthenticationError", "auth"),
        ("BadRequestError", "invalid_request"),
        ("SomethingElse", "other"),
    ],
)
def test_without_a_status_the_class_names_the_fault(name: str, fault: str) -> None:
    assert fault_of(type(name, (Exception,), {})()) == fault
    assert fault_of(type("Derived", (type(name, (Exception,), {}),), {})()) == fault


def test_the_nearest_class_wins_over_its_bases() -> None:
    connection = type("APIConnectionError", (Exception,), {})
    assert fault_of(type("APITimeoutError", (connection,), {})()) == "timeout"
    assert fault_of(TimeoutError()) == "timeout"
    assert fault_of(ConnectionRefusedError()) == "unreachable"
    assert fault_of(ConnectionResetError()) == "outage"


def test_words_in_a_message_change_nothing() -> None:
    assert fault_of(RuntimeError("429 rate_limit_error: overloaded, timed out, invalid api key")) == "other"


@pytest.mark.parametrize(
    ("headers", "wait_ms"),
    [
        ({}, None),
        ({"Retry-After": "2"}, 2_000),
        ({"retry-after": "0.2504"}, 251),
        ({"retry-after": "-3"}, 0),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "1e999999"}, RETRY_AFTER_MS_MAX),
        ({"retry-after": "86400"}, RETRY_AFTER_MS_MAX),
        ({"retry-after-ms": "1500.2", "retry-after": "9"}, 1_501),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:25 GMT"}, 5_000),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:25"}, 5_000),
        ({"retry-after": "Tue, 14 Nov 2023 22:13:00 GMT"}, 0),
        ({"retry-after": "Tue, 14 Nov 2051 22:13:00 GMT"}, RETRY_AFTER_MS_MAX),
        ({"retry-after": "soon"}, None),
    ],
)
def test_the_providers_wait_is_read_in_every_form_and_clamped(headers: dict[str, str], wait_ms: int | None) -> None:
    error = StatusError(429, headers)
    assert retry_after_ms_of(error, now_us=NOW_US) == wait_ms
    assert retry_after_ms_of(caused(RuntimeError(), error), now_us=NOW_US) == wait_ms


def test_a_wait_on_the_exception_itself_is_used_when_no_header_names_one() -> None:
    error = StatusError(429)
    error.retry_after = 1.25  # type: ignore[attr-defined]  # as pydantic-ai does for Gemini's RetryInfo
    assert retry_after_ms_of(error, now_us=NOW_US) == 1_250


def test_the_message_names_model_status_and_next_step_and_repeats_nothing_of_the_provider() -> None:
    body = {"error": {"type": "invalid_request_error", "code": "sk-live-123", "message": "sk-live-123"}}
    error = provider_error(StatusError(400, body=body), model="openai:gpt-5", now_us=NOW_US)
    assert isinstance(error, ProviderError)
    text = str(error)
    assert "openai:gpt-5" in text
    assert "400 (invalid_request_error)" in text
    assert "check the model's name" in text
    assert "sk-live-123" not in text + repr(error)


def test_every_fault_is_reached() -> None:
    reached = {fault_of(StatusError(status)) for status in range(400, 600)} | {fault_of(ConnectionRefusedError())}
    assert reached == set(FAULTS)


def test_a_circle_of_causes_ends() -> None:
    first, second = RuntimeError(), RuntimeError()
    first.__cause__, second.__cause__ = second, first
    assert fault_of(first) == "other"
