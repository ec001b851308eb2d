"""A small customer database behind real HTTP: the target that the demonstration's agent writes to.

It does what the target of a public incident did: it applies every update it is sent, also the same one twice, and it
only logs the Idempotency-Key header. So its own table says how many side effects really happened.

    POST /contacts/{id}    {"stage": "…", "version": 7}    applies the update and answers with the contact
    GET  /contacts/{id}    the contact and how many writes it has seen
    GET  /health           {"ok": true}

A POST may ask for a late answer (`?delay_ms=` or the header Delay-Ms): the update is committed first, then the answer
waits, so that a client can be killed between effect and answer.

    python -m endstop.demo.crm --db crm.db      # the first line of output is the URL

The process ends on SIGINT, SIGTERM, when its lifetime is over or, with `--until-eof`, when its stdin is closed, as it
is by the end of the process that holds the other side.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import sqlite3
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final, cast
from urllib.parse import parse_qs, quote, urlsplit

__all__ = ["CrmError", "CrmServer", "CrmWrite", "get_contact", "recorded_writes", "serve_crm", "update_contact"]

CONTACT_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
BODY_BYTES_MAX: Final = 16 * 1024
ANSWER_BYTES_MAX: Final = 64 * 1024
STAGE_CHARS_MAX: Final = 64
VERSION_MAX: Final = 2**53 - 1
KEY_CHARS_MAX: Final = 200
DELAY_MS_MAX: Final = 60_000
BUSY_MS_MAX: Final = 10_000
IDLE_MS_MAX: Final = 10_000
CLIENT_TIMEOUT_MS: Final = 10_000
LIFETIME_MS: Final = 3_600_000
STDIN_BYTES: Final = 1024

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS contacts (
    contact_id TEXT PRIMARY KEY,
    stage TEXT NOT NULL,
    version INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS writes (
    write_id INTEGER PRIMARY KEY AUTOINCREMENT,
    contact_id TEXT NOT NULL,
    stage TEXT NOT NULL,
    version INTEGER NOT NULL,
    idempotency_key TEXT
);
"""


class CrmError(Exception):
    """The CRM refused a request or could not be asked. `status` is the HTTP status, None when there was no answer.

    A refused update (status 4xx) was not applied. Without an answer, or with a 5xx, an update may have been applied.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[type[CrmError], tuple[str, int | None]]:
        return type(self), (str(self), self.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrmWrite:
    """One row of the CRM's own table of writes: one side effect that happened."""

    write_id: int
    contact_id: str
    stage: str
    version: int
    idempotency_key: str | None


def recorded_writes(db_path: str | Path, contact_id: str | None = None) -> tuple[CrmWrite, ...]:
    """The writes that the CRM has applied, oldest first, read from its file; also of a CRM in another process.

    Raises sqlite3.OperationalError if the file is missing or no CRM's.
    """
    with closing(_connect(db_path, mode="ro")) as database:
        rows = database.execute(
            "SELECT write_id, contact_id, stage, version, idempotency_key FROM writes"
            " WHERE ?1 IS NULL OR contact_id = ?1 ORDER BY write_id",
            (contact_id,),
        ).fetchall()
    return tuple(
        CrmWrite(write_id=row[0], contact_id=row[1], stage=row[2], version=row[3], idempotency_key=row[4])
        for row in rows
    )


def _connect(db_path: str | Path, *, mode: str) -> sqlite3.Connection:
    place = f"file:{quote(str(Path(db_path).resolve()))}?mode={mode}"
    # isolation_level None: transactions begin and end where the text says so, the same in every Python version.
    return sqlite3.connect(place, uri=True, timeout=BUSY_MS_MAX / 1000, isolation_level=None)


# --- the server ------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """A request that is answered with an error status; nothing was applied."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class CrmServer(ThreadingHTTPServer):
    """The CRM on 127.0.0.1. Use `serve_crm`, which also starts and stops its thread."""

    # Not daemons: closing the server waits for its request threads, so none is left over.
    daemon_threads = False
    request_queue_size = 128

    def __init__(self, db_path: str | Path, port: int = 0) -> None:
        self.db_path = Path(db_path)
        self.stopping = threading.Event()
        self.writing = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        with closing(_connect(self.db_path, mode="rwc")) as database:
            database.executescript(_SCHEMA)
        super().__init__(("127.0.0.1", port), _CrmHandler)

    @property
    def url(self) -> str:
        """The base URL, without a slash at its end."""
        return f"http://127.0.0.1:{self.server_port}"

    def writes(self, contact_id: str) -> int:
        """How many updates of this contact were applied, counted in the CRM's own table."""
        return len(recorded_writes(self.db_path, contact_id))

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept one connection, and remember it so that stopping can end it."""
        connection, address = super().get_request()
        with self._lock:
            self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close one connection and forget it."""
        with self._lock:
            self._connections.discard(cast("socket.socket", request))
        super().shutdown_request(request)

    def stop(self) -> None:
        """Stop serving: delayed answers go out now, silent connections are ended, all threads are waited for."""
        self.stopping.set()
        self.shutdown()
        with self._lock:
            for connection in self._connections:
                # Reading side only: a thread that waits for a request wakes up, an answer under way still gets out.
                _end_reading(connection)
        self.server_close()


