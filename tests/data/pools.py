"""A worker pool without processes: the same pickling, at once, and failures on demand."""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollplex.errors import WorkerError
from rollplex.pool import WorkerPool


class InlinePool(WorkerPool):
    """Runs a task when it is submitted. `deadly`: text in a pickled task that "kills the worker"."""

    def __init__(self, deadly: bytes | None = None) -> None:
        self.submitted: list[tuple[Any, ...]] = []
        self._deadly = deadly

    def submit(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Future[Any]:
        self.submitted.append((function, *args))
        future: Future[Any] = Future()
        try:
            payload = pickle.dumps((function, args))
        except Exception as error:
            raise WorkerError(f"cannot be sent: {error}") from error
        if self._deadly is not None and self._deadly in payload:
            future.set_exception(WorkerError("the worker process died"))
            return future
        try:
            function, args = pickle.loads(payload)
            future.set_result(pickle.loads(pickle.dumps(function(*args))))
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass
