"""The tree keeps the house rules, and every rule is seen to fire on a snippet that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Final

import pytest

from tests import tidy_rules
from tests.tidy_rules import Finding, Module, Rule

ROOT: Final = Path(__file__).resolve().parents[1]
PYTHON_FOLDERS: Final = ("src", "tests", "examples", "benchmarks")
TEXT_FOLDERS: Final = (*PYTHON_FOLDERS, "docs", ".ci")
TEXT_SUFFIXES: Final = frozenset(
    {"", ".cfg", ".html", ".ini", ".json", ".jsonl", ".md", ".py", ".sh", ".sql", ".toml", ".txt", ".yaml", ".yml"}
)

# Records that stay open, each with the reason. An entry that is no longer needed fails the test below.
FOLD_STATE: Final = "the state of a fold: an event changes it in place, and a copy would cost more than the decision"
OPEN_RECORDS: Final[dict[tuple[str, str], str]] = {
    ("src/endstop/core/evidence.py", "Evidence"): FOLD_STATE,
    ("src/endstop/core/evidence.py", "LastAnswer"): FOLD_STATE,
    ("src/endstop/core/evidence.py", "Pending"): FOLD_STATE,
    ("src/endstop/core/records.py", "RunTransaction"): "the working copy that one transaction changes",
}


def _modules(*folders: str) -> Iterator[Module]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield Module.parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def _texts() -> Iterator[tuple[str, str]]:
    paths = [path for path in ROOT.iterdir() if path.suffix in {".md", ".toml"}]
    for folder in TEXT_FOLDERS:
        paths += (ROOT / folder).rglob("*")
    for path in sorted(paths):
        if path.is_file() and path.suffix in TEXT_SUFFIXES and "__pycache__" not in path.parts:
            # An example page may be in another encoding on purpose; what is looked for here is ASCII.
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8", errors="replace")


def _report(findings: list[Finding]) -> str:
    return "\n" + "\n".join(str(finding) for finding in findings)


def _core(text: str) -> Module:
    return Module.parse("src/endstop/core/snippet.py", text)


# --- the tree ---------------------------------------------------------------------------------------------------------


def test_the_walk_finds_the_tree_it_is_meant_to_judge() -> None:
    """A walk that finds nothing would pass everything."""
    paths = {module.path for module in _modules(*PYTHON_FOLDERS)}
    assert "src/endstop/errors.py" in paths
    assert "tests/test_tidy.py" in paths
    assert {"pyproject.toml", "docs/glossary.md", ".ci/run"} <= {path for path, _ in _texts()}


@pytest.mark.parametrize("rule", tidy_rules.SOURCE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_of_the_package_keeps(rule: Rule) -> None:
    findings = [finding for module in _modules("src") for finding in rule(module)]
    assert not findings, _report(findings)


@pytest.mark.parametrize("rule", tidy_rules.PYTHON_RULES, ids=lambda rule: rule.__name__)
def test_every_python_file_keeps(rule: Rule) -> None:
    findings = [finding for module in _modules(*PYTHON_FOLDERS) for finding in rule(module)]
    assert not findings, _report(findings)


def test_no_text_names_a_path_of_one_machine() -> None:
    findings = [finding for path, text in _texts() for finding in tidy_rules.machine_path_text(path, text)]
    assert not findings, _report(findings)


def test_no_text_leaves_work_for_later() -> None:
    findings = [finding for path, text in _texts() for finding in tidy_rules.unfinished_text(path, text)]
    assert not findings, _report(findings)


def test_records_of_core_and_store_are_frozen_slotted_and_keyword_only() -> None:
    """A value that cannot change needs no copy, no lock and no second look. The exceptions give their reason."""
    found = [(module.path, name, finding) for module in _modules("src") for name, finding in _open(module)]
    unknown = [finding for path, name, finding in found if (path, name) not in OPEN_RECORDS]
    assert not unknown, _report(unknown)
    stale = OPEN_RECORDS.keys() - {(path, name) for path, name, _ in found}
    assert not stale, f"no longer open, take them off the list: {sorted(stale)}"


def _open(module: Module) -> list[tuple[str, Finding]]:
    return list(tidy_rules.open_records(module))


# --- each rule fires --------------------------------------------------------------------------------------------------

LONG_FUNCTION: Final = "def f():\n" + "    x = 1\n" * tidy_rules.FUNCTION_LINES_MAX
LONG_DOCSTRING: Final = 'def f():\n    """One.\n' + "    more\n" * 100 + '    """\n    return 1\n'

BAD: Final[list[tuple[Rule, str, str]]] = [
    (tidy_rules.module_size, "x = 1\n" * (tidy_rules.MODULE_LINES_MAX + 1), "501 lines"),
    (tidy_rules.function_size, LONG_FUNCTION, "f has 71 lines"),
    (tidy_rules.function_size, "class A:\n" + indent(LONG_FUNCTION, "    "), "f has 71 lines"),
    (tidy_rules.future_annotations, '"""Doc."""\nimport ast\n', "annotations"),
    (tidy_rules.future_annotations, "from __future__ import generator_stop\n", "annotations"),
    (tidy_rules.ignore_reason, "x = y  # type: ignore\n", "needs `[code]`"),
    (tidy_rules.ignore_reason, "x = y  # type: ignore[misc]\n", "needs `[code]`"),
    (tidy_rules.unfinished, "x = 1  # TO" + "DO: the rest\n", "left for later"),
    (tidy_rules.core_imports, "import time\n", "import time"),
    (tidy_rules.core_imports, "def f():\n    from os.path import join\n", "import os.path"),
    (tidy_rules.core_imports, "import pydantic\n", "import pydantic"),
    (tidy_rules.core_imports, "from endstop.store import port\n", "import endstop.store"),
    (tidy_rules.core_imports, "from endstop import errors\n", "import endstop"),
    (tidy_rules.core_imports, "from . import model\n", "import ."),
    (tidy_rules.core_calls, "print('x')\n", "print()"),
    (tidy_rules.core_calls, "with open('f') as f:\n    pass\n", "open()"),
    (tidy_rules.core_calls, "x = input()\n", "input()"),
    (tidy_rules.core_calls, "x = time.monotonic()\n", "time.monotonic()"),
    (tidy_rules.core_calls, "x = random.random()\n", "random.random()"),
    (tidy_rules.core_calls, "x = os.getenv('A')\n", "os.getenv()"),
    (tidy_rules.core_calls, "x = datetime.now()\n", "datetime.now()"),
    (tidy_rules.core_calls, "x = datetime.datetime.now(tz=None)\n", "now()"),
    (tidy_rules.untyped_mappings, "def f(x: dict[str, Any]): ...\n", "x is a mapping of Any"),
    (tidy_rules.untyped_mappings, "def f(*, x: 'list[Mapping[str, Any]] | None'): ...\n", "x is a mapping of Any"),
    (tidy_rules.untyped_mappings, "async def f() -> typing.Dict[str, typing.Any]: ...\n", "f is a mapping of Any"),
    (tidy_rules.untyped_mappings, "class A:\n    x: dict[str, Any]\n", "x is a mapping of Any"),
    (tidy_rules.untyped_mappings, "Json = dict[str, Any]\n", "alias is a mapping of Any"),
    (tidy_rules.untyped_mappings, "Json = dict[str, Any] | None\n", "alias is a mapping of Any"),
    (tidy_rules.float_units, "def f(lease_ms: float): ...\n", "lease_ms is a float"),
    (tidy_rules.float_units, "def now_us() -> float: ...\n", "now_us is a float"),
    (tidy_rules.float_units, "class A:\n    spend_nanos: int | float | None\n", "spend_nanos is a float"),
    (tidy_rules.float_units, "def f(self):\n    self.at_us: 'float' = 1\n", "at_us is a float"),
]

GOOD: Final[list[tuple[Rule, str]]] = [
    (tidy_rules.module_size, "x = 1\n" * tidy_rules.MODULE_LINES_MAX),
    (tidy_rules.function_size, LONG_FUNCTION.removesuffix("    x = 1\n")),
    (tidy_rules.function_size, LONG_DOCSTRING),
    (tidy_rules.future_annotations, '"""Doc."""\n'),
    (tidy_rules.future_annotations, '"""Doc."""\nfrom __future__ import annotations\nimport ast\n'),
    (tidy_rules.ignore_reason, "x = y  # type: ignore[misc]  # the stub is wrong\n"),
    (tidy_rules.unfinished, "x = 'todos'\n"),
    (tidy_rules.core_imports, "import hashlib, orjson\nfrom endstop.core import model\nimport endstop.errors\n"),
    (tidy_rules.core_calls, "x = entry.open()\ny = f(now_us)\n"),
    (tidy_rules.untyped_mappings, "def f(x: dict[str, int], **more: Any) -> Mapping[str, object]: ...\n"),
    (tidy_rules.untyped_mappings, "def f():\n    x: dict[str, Any] = {}\n"),
    (tidy_rules.float_units, "def f(lease_ms: int, ratio: float): ...\n"),
]


@pytest.mark.parametrize(("rule", "text", "message"), BAD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_fires_once_on_code_that_breaks_it(rule: Rule, text: str, message: str) -> None:
    findings = list(rule(_core(text)))
    assert len(findings) == 1, _report(findings)
    assert message in findings[0].message


@pytest.mark.parametrize(("rule", "text"), GOOD, ids=lambda value: getattr(value, "__name__", ""))
def test_a_rule_is_silent_on_code_that_keeps_it(rule: Rule, text: str) -> None:
    assert list(rule(_core(text))) == []


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    tried = {rule for rule, _, _ in BAD} | {tidy_rules.module_name}
    assert set(tidy_rules.SOURCE_RULES) | set(tidy_rules.PYTHON_RULES) == tried


@pytest.mark.parametrize("path", ["src/endstop/utils.py", "src/endstop/core/_common.py", "src/endstop/base/x.py"])
def test_a_module_named_after_nothing_is_found(path: str) -> None:
    assert len(list(tidy_rules.module_name(Module.parse(path, "")))) == 1


def test_the_core_rules_leave_other_packages_alone() -> None:
    module = Module.parse("src/endstop/runtime/clock.py", "import time\nprint(time.time())\n")
    assert [*tidy_rules.core_imports(module), *tidy_rules.core_calls(module)] == []


@pytest.mark.parametrize(
    ("decorator", "missing"),
    [
        ("@dataclass", "frozen, slots, kw_only"),
        ("@dataclasses.dataclass(frozen=True)", "slots, kw_only"),
        ("@dataclass(frozen=True, slots=True, kw_only=False)", "kw_only"),
    ],
)
def test_an_open_record_is_found_in_core_and_store_only(decorator: str, missing: str) -> None:
    text = f"{decorator}\nclass A:\n    x: int\n"
    [(name, finding)] = tidy_rules.open_records(_core(text))
    assert name == "A"
    assert finding.message.endswith(missing)
    assert list(tidy_rules.open_records(Module.parse("src/endstop/cli/snippet.py", text))) == []


def test_a_closed_record_is_no_finding() -> None:
    text = "@final\n@dataclass(frozen=True, slots=True, kw_only=True)\nclass A:\n    x: int\n"
    assert list(tidy_rules.open_records(_core(text))) == []


@pytest.mark.parametrize("tail", ["work/main/x.py", "root/.cache", "home/ann/notes", "Users/ann/x", "opt/venv/bin"])
def test_a_machine_path_is_found(tail: str) -> None:
    assert len(list(tidy_rules.machine_path_text("docs/x.md", f"see `/{tail}`"))) == 1


@pytest.mark.parametrize("text", ["https://example.org/home/page", "src/endstop/opt/x", "~/work/x", "*/opt/x", "/tmp"])
def test_an_address_or_a_relative_path_is_no_machine_path(text: str) -> None:
    assert list(tidy_rules.machine_path_text("docs/x.md", text)) == []
