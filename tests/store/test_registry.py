"""From a URL to a store, and what is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from endstop.errors import StoreUnavailableError, UsageError
from endstop.store.memory import MemoryStore
from endstop.store.registry import URL_CHARS_MAX, open_store
from endstop.store.sqlite import SqliteStore
from tests.store.kit import CLOCK, IDS


def opened(url: str) -> object:
    store = open_store(url, new_key=IDS.new_key, now_us=CLOCK.now_us)
    store.close()
    return store


def test_memory_is_for_tests() -> None:
    assert isinstance(opened("memory:"), MemoryStore)


def test_a_sqlite_store_is_named_by_url_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url, path in [
        (f"sqlite:///{tmp_path}/one.db", "one.db"),
        ("sqlite:///two.db", "two.db"),
        ("three.db", "three.db"),
        (f"{tmp_path}/sub:folder/four.db", "sub:folder/four.db"),
    ]:
        store = opened(url)
        assert isinstance(store, SqliteStore)
        assert store.url == f"sqlite:///{tmp_path / path}"
        assert (tmp_path / path).exists()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "1 to 4096 characters"),
        ("x" * (URL_CHARS_MAX + 1), "1 to 4096 characters"),
        ("state\0.db", "1 to 4096 characters"),
        ("sqlite:state.db", "sqlite:///relative/path"),
        ("sqlite:///", "sqlite:///relative/path"),
        ("mysql://host/db", "no store of kind 'mysql'"),
        (":memory:", "use memory: for tests"),
    ],
)
def test_what_names_no_store_is_refused(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        opened(url)


def test_a_folder_that_cannot_be_made_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailableError):
        opened(f"{tmp_path}/file/state.db")


def test_the_package_loads_no_store_until_one_is_opened() -> None:
    code = "import sys, endstop, endstop.store.registry; print(sorted({'apsw', 'sqlite3'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
