"""The house rules that no linter knows, each a pure function from a parsed module to its findings.

`tests/test_tidy.py` runs them over the tree and over bad snippets, so that every rule is seen to fire.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

MODULE_LINES_MAX: Final = 500
FUNCTION_LINES_MAX: Final = 70

BANNED_MODULE_NAMES: Final = frozenset({"base", "common", "helpers", "manager", "misc", "utils"})

# What the core may import from the standard library is what is left of it after these.
CORE_BANNED_MODULES: Final = frozenset(
    {
        "asyncio",
        "concurrent",
        "contextvars",
        "glob",
        "http",
        "io",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "queue",
        "random",
        "secrets",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "time",
        "urllib",
        "uuid",
    }
)
CORE_THIRD_PARTIES: Final = frozenset({"orjson"})
CORE_BANNED_BUILTINS: Final = frozenset(
    {"__import__", "breakpoint", "compile", "eval", "exec", "input", "open", "print"}
)
CORE_BANNED_ATTRIBUTES: Final = frozenset({"now", "today", "utcnow"})

INTEGER_UNITS: Final = ("_us", "_ms", "_nanos")

# Put together, so that this file does not find itself.
UNFINISHED: Final = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
# A path of one machine tells a reader nothing. What stands before the slash keeps web addresses and globs out.
MACHINE_PATH: Final = re.compile(r"(?<![\w.~:/*-])/(?:work|root|home|Users|mnt|opt|tmp/[a-z]{2})/[\w.]")
TYPE_IGNORE: Final = re.compile(r"#\s*type:\s*ignore(?P<rest>.*)$")
TYPE_IGNORE_WITH_REASON: Final = re.compile(r"^\[[\w, -]+\]\s+#\s*\S+")

Definition = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One parsed source file; `path` is relative to the repository and uses forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Module:
        return cls(path=path, text=text, tree=ast.parse(text, filename=path))

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.path.removesuffix(".py").split("/"))

    def is_under(self, *packages: str) -> bool:
        return any(self.path.startswith(f"src/endstop/{package}/") for package in packages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken rule at one place."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


Rule = Callable[[Module], Iterator[Finding]]


def _definitions(tree: ast.Module) -> Iterator[Definition]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _has_docstring(node: Definition) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def module_size(module: Module) -> Iterator[Finding]:
    """A module has at most `MODULE_LINES_MAX` lines."""
    lines = len(module.text.splitlines())
    if lines > MODULE_LINES_MAX:
        message = f"{lines} lines, at most {MODULE_LINES_MAX}: split it by noun"
        yield Finding(path=module.path, line=lines, message=message)


def function_size(module: Module) -> Iterator[Finding]:
    """A function has at most `FUNCTION_LINES_MAX` lines, its docstring left out."""
    for node in _definitions(module.tree):
        end = node.end_lineno or node.lineno
        lines = end - node.lineno + 1
        if _has_docstring(node):
            first = node.body[0]
            lines -= (first.end_lineno or first.lineno) - first.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            message = f"{node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
            yield Finding(path=module.path, line=node.lineno, message=message)


def module_name(module: Module) -> Iterator[Finding]:
    """A module or package is named after what it holds."""
    for part in module.parts:
        if part.strip("_") in BANNED_MODULE_NAMES:
            yield Finding(path=module.path, line=1, message=f"{part!r} names nothing: name the noun it holds")


def future_annotations(module: Module) -> Iterator[Finding]:
    """Every module that has a statement switches deferred annotations on."""
    statements = [node for node in module.tree.body if not _is_string(node)]
    if not statements:
        return
    futures = [node for node in statements if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    if not any(alias.name == "annotations" for node in futures for alias in node.names):
        yield Finding(path=module.path, line=1, message="`from __future__ import annotations` is missing")


def _is_string(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def unfinished(module: Module) -> Iterator[Finding]:
    """Nothing is left for later in the code; an issue is the place for it."""
    yield from unfinished_text(module.path, module.text)


def unfinished_text(path: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield Finding(path=path, line=number, message="left for later: finish it or open an issue")


def machine_path_text(path: str, text: str) -> Iterator[Finding]:
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line):
            yield Finding(path=path, line=number, message="a path of one machine")


def ignore_reason(module: Module) -> Iterator[Finding]:
    """A silenced type error names its code and, in a comment behind it, the reason."""
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        found = TYPE_IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if found and not TYPE_IGNORE_WITH_REASON.search(found["rest"]):
            message = "a type ignore needs `[code]` and a reason: `# type: ignore[code]  # why`"
            yield Finding(path=module.path, line=token.start[0], message=message)


def core_imports(module: Module) -> Iterator[Finding]:
    """The core imports itself, the errors, orjson and the harmless part of the standard library."""
    if not module.is_under("core"):
        return
    for node in ast.walk(module.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        for name in names:
            if not _core_may_import(name):
                line = getattr(node, "lineno", 1)
                yield Finding(path=module.path, line=line, message=f"the core may not import {name}")


def _core_may_import(name: str) -> bool:
    top = name.split(".", maxsplit=1)[0]
    if top == "endstop":
        return name.startswith(("endstop.core", "endstop.errors"))
    if top in CORE_THIRD_PARTIES:
        return True
    return top in sys.stdlib_module_names and top not in CORE_BANNED_MODULES


def core_calls(module: Module) -> Iterator[Finding]:
    """The core opens, prints, evaluates and asks nothing, and never reads a clock through a class."""
    if not module.is_under("core"):
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in CORE_BANNED_BUILTINS:
            yield Finding(path=module.path, line=node.lineno, message=f"the core may not call {called.id}()")
        elif isinstance(called, ast.Attribute):
            root = called.value.id if isinstance(called.value, ast.Name) else ""
            if root in CORE_BANNED_MODULES or called.attr in CORE_BANNED_ATTRIBUTES:
                name = f"{root}.{called.attr}" if root else called.attr
                yield Finding(path=module.path, line=node.lineno, message=f"the core may not call {name}()")


def _annotation(node: ast.expr | None) -> ast.expr | None:
    """The annotation itself, also when it was written as a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            return ast.parse(node.value, mode="eval").body
        except SyntaxError:
            return None
    return node


