"""When two different answers of one undeclared call still say the same.

Used only when one call is repeated back to back: pages read by OCR, clocks and process ids make real dead-click
loops answer with other bytes each time. Clock values are masked (dates, times of day, durations with a unit, UUIDs,
addresses, process ids); plain digits never are. Two answers are the same when, so masked, their words and numbers are
equal; or when no number was replaced by another, the newer is not merely the older plus something, both hold at least
`WORDS_MIN` words and at most `CHARS_MAX` characters, and their words overlap by `OVERLAP_PERCENT_MIN` percent
(multisets, intersection over union). Everything else is new.

A `Sketch` holds 24-bit word hashes in place of words, so that a stored state carries no text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

__all__ = ["CHARS_MAX", "MASKED_CHARS_MAX", "TOKENS_MAX", "Sketch", "alike", "sketch"]

WORDS_MIN: Final = 5
CHARS_MAX: Final = 8_000
MASKED_CHARS_MAX: Final = 32_000
OVERLAP_PERCENT_MIN: Final = 70
TOKENS_MAX: Final = 2_000
_HASH_BYTES: Final = 3
_HASH_MASK: Final = 0xFFFFFF

_CLOCK_VALUES: Final = re.compile(
    r"""
      \b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b          # UUID
    | \b0x[0-9a-fA-F]+\b                                                                        # address in memory
    | \b\d{4}-\d{2}-\d{2}(?:[T\ ]\d{2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?    # ISO date (and time)
    | \b\d{1,2}[/.]\d{1,2}[/.]\d{4}\b                                                           # date with slashes
    | \b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?:\s?[AaPp][Mm])?\b                                # time of day
    | \b\d+(?:[.,]\d+)?\s?(?:ns|us|µs|ms|s|secs?|seconds?|mins?|minutes?|hours?|hrs?|h|days?)\b # duration
    | \b(?:pid|PID|[Pp]rocess(?:\ id)?)\s*[:=#]?\s*\d+                                          # process id
    """,
    re.VERBOSE,
)
_TOKENS: Final = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """The masked words and numbers of one answer. `whole` is a digest of both multisets; `words` and `numbers` hold
    sorted hashes (repeated by count), and are empty with `long` when the text has more than `CHARS_MAX` characters or
    `TOKENS_MAX` words and numbers."""

    whole: str
    words: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    long: bool = False

    def pack(self) -> list[object]:
        """This sketch as JSON values; `unpack` is the inverse."""
        return [self.whole, _to_text(self.words), _to_text(self.numbers), self.long]

    @classmethod
    def unpack(cls, parts: list[object]) -> Sketch:
        """The sketch that `pack` wrote. Raises ValueError or TypeError for anything else."""
        whole, words, numbers, long = parts
        return cls(whole=str(whole), words=_from_text(str(words)), numbers=_from_text(str(numbers)), long=bool(long))


def sketch(text: str | bytes) -> Sketch | None:
    """The sketch of `text`, or None when the text is too long to be compared at all."""
    if len(text) > MASKED_CHARS_MAX:
        return None
    plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
    words: list[int] = []
    numbers: list[int] = []
    for token in _TOKENS.findall(_CLOCK_VALUES.sub(" ", plain)):
        (numbers if token[0].isdigit() else words).append(zlib.crc32(token.encode()) & _HASH_MASK)
    words.sort()
    numbers.sort()
    whole = hashlib.sha256(repr((words, numbers)).encode()).hexdigest()[:32]
    if len(plain) > CHARS_MAX or len(words) + len(numbers) > TOKENS_MAX:
        return Sketch(whole=whole, long=True)
    return Sketch(whole=whole, words=tuple(words), numbers=tuple(numbers))


def alike(older: Sketch, newer: Sketch) -> bool:
    """Whether the newer answer says the same as the older one."""
    # 1. The same words and numbers, whatever the length.
    if older.whole == newer.whole:
        return True
    if older.long or newer.long:
        return False
    # 2. A number was replaced by another: neither multiset of numbers holds the other.
    old_numbers, new_numbers = Counter(older.numbers), Counter(newer.numbers)
    if not (old_numbers <= new_numbers or new_numbers <= old_numbers):
        return False
    # 3. The old answer plus something is growth, and growth is news.
    old_words, new_words = Counter(older.words), Counter(newer.words)
    if old_words <= new_words and old_numbers <= new_numbers:
        return False
    # 4. Enough words, and enough of them shared.
    if min(len(older.words), len(newer.words)) < WORDS_MIN:
        return False
    shared = (old_words & new_words).total()
    union = (old_words | new_words).total()
    return shared * 100 >= union * OVERLAP_PERCENT_MIN


def _to_text(hashes: tuple[int, ...]) -> str:
    return base64.b85encode(b"".join(value.to_bytes(_HASH_BYTES, "big") for value in hashes)).decode()


def _from_text(text: str) -> tuple[int, ...]:
    data = base64.b85decode(text)
    return tuple(int.from_bytes(data[start : start + _HASH_BYTES], "big") for start in range(0, len(data), _HASH_BYTES))
