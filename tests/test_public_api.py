"""The public face: what `endstop` exports, what importing it costs, and what a type checker sees of it."""

from __future__ import annotations

import importlib.resources
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

import endstop

# Heavy, optional, or another layer's. `import endstop` loads none of them.
NOT_LOADED: Final = (
    "anthropic",
    "click",
    "genai_prices",
    "google.genai",
    "httpx",
    "openai",
    "psycopg",
    "pydantic",
    "pydantic_ai",
    "rich",
    "selectolax",
    "starlette",
    "endstop.adapters",
    "endstop.cli",
    "endstop.console",
    "endstop.demo",
    "endstop.gateway",
    "endstop.loop",
    "endstop.replay",
    "endstop.testing",
)

TYPING_FILES: Final = sorted((Path(__file__).parent / "typing").glob("*.py"))


def _loaded_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after `statement`."""
    program = f"import sys, json\n{statement}\njson.dump(sorted(sys.modules), sys.stdout)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(ended.stdout))


def test_all_is_sorted_and_names_nothing_twice() -> None:
    assert list(endstop.__all__) == sorted(set(endstop.__all__))


def test_all_is_complete() -> None:
    """What is public by its spelling is exported; parts of the package and imported modules are not names of ours."""
    public = {
        name
        for name, value in vars(endstop).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    assert public <= set(endstop.__all__), sorted(public - set(endstop.__all__))


@pytest.mark.parametrize("name", endstop.__all__)
def test_every_exported_name_resolves_and_is_listed(name: str) -> None:
    """This covers the names that are loaded on first use."""
    assert getattr(endstop, name) is not None
    assert name in dir(endstop)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        getattr(endstop, "no_such_name")  # noqa: B009  a literal attribute would not type-check


@pytest.mark.parametrize("name", endstop.__all__)
def test_every_exported_class_and_function_says_what_it_promises(name: str) -> None:
    exported = getattr(endstop, name)
    if inspect.isclass(exported) or inspect.isfunction(exported):
        assert (inspect.getdoc(exported) or "").strip(), f"endstop.{name} has no docstring"


def test_importing_the_package_loads_nothing_heavy() -> None:
    loaded = _loaded_after("import endstop")
    assert "endstop" in loaded
    assert not loaded & set(NOT_LOADED)


def test_the_check_of_loaded_modules_sees_a_module_that_is_loaded() -> None:
    assert {"endstop", "click"} <= _loaded_after("import endstop, click")


def test_the_marker_of_a_typed_package_is_shipped() -> None:
    assert importlib.resources.files("endstop").joinpath("py.typed").is_file()


def _type_check(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    """mypy as a user runs it: strict, no settings of ours, the package found where this process found it."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={cache}", str(path)]
    environment = dict(os.environ)
    home = Path(endstop.__file__).resolve().parents[1]
    if home.name != "site-packages":
        environment["MYPYPATH"] = str(home)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("path", TYPING_FILES, ids=lambda path: path.name)
def test_what_the_contract_writes_type_checks_strictly(path: Path, tmp_path: Path) -> None:
    checked = _type_check(path, tmp_path / "cache")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.slow
def test_a_wrong_use_of_the_package_does_not_type_check(tmp_path: Path) -> None:
    """Without types that reach the user, every use would pass."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import endstop\n\nendstop.Limits(steps_max='twenty')\n", encoding="utf-8")
    checked = _type_check(wrong, tmp_path / "cache")
    assert checked.returncode == 1, checked.stdout + checked.stderr
    assert "[arg-type]" in checked.stdout
