"""Both stores, for every test that asks for a `scene`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.scenes import Scene


@pytest.fixture(params=["memory", "sqlite"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(request.param, tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def file_scene(tmp_path: Path) -> Iterator[Scene]:
    """A store that other processes can share."""
    scene = Scene("sqlite", tmp_path)
    yield scene
    scene.close()
