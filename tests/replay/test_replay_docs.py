"""The page on replay names every format, says which were tried, and every field of a plain line."""

from __future__ import annotations

import re
from pathlib import Path

from endstop.replay.recognise import formats


def test_the_page_lists_every_format_and_whether_it_was_tried(repository: Path) -> None:
    text = (repository / "docs" / "replay.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (yes|no) \|$", text, re.MULTILINE))
    assert rows == {known.name: "yes" if known.tried else "no" for known in formats()}
