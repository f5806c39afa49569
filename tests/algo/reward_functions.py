"""Reward functions for test_reward.py: well-behaved ones, and one for each way to fail. Loaded in worker processes."""

import asyncio
import functools
import importlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

calls: list[int] = []


def echo(prompts: Any, completions: Any, completion_ids: Any, answer: Any, scale: float = 1.0, **columns: Any) -> Any:
    """What a well-behaved function sees: tells it in an exception, or else scores by it."""
    if answer[0] == "show":
        raise ValueError(repr((prompts, completions, completion_ids, answer, scale, sorted(columns.items()))))
    return [scale * len(completion) for completion in completions]


def length(completions: list[str]) -> list[float]:
    return [float(len(text)) for text in completions]


async def slow_length(completions: list[str], **_: Any) -> list[float]:
    async def one(text: str) -> float:
        await asyncio.sleep(0.01)
        return float(len(text))

    return list(await asyncio.gather(*map(one, completions)))


class Scorer:
    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return length(completions)


scorer = Scorer()
not_callable = 3


def one_tensor() -> Any:
    torch: Any = importlib.import_module("torch")  # not at the top: the other functions need no torch
    return torch.tensor([[1.25]], requires_grad=True)


def typed(completions: list[str], **_: Any) -> Any:
    """Return what the first completion asks for."""
    kinds: dict[str, Callable[[], Any]] = {
        "none": lambda: [None],
        "bool": lambda: [True],
        "int": lambda: [2],
        "numpy": lambda: [np.float32(0.5)],
        "array": lambda: np.array([0.25]),
        "zero_dim": lambda: [np.array(4.0)],
        "tuple": lambda: (1.5,),
        "generator": lambda: (value for value in [3.0]),
        "text": lambda: ["1.0"],
        "string": lambda: "1",
        "number": lambda: 1.0,
        "mapping": lambda: {"a": 1.0},
        "set": lambda: {1.0},
        "nothing": lambda: None,
        "zero_dim_alone": lambda: np.array(1.0),
        "column": lambda: np.full((1, 1), 0.75),
        "tensor": lambda: one_tensor(),
        "matrix": lambda: np.ones((1, 2)),
        "complex": lambda: [1j],
        "nan": lambda: [float("nan")],
        "inf": lambda: [np.float64("-inf")],
        "huge": lambda: [10**400],
        "empty": lambda: [],
        "long": lambda: [1.0, 2.0],
    }
    return kinds[completions[0]]()


class StrangeError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)
        self.stream = sys.stdout

    def __str__(self) -> str:
        raise RuntimeError("no text either")


def recurse() -> NoReturn:
    recurse()


def broken_generator() -> Iterator[float]:
    yield from []
    raise LookupError("half way")


def misbehave(completions: list[str], **_: Any) -> Any:
    """Fail as the first completion says; `ok` is fine."""
    match completions[0]:
        case "raise":
            raise KeyError("x")
        case "strange":
            raise StrangeError("a", "b")
        case "exit":
            sys.exit(3)
        case "vanish":
            time.sleep(0.2)  # pebble may miss which call a process that dies at once was running
            os._exit(9)
        case "recurse":
            recurse()
        case "hang":
            time.sleep(600)
        case "hang_in_c":
            re.match(r"(a|a)*$", "a" * 60 + "b")
        case "interrupt":
            raise KeyboardInterrupt
        case "generator":
            return broken_generator()
        case "fork":
            os.fork()
        case "print":
            for line in range(20_000):
                print("line", line)
    return [1.0] * len(completions)


def vandal(prompts: Any, completions: Any, completion_ids: Any, items: Any, bag: Any, **_: Any) -> list[float]:
    """Change every argument, and score by what is left of the neighbours'."""
    values = []
    for index in range(len(items)):
        values.append(float(len(items[index]) + len(bag) + len(prompts[index]) + len(completion_ids[index])))
        items[index].clear()
        bag.clear() if index == len(items) - 1 else None
        prompts[index].clear()
        completion_ids[index].clear()
    completions.clear()
    return values


def rank(completions: list[str], **_: Any) -> list[float]:
    """Compares siblings."""
    return [float(sorted(completions).index(text)) for text in completions]


def on_even(completions: list[str], **_: Any) -> list[float | None]:
    return [None if len(text) % 2 else 1.0 for text in completions]


def needs_column(completions: list[str], solution: list[str]) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, solution, strict=True)]


def strict_columns(prompts: Any, /, completions: Any, *, answer: Any, level: int = 7) -> list[float]:
    """Arguments by position only, by keyword only, and with a default."""
    assert len(prompts) == len(completions) == len(answer)
    return [float(level)] * len(completions)


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@logged
def decorated(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


def scaled(factor: float, completions: list[str]) -> list[float]:
    return [factor * len(text) for text in completions]


partly = functools.partial(scaled, 3.0)


class Judge:
    """An instance with decorated __call__ and an asynchronous client of its own, bound to the first loop it sees."""

    def __init__(self) -> None:
        self.lock: asyncio.Lock | None = None

    @logged
    async def __call__(self, completions: list[str]) -> list[float]:
        if self.lock is None:
            self.lock = asyncio.Lock()
            self.loop = asyncio.get_running_loop()
        async with self.lock:
            return [float(self.loop is asyncio.get_running_loop())] * len(completions)


judge = Judge()


def per_sample(completions: list[str]) -> list[Any]:
    """What each completion asks for."""
    kinds = {"text": "high", "nan": float("nan"), "none": None, "much": 1e30, "object": UnshowableError(), "ok": 1.0}
    return [kinds[text] for text in completions]


class UnshowableError(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("cannot be shown")


def endless(completions: list[str]) -> Iterator[float]:
    while True:
        yield 1.0


def long_winded(completions: list[str]) -> list[float]:
    raise ValueError("x" * 10_000_000)


def slow_then_fast(completions: list[str]) -> list[float]:
    """The first completion's length in tenths of a second later, its length."""
    time.sleep(len(completions[0]) / 10)
    return [float(len(text)) for text in completions]


def mean(completions: list[str]) -> list[float]:
    """Has the name of a metric."""
    return [1.0] * len(completions)