def _end_reading(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RD)
    except OSError:
        return  # the client has hung up already, which is what this is for


class _CrmHandler(BaseHTTPRequestHandler):
    timeout = IDLE_MS_MAX / 1000
    server_version = "endstop-demo-crm"
    sys_version = ""

    def do_GET(self) -> None:
        try:
            path = urlsplit(self.path).path
            answer = {"ok": True} if path == "/health" else self._contact(_contact_id(path))
        except _Refused as refusal:
            self._send(refusal.status, {"error": str(refusal)})
        else:
            self._send(200, answer)

    def do_POST(self) -> None:
        try:
            parts = urlsplit(self.path)
            contact_id = _contact_id(parts.path)
            stage, version = _update(self._body())
            delay_ms = _delay_ms(parts.query, self.headers.get("Delay-Ms"))
            key = self.headers.get("Idempotency-Key")
            if key is not None and len(key) > KEY_CHARS_MAX:
                raise _Refused(400, f"the Idempotency-Key header is longer than {KEY_CHARS_MAX} characters")
            answer = self._apply(contact_id, stage, version, key)
        except _Refused as refusal:
            self._send(refusal.status, {"error": str(refusal)})
            return
        if delay_ms:
            # The effect is committed; only the answer is late. Stopping the server cuts the wait short.
            self._crm.stopping.wait(delay_ms / 1000)
        self._send(200, answer)

    @property
    def _crm(self) -> CrmServer:
        return cast("CrmServer", self.server)

    def _contact(self, contact_id: str) -> dict[str, object]:
        with closing(_connect(self._crm.db_path, mode="ro")) as database:
            return _contact_row(database, contact_id)

    def _apply(self, contact_id: str, stage: str, version: int, key: str | None) -> dict[str, object]:
        # One writer at a time: SQLite's own waiting is not fair and may let one request wait for seconds.
        with self._crm.writing, closing(_connect(self._crm.db_path, mode="rw")) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute(
                "INSERT INTO writes (contact_id, stage, version, idempotency_key) VALUES (?, ?, ?, ?)",
                (contact_id, stage, version, key),
            )
            database.execute(
                "INSERT INTO contacts (contact_id, stage, version) VALUES (?, ?, ?)"
                " ON CONFLICT (contact_id) DO UPDATE SET stage = excluded.stage, version = excluded.version",
                (contact_id, stage, version),
            )
            answer = _contact_row(database, contact_id)
            database.execute("COMMIT")
        return answer

    def _body(self) -> bytes:
        text = self.headers.get("Content-Length", "")
        if not text.isascii() or not text.isdigit():
            raise _Refused(411, "a Content-Length is needed")
        if len(text) > len(str(BODY_BYTES_MAX)) or int(text) > BODY_BYTES_MAX:
            raise _Refused(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
        return self.rfile.read(int(text))

    def _send(self, status: int, answer: Mapping[str, object]) -> None:
        data = json.dumps(answer).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            # The client is gone, as a killed one is. What was applied stays applied; there is nobody to tell.
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        """Stay silent: the printed URL is the only output."""


def _contact_id(path: str) -> str:
    head, _, contact_id = path.rpartition("/")
    if head != "/contacts" or not CONTACT_ID.fullmatch(contact_id):
        raise _Refused(404, "there is no such place; use /contacts/{id} or /health")
    return contact_id


def _update(body: bytes) -> tuple[str, int]:
    try:
        given: object = json.loads(body)
    except ValueError:
        raise _Refused(400, "the body is no JSON") from None
    if not isinstance(given, dict) or set(given) != {"stage", "version"}:
        raise _Refused(400, "the body must be an object with exactly stage and version")
    stage, version = given["stage"], given["version"]
    if not isinstance(stage, str) or not stage.strip() or len(stage) > STAGE_CHARS_MAX:
        raise _Refused(400, f"stage must be text of 1 to {STAGE_CHARS_MAX} characters")
    if type(version) is not int or not 0 <= version <= VERSION_MAX:
        raise _Refused(400, f"version must be a whole number from 0 to {VERSION_MAX}")
    return stage, version


def _delay_ms(query: str, header: str | None) -> int:
    text = parse_qs(query).get("delay_ms", [header or "0"])[-1]
    if not text.isascii() or not text.isdigit() or len(text) > len(str(DELAY_MS_MAX)) or int(text) > DELAY_MS_MAX:
        raise _Refused(400, f"delay_ms must be a whole number from 0 to {DELAY_MS_MAX}")
    return int(text)


def _contact_row(database: sqlite3.Connection, contact_id: str) -> dict[str, object]:
    row = database.execute(
        "SELECT stage, version, (SELECT count(*) FROM writes WHERE writes.contact_id = contacts.contact_id)"
        " FROM contacts WHERE contact_id = ?",
        (contact_id,),
    ).fetchone()
    if row is None:
        raise _Refused(404, "there is no such contact")
    return {"contact_id": contact_id, "stage": row[0], "version": row[1], "writes": row[2]}


@contextmanager
def serve_crm(db_path: str | Path, port: int = 0) -> Iterator[CrmServer]:
    """Serve the CRM on 127.0.0.1 (port 0: any free one) from `db_path`, which is made if it is missing.

    On leaving, the server is stopped and all its threads have ended; the file stays. Raises OSError when the port is
    taken.
    """
    server = CrmServer(db_path, port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="endstop-demo-crm")
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()


# --- the client ------------------------------------------------------------------------------------------------------


def update_contact(
    base_url: str,
    contact_id: str,
    stage: str,
    version: int,
    idempotency_key: str | None = None,
    *,
    timeout_ms: int = CLIENT_TIMEOUT_MS,
    delay_ms: int = 0,
) -> dict[str, object]:
    """Update one contact, once: no retry of any kind. Gives contact_id, stage, version and writes.

    `delay_ms` asks the CRM to answer late. Raises CrmError; see there when an update may have been applied.
    """
    headers = {"Content-Type": "application/json", "Delay-Ms": str(delay_ms)}
    if idempotency_key is not None:
        headers["Idempotency-Key"] = idempotency_key
    body = json.dumps({"stage": stage, "version": version}).encode()
    return _ask("update", _contact_url(base_url, contact_id), headers, body, timeout_ms)


def get_contact(base_url: str, contact_id: str, *, timeout_ms: int = CLIENT_TIMEOUT_MS) -> dict[str, object]:
    """Read one contact: contact_id, stage, version and writes. Raises CrmError (status 404: there is none)."""
    return _ask("read", _contact_url(base_url, contact_id), {}, None, timeout_ms)


def _contact_url(base_url: str, contact_id: str) -> str:
    if not base_url.startswith("http://") or not CONTACT_ID.fullmatch(contact_id):
        msg = "contact not asked for: the base URL must be http, the id 1 to 64 letters, digits, '_', '.' and '-'"
        raise CrmError(msg, 400)
    return f"{base_url.rstrip('/')}/contacts/{contact_id}"


def _ask(verb: str, url: str, headers: dict[str, str], body: bytes | None, timeout_ms: int) -> dict[str, object]:
    request = urllib.request.Request(url, data=body, headers=headers)  # noqa: S310 - only http, checked above
    # Without the environment's proxies: this client speaks to loopback.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_ms / 1000) as answer:
            contact: object = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            msg = f"CRM {verb} refused with status {error.code}"
            raise CrmError(msg, error.code) from None
    except (OSError, ValueError) as error:
        msg = f"CRM {verb} got no usable answer ({type(error).__name__}); an update may have been applied"
        raise CrmError(msg) from error
    if not isinstance(contact, dict):
        msg = f"CRM {verb} got no usable answer (no object); an update may have been applied"
        raise CrmError(msg)
    return contact


# --- as a process ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Serve until SIGINT, SIGTERM or the end of its lifetime; the first line of output is the URL."""
    parser = argparse.ArgumentParser(prog="python -m endstop.demo.crm", description="Serve the demonstration's CRM.")
    parser.add_argument("--db", required=True, type=Path, help="its SQLite file; made if missing")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0: any free one (default)")
    parser.add_argument(
        "--lifetime-ms", type=int, default=LIFETIME_MS, help=f"end by itself after this time (default {LIFETIME_MS})"
    )
    parser.add_argument("--until-eof", action="store_true", help="end when stdin is closed")
    arguments = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with serve_crm(arguments.db, arguments.port) as server:
        print(server.url, flush=True)  # noqa: T201 - the URL on stdout is this process's answer
        if arguments.until_eof:
            threading.Thread(target=_wait_for_eof, args=(stop,), daemon=True).start()
        stop.wait(arguments.lifetime_ms / 1000)


def _wait_for_eof(stop: threading.Event) -> None:
    # The bare descriptor: a daemon thread inside sys.stdin would hold its lock while the interpreter ends.
    while os.read(0, STDIN_BYTES):
        pass
    stop.set()


if __name__ == "__main__":
    main()
