"""Rewards: the user's functions, with TRL's signature, run in worker processes.

    submit(prompt, samples) -> one call per function -> weighted sum -> one Score per sample

A function is `(prompts, completions, **columns) -> list[float]`, plain or async; columns are the row's, one entry per
sample, and `completion_ids` as in TRL. Chat prompts are lists of messages, and then a completion is one assistant
message. `None` for a sample means that the function does not apply to it. Whatever else goes wrong - an exception, a
time-out, a dead worker, a wrong length or type, a value that is not finite - names the function and the sample, and
stops the run or counts as zero. This file knows no tensor and no loss.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from rollplex.algo import builtin_rewards
from rollplex.config import RewardConfig, RewardFunction
from rollplex.errors import ConfigError, RewardError, WorkerError
from rollplex.pool import WorkerPool
from rollplex.types import Prompt, Sample

RewardCallable = Callable[..., Any]
Value = float | None
START_TIMEOUT_S = 300.0
"""For importing the user's module, which may load models of its own."""
SHOWN_CHARACTERS = 120


@dataclass(frozen=True)
class Score:
    """A sample's reward: the weighted sum, each function's value (None: does not apply), and what failed."""

    total: float
    parts: Mapping[str, Value]
    failures: tuple[str, ...] = ()


class RewardWorkers:
    """The recipe's reward functions and the processes that they run in."""

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._names = _unique_names(config.functions)
        self._pool = WorkerPool(config.num_workers)

    def check(self) -> None:
        """Load every function once, in a worker.

        Raises:
            ConfigError: a function cannot be found or loaded.
        """
        for function in self._config.functions:
            try:
                self._pool.submit(check_reward, function.function, timeout_s=START_TIMEOUT_S).result()
            except WorkerError as error:
                raise ConfigError(f"reward.functions: {function.function!r} cannot be loaded: {error}") from error

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> "PendingScores":
        """Begin to score some responses to one prompt; each function gets them in one call."""
        completions = [sample.text for sample in samples]
        ids = [sample.ids.tolist() for sample in samples]
        futures = [
            self._pool.submit(
                call_reward, function.function, dict(function.kwargs), prompt.content, completions, ids,
                dict(prompt.columns), timeout_s=self._config.timeout_s,
            )
            for function in self._config.functions
        ]  # fmt: skip
        return PendingScores(self._config, self._names, prompt, tuple(samples), tuple(futures))

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class PendingScores:
    """Calls under way for some responses to one prompt."""

    config: RewardConfig
    names: Sequence[str]
    prompt: Prompt
    samples: tuple[Sample, ...]
    futures: tuple[Future[list[Value]], ...]

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return all(future.done() for future in self.futures)

    def result(self) -> tuple[Score, ...]:
        """One score per sample, in order.

        Raises:
            RewardError: a function failed, and reward.on_error is "error".
        """
        parts: list[dict[str, Value]] = [{} for _ in self.samples]
        failures: list[list[str]] = [[] for _ in self.samples]
        for name, future in zip(self.names, self.futures, strict=True):
            for index, outcome in enumerate(self._values(name, future)):
                if isinstance(outcome, str):
                    parts[index][name] = 0.0
                    failures[index].append(outcome)
                else:
                    parts[index][name] = outcome
        return tuple(
            Score(self._total(part), part, tuple(failed)) for part, failed in zip(parts, failures, strict=True)
        )

    def _total(self, part: Mapping[str, Value]) -> float:
        weights = [function.weight for function in self.config.functions]
        values = zip(weights, (part[name] for name in self.names), strict=True)
        return sum(weight * value for weight, value in values if value is not None)

    def _values(self, name: str, future: "Future[list[Value]]") -> list[Value | str]:
        """Each sample's value, or what went wrong with it."""
        count = len(self.samples)
        try:
            values = future.result()
        except Exception as error:  # whatever the user's function raises
            reason = str(error) if isinstance(error, RewardError | WorkerError) else f"raised {_summary(error)}"
            return [self._failed(name, sample, reason, error) for sample in self.samples]
        checked: list[Value | str] = []
        for sample, value in zip(self.samples, values, strict=True):
            broken = value is not None and not math.isfinite(value)
            checked.append(self._failed(name, sample, f"returned {value}, which is not finite") if broken else value)
        assert len(checked) == count
        return checked

    def _failed(self, name: str, sample: Sample, reason: str, cause: Exception | None = None) -> str:
        text = sample.text if len(sample.text) <= SHOWN_CHARACTERS else sample.text[:SHOWN_CHARACTERS] + "..."
        message = f"reward function {name!r}, {self.prompt.source}, sample {sample.sample} ({text!r}): {reason}"
        if self.config.on_error == "error":
            remedy = 'mend the function, or set reward.on_error = "zero" to count such samples as 0'
            raise RewardError(f"{message}; {remedy}") from cause
        return message


