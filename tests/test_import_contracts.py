"""The import contracts hold, and each of them catches a tree that breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LINT: Final = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache"]

# A small tree of the real shape that keeps every contract.
SOUND: Final[dict[str, str]] = {
    "__init__.py": "",
    "errors.py": "",
    "core/__init__.py": "",
    "core/model.py": "import dataclasses, orjson\nfrom endstop import errors\n",
    "store/__init__.py": "",
    "store/port.py": "from endstop.core import model\n",
    "store/sqlite/__init__.py": "",
    "store/sqlite/writer.py": "import apsw, threading\nfrom endstop.store import port\n",
    "runtime/__init__.py": "",
    "runtime/guard.py": "from endstop.store import port\n",
    "loop/__init__.py": "",
    "loop/agent.py": "from endstop.runtime import guard\n",
    "replay/__init__.py": "",
    "testing/__init__.py": "",
    "demo/__init__.py": "import sqlite3\n",
    "demo/crm.py": "import sqlite3\nfrom endstop.loop import agent\n",
    "cli/__init__.py": "",
    "cli/main.py": "from endstop.demo import crm\n",
}

LAYERS: Final = "Imports go down only"
PURE: Final = "The core does no I/O"
SQLITE: Final = "Only the SQLite store"

BROKEN: Final[dict[str, tuple[str, str, str]]] = {
    "core imports store": ("core/x.py", "from endstop.store import port", LAYERS),
    "store imports runtime": ("store/x.py", "def f():\n    from endstop.runtime import guard", LAYERS),
    "runtime imports testing": ("runtime/x.py", "import endstop.testing", LAYERS),
    "demo imports its neighbour replay": ("demo/x.py", "import endstop.replay", LAYERS),
    "core reaches runtime through the package": ("__init__.py", "import endstop.runtime.guard", LAYERS),
    "a new part without a layer": ("widgets.py", "", LAYERS),
    "core imports time in a function": ("core/x.py", "def f():\n    import time", PURE),
    "core imports os.path": ("core/x.py", "from os.path import join", PURE),
    "core imports pydantic": ("core/x.py", "import pydantic", PURE),
    "core imports threading through errors": ("errors.py", "import threading", PURE),
    "another store imports apsw": ("store/memory.py", "import apsw", SQLITE),
    "the command line imports apsw": ("cli/doctor.py", "import apsw", SQLITE),
    "the SQLite store imports the other sqlite": ("store/sqlite/x.py", "import sqlite3", SQLITE),
}


def _lint(folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(LINT, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120)


def _tree(repository: Path, folder: Path, changes: dict[str, str]) -> Path:
    shutil.copy(repository / "pyproject.toml", folder)
    for name, text in (SOUND | changes).items():
        target = folder / "src" / "endstop" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    return folder


def test_the_package_keeps_its_import_contracts(repository: Path) -> None:
    checked = _lint(repository, str(repository / "src"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "4 kept, 0 broken" in checked.stdout


@pytest.mark.slow
def test_a_sound_tree_keeps_the_contracts(repository: Path, tmp_path: Path) -> None:
    """Without this one, a broken tree could be red for another reason."""
    checked = _lint(_tree(repository, tmp_path, {}), str(tmp_path / "src"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_tree_is_caught_where(name: str, repository: Path, tmp_path: Path) -> None:
    path, text, contract = BROKEN[name]
    changes = {path: text}
    if path == "__init__.py":
        changes["core/x.py"] = "import endstop"
    checked = _lint(_tree(repository, tmp_path, changes), str(tmp_path / "src"))
    assert checked.returncode == 1, checked.stdout + checked.stderr
    broken = [line for line in checked.stdout.splitlines() if " BROKEN" in line]
    assert broken, checked.stdout
    assert all(line.startswith(contract) for line in broken), broken
