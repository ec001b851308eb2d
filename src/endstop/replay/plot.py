"""A run as a picture: calls, repeats and tokens over its course, with the stop marked. As SVG, or for a terminal.

The pictures show names and numbers only. Without times in the recording the course is counted in calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from endstop.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from endstop.replay.report import RunReport, Sample

__all__ = ["svg_plot", "terminal_plot"]

WIDTH, PANEL, GAP, LEFT, TOP, RIGHT = 800, 90, 34, 70, 56, 20
BARS: Final = " ▁▂▃▄▅▆▇█"
TERMINAL_WIDTH_MIN: Final = 20
TERMINAL_WIDTH_MAX: Final = 400
TITLE_CHARS: Final = 96
STORY_CHARS: Final = 120
_SECOND_US: Final = 1_000_000
_KILO: Final = 1_000

_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#444}.t{font-size:14px;fill:#111}"
    ".l{fill:none;stroke:#2b6cb0;stroke-width:1.5}"
    ".b{fill:#2b6cb0}.a{stroke:#bbb}.s{stroke:#c53030;stroke-width:1.5}.w{fill:#c53030;fill-opacity:.08}.r{fill:#c53030}"
    "@media(prefers-color-scheme:dark){text{fill:#bbb}.t{fill:#eee}.a{stroke:#555}.l{stroke:#63b3ed}.b{fill:#63b3ed}}"
)


def _samples(report: RunReport) -> tuple[Sample, ...]:
    if not report.samples:
        msg = f"run {report.run_id} was replayed without samples, or has no calls: there is nothing to draw"
        raise UsageError(msg)
    return report.samples


def _places(samples: Sequence[Sample]) -> tuple[list[int], bool]:
    """Where the points stand on the course, and whether that is time."""
    timed = samples[-1].time_us > samples[0].time_us
    return [sample.time_us if timed else sample.call_index for sample in samples], timed


def _stop_place(report: RunReport, samples: Sequence[Sample], places: Sequence[int]) -> int | None:
    """Where on the course the run would have ended; None when it would not."""
    stop = report.stop
    if stop is None or stop.call_index >= report.totals.calls:
        return None
    return next(
        (place for sample, place in zip(samples, places, strict=True) if sample.call_index >= stop.call_index),
        places[-1],
    )


def svg_plot(report: RunReport) -> str:
    """`report` as one self-contained SVG picture. Raises UsageError when it was replayed without samples."""
    samples = _samples(report)
    places, timed = _places(samples)
    stop = _stop_place(report, samples, places)
    span = max(places[-1] - places[0], 1)
    inner = WIDTH - LEFT - RIGHT
    across = [LEFT + (place - places[0]) * inner // span for place in places]
    panels = (
        ("calls", [sample.call_index + 1 for sample in samples], False),
        ("repeats of the call in the window", [sample.repeats for sample in samples], True),
        ("tokens", [sample.tokens for sample in samples], False),
    )
    height = TOP + len(panels) * (PANEL + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f"<title>{escape(report.run_id)}</title><style>{_STYLE}</style>",
        f'<text class="t" x="{LEFT}" y="20">{escape(report.run_id[:TITLE_CHARS])}</text>',
        f'<text x="{LEFT}" y="38">{escape(report.story[:STORY_CHARS])}</text>',
    ]
    for number, (title, values, bars) in enumerate(panels):
        parts += _panel(title, values, across, TOP + number * (PANEL + GAP), bars=bars)
    bottom = TOP + len(panels) * (PANEL + GAP) - GAP
    if stop is not None:
        at = LEFT + (stop - places[0]) * inner // span
        parts += [
            f'<rect class="w" x="{at}" y="{TOP}" width="{WIDTH - RIGHT - at}" height="{bottom - TOP}"/>',
            f'<line class="s" x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}"/>',
            _label(at, bottom + 16, f"stopped before call {0 if report.stop is None else report.stop.call_index}"),
        ]
    last = f"{(places[-1] - places[0]) // _SECOND_US} s" if timed else f"call {places[-1]}"
    parts += [f'<text x="{WIDTH - RIGHT}" y="{height - 4}" text-anchor="end">{last}</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def _label(at: int, down: int, said: str) -> str:
    anchor = "end" if at > WIDTH * 3 // 4 else "start" if at < WIDTH // 4 else "middle"
    return f'<text class="r" x="{at}" y="{down}" text-anchor="{anchor}">{escape(said)}</text>'


def _panel(title: str, values: Sequence[int], across: Sequence[int], top: int, *, bars: bool) -> list[str]:
    most = max(*values, 1)
    bottom = top + PANEL
    downs = [bottom - value * PANEL // most for value in values]
    parts = [
        f'<text x="{LEFT}" y="{top - 4}">{title}</text>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{_short(most)}</text>',
        f'<line class="a" x1="{LEFT}" y1="{bottom}" x2="{WIDTH - RIGHT}" y2="{bottom}"/>',
    ]
    if bars:
        wide = max(1, (WIDTH - LEFT - RIGHT) // max(len(values), 1) - 1)
        parts += [
            f'<rect class="b" x="{x}" y="{y}" width="{wide}" height="{bottom - y}"/>'
            for x, y in zip(across, downs, strict=True)
            if bottom > y
        ]
    else:
        points = " ".join(f"{x},{y}" for x, y in zip(across, downs, strict=True))
        parts.append(f'<polyline class="l" points="{points}"/>')
    return parts


def _short(value: int) -> str:
    """A figure in a few characters."""
    if value < 10 * _KILO:
        return str(value)
    return f"{value // _KILO}k" if value < _KILO * _KILO else f"{value / _KILO / _KILO:.1f}M"


def terminal_plot(report: RunReport, *, width: int = 72) -> str:
    """`report` as four lines of text, `width` columns of blocks wide, with the stop marked below them.

    Raises UsageError when it was replayed without samples.
    """
    samples = _samples(report)
    width = min(max(width, TERMINAL_WIDTH_MIN), TERMINAL_WIDTH_MAX)
    places, timed = _places(samples)
    stop = _stop_place(report, samples, places)
    span = max(places[-1] - places[0], 1)
    columns = [(place - places[0]) * (width - 1) // span for place in places]
    rows = (
        ("calls", [sample.call_index + 1 for sample in samples]),
        ("repeats", [sample.repeats for sample in samples]),
        ("tokens", [sample.tokens for sample in samples]),
    )
    lines = [f"{name:>8} {_blocks(values, columns, width)} {_short(max(values))}" for name, values in rows]
    if stop is None:
        lines.append(f"{'':8} {report.story}")
    else:
        at = (stop - places[0]) * (width - 1) // span
        told = f"▲ {report.story}"
        lines.append(f"{'':8} {' ' * min(at, max(0, width - len(told)))}{told}")
    if timed:
        lines.append(f"{'':8} over {(places[-1] - places[0]) // _SECOND_US} s")
    return "\n".join(lines) + "\n"


def _blocks(values: Sequence[int], columns: Sequence[int], width: int) -> str:
    """One row: each column shows the most of its points; an empty one goes on from the one before."""
    most = max(*values, 1)
    heights: list[int | None] = [None] * width
    for value, column in zip(values, columns, strict=True):
        heights[column] = max(heights[column] or 0, value)
    row = []
    height = 0
    for found in heights:
        height = height if found is None else found
        row.append(BARS[-(-height * (len(BARS) - 1) // most)])
    return "".join(row)
