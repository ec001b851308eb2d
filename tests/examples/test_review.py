"""The review tools read a diff hunk by hunk and keep each comment once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("unidiff", reason="NOT TESTED: the review tools need unidiff, install endstop[examples]")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from endstop_examples import review
from endstop_examples.refusals import InputRefusedError, WriteRefusedError

DIFF = """\
diff --git a/new.txt b/new.txt
new file mode 100644
--- /dev/null
+++ b/new.txt
@@ -0,0 +1 @@
+hello
diff --git a/code.py b/code.py
--- a/code.py
+++ b/code.py
@@ -3,3 +3,4 @@ def f():
 keep
-old
+first
+second
 tail
@@ -20,2 +21,1 @@
 kept
-gone
diff --git a/was.py b/is.py
similarity index 100%
rename from was.py
rename to is.py
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "change.diff").write_text(DIFF)
    monkeypatch.setenv("ENDSTOP_REVIEW_ROOT", str(tmp_path))
    monkeypatch.setenv("ENDSTOP_REVIEW_OUT", str(tmp_path / "out"))
    return tmp_path


def post(line: int = 4, text: str = "Why?", file: str = "code.py") -> dict[str, object]:
    return review.post_comment("change.diff", "review.jsonl", file, line, text)


def posted(folder: Path) -> list[dict[str, object]]:
    return [json.loads(row) for row in (folder / "out" / "review.jsonl").read_text().splitlines()]


def test_the_changed_files_are_listed_with_their_kind_and_counts() -> None:
    answer = review.list_changed_files("change.diff")
    assert (answer["files_count"], answer["lines_added"], answer["lines_removed"]) == (3, 3, 2)
    assert [(f["file"], f["change"], f["hunks"]) for f in answer["files"]] == [  # type: ignore[attr-defined] # JSON
        ("new.txt", "added", 1),
        ("code.py", "modified", 2),
        ("is.py", "renamed", 0),
    ]


def test_a_hunk_is_read_line_by_line_with_its_new_line_numbers() -> None:
    hunk = review.read_hunk("change.diff", "code.py", 0)
    assert hunk["section"] == "def f():"
    assert hunk["lines"] == [
        {"kind": "context", "line": 3, "text": "keep"},
        {"kind": "removed", "line": None, "text": "old"},
        {"kind": "added", "line": 4, "text": "first"},
        {"kind": "added", "line": 5, "text": "second"},
        {"kind": "context", "line": 6, "text": "tail"},
    ]


def test_a_hunk_longer_than_the_limit_says_how_much_is_left_out(folder: Path) -> None:
    lines = "".join(f"+line {number}\n" for number in range(review.HUNK_LINES_MAX + 7))
    head = f"--- /dev/null\n+++ b/long.txt\n@@ -0,0 +1,{review.HUNK_LINES_MAX + 7} @@\n"
    (folder / "long.diff").write_text(head + lines)
    hunk = review.read_hunk("long.diff", "long.txt", 0)
    assert hunk["lines_left_out"] == 7


@pytest.mark.parametrize(("file", "index"), [("code.py", 2), ("code.py", -1), ("is.py", 0), ("none.py", 0)])
def test_a_hunk_that_does_not_exist_is_refused_with_what_there_is(file: str, index: int) -> None:
    with pytest.raises(review.HunkUnknownError, match=r"hunk\(s\)|it changes: new\.txt"):
        review.read_hunk("change.diff", file, index)


def test_a_comment_is_kept_once_whoever_repeats_it(folder: Path) -> None:
    first, again, other = post(), post(), post(text="Another.")
    assert (first["posted"], again["posted"], other["posted"]) == (True, False, True)
    assert first["comment_id"] == again["comment_id"] != other["comment_id"]
    assert [(row["line"], row["text"]) for row in posted(folder)] == [(4, "Why?"), (4, "Another.")]


def test_comments_posted_at_once_are_all_kept_and_none_twice(folder: Path) -> None:
    threads = [threading.Thread(target=post, args=(4, f"Comment {number % 5}")) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(str(row["text"]) for row in posted(folder)) == [f"Comment {number}" for number in range(5)]


@pytest.mark.parametrize("line", [0, 2, 7, 22, -1])
def test_a_comment_on_a_line_outside_the_diff_is_refused(folder: Path, line: int) -> None:
    with pytest.raises(review.LineNotInDiffError):
        post(line=line)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("text", ["", "  \n", "x" * 4_001])
def test_a_blank_or_overlong_comment_is_refused(text: str) -> None:
    with pytest.raises(WriteRefusedError, match="4000"):
        post(text=text)


def test_a_review_file_that_is_something_else_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "review.jsonl").write_text("notes\n")
    with pytest.raises(WriteRefusedError, match="line 1"):
        post()
    assert (folder / "out" / "review.jsonl").read_text() == "notes\n"


@pytest.mark.parametrize(
    "text", ["", "secret prose\n", "@@ -1 +1 @@\n-secret\n", "--- a/x\n+++ b/x\n@@ -1,9 +1,9 @@\n secret\n"]
)
def test_what_is_no_diff_is_refused_without_quoting_it(folder: Path, text: str) -> None:
    (folder / "bad.diff").write_text(text)
    with pytest.raises(review.DiffUnreadableError) as refusal:
        review.list_changed_files("bad.diff")
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("path", ["../change.diff", "/etc/passwd", "missing.diff", "."])
def test_a_diff_outside_the_folder_or_missing_is_refused(path: str) -> None:
    with pytest.raises(InputRefusedError):
        review.list_changed_files(path)


ROWS = st.sampled_from(
    [*DIFF.splitlines(), "+x", "-y", " z", "", "\\ No newline at end of file", "@@ -1 +1 @@", "@@ -9,9 +9 @@"]
)
ODD = [
    "Binary files a/x and b/x differ",
    "GIT binary patch",
    "diff --git a/x b/y",
    "rename from x",
    "deleted file mode 1",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(ROWS, st.sampled_from(ODD), st.text(max_size=20)), max_size=30))
def test_any_rows_are_a_diff_or_a_refusal_and_nothing_else(folder: Path, rows: list[str]) -> None:
    (folder / "any.diff").write_text("\n".join(rows) + "\n", encoding="utf-8", errors="surrogatepass")
    try:
        answer = review.list_changed_files("any.diff")
    except InputRefusedError:
        return
    json.dumps(answer)
