"""A file that a model names stays inside its folder, and is replaced whole or not at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from endstop_examples.confined_files import inside, locked, read_limited, replace_file
from endstop_examples.refusals import InputRefusedError, shown


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", "../x", "a/../../x", "/etc/passwd", "a\0b", "a\nb", "x" * 241, "a/..", "./"]
)
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputRefusedError):
        inside(tmp_path, name)


def test_a_symbolic_link_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(InputRefusedError, match="outside the allowed folder"):
        inside(tmp_path / "root", "link/file")


def test_a_name_inside_the_folder_is_its_file(tmp_path: Path) -> None:
    assert inside(tmp_path, "a/b.txt") == tmp_path.resolve() / "a" / "b.txt"
    assert inside(tmp_path, "a/../b.txt") == tmp_path.resolve() / "b.txt"


@given(st.text(alphabet="./\\ab\0~$%", max_size=30))
def test_whatever_the_name_the_file_is_inside_or_refused(name: str) -> None:
    root = Path("root").resolve()
    try:
        found = inside(root, name)
    except InputRefusedError:
        return
    assert found.is_relative_to(root)
    assert found != root


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"12345")
    assert read_limited(file, name="f", bytes_max=5) == b"12345"
    with pytest.raises(InputRefusedError, match="larger than 4 bytes"):
        read_limited(file, name="f", bytes_max=4)


@pytest.mark.parametrize("name", ["missing", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputRefusedError, match="no such regular file"):
        read_limited(tmp_path / name, name=name, bytes_max=9)


def test_replacing_a_file_leaves_nothing_else_behind(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "f"
    replace_file(target, b"one")
    replace_file(target, b"two")
    assert target.read_bytes() == b"two"
    assert [entry.name for entry in target.parent.iterdir()] == ["f"]


def test_a_replacement_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "f"
    target.mkdir()
    (target / "kept").write_bytes(b"old")
    with pytest.raises(OSError, match="f"):
        replace_file(target, b"new")
    assert (target / "kept").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_one_writer_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    target = tmp_path / "count"
    target.write_text("0")

    def add_ten() -> None:
        for _ in range(10):
            with locked(target):
                replace_file(target, str(int(target.read_text()) + 1).encode())

    threads = [threading.Thread(target=add_ten) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_text() == "40"


def test_what_a_message_shows_is_one_short_printable_line() -> None:
    assert shown("a\nb\x1b[31m") == "a\\nb\\x1b[31m"
    assert len(shown("x" * 999)) == 120
