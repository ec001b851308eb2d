"""The demonstration's CRM counts every side effect, answers late on request, and ends cleanly."""

from __future__ import annotations

import copy
import http.client
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from endstop.demo.crm import (
    BODY_BYTES_MAX,
    CrmError,
    CrmServer,
    CrmWrite,
    get_contact,
    recorded_writes,
    serve_crm,
    update_contact,
)


@pytest.fixture
def crm(tmp_path: Path) -> Iterator[CrmServer]:
    with serve_crm(tmp_path / "crm.db") as server:
        yield server


def ask(crm: CrmServer, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, object]:
    connection = http.client.HTTPConnection("127.0.0.1", crm.server_port, timeout=10)
    try:
        connection.request(
            method, path, body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_an_update_is_applied_recorded_and_readable(crm: CrmServer) -> None:
    answer = update_contact(crm.url, "c-1", "won", 7, "key-1")
    assert answer == {"contact_id": "c-1", "stage": "won", "version": 7, "writes": 1}
    assert get_contact(crm.url, "c-1") == answer
    assert recorded_writes(crm.db_path) == (
        CrmWrite(write_id=1, contact_id="c-1", stage="won", version=7, idempotency_key="key-1"),
    )


def test_the_same_update_twice_is_two_writes_also_under_one_key(crm: CrmServer) -> None:
    for _ in range(3):
        update_contact(crm.url, "c-1", "won", 7, "key-1")
    update_contact(crm.url, "c-2", "lost", 1)
    assert (crm.writes("c-1"), crm.writes("c-2"), crm.writes("c-3")) == (3, 1, 0)
    assert [write.idempotency_key for write in recorded_writes(crm.db_path)] == ["key-1"] * 3 + [None]


def test_every_one_of_many_concurrent_updates_is_counted(crm: CrmServer) -> None:
    failures: list[Exception] = []

    def send(worker: int) -> None:
        try:
            for number in range(10):
                update_contact(crm.url, "c-1", "stage", worker * 10 + number, f"{worker}-{number}")
        except CrmError as error:
            failures.append(error)

    threads = [threading.Thread(target=send, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert crm.writes("c-1") == 80
    assert len({write.idempotency_key for write in recorded_writes(crm.db_path)}) == 80


def test_an_unknown_contact_is_a_404_and_health_is_well(crm: CrmServer) -> None:
    with pytest.raises(CrmError, match="404") as failure:
        get_contact(crm.url, "c-9")
    assert failure.value.status == 404
    assert ask(crm, "GET", "/health") == (200, {"ok": True})


@pytest.mark.parametrize(
    "path", ["/", "/contacts/", "/contacts/a/b", "/contacts/%2e%2e", "/contacts/" + "x" * 65, "/x/c-1"]
)
def test_another_place_is_a_404_for_reads_and_writes(crm: CrmServer, path: str) -> None:
    body = b'{"stage": "won", "version": 1}'
    assert ask(crm, "GET", path)[0] == 404
    assert ask(crm, "POST", path, body)[0] == 404
    assert recorded_writes(crm.db_path) == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"\xff",
        b"[]",
        b"{}",
        b'{"stage": "won"}',
        b'{"stage": "won", "version": "1"}',
        b'{"stage": "won", "version": true}',
        b'{"stage": "won", "version": -1}',
        b'{"stage": "won", "version": 1.0}',
        b'{"stage": "won", "version": 99999999999999999999}',
        b'{"stage": " ", "version": 1}',
        b'{"stage": 5, "version": 1}',
        b'{"stage": "won", "version": 1, "owner": "x"}',
    ],
)
def test_a_malformed_update_is_refused_and_not_applied(crm: CrmServer, body: bytes) -> None:
    assert ask(crm, "POST", "/contacts/c-1", body)[0] == 400
    assert recorded_writes(crm.db_path) == ()


def test_a_body_without_length_or_above_the_limit_is_refused(crm: CrmServer) -> None:
    assert ask(crm, "POST", "/contacts/c-1", None, Content_Length="x")[0] == 411
    assert ask(crm, "POST", "/contacts/c-1", None, Content_Length=str(BODY_BYTES_MAX + 1))[0] == 413
    assert ask(crm, "POST", "/contacts/c-1", None, Content_Length="9" * 5_000)[0] == 413


@pytest.mark.parametrize("delay", ["-1", "x", "60001", "9" * 5_000, "1.5", "²"])
def test_a_malformed_delay_is_refused_before_the_update_is_applied(crm: CrmServer, delay: str) -> None:
    body = b'{"stage": "won", "version": 1}'
    assert ask(crm, "POST", "/contacts/c-1", body, Delay_Ms=delay.encode().decode("latin-1"))[0] == 400
    assert recorded_writes(crm.db_path) == ()


def wait_for_write(crm_db: Path, contact_id: str) -> None:
    deadline = threading.Event()
    for _ in range(500):
        if recorded_writes(crm_db, contact_id):
            return
        deadline.wait(0.02)
    pytest.fail("the update was not applied within ten seconds")


@pytest.mark.parametrize("ask_by", ["query", "header"])
def test_a_delayed_answer_comes_after_the_write_and_goes_out_when_the_server_stops(tmp_path: Path, ask_by: str) -> None:
    answers: list[tuple[int, object]] = []
    body = b'{"stage": "won", "version": 1}'

    def send(crm: CrmServer) -> None:
        if ask_by == "query":
            answers.append(ask(crm, "POST", "/contacts/c-1?delay_ms=60000", body))
        else:
            answers.append(ask(crm, "POST", "/contacts/c-1", body, Delay_Ms="60000"))

    with serve_crm(tmp_path / "crm.db") as crm:
        client = threading.Thread(target=send, args=(crm,))
        client.start()
        wait_for_write(crm.db_path, "c-1")
        assert answers == []
    client.join()
    assert answers == [(200, {"contact_id": "c-1", "stage": "won", "version": 1, "writes": 1})]


def test_a_client_that_runs_out_of_time_leaves_an_applied_write_behind(crm: CrmServer) -> None:
    with pytest.raises(CrmError, match="may have been applied") as failure:
        update_contact(crm.url, "c-1", "won", 7, timeout_ms=200, delay_ms=60_000)
    assert failure.value.status is None
    assert crm.writes("c-1") == 1


def test_leaving_ends_every_thread_also_with_a_silent_connection_open(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with serve_crm(tmp_path / "crm.db") as crm:
        silent = socket.create_connection(("127.0.0.1", crm.server_port))
        update_contact(crm.url, "c-1", "won", 1)
    silent.close()
    assert set(threading.enumerate()) <= before


def test_a_file_that_was_served_before_keeps_its_writes(tmp_path: Path) -> None:
    for version in (1, 2):
        with serve_crm(tmp_path / "crm.db") as crm:
            update_contact(crm.url, "c-1", "won", version)
    assert len(recorded_writes(tmp_path / "crm.db", "c-1")) == 2


@pytest.mark.parametrize(
    ("url", "contact_id"), [("https://x", "c"), ("file:///x", "c"), ("http://127.0.0.1", "a/b"), ("", "c")]
)
def test_the_client_asks_no_other_place(url: str, contact_id: str) -> None:
    with pytest.raises(CrmError) as failure:
        get_contact(url, contact_id)
    assert failure.value.status == 400


def test_a_server_that_is_gone_gives_an_error_without_a_status(tmp_path: Path) -> None:
    with serve_crm(tmp_path / "crm.db") as crm:
        url = crm.url
    with pytest.raises(CrmError) as failure:
        update_contact(url, "c-1", "won", 1)
    assert failure.value.status is None


def test_the_error_survives_copy_and_pickle() -> None:
    error = CrmError("refused", 404)
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(again), again.status) == ("refused", 404)


CLIENT = """
import sys
from endstop.demo.crm import update_contact
update_contact(sys.argv[1], "c-1", "won", 7, "k", delay_ms=60_000)
"""


@pytest.mark.slow
def test_as_a_process_it_outlives_a_client_killed_between_effect_and_answer(tmp_path: Path) -> None:
    db = tmp_path / "crm.db"
    command = [sys.executable, "-m", "endstop.demo.crm", "--db", str(db)]
    # The child imports what this process imports, installed or not.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            with subprocess.Popen([sys.executable, "-c", CLIENT, url], env=environment) as client:
                wait_for_write(db, "c-1")
                client.kill()
            assert get_contact(url, "c-1")["writes"] == 1
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=10) == 0
    assert [write.idempotency_key for write in recorded_writes(db)] == ["k"]