def _signature(node: Definition) -> Iterator[tuple[str, ast.expr]]:
    """Every annotated name of a signature; the return value goes under the function's own name."""
    args = node.args
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None and (annotation := _annotation(arg.annotation)) is not None:
            yield arg.arg, annotation
    if (returned := _annotation(node.returns)) is not None:
        yield node.name, returned


def _outer_statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of the module and of its classes, not those inside functions."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        statement = pending.pop()
        yield statement
        if isinstance(statement, ast.ClassDef | ast.If | ast.Try):
            pending.extend(node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt))


def _is_untyped_mapping(node: ast.AST) -> bool:
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    name = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
    last = node.slice.elts[-1]
    value = last.attr if isinstance(last, ast.Attribute) else getattr(last, "id", "")
    return name in {"Dict", "Mapping", "MutableMapping", "dict"} and value == "Any"


def untyped_mappings(module: Module) -> Iterator[Finding]:
    """No signature, record field or alias is a mapping of anything: a record has a name and fields."""
    places: list[tuple[str, ast.expr, int]] = []
    for definition in _definitions(module.tree):
        places += [(name, annotation, definition.lineno) for name, annotation in _signature(definition)]
    for statement in _outer_statements(module.tree):
        if isinstance(statement, ast.AnnAssign):
            annotation = _annotation(statement.annotation)
            if annotation is not None:
                places.append((ast.unparse(statement.target), annotation, statement.lineno))
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Subscript | ast.BinOp):
            places.append(("alias", statement.value, statement.lineno))
    for name, annotation, line in places:
        if any(_is_untyped_mapping(node) for node in ast.walk(annotation)):
            message = f"{name} is a mapping of Any: give it a record"
            yield Finding(path=module.path, line=line, message=message)


def float_units(module: Module) -> Iterator[Finding]:
    """Time and money are integers: a name that ends in their unit is never annotated as a float."""
    places: list[tuple[str, ast.expr, int]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            places += [(name, annotation, node.lineno) for name, annotation in _signature(node)]
        elif isinstance(node, ast.AnnAssign) and (annotation := _annotation(node.annotation)) is not None:
            target = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
            places.append((target, annotation, node.lineno))
    for name, annotation, line in places:
        mentions = {child.id for child in ast.walk(annotation) if isinstance(child, ast.Name)}
        if name.endswith(INTEGER_UNITS) and "float" in mentions:
            yield Finding(path=module.path, line=line, message=f"{name} is a float: use an integer of that unit")


def open_records(module: Module) -> Iterator[tuple[str, Finding]]:
    """Dataclasses of core and store that are not frozen, slotted and keyword-only, with their names."""
    if not module.is_under("core", "store"):
        return
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            missing = _missing_record_options(decorator)
            if missing:
                message = f"{node.name} is a dataclass without {', '.join(missing)}"
                yield node.name, Finding(path=module.path, line=node.lineno, message=message)


def _missing_record_options(decorator: ast.expr) -> list[str]:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name != "dataclass":
        return []
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    given = {k.arg for k in keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
    return [option for option in ("frozen", "slots", "kw_only") if option not in given]


# Over the package, and over everything that is Python.
SOURCE_RULES: Final[tuple[Rule, ...]] = (
    module_size,
    function_size,
    module_name,
    core_imports,
    core_calls,
    untyped_mappings,
    float_units,
)
PYTHON_RULES: Final[tuple[Rule, ...]] = (future_annotations, ignore_reason, unfinished)
