"""Worker processes for the host lane: run a function elsewhere, and survive whatever it does.

    submit ->  pickled (function, args)  ->  worker process  ->  pickled outcome  ->  Future
                                                |
                              hangs, dies, exits, forks: only its own task fails, and the worker is replaced

A thin layer over pebble's process pool, which kills and replaces workers. What is added: arguments and results are
pickled here, so that nothing that fails to pickle can take a worker down; workers die with their parent, leave Ctrl-C
and stdout to it, use few threads, and never import the parent's main script. This file knows neither rewards nor data.
"""

import atexit
import faulthandler
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import connection, context, resource_tracker
from typing import Any, Self, TypeVar

from pebble import ProcessExpired, ProcessPool

from rollplex.errors import WorkerError

T = TypeVar("T")

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "RAYON_NUM_THREADS",
)
_EXITED_WITH_0 = 256  # no exit status: those end at 255
_start_lock = threading.Lock()


class WorkerTimeoutError(WorkerError):
    """A task exceeded its time limit; its worker was stopped and replaced."""


class WorkerPool:
    """A fixed number of spawned worker processes, started at once and replaced when they die.

    num_workers: processes.
    initializer, initargs: called once in every new worker, for example to load what its tasks share. If it raises,
        every task of that worker comes back with its exception.
    num_threads: limit given to numerical libraries in each worker.

    A function is found by its module's name, so it cannot live in the script being run (`__main__`): workers do not
    import that script, and it needs no `if __name__ == "__main__"` guard.
    """

    def __init__(
        self,
        num_workers: int,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        num_threads: int = 1,
    ) -> None:
        start = None if initializer is None else _pickled_call(initializer, initargs)
        self._num_workers = num_workers
        self._start_arguments = (os.getpid(), num_threads, start)
        self._pending: dict[Future[Any], tuple[str, ProcessPool]] = {}
        self._closed = False
        self._lock = threading.RLock()
        self._pool = self._new_pool()
        # A pool left open is closed before pebble's own exit handler, which may kill a worker while another is started.
        atexit.register(self.close)

    def submit(self, function: Callable[..., T], *args: Any, timeout_s: float | None = None) -> Future[T]:
        """Run `function(*args)` in a worker; `timeout_s` seconds are counted from when it begins to run.

        The future raises WorkerTimeoutError after the time limit, WorkerError if the process died, called sys.exit, or
        raised what cannot be sent back; otherwise the function's own exception, with its traceback as a note.

        Raises:
            WorkerError: the pool is closed, or function and arguments cannot be sent to another process.
        """
        payload = _pickled_call(function, args)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        pool = self._live_pool(function)
        with self._lock:
            self._pending[future] = (_name(function), pool)
        inner = pool.schedule(_run, args=(payload,), timeout=timeout_s)
        inner.add_done_callback(lambda done: self._finish(future, done, timeout_s))
        if not pool.active:  # it broke, or was closed, just now: pebble may never answer
            self._abandon(pool)
        return future

    def close(self) -> None:
        """Stop all workers at once; tasks not yet done fail with WorkerError. Closing twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        for future in list(self._pending):
            self._settle(future, error=WorkerError("the worker pool was closed before the task was done"))
        _stop(self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _new_pool(self) -> ProcessPool:
        pool = ProcessPool(
            max_workers=self._num_workers, initializer=_start, initargs=self._start_arguments, context=_Spawn()
        )
        assert pool.active, "asking starts the workers"
        return pool

    def _live_pool(self, function: Callable[..., object]) -> ProcessPool:
        """The pool, or a new one: pebble gives up when a worker dies while no worker has a task."""
        with self._lock:
            if self._closed:
                raise WorkerError(f"{_name(function)} was submitted to a closed worker pool; make a new pool")
            if self._pool.active:
                return self._pool
            broken, self._pool = self._pool, self._new_pool()
        _stop(broken)  # outside the lock, which pebble's threads may be waiting for
        return self._pool

    def _abandon(self, pool: ProcessPool) -> None:
        for future, (name, its_pool) in list(self._pending.items()):
            if its_pool is pool:
                self._settle(future, error=WorkerError(f"all worker processes died before {name} could run"))

    def _finish(self, future: Future[Any], inner: "Future[bytes]", timeout_s: float | None) -> None:
        """Turn pebble's outcome into ours. Runs in one of pebble's threads."""
        with self._lock:
            if future not in self._pending:  # settled by close or by a broken pool
                return
            name, pool = self._pending[future]
        error = inner.exception()
        if error is None:
            succeeded, value = _loaded(inner.result(), name)
            self._settle(future, value if succeeded else None, None if succeeded else value)
        elif isinstance(error, TimeoutError):
            text = f"{name} exceeded its time limit of {timeout_s:g} s; its worker was stopped and replaced"
            self._settle(future, error=WorkerTimeoutError(text))
        elif isinstance(error, ProcessExpired):
            text = f"the worker process running {name} died: {_exit_reason(error.exitcode)}"
            self._settle(future, error=WorkerError(text))
        elif isinstance(error, BrokenProcessPool):
            self._abandon(pool)  # also the tasks that pebble had not taken up yet, which it would forget
        else:
            self._settle(future, error=error)

    def _settle(self, future: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if self._pending.pop(future, None) is None:
                return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _stop(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _exit_reason(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code % _EXITED_WITH_0} (os._exit, or a library that ends the process)"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; often the system's out-of-memory killer" if code == -signal.SIGKILL else ""
    return f"it was killed by {name}{hint}"


def _pickled_call(function: Callable[..., object], args: tuple[Any, ...]) -> bytes:
    if getattr(function, "__module__", None) == "__main__":
        raise WorkerError(
            f"{_name(function)} is defined in the script being run, which workers do not import; "
            "move it into a module of its own"
        )
    try:
        return pickle.dumps((function, args))
    except Exception as error:  # objects may raise anything while being pickled
        raise WorkerError(f"{_name(function)} or its arguments cannot be sent to a worker process: {error}") from error


def _loaded(encoded: bytes, name: str) -> tuple[bool, Any]:
    try:
        outcome: tuple[bool, Any] = pickle.loads(encoded)
    except Exception as error:  # a class that only the worker can import, for example
        return False, WorkerError(f"the result of {name} cannot be read in the parent process: {error!r}")
    return outcome


# ---- how a worker starts: the parent's side


@contextmanager
def _quiet_start() -> Iterator[None]:
    """While a worker is being launched: hide the main script from it, and let it inherit a blocked SIGINT.

    A spawned process imports the parent's main script again, which is slow for a command line tool and an endless
    recursion for a script without a guard; a main module that calls itself "__main__" is left alone. The worker
    unblocks SIGINT once it ignores it, so that Ctrl-C cannot print a traceback from a half-started worker.
    """
    main = sys.modules["__main__"]
    with _start_lock:
        spec = main.__spec__
        resource_tracker.ensure_running()  # its own launch would unblock SIGINT again
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        main.__spec__ = importlib.util.spec_from_loader("__main__", loader=None)
        try:
            yield
        finally:
            main.__spec__ = spec
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


class _Process(context.SpawnProcess):
    def start(self) -> None:
        with _quiet_start():
            super().start()

    def terminate(self) -> None:
        """Kill at once: pebble lets every other worker wait while a hung one thinks about SIGTERM."""
        self.kill()

    @property
    def exitcode(self) -> int | None:
        """As usual, but never 0: pebble would take the worker for retired, and let its task wait for ever."""
        code = super().exitcode
        return _EXITED_WITH_0 if code == 0 else code


class _Spawn(context.SpawnContext):
    Process = _Process


# ---- inside a worker

_start_failure: bytes | None = None
"""The initializer's exception in this worker, as an encoded outcome."""


