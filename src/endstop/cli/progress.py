"""Live progress of a run, read from its entries and counters: bars on a terminal, a line an event elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from endstop.cli.figures import usage
from endstop.cli.text import shortened
from endstop.cli.timeline import event_of, row_of

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import RenderableType
    from rich.live import Live

    from endstop.cli.output import Output
    from endstop.cli.timeline import Event
    from endstop.core.records import RunRecord
    from endstop.store.port import Store

__all__ = ["Progress", "progress_on_stderr"]

PAGE: Final = 500
EVENTS_SHOWN: Final = 6
BAR_COLUMNS: Final = 24
REFRESHES_PER_SECOND: Final = 8
_QUIET: Final = frozenset({"run_join", "call_intent", "checkpoint"})


class Progress(Protocol):
    """Shows what has happened to one run."""

    def look(self) -> None:
        """Show what is new."""
        ...

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def progress_on_stderr(output: Output, store: Store, run_id: str, *, quiet: bool) -> Progress:
    """The progress display that fits stderr."""
    if quiet:
        return _Silence()
    if output.draws_on(sys.stderr):
        return _Bars(output, _Feed(store, run_id))
    return _Lines(output, _Feed(store, run_id))


class _Feed:
    """What is new in a run since the last look."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._counter: int | None = None
        # What earlier generations did was shown then.
        newest = store.entries(run_id=run_id, limit=1, newest_first=True).result()
        self._after = newest[0].index if newest else -1

    def new(self) -> tuple[list[Event], RunRecord | None]:
        """New events, and the run when anything changed in the store."""
        counter = self._store.change_counter()
        if counter == self._counter:
            return [], None
        self._counter = counter
        events: list[Event] = []
        while True:
            page = self._store.entries(run_id=self._run_id, after_index=self._after, limit=PAGE).result()
            for entry in page:
                self._after = entry.index
                events.append(event_of(entry))
            if len(page) < PAGE:
                return events, self._store.run(self._run_id).result()


class _Silence:
    """Shows nothing."""

    def look(self) -> None:
        """Nothing."""

    def __enter__(self) -> _Silence:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class _Lines:
    """One line an event, for logs."""

    def __init__(self, output: Output, feed: _Feed) -> None:
        self._output = output
        self._feed = feed

    def look(self) -> None:
        """Write the new events."""
        for event in self._feed.new()[0]:
            if event.kind not in _QUIET:
                self._output.note(_line(event))

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


class _Bars:
    """Counters against their limits as bars, and the last events under them."""

    def __init__(self, output: Output, feed: _Feed) -> None:
        from rich.live import Live

        self._feed = feed
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._live: Live = Live(
            console=output.console(sys.stderr), refresh_per_second=REFRESHES_PER_SECOND, transient=True,
            redirect_stdout=False, redirect_stderr=True,
        )  # fmt: skip

    def look(self) -> None:
        """Draw anew when something changed."""
        events, run = self._feed.new()
        self._events.extend(_line(event) for event in events if event.kind not in _QUIET)
        if run is not None:
            self._live.update(self._drawn(run))

    def __enter__(self) -> _Bars:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _drawn(self, run: RunRecord) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bars = Table.grid(padding=(0, 2))
        for name, value, limit, shown in usage(run.counters, run.limits):
            bar: RenderableType = Text("")
            if limit:
                bar = ProgressBar(total=limit, completed=min(value, limit), width=BAR_COLUMNS)
            bars.add_row(Text(name), bar, Text(shown))
        head = Text(shortened(f"{run.run_id}  {run.state}"))
        return Group(head, bars, *(Text(line, overflow="ellipsis", no_wrap=True) for line in self._events))


def _line(event: Event) -> str:
    time, turn, step, agent, tool, decision, guard, why = row_of(event)
    words = [time, f"turn {turn or 0} step {step or 0}", "" if agent == "main" else agent, tool, decision]
    if guard:
        words.append(f"[{guard}]")
    return shortened("  ".join(word for word in (*words, why) if word))
