"""What every test shares: seeded properties, the paths of the repository, and no network but loopback."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The default draws the same examples every time, so that a red run is red for everybody. `nightly` looks further.
settings.register_profile(
    "house", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("house"), derandomize=False, max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "house"))


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository. The package under test may be installed elsewhere."""
    return Path(__file__).resolve().parents[1]


def is_loopback(family: int, address: object) -> bool:
    """Whether a socket address stays on this machine: a local socket, `localhost`, or a loopback number."""
    if family not in {socket.AF_INET, socket.AF_INET6}:
        return True
    host = address[0] if isinstance(address, tuple) else ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def only_loopback(connect: Callable[..., object], attempts: list[str]) -> Callable[..., object]:
    """Wrap a socket's `connect` so that an address outside is refused and written down in `attempts`."""

    def guarded(self: socket.socket, address: object) -> object:
        if not is_loopback(self.family, address):
            attempts.append(str(address))
            raise ConnectionRefusedError(f"a test tried to leave the machine: {address}")
        return connect(self, address)

    return guarded


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse every connection that is not loopback, and fail the test even when its code swallowed the refusal."""
    attempts: list[str] = []
    monkeypatch.setattr(socket.socket, "connect", only_loopback(socket.socket.connect, attempts))
    monkeypatch.setattr(socket.socket, "connect_ex", only_loopback(socket.socket.connect_ex, attempts))
    yield
    assert not attempts, f"a test tried to leave the machine: {attempts}"
