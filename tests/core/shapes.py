"""The 19 loop and 13 legitimate shapes of tool calls that the loop guards were chosen on, as data.

Each shape is a list of steps for `tests.fixtures.driver.drive`, and the declarations that a careful host would make of
its tools. `refused` is the number of the first call that must not run, without and with these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from endstop import ErrorClass, ToolPolicy, ToolResult
from tests.fixtures.driver import Step

READ: Final = ToolPolicy(effect="read")
POLL: Final = ToolPolicy(effect="poll")
WAIT: Final = ToolPolicy(effect="wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Steps, what would be declared of their tools, and the call that must be refused (None: none)."""

    name: str
    steps: list[Step]
    refused: int | None = None
    declared_refused: int | None = None
    tools: dict[str, ToolPolicy] = field(default_factory=dict)


def lookup(args: dict[str, object], answer: object) -> Step:
    return Step(tool="lookup", args=args, answer=answer)


def reads(names: str) -> list[Step]:
    """One read for each letter, each with its own constant answer."""
    return [Step(tool="read", args={"file": name}, answer=f"text of file {name}") for name in names]


def unique(number: int) -> Step:
    return Step(tool="read", args={"file": f"noise-{number}"}, answer=f"text of noise {number}")


def failed(error_class: ErrorClass, message: str) -> ToolResult[object]:
    return ToolResult(error_class=error_class, message=message)


def stamped(number: int) -> dict[str, object]:
    return {"at": f"2031-05-04 10:{number:02}:11", "status": "no job is running on this host right now"}


def rounds(*groups: list[Step]) -> list[Step]:
    """Each group becomes the calls of one assistant message."""
    return [
        Step(tool=step.tool, args=step.args, answer=step.answer, round_id=f"message-{number}")
        for number, group in enumerate(groups)
        for step in group
    ]


def _sweep(start: int, count: int) -> list[Step]:
    """Pages of 40 lines; each answer holds other lines, and the last line it reached."""
    return [
        Step(
            tool="read_lines",
            args={"file": "big.log", "start": line},
            answer={"lines": f"text from {line} on", "reached": line + 39},
        )
        for line in range(start, start + count * 40, 40)
    ]


def _loops() -> list[Shape]:
    a = lookup({"key": "a"}, [])
    b = Step(tool="list", answer=["x", "y"])
    test = Step(tool="run_tests", answer="1 failed, 11 passed")
    return [
        Shape(name="L01 one call, one answer", steps=[a] * 30, refused=3, declared_refused=3, tools={"lookup": READ}),
        Shape(name="L02 two calls in turn", steps=[a, b] * 15, refused=4, declared_refused=4),
        Shape(name="L03 three calls in turn", steps=reads("abc") * 10, refused=7, declared_refused=7),
        Shape(name="L04 period 6", steps=reads("abcdef") * 8, refused=13, declared_refused=13),
        Shape(name="L05 period 12", steps=reads("abcdefghijkl") * 6, refused=28, declared_refused=28),
        Shape(
            name="L06 one call between unique noise",
            steps=list(chain.from_iterable((a, unique(n)) for n in range(20))),
            refused=5,
            declared_refused=5,
        ),
        Shape(
            name="L07 same arguments, a clock in the answer",
            steps=[Step(tool="jobs", answer=stamped(n)) for n in range(40)],
            refused=3,
            declared_refused=3,
            tools={"jobs": ToolPolicy(effect="read", volatile_result=("at",))},
        ),
        Shape(
            name="L08 a nonce in the arguments, one answer",
            steps=[lookup({"key": "a", "request_id": f"r{n}"}, ["nothing"]) for n in range(30)],
            refused=None,
            declared_refused=3,
            tools={"lookup": ToolPolicy(effect="read", volatile_args=("request_id",))},
        ),
        Shape(
            name="L09 a nonce in the arguments, a fresh id in the answer",
            steps=[
                lookup({"key": "a", "request_id": f"r{n}"}, {"found": None, "trace": f"t-{n:04}"}) for n in range(30)
            ],
            refused=None,
            declared_refused=3,
            tools={"lookup": ToolPolicy(effect="read", volatile_args=("request_id",), volatile_result=("trace",))},
        ),
        Shape(
            name="L10 a search in ever new words, nothing found",
            steps=[Step(tool="search", args={"q": f"wording {n}"}, answer=[]) for n in range(20)],
            refused=None,
            declared_refused=9,
            tools={"search": READ},
        ),
        Shape(
            name="L11 not found, with ever new ids",
            steps=[
                Step(tool="get", args={"id": n}, answer=failed(ErrorClass.NOT_FOUND, f"no record {n}"))
                for n in range(20)
            ],
            refused=4,
            declared_refused=4,
            tools={"get": READ},
        ),
        Shape(
            name="L12 an unknown tool with ever new arguments",
            steps=[
                Step(tool="get_weather2", args={"city": n}, answer=failed(ErrorClass.UNKNOWN_TOOL, "no such tool"))
                for n in range(20)
            ],
            refused=3,
            declared_refused=3,
        ),
        Shape(
            name="L13 fail, unrelated success, fail",
            steps=list(chain.from_iterable((test, unique(n)) for n in range(15))),
            refused=5,
            declared_refused=5,
        ),
        Shape(
            name="L14 the order of keys flips",
            steps=[lookup({"a": 1, "b": 2}, []), lookup({"b": 2, "a": 1}, [])] * 10,
            refused=3,
            declared_refused=3,
            tools={"lookup": READ},
        ),
        Shape(
            name="L16 the same fan-out in every message",
            steps=rounds(*[reads("abc")] * 10),
            refused=7,
            declared_refused=7,
        ),
        Shape(
            name="L17 an anchor and something new in every message",
            steps=rounds(*[[a, unique(n)] for n in range(10)]),
            refused=5,
            declared_refused=5,
        ),
        Shape(name="L18 eight identical calls in one message", steps=rounds([a] * 8), refused=3, declared_refused=3),
        Shape(
            name="L19 a sweep over pages, from the top again, shifted",
            steps=[*_sweep(1, 20), *_sweep(21, 20)],
            refused=None,
            declared_refused=24,
            tools={"read_lines": ToolPolicy(effect="read", progress="reached", progress_scope=("file",))},
        ),
        Shape(
            name="L20 a flag written on and off",
            steps=[Step(tool="write", args={"file": "flag", "text": text}, answer="ok") for text in "01" * 15],
            refused=4,
            declared_refused=4,
        ),
    ]


