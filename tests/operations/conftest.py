"""Every store, for every test that asks for a `place`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operations.scenes import STORES, Bank, Place


@pytest.fixture(params=sorted(STORES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    found = Place(request.param, tmp_path)
    yield found
    found.close()


@pytest.fixture
def bank() -> Bank:
    return Bank()
