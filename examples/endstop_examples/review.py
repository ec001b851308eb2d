"""The code review's tools: look at a diff hunk by hunk (read), post comments to a review file (write)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchedFile, PatchSet

from endstop_examples.confined_files import folder_from_environment, inside, locked, read_limited, replace_file
from endstop_examples.refusals import InputRefusedError, WriteRefusedError, shown

ROOT_VARIABLE = "ENDSTOP_REVIEW_ROOT"
OUT_VARIABLE = "ENDSTOP_REVIEW_OUT"
DIFF_BYTES_MAX = 4 * 1024 * 1024
HUNK_LINES_MAX = 400
FILES_MAX = 500
COMMENT_CHARS_MAX = 4_000
REVIEW_BYTES_MAX = 16 * 1024 * 1024
DIGEST_CHARS = 16


class DiffUnreadableError(InputRefusedError):
    """The file is no unified diff that can be read. Its contents are not in the message."""


class HunkUnknownError(InputRefusedError):
    """The diff has no such file, or the file no such hunk. The message says which there are."""


class LineNotInDiffError(WriteRefusedError):
    """The comment's line is not on the new side of any hunk of the file. Nothing was posted."""


def list_changed_files(diff_path: str) -> dict[str, object]:
    """The files that a unified diff changes: path, kind of change, lines added and removed, number of hunks.

    `diff_path` is a relative name below ENDSTOP_REVIEW_ROOT (default: the working folder). Raises InputRefusedError
    or DiffUnreadableError.
    """
    patch = _diff(diff_path)
    files: list[dict[str, object]] = []
    for changed in list(patch)[:FILES_MAX]:
        kind = "added" if changed.is_added_file else "removed" if changed.is_removed_file else "modified"
        files.append(
            {
                "file": changed.path,
                "change": "renamed" if changed.is_rename else kind,
                "binary": changed.is_binary_file,
                "lines_added": changed.added,
                "lines_removed": changed.removed,
                "hunks": len(changed),
            }
        )
    return {"files": files, "files_count": len(patch), "lines_added": patch.added, "lines_removed": patch.removed}


def read_hunk(diff_path: str, file: str, index: int) -> dict[str, object]:
    """One hunk of one changed file, line by line with its new line number (None for a removed line).

    `index` counts from 0. Raises HunkUnknownError, InputRefusedError or DiffUnreadableError.
    """
    changed = _changed_file(_diff(diff_path), file)
    if not 0 <= index < len(changed):
        msg = f"hunk {index} of {shown(file)!r} is unknown: it has {len(changed)} hunk(s), counted from 0"
        raise HunkUnknownError(msg)
    hunk = changed[index]
    lines = [
        {"kind": _kind(line.line_type), "line": line.target_line_no, "text": line.value.rstrip("\r\n")}
        for line in list(hunk)[:HUNK_LINES_MAX]
    ]
    return {
        "file": changed.path,
        "index": index,
        "hunks": len(changed),
        "section": hunk.section_header,
        "lines": lines,
        "lines_left_out": max(0, len(hunk) - HUNK_LINES_MAX),
    }


def post_comment(diff_path: str, review_path: str, file: str, line: int, text: str) -> dict[str, object]:
    """Append one comment to the review, a file of JSON lines below ENDSTOP_REVIEW_OUT (default ./out).

    `line` is a number on the new side of the diff, and must stand in one of the file's hunks. A comment's identity is
    file, line and text: posting it again adds nothing (`posted` is then false). Raises LineNotInDiffError,
    WriteRefusedError, InputRefusedError or DiffUnreadableError; nothing was posted then.
    """
    if not text.strip() or len(text) > COMMENT_CHARS_MAX:
        msg = f"comment refused: its text must have 1 to {COMMENT_CHARS_MAX} characters"
        raise WriteRefusedError(msg)
    changed = _changed_file(_diff(diff_path), file)
    if not any(entry.target_line_no == line for hunk in changed for entry in hunk):
        msg = f"comment refused: line {line} of {shown(file)!r} is not in the diff; take a line that read_hunk shows"
        raise LineNotInDiffError(msg)
    target = inside(folder_from_environment(OUT_VARIABLE, "out"), review_path)
    identity = json.dumps([changed.path, line, text]).encode()
    comment_id = hashlib.sha256(identity).hexdigest()[:DIGEST_CHARS]
    with locked(target):
        comments = _comments(target, review_path)
        posted = comment_id not in {comment.get("comment_id") for comment in comments}
        if posted:
            comments.append({"comment_id": comment_id, "file": changed.path, "line": line, "text": text})
            # The whole file is replaced, so that a crash leaves no half line behind.
            replace_file(target, "".join(json.dumps(comment) + "\n" for comment in comments).encode())
    return {"comment_id": comment_id, "posted": posted, "comments": len(comments)}


def _diff(diff_path: str) -> PatchSet:
    source = inside(folder_from_environment(ROOT_VARIABLE, "."), diff_path)
    data = read_limited(source, name=diff_path, bytes_max=DIFF_BYTES_MAX)
    try:
        patch = PatchSet.from_string(data.decode("utf-8", "replace"))
    except UnidiffParseError:
        # The library quotes the line it stumbled over; that is contents.
        msg = f"diff {shown(diff_path)!r} is unreadable: it is no well-formed unified diff"
        raise DiffUnreadableError(msg) from None
    if len(patch) == 0:
        msg = f"diff {shown(diff_path)!r} is unreadable: it changes no file"
        raise DiffUnreadableError(msg)
    return patch


def _changed_file(patch: PatchSet, file: str) -> PatchedFile:
    for changed in patch:
        if changed.path == file:
            return changed
    listed = ", ".join(shown(changed.path) for changed in list(patch)[:10])
    msg = f"file {shown(file)!r} is not in the diff; it changes: {listed}"
    raise HunkUnknownError(msg)


def _kind(line_type: str) -> str:
    return {"+": "added", "-": "removed", " ": "context"}.get(line_type, "note")


def _comments(target: Path, name: str) -> list[dict[str, object]]:
    if not target.exists():
        return []
    comments = []
    for number, row in enumerate(read_limited(target, name=name, bytes_max=REVIEW_BYTES_MAX).splitlines(), start=1):
        try:
            comment = json.loads(row)
        except ValueError:
            comment = None
        if not isinstance(comment, dict):
            msg = f"review {shown(name)!r} refused: line {number} is no JSON object; move the file away"
            raise WriteRefusedError(msg)
        comments.append(comment)
    return comments
