"""Functions that test_pool.py runs in worker processes: well-behaved ones, and one for each kind of misbehaviour."""

import ctypes
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

state: list[str] = []


def add(left: int, right: int) -> int:
    return left + right


def pid() -> int:
    return os.getpid()


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def hang_in_c() -> None:
    """Backtrack for ages inside the regular expression engine, which neither gives up the GIL nor looks at signals."""
    re.match(r"(a|a)*$", "a" * 60 + "b")


def hang_ignoring_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def announce_and(path: str, action: str) -> None:
    Path(path).write_text(str(os.getpid()))
    hang_in_c() if action == "c" else time.sleep(600)


def fail(message: str) -> NoReturn:
    raise ValueError(message)


class UnpicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = sys.stdout


class HalfPicklableError(Exception):
    """Pickles, but cannot be built again from its args."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def fail_with(name: str) -> NoReturn:
    raise {
        "UnpicklableError": UnpicklableError,
        "HalfPicklableError": HalfPicklableError,
        "UnprintableError": UnprintableError,
    }[name]("one", "two")


def recurse() -> None:
    recurse()


def leave(code: int) -> NoReturn:
    sys.exit(code)


def vanish(code: int) -> NoReturn:
    os._exit(code)


def crash() -> None:
    ctypes.string_at(0)


def kill_self(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)
    time.sleep(600)


def unpicklable_result() -> Any:
    return lambda: None


def big(num_bytes: int) -> bytes:
    return b"x" * num_bytes


def fork_and_return() -> int:
    os.fork()
    return os.getpid()


def chatter(num_lines: int) -> str:
    for line in range(num_lines):
        print("chatter", line)
    return "said"


def environment() -> dict[str, str]:
    return dict(os.environ)


def loaded_modules() -> list[str]:
    return sorted(sys.modules)


def interrupt_self() -> str:
    os.kill(os.getpid(), signal.SIGINT)
    return "still here"


def remember(word: str) -> None:
    state.append(word)


def recall() -> list[str]:
    return state


class Unloadable:
    """Pickles, and fails when it is read."""

    def __reduce__(self) -> Any:
        return fail, ("cannot be read",)


def same(value: Any) -> Any:
    return value


def unloadable() -> Any:
    return Unloadable()
