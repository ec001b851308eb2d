"""The tools of the test tasks. Importable in this process and in those that tests start."""

from __future__ import annotations

import time
from pathlib import Path

import endstop as es

HOSTILE = "\x1b[31mred\x1b[0m\x07 \u202eevil\u2066 \x9b2J zero\u200bwidth\r\nfake: line"


def look(q: str) -> str:
    print("a tool prints this")  # noqa: T201  # what a tool prints must not reach stdout
    return f"found nothing for {q}"


def touch(path: str) -> str:
    """A side effect that a test can count."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write("x")
    return "touched"


def dawdle(seconds: int) -> str:
    time.sleep(seconds)
    return "late"


def ask_person() -> es.ToolResult[str]:
    return es.ToolResult(status="human_required", message="someone must approve")


def unpermitted() -> es.ToolResult[str]:
    return es.ToolResult(status="permission_denied", message=HOSTILE)
