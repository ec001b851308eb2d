"""Who is alive: a lock that dies with its process, and nothing else, tells."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest

import endstop as es
from endstop.errors import StoreUnavailableError
from endstop.runtime.clock import SystemIds
from endstop.runtime.owners import Worker, WorkerBoard
from tests.runtime.scenes import SPEC, Scene


def test_an_owner_lives_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    board = WorkerBoard(tmp_path / "owners")
    worker = Worker(board, SystemIds())
    assert board.is_alive(worker.owner_id)
    assert board.is_alive(f"{worker.owner_id}.7")  # a member of it
    assert board.dead_of((worker.owner_id, "somebody")) == {"somebody"}
    path = board.path_of(worker.owner_id)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    worker.close()
    worker.close()
    assert not board.is_alive(worker.owner_id)
    assert not path.exists()


def test_a_store_of_one_process_has_owners_without_files() -> None:
    board = WorkerBoard(None)
    worker = Worker(board, SystemIds())
    assert board.is_alive(worker.owner_id)
    worker.close()
    assert not board.is_alive(worker.owner_id)


HOLDER = """
    import sys
    from pathlib import Path
    from endstop.runtime.clock import SystemIds
    from endstop.runtime.owners import Worker, WorkerBoard
    worker = Worker(WorkerBoard(Path(sys.argv[1])), SystemIds())
    print(worker.owner_id, flush=True)
    sys.stdin.readline()
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
    )  # fmt: skip
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_another_process_is_alive_until_it_is_killed_also_while_it_is_stopped(tmp_path: Path) -> None:
    board = WorkerBoard(tmp_path)
    process, owner_id = holder(tmp_path)
    with process:
        for _ in range(3):  # looking does not break the lock
            assert board.is_alive(owner_id)
        process.send_signal(signal.SIGSTOP)
        assert board.is_alive(owner_id)
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert not board.is_alive(owner_id)
        # A dead owner's file is taken away, and it stays dead.
        assert not list(tmp_path.iterdir())
        assert not board.is_alive(owner_id)


def test_looking_at_another_owner_does_not_lose_the_own_lock(tmp_path: Path) -> None:
    """Closing any descriptor of a locked file gives a POSIX record lock back: one's own is never opened again."""
    board = WorkerBoard(tmp_path)
    mine = Worker(board, SystemIds())
    board.is_alive(mine.owner_id)
    WorkerBoard(tmp_path).is_alive(mine.owner_id)
    probe = f"""
        from pathlib import Path
        from endstop.runtime.owners import WorkerBoard
        print(WorkerBoard(Path({str(tmp_path)!r})).is_alive({mine.owner_id!r}))
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(probe)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(Path(es.__file__).parents[1])},
    ).stdout  # fmt: skip
    assert said == "True\n"
    mine.close()


def in_child(work: object) -> str:
    """What `work()` gives in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            said = repr(work())  # type: ignore[operator]  # a function
        except BaseException as error:
            said = type(error).__name__
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_is_no_owner_and_its_end_is_not_its_parents(tmp_path: Path) -> None:
    board = WorkerBoard(tmp_path)
    parent = Worker(board, SystemIds())

    def child() -> list[bool]:
        seen = [board.is_alive(parent.owner_id)]  # by its lock, as any other process sees it
        parent.close()  # the child's copy: nothing of the parent's is given back
        own = Worker(board, SystemIds())
        seen += [board.is_alive(own.owner_id), own.owner_id != parent.owner_id]
        return seen

    assert in_child(child) == "[True, True, True]"
    process, _ = holder(tmp_path)
    process.kill()
    process.communicate()
    assert board.is_alive(parent.owner_id)
    path = board.path_of(parent.owner_id)
    assert path is not None
    assert path.exists()
    parent.close()


def test_a_forked_child_can_ask_though_a_thread_of_its_parent_was_asking(tmp_path: Path) -> None:
    board = WorkerBoard(tmp_path)
    worker = Worker(board, SystemIds())
    from endstop.runtime import owners

    asking, done = threading.Event(), threading.Event()

    def ask() -> None:
        with owners._local_lock:
            asking.set()
            done.wait(20)

    thread = threading.Thread(target=ask)
    thread.start()
    asking.wait(10)
    try:
        assert in_child(lambda: board.is_alive(worker.owner_id)) == "True"
    finally:
        done.set()
        thread.join()
        worker.close()


def test_a_folder_that_cannot_hold_locks_is_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailableError):
        WorkerBoard(tmp_path / "file")
    board = WorkerBoard(tmp_path / "owners")
    (tmp_path / "owners").rmdir()
    with pytest.raises(StoreUnavailableError, match="nothing was started"):
        Worker(board, SystemIds())


def test_a_closed_guard_is_a_dead_owner_and_its_open_run_is_interrupted(file_scene: Scene) -> None:
    guard = file_scene.open()
    scope = guard.run(SPEC, run_id="r1")
    scope.__enter__()
    other = file_scene.another(guard)
    assert other.show("r1").state is es.RunState.RUNNING
    guard.close()
    assert other.show("r1").state is es.RunState.INTERRUPTED
    with pytest.raises(es.GuardClosedError):
        scope.__exit__(None, None, None)
