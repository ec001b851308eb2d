"""What a run may be called, carry and start with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from endstop.core.entries import safe_name
from endstop.core.model import COUNT_MAX
from endstop.errors import UsageError
from endstop.store.workspace import GLOBAL_RUN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from endstop.core.model import Version

__all__ = ["check_run_id", "checked_labels", "checked_version"]

LABEL_CHARS_MAX: Final = 200
LABELS_MAX: Final = 32
VERSION_CHARS_MAX: Final = 200


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """`labels` as a run may carry them. Raises UsageError."""
    if len(labels) > LABELS_MAX:
        msg = f"a run has {LABELS_MAX} labels at most"
        raise UsageError(msg)
    for name, value in labels.items():
        words: tuple[object, object] = (name, value)
        if not all(isinstance(word, str) for word in words) or not name or "=" in name:
            msg = "labels map names (without '=') to text"
            raise UsageError(msg)
        if len(name) > LABEL_CHARS_MAX or len(value) > LABEL_CHARS_MAX:
            msg = f"a label's name and value have {LABEL_CHARS_MAX} characters at most"
            raise UsageError(msg)
    return dict(labels)


def check_run_id(run_id: str | None) -> None:
    """An id stands in every entry of its run, so it is a plain name of one that an entry may hold."""
    if run_id is not None and (safe_name(run_id) != run_id or run_id in ("", GLOBAL_RUN)):
        msg = "a run's id is a plain name: 1 to 80 ASCII letters, digits, spaces and _ . : / @ # + -"
        raise UsageError(msg)


def checked_version(version: Version | None) -> Version | None:
    """A progress version as a run may start with. Raises UsageError."""
    value: object = version
    if value is None or (isinstance(value, str) and len(value) <= VERSION_CHARS_MAX):
        return version
    if type(value) is int and abs(value) <= COUNT_MAX:
        return version
    msg = f"initial_progress_version is a whole number of at most {COUNT_MAX}, or text of at most {VERSION_CHARS_MAX}"
    raise UsageError(msg)
