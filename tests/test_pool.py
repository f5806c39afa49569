"""Worker processes: every kind of misbehaviour stays inside its own task, and nothing outlives the parent."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollplex.errors import WorkerError
from rollplex.pool import WorkerPool, WorkerTimeoutError
from tests import pool_tasks

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _pool_still_works(pool: WorkerPool) -> Iterator[None]:
    yield
    assert pool.submit(pool_tasks.add, 1, 2).result(PATIENCE_S) == 3


def wait_until(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_results_and_exceptions_come_back(pool: WorkerPool) -> None:
    futures = [pool.submit(pool_tasks.add, number, 1) for number in range(50)]
    assert [future.result(PATIENCE_S) for future in futures] == list(range(1, 51))
    with pytest.raises(ValueError, match="wrong") as caught:
        pool.submit(pool_tasks.fail, "wrong").result(PATIENCE_S)
    assert str(caught.value) == "wrong"
    assert any("pool_tasks.py" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("task", [pool_tasks.hang_in_c, pool_tasks.hang_ignoring_sigterm])
def test_hung_worker_is_killed_and_replaced(pool: WorkerPool, task: Callable[[], None]) -> None:
    before = pool.submit(pool_tasks.pid).result(PATIENCE_S)
    hung = pool.submit(task, timeout_s=0.3)
    queued = pool.submit(pool_tasks.pid)
    with pytest.raises(WorkerTimeoutError, match=rf"{task.__name__} exceeded its time limit of 0.3 s"):
        hung.result(PATIENCE_S)
    assert queued.result(PATIENCE_S) != before
    assert wait_until(lambda: not alive(before))


def test_other_tasks_go_on_beside_a_hung_one() -> None:
    with WorkerPool(2) as pool:
        hung = pool.submit(pool_tasks.sleep, 600.0, timeout_s=2.0)
        others = [pool.submit(pool_tasks.add, number, 0, timeout_s=30.0) for number in range(20)]
        assert [other.result(PATIENCE_S) for other in others] == list(range(20))
        with pytest.raises(WorkerTimeoutError):
            hung.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("task", "argument", "message"),
    [
        (pool_tasks.vanish, 0, "exited with code 0"),
        (pool_tasks.vanish, 7, "exited with code 7"),
        (pool_tasks.kill_self, signal.SIGKILL, "SIGKILL.*out-of-memory"),
        (pool_tasks.kill_self, signal.SIGTERM, "SIGTERM"),
    ],
)
def test_death_of_a_worker_is_a_worker_error(
    pool: WorkerPool, task: Callable[[int], None], argument: int, message: str
) -> None:
    with pytest.raises(WorkerError, match=f"{task.__name__} died: .*{message}") as caught:
        pool.submit(task, int(argument), timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert not isinstance(caught.value, WorkerTimeoutError)


def test_segmentation_fault(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="SIGSEGV"):
        pool.submit(pool_tasks.crash).result(PATIENCE_S)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("UnpicklableError", "one and two"),
        ("HalfPicklableError", "one and two"),
        ("UnprintableError", "UnprintableError"),
    ],
)
def test_exceptions_that_cannot_travel_are_described(pool: WorkerPool, name: str, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        pool.submit(pool_tasks.fail_with, name).result(PATIENCE_S)


def test_exit_recursion_and_bad_results_leave_the_worker_alive(pool: WorkerPool) -> None:
    before = pool.submit(pool_tasks.pid).result(PATIENCE_S)
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        pool.submit(pool_tasks.leave, 3).result(PATIENCE_S)
    with pytest.raises(RecursionError):
        pool.submit(pool_tasks.recurse).result(PATIENCE_S)
    with pytest.raises(Exception, match="pickle"):
        pool.submit(pool_tasks.unpicklable_result).result(PATIENCE_S)
    with pytest.raises(ValueError, match="cannot be read"):
        pool.submit(pool_tasks.same, pool_tasks.Unloadable()).result(PATIENCE_S)
    with pytest.raises(WorkerError, match="unloadable cannot be read in the parent"):
        pool.submit(pool_tasks.unloadable).result(PATIENCE_S)
    assert pool.submit(pool_tasks.interrupt_self).result(PATIENCE_S) == "still here"
    assert pool.submit(pool_tasks.pid).result(PATIENCE_S) == before


def test_what_cannot_be_sent_is_refused_at_submit(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="cannot be sent"):
        pool.submit(lambda: None)
    with pytest.raises(WorkerError, match="cannot be sent"):
        pool.submit(pool_tasks.same, sys.stdout)


def test_big_arguments_and_results(pool: WorkerPool) -> None:
    futures = [pool.submit(pool_tasks.same, pool_tasks.big(5_000_000)) for _ in range(4)]
    assert [len(future.result(PATIENCE_S)) for future in futures] == [5_000_000] * 4


def test_a_fork_answers_once(pool: WorkerPool) -> None:
    before = pool.submit(pool_tasks.pid).result(PATIENCE_S)
    assert pool.submit(pool_tasks.fork_and_return).result(PATIENCE_S) == before
    assert [pool.submit(pool_tasks.pid).result(PATIENCE_S) for _ in range(5)] == [before] * 5


def test_environment_and_start_are_light(pool: WorkerPool) -> None:
    environment = pool.submit(pool_tasks.environment).result(PATIENCE_S)
    assert environment["OMP_NUM_THREADS"] == environment["OPENBLAS_NUM_THREADS"] == "1"
    loaded = pool.submit(pool_tasks.loaded_modules).result(PATIENCE_S)
    assert not {"torch", "numpy", "transformers", "pytest", "conftest"}.intersection(loaded)


def test_idle_death_of_every_worker_is_repaired(pool: WorkerPool) -> None:
    for pause in (0.0, 0.3):
        os.kill(pool.submit(pool_tasks.pid).result(PATIENCE_S), signal.SIGKILL)
        time.sleep(pause)
        with contextlib.suppress(WorkerError):  # submitted in the moment before the death was noticed
            assert pool.submit(pool_tasks.add, 1, 1).result(PATIENCE_S) == 2
        assert pool.submit(pool_tasks.add, 1, 1).result(PATIENCE_S) == 2


def test_initializer_runs_in_every_new_worker() -> None:
    with WorkerPool(1, initializer=pool_tasks.remember, initargs=("word",)) as pool:
        assert pool.submit(pool_tasks.recall).result(PATIENCE_S) == ["word"]
        with pytest.raises(WorkerError):
            pool.submit(pool_tasks.vanish, 1).result(PATIENCE_S)
        assert pool.submit(pool_tasks.recall).result(PATIENCE_S) == ["word"]


def test_failing_initializer_is_reported_by_tasks() -> None:
    with WorkerPool(2, initializer=pool_tasks.fail, initargs=("no licence",)) as pool:
        for _ in range(4):
            with pytest.raises(ValueError, match="no licence"):
                pool.submit(pool_tasks.pid).result(PATIENCE_S)


def test_dying_initializer_fails_all_tasks() -> None:
    with WorkerPool(2, initializer=pool_tasks.vanish, initargs=(5,)) as pool:
        futures = [pool.submit(pool_tasks.same, b"x" * 100_000) for _ in range(5)]
        for future in futures:
            with pytest.raises(WorkerError, match="died"):
                future.result(PATIENCE_S)


def test_close_fails_what_is_left_and_stops_at_once() -> None:
    pool = WorkerPool(1)
    worker = pool.submit(pool_tasks.pid).result(PATIENCE_S)
    futures = [pool.submit(pool_tasks.sleep, 600.0) for _ in range(3)]
    started = time.monotonic()
    pool.close()
    pool.close()
    assert time.monotonic() - started < 10
    assert not alive(worker)
    for future in futures:
        with pytest.raises(WorkerError, match="closed"):
            future.result(0)
    with pytest.raises(WorkerError, match="closed"):
        pool.submit(pool_tasks.pid)


PARENT = """
import sys
{guard}
from tests import pool_tasks
from rollplex.pool import WorkerPool
pool = WorkerPool(1)
{body}
"""


def run_parent(tmp_path: Path, body: str, *, as_module: bool = False) -> "subprocess.Popen[str]":
    """Start a plain script, without a __main__ guard, that uses a pool; importing it a second time would be noticed."""
    guard = "assert __name__ == '__main__', 'the main script was imported by a worker'"
    script = tmp_path / "plain.py"
    script.write_text(PARENT.format(guard=guard, body=body))
    path = os.pathsep.join([str(Path(__file__).parent.parent), str(tmp_path)])
    command = [sys.executable, "-m", "plain"] if as_module else [sys.executable, str(script)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize("as_module", [False, True])
def test_scripts_without_a_guard_and_prints_of_workers(tmp_path: Path, as_module: bool) -> None:
    body = "print(pool.submit(pool_tasks.chatter, 1000).result(60)); pool.close()"
    parent = run_parent(tmp_path, body, as_module=as_module)
    stdout, stderr = parent.communicate(timeout=PATIENCE_S)
    assert (parent.returncode, stdout) == (0, "said\n"), stderr
    assert "chatter 999" in stderr


def test_a_pool_left_open_does_not_keep_the_script_alive(tmp_path: Path) -> None:
    parent = run_parent(tmp_path, "pool.submit(pool_tasks.pid).result(60); pool.submit(pool_tasks.sleep, 600.0)")
    _, stderr = parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 0, stderr


@pytest.mark.parametrize("action", ["c", "sleep"])
def test_no_orphans_after_sigkill_of_the_parent(tmp_path: Path, action: str) -> None:
    note = tmp_path / "pid"
    body = f"pool.submit(pool_tasks.announce_and, {str(note)!r}, {action!r}).result()"
    parent = run_parent(tmp_path, body)
    assert wait_until(lambda: note.exists() and note.read_text() != "")
    worker = int(note.read_text())
    assert alive(worker)
    parent.kill()
    parent.communicate(timeout=PATIENCE_S)  # ends only when no worker holds the pipes
    assert wait_until(lambda: not alive(worker))


def test_a_pool_made_in_a_thread_outlives_it(tmp_path: Path) -> None:
    body = (
        "import threading\nmade = []\n"
        "thread = threading.Thread(target=lambda: made.append(WorkerPool(1))); thread.start(); thread.join()\n"
        "first = made[0].submit(pool_tasks.pid).result(60)\n"
        "print(first == made[0].submit(pool_tasks.pid).result(60)); made[0].close(); pool.close()"
    )
    stdout, stderr = run_parent(tmp_path, body).communicate(timeout=PATIENCE_S)
    assert stdout == "True\n", stderr


def test_ctrl_c_reaches_only_the_parent(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the whole process group, here while workers are being started."""
    body = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "more = WorkerPool(2)\n"
        "for _ in range(20): os.killpg(0, signal.SIGINT); time.sleep(0.02)\n"
        "print(more.submit(pool_tasks.add, 1, 2).result(60)); more.close(); pool.close()"
    )
    parent = run_parent(tmp_path, "os = __import__('os'); os.setpgrp()\n" + body)
    stdout, stderr = parent.communicate(timeout=PATIENCE_S)
    assert (stdout, stderr) == ("3\n", "")
