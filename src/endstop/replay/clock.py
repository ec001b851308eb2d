"""The clock of a recording: its own times, less what was spent standing still or waiting for a person."""

from __future__ import annotations

__all__ = ["RunClock"]


class RunClock:
    """Microseconds. `last_us` is the newest time of the recording, `now_us` running time's own; neither goes back."""

    __slots__ = ("_paused", "_waited_us", "first_us", "last_us", "now_us")

    def __init__(self) -> None:
        self.first_us: int | None = None
        # A guard's clock may start anywhere but at zero, which marks "not running".
        self.last_us = self.now_us = 1
        self._waited_us = 0
        self._paused = False

    def advance(self, at_us: int) -> None:
        """An event happened at `at_us`; one that comes out of order changes nothing."""
        if self.first_us is None:
            self.first_us = self.last_us = self.now_us = max(at_us, 1)
        elif at_us > self.last_us:
            if self._paused:
                self._waited_us += at_us - self.last_us
            self.last_us = at_us
            self.now_us = max(self.now_us, at_us - self._waited_us)
        self._paused = False

    def pause(self) -> None:
        """From here to the next event is no running time."""
        self._paused = True

    def wait_until(self, until_us: int) -> None:
        """Running time went on to `until_us` without an event."""
        self.now_us = max(self.now_us, until_us)

    @property
    def elapsed_us(self) -> int:
        """Running time since the first event that had a time."""
        return 0 if self.first_us is None else max(0, self.now_us - self.first_us)