def check_reward(name: str) -> None:
    """Load a function; in a worker, so that the user's imports do not reach the run's own process."""
    load_reward(name)


def call_reward(
    name: str, kwargs: Mapping[str, Any], content: Any, completions: Sequence[str], ids: Sequence[list[int]],
    columns: Mapping[str, Any],
) -> list[Value]:  # fmt: skip
    """Call one function on some responses to one prompt, in a worker; one value per response."""
    function, count = load_reward(name), len(completions)
    as_chat = not isinstance(content, str)
    arguments: dict[str, Any] = {
        "prompts": [content] * count,
        "completions": [[{"role": "assistant", "content": text}] if as_chat else text for text in completions],
        "completion_ids": list(ids),
        **{column: [value] * count for column, value in columns.items() if column not in ("prompts", "completions")},
        **kwargs,
    }
    values = function(**_accepted(function, arguments))
    if inspect.isawaitable(values):
        values = asyncio.run(_awaited(values))
    return _as_values(values, count)


@cache
def load_reward(name: str) -> RewardCallable:
    """A built-in by name, `package.module:function`, or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such file, module or function; it is no function; or its module fails to load.
    """
    owner, separator, attribute = name.rpartition(":")
    if not separator:
        if name in builtin_rewards.__all__:
            return getattr(builtin_rewards, name)  # type: ignore[no-any-return]
        known = ", ".join(builtin_rewards.__all__)
        raise ConfigError(
            f"reward.functions: {name!r} is no built-in ({known}); write package.module:function or file.py:function"
        )
    module = _load_file(name, Path(owner)) if owner.endswith(".py") else _load_module(name, owner)
    function = getattr(module, attribute, None)
    if function is None:
        raise ConfigError(f"reward.functions: {name!r}: {owner} has no {attribute!r}; check the name after the colon")
    if not callable(function):
        raise ConfigError(f"reward.functions: {name!r} is a {type(function).__name__}; name a function")
    return function  # type: ignore[no-any-return]


def _load_file(name: str, path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"reward.functions: {name!r}: there is no file {str(path)!r} (relative to {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"rollplex_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise ConfigError(f"reward.functions: {name!r}: {path} fails to load: {_summary(error)}") from error
    return module


def _load_module(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # the user's code, or no such module
        raise ConfigError(f"reward.functions: {name!r}: module {module!r} fails to load: {_summary(error)}") from error


def _accepted(function: RewardCallable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function without **kwargs names; all of them for one that has it."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # written in C
        return dict(arguments)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}


async def _awaited(values: Any) -> Any:
    return await values


def _as_values(values: Any, count: int) -> list[Value]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise RewardError(f"returned {type(values).__name__}; return a list of {count} numbers")
    items = list(values)
    if len(items) != count:
        raise RewardError(f"returned {len(items)} values for {count} completions; return one number for each")
    numbers: list[Value] = []
    for item in items:
        if item is None:
            numbers.append(None)
            continue
        try:
            if isinstance(item, str | bytes):
                raise TypeError("text is no number")
            numbers.append(float(item))
        except (TypeError, ValueError) as error:
            raise RewardError(f"returned {item!r} for a completion; return a number or None") from error
    return numbers


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        repeats = sum(other.name == function.name for other in functions[: len(names)])
        names.append(f"{function.name}_{repeats + 1}" if repeats else function.name)
    return tuple(names)