def _legitimate() -> list[Shape]:
    status = "building, {} % of 14 modules are done"
    snapshot = Step(tool="snapshot", answer="page: two buttons and a form")
    return [
        Shape(
            name="F01 a poll whose answer changes",
            steps=[Step(tool="status", answer=status.format(n * 6)) for n in range(15)],
            tools={"status": POLL},
        ),
        Shape(
            name="F02 a poll that is unchanged twelve times, then done",
            steps=[*[Step(tool="status", answer="running")] * 12, Step(tool="status", answer="done")],
            refused=3,
            tools={"status": POLL},
        ),
        Shape(
            name="F03 look and sleep, the answer changes",
            steps=list(
                chain.from_iterable(
                    (
                        Step(tool="status", answer=status.format(n * 9)),
                        Step(tool="sleep", args={"seconds": 5}, answer="slept"),
                    )
                    for n in range(10)
                )
            ),
            tools={"status": POLL, "sleep": WAIT},
        ),
        Shape(
            name="F04 twenty pages by cursor",
            steps=[Step(tool="page", args={"cursor": n}, answer=[n, n + 1]) for n in range(20)],
            tools={"page": READ},
        ),
        Shape(
            name="F05 four files attached, each answered with true",
            steps=[Step(tool="attach", args={"file": name}, answer=True) for name in "abcd"],
            tools={"attach": ToolPolicy(effect="write", idempotency_key="{file}")},
        ),
        Shape(
            name="F06 edit, then test with a better result each time",
            steps=list(
                chain.from_iterable(
                    (
                        Step(tool="edit", args={"patch": n}, answer="applied"),
                        Step(tool="run_tests", answer=f"{8 - n} failed, {n} passed in the suite"),
                    )
                    for n in range(8)
                )
            ),
            tools={"run_tests": READ},
        ),
        Shape(
            name="F07 twenty different reads in one message",
            steps=rounds([unique(n) for n in range(20)]),
            tools={"read": READ},
        ),
        Shape(
            name="F08 click, then look at a page that changes",
            steps=list(
                chain.from_iterable(
                    (
                        Step(tool="click", args={"button": n}, answer="clicked"),
                        Step(tool="snapshot", answer=f"page {n} of the wizard: a form and two buttons"),
                    )
                    for n in range(10)
                )
            ),
            tools={"snapshot": READ},
        ),
        Shape(
            name="F09 a new to-do list each time, one acknowledgement",
            steps=[Step(tool="todo_write", args={"items": list(range(n))}, answer="saved") for n in range(12)],
            tools={"todo_write": ToolPolicy(effect="unknown")},
        ),
        Shape(
            name="F10 twenty rows updated, each answered with OK",
            steps=[Step(tool="update_row", args={"row": n}, answer="OK") for n in range(20)],
            tools={"update_row": ToolPolicy(effect="write", idempotency_key="{row}")},
        ),
        Shape(
            name="F11 the same call for five messages of the user",
            steps=[Step(tool="balance", answer="12.00 EUR", user_speaks=True) for _ in range(5)],
            tools={"balance": READ},
        ),
        Shape(
            name="F12 three looks at one page, then a click",
            steps=[snapshot, snapshot, snapshot, Step(tool="click", args={"button": 1}, answer="clicked")],
            refused=3,
            tools={"snapshot": POLL},
        ),
        Shape(
            name="F13 grep, move and edit for each of six files",
            steps=list(
                chain.from_iterable(
                    (
                        Step(tool="grep", args={"word": name}, answer=f"{name}.py:1"),
                        Step(tool="mv", args={"file": name}, answer=""),
                        Step(tool="edit", args={"file": name}, answer="applied"),
                    )
                    for name in "abcdef"
                )
            ),
            tools={"grep": READ},
        ),
    ]


LOOPS: Final = _loops()
LEGITIMATE: Final = _legitimate()
