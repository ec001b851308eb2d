"""The test set-up and the packaging keep their own promises."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import is_loopback, only_loopback


@pytest.mark.parametrize(
    ("family", "address", "stays"),
    [
        (socket.AF_INET, ("127.0.0.1", 80), True),
        (socket.AF_INET, ("127.9.9.9", 80), True),
        (socket.AF_INET, ("localhost", 80), True),
        (socket.AF_INET6, ("::1", 80, 0, 0), True),
        (socket.AF_UNIX, "\0name", True),
        (socket.AF_INET, ("192.0.2.1", 80), False),
        (socket.AF_INET, ("169.254.169.254", 80), False),
        (socket.AF_INET, ("example.org", 80), False),
        (socket.AF_INET, ("", 80), False),
        (socket.AF_INET6, ("2001:db8::1", 80, 0, 0), False),
    ],
)
def test_only_loopback_addresses_stay_on_the_machine(family: int, address: object, stays: bool) -> None:
    assert is_loopback(family, address) is stays


def test_a_connection_that_would_leave_is_refused_and_written_down() -> None:
    called: list[object] = []
    attempts: list[str] = []
    connect = only_loopback(lambda _sock, address: called.append(address), attempts)
    with socket.socket() as sock:
        connect(sock, ("127.0.0.1", 1))
        with pytest.raises(ConnectionRefusedError, match="leave the machine"):
            connect(sock, ("192.0.2.1", 1))
    assert called == [("127.0.0.1", 1)]
    assert attempts == ["('192.0.2.1', 1)"]


def test_the_guard_on_sockets_is_in_force_in_every_test() -> None:
    assert socket.socket.connect.__qualname__.startswith("only_loopback")
    assert socket.socket.connect_ex.__qualname__.startswith("only_loopback")


def test_properties_are_seeded() -> None:
    assert settings().derandomize or settings.get_profile("nightly").max_examples == settings().max_examples


def test_the_ci_script_is_executable_and_parses(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_changelog_names_the_version_of_the_package_or_what_is_unreleased(repository: Path) -> None:
    version = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    headings = re.findall(r"^## \[([^\]]+)\]", (repository / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1] == version
