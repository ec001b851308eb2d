"""The fair queue of processes before the write lock. Two turnstiles of one process stand for two processes."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from endstop.errors import StoreUnavailableError
from endstop.store.sqlite import turnstile as turnstile_module
from endstop.store.sqlite.turnstile import Turnstile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def turnstile(folder: Path, *, wait_ms_max: int = 10_000) -> Turnstile:
    return Turnstile(folder / "turn", folder / "lock", wait_ms_max=wait_ms_max)


def free(folder: Path, name: str) -> bool:
    """Whether nobody holds the lock of that file."""
    fd = os.open(folder / name, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def eventually(condition: object) -> bool:
    """Wait a little for another thread."""
    assert callable(condition)
    until = time.monotonic() + 10
    while not condition() and time.monotonic() < until:
        time.sleep(0.001)
    return bool(condition())


def test_one_at_a_time_goes_through(folder: Path) -> None:
    one, two = turnstile(folder), turnstile(folder)
    one.enter()
    assert not free(folder, "lock")
    assert free(folder, "turn")
    inside = threading.Event()

    def follow() -> None:
        two.enter()
        inside.set()

    thread = threading.Thread(target=follow)
    thread.start()
    assert eventually(lambda: not free(folder, "turn"))
    assert not inside.is_set()
    one.leave()
    thread.join(10)
    assert inside.is_set()
    assert free(folder, "turn")
    two.leave()
    one.close()
    two.close()
    assert free(folder, "lock")


def test_leaving_twice_or_without_having_entered_does_no_harm(folder: Path) -> None:
    one, two = turnstile(folder), turnstile(folder)
    one.leave()
    two.enter()
    one.leave()
    assert not free(folder, "lock")
    two.leave()
    two.leave()
    one.close()
    two.close()
    two.close()


def test_whoever_waits_too_long_is_told_and_holds_nothing(folder: Path) -> None:
    one, two = turnstile(folder), turnstile(folder, wait_ms_max=50)
    one.enter()
    for _ in range(2):
        with pytest.raises(StoreUnavailableError, match="for 50 ms; nothing was written"):
            two.enter()
    one.leave()
    # Its place in the queue is used up without it: both files are free again.
    assert eventually(lambda: free(folder, "lock") and free(folder, "turn"))
    two.enter()
    two.leave()
    one.close()
    two.close()


def test_whoever_gave_up_and_asks_again_keeps_its_place(folder: Path) -> None:
    one, two = turnstile(folder), turnstile(folder, wait_ms_max=50)
    one.enter()
    with pytest.raises(StoreUnavailableError):
        two.enter()
    two._wait_ms_max = 10_000
    threading.Timer(0.05, one.leave).start()
    two.enter()
    assert not free(folder, "lock")
    two.leave()
    one.close()
    two.close()


def test_the_one_at_the_turn_is_before_all_others(folder: Path) -> None:
    """Whoever comes later waits for the turn, and cannot overtake however quick it is."""
    holder, first, late = turnstile(folder), turnstile(folder), turnstile(folder)
    holder.enter()
    order: list[str] = []

    def wait(name: str, gate: Turnstile) -> None:
        gate.enter()
        order.append(name)
        gate.leave()

    threads = [threading.Thread(target=wait, args=("first", first))]
    threads[0].start()
    assert eventually(lambda: not free(folder, "turn"))
    threads.append(threading.Thread(target=wait, args=("late", late)))
    threads[1].start()
    assert eventually(lambda: late._standing)
    holder.leave()
    for thread in threads:
        thread.join(10)
    assert order == ["first", "late"]
    for gate in (holder, first, late):
        gate.close()


def test_an_interrupt_while_waiting_leaves_no_place_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the turn nor, when it comes at last, the lock."""
    one, two = turnstile(folder), turnstile(folder)
    one.enter()

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.enter()
    one.leave()
    assert eventually(lambda: free(folder, "lock") and free(folder, "turn"))
    one.close()
    two.close()


def test_an_interrupt_at_the_turn_gives_it_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = turnstile(folder)
    real = turnstile_module._taken

    def interrupted(fd: int) -> bool:
        real(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(turnstile_module, "_taken", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gate.enter()
    assert free(folder, "turn")
    gate.close()


def test_closing_does_not_wait_for_ever_for_a_place_in_the_queue(folder: Path) -> None:
    one, two = turnstile(folder), turnstile(folder, wait_ms_max=30)
    one.enter()
    with pytest.raises(StoreUnavailableError):
        two.enter()
    two.close()
    one.leave()
    assert eventually(lambda: free(folder, "lock") and free(folder, "turn"))
    one.close()


def test_a_folder_that_is_not_there_opens_nothing(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file"):
        Turnstile(folder / "none" / "turn", folder / "lock")
    with pytest.raises(OSError, match="No such file"):
        Turnstile(folder / "turn", folder / "none" / "lock")
    assert len(os.listdir("/proc/self/fd")) == before