def _start(parent_pid: int, num_threads: int, initializer: bytes | None) -> None:
    """Make this process a good worker, then run the pool's initializer. Called once, first of all."""
    global _start_failure
    _die_with_parent(parent_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler never runs inside a hung C function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(num_threads)), TOKENIZERS_PARALLELISM="false")
    # What a user's function prints must not mix with the parent's stdout, which another program may read.
    os.dup2(sys.stderr.fileno() if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY), 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    if initializer is None:
        return
    try:
        function, args = pickle.loads(initializer)
        function(*args)
    except BaseException as error:  # kept for the tasks, which report it
        _start_failure = _encoded_failure(error)


def _die_with_parent(parent_pid: int) -> None:
    """End this process when the parent ends, however it ends.

    Not PR_SET_PDEATHSIG, which fires when the thread that launched this process ends. The parent holds the other end
    of a pipe; on Linux the kernel kills us when it closes, even inside a C function that never gives up the GIL.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid == parent_pid, "workers are started by the pool's own process"
    if sys.platform == "linux":
        import fcntl

        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    else:
        threading.Thread(target=_exit_after, args=(parent.sentinel,), daemon=True).start()
    if connection.wait([parent.sentinel], timeout=0):
        os._exit(1)


def _exit_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def _run(payload: bytes) -> bytes:
    """Run one pickled call and encode its outcome; no exception gets out."""
    pid = os.getpid()
    if _start_failure is not None:
        return _start_failure
    try:
        function, args = pickle.loads(payload)
        encoded = pickle.dumps((True, function(*args)))
    except BaseException as error:  # sys.exit included: the worker lives on
        encoded = _encoded_failure(error)
    if os.getpid() != pid:  # the function forked, and this is the child: it must not answer for the worker
        os._exit(0)
    return encoded


def _encoded_failure(error: BaseException) -> bytes:
    """Encode (False, exception); what cannot travel as it is becomes a WorkerError that describes it."""
    note = "in a worker process:\n" + "".join(traceback.format_exception(error))
    summary = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, Exception):
        try:
            error.add_note(note)
            encoded = pickle.dumps((False, error))
            if str(pickle.loads(encoded)[1]) == str(error):
                return encoded
        except Exception:  # its own __reduce__, __init__ or __str__ fails: described below
            pass
    failure = WorkerError(summary)
    failure.add_note(note)
    return pickle.dumps((False, failure))
