"""The test support keeps its promises: nothing is left behind, and nothing is skipped silently."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import postgres_server
from tests.postgres_server import PostgresServer, skip_or_fail

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[3]
HOLDS = """
import sys, time
from tests.postgres_server import PostgresServer
server = PostgresServer.make()
print(server.folder, server.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_goes_with_the_process_that_made_it(postgres: PostgresServer, how: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS], cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": "."}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    folder, port = process.stdout.readline().split()
    assert Path(folder).exists()
    process.send_signal(how)
    process.wait(60)
    process.stdout.close()
    until = time.monotonic() + 60
    while Path(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port))) != 0


def test_the_server_listens_on_loopback_alone(postgres: PostgresServer) -> None:
    assert postgres.execute("SHOW listen_addresses") == [("127.0.0.1",)]
    assert postgres.execute("SHOW unix_socket_directories") == [("",)]
    assert postgres.execute("SHOW fsync") == [("on",)]


def test_without_a_server_the_tests_are_skipped_with_a_reason_and_fail_on_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="NO POSTGRESQL: none here"):
        skip_or_fail("none here")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must run the PostgreSQL tests: none here"):
        skip_or_fail("none here")


def test_nothing_is_installed_when_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDSTOP_TEST_NO_APT", "1")
    monkeypatch.setattr(postgres_server.subprocess, "run", lambda *_, **__: pytest.fail("apt-get was called"))
    assert not postgres_server.install("postgresql")


def test_the_binaries_are_looked_for_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENDSTOP_TEST_NO_APT", "1")
    monkeypatch.setattr(postgres_server, "DEBIAN", tmp_path / "debian")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(postgres_server, "WHEELS", ())
    with pytest.raises(postgres_server.PostgresUnavailableError, match="no wheel ships one"):
        postgres_server.find_binaries()
    for version in ("9.6", "15", "16"):
        folder = tmp_path / "debian" / version / "bin"
        folder.mkdir(parents=True)
        for name in ("initdb", "postgres"):
            (folder / name).touch()
    assert postgres_server.find_binaries() == tmp_path / "debian" / "16" / "bin"
