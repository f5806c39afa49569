"""Rewards: the user's functions, with TRL's signature, run in worker processes.

    submit(prompt, samples) -> one call per function, in a worker -> weighted sum -> one Score per sample

A value that is None means that the function does not apply to the sample. Whatever goes wrong in a call - an exception,
a time-out, a dead worker, a wrong length - or with one value names the function and the samples, and stops the run or
counts as zero. How a function is found and called is in `reward_call.py`. This file knows no tensor and no loss.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollplex.algo.reward_call import (
    Outcome,
    Value,
    call_reward,
    enter_folder,
    find_missing,
    find_problems,
    load_reward,
    start_worker,
)
from rollplex.config import RewardConfig, RewardFunction
from rollplex.errors import ConfigError, RewardError, RollplexError, WorkerError
from rollplex.pool import WorkerPool, WorkerTimeoutError
from rollplex.types import Prompt, Sample

__all__ = ["PendingScores", "RewardWorkers", "Score", "call_reward", "load_reward"]

START_TIMEOUT_S = 300.0
"""For importing the user's modules, which may load models of their own."""
LARGEST_VALUE = 1e18
"""Advantages square rewards in float32, which ends at 3e38."""
SHOWN_CHARACTERS = 120
_METRICS = ("mean", "std", "failures")
"""Taken in the log: `reward/mean` and so on stand beside `reward/` and a function's name."""


@dataclass(frozen=True)
class Score:
    """A sample's reward: the weighted sum, each function's value (None: does not apply), and what failed."""

    total: float
    parts: Mapping[str, Value]
    failures: tuple[str, ...] = ()


class RewardWorkers:
    """The recipe's reward functions and the processes that they run in, which work in the present folder.

    start_timeout_s: for importing the user's modules, which no call's time limit counts.
    """

    def __init__(self, config: RewardConfig, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._config = config
        self._names = _unique_names(config.functions)
        self._requests = tuple((function.function, dict(function.kwargs)) for function in config.functions)
        self._start_timeout_s = start_timeout_s
        self._folder = str(Path.cwd())
        self._pool = WorkerPool(config.num_workers, start_worker, (self._requests, self._folder))

    def check(self) -> None:
        """Wait until a worker has loaded every function, and compare their parameters with the recipe's kwargs.

        Raises:
            ConfigError: one line for each function that cannot be used.
        """
        self._refuse(find_problems)

    def check_columns(self, columns: Collection[str]) -> None:
        """Compare the functions' parameters with the columns of a row.

        Raises:
            ConfigError: one line for each function that needs what is no column.
        """
        self._refuse(find_missing, sorted(columns))

    def _refuse(self, find: Callable[..., list[str]], *args: Any) -> None:
        try:
            problems = self._pool.submit(find, self._requests, *args).result(self._start_timeout_s)
        except (WorkerError, TimeoutError) as error:  # a module ends its process, or does not come to an end: which?
            reason = f"they take longer than {self._start_timeout_s:g} s" if isinstance(error, TimeoutError) else error
            together = f"reward.functions: each can be loaded by itself, but not all in one worker: {reason}"
            problems = self._find_one_by_one(find, *args) or [together]
        if problems:
            raise ConfigError("\n".join(problems))

    def _find_one_by_one(self, find: Callable[..., list[str]], *args: Any) -> list[str]:
        problems: list[str] = []
        with WorkerPool(1, enter_folder, (self._folder,)) as pool:
            for request in self._requests:
                found, name = pool.submit(find, (request,), *args, timeout_s=self._start_timeout_s), repr(request[0])
                try:
                    problems += found.result()
                except WorkerTimeoutError:
                    limit = f"loading it takes longer than {self._start_timeout_s:g} s"
                    problems.append(f"reward.functions: {name}: {limit}; do slow work in the first call instead")
                except WorkerError as error:
                    remedy = "check that its module can be imported by itself"
                    problems.append(f"reward.functions: {name} cannot be loaded: {error}; {remedy}")
        return problems

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
    futures: tuple[Future[list[Outcome]], ...]

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return all(future.done() for future in self.futures)

    def result(self) -> tuple[Score, ...]:
        """One score per sample, in order.

        Raises:
            RewardError: a function failed, and reward.on_error is "error".
            ConfigError: a function cannot be called at all, whatever reward.on_error says.
        """
        parts: list[dict[str, Value]] = [{} for _ in self.samples]
        failures: list[list[str]] = [[] for _ in self.samples]
        for index, name in enumerate(self.names):
            for sample, outcome in enumerate(self._outcomes(index)):
                parts[sample][name] = 0.0 if isinstance(outcome, str) else outcome
                if isinstance(outcome, str):
                    failures[sample].append(outcome)
        return tuple(
            Score(self._total(part), part, tuple(failed)) for part, failed in zip(parts, failures, strict=True)
        )

    def _total(self, part: Mapping[str, Value]) -> float:
        weights = [function.weight for function in self.config.functions]
        values = zip(weights, (part[name] for name in self.names), strict=True)
        return sum((weight * value for weight, value in values if value is not None), 0.0)

    def _outcomes(self, index: int) -> list[Outcome]:
        """Each sample's value, or the message about what went wrong with it."""
        try:
            outcomes = self.futures[index].result()
        except ConfigError:
            raise
        except Exception as error:  # the user's function, or a column's class while the worker reads it
            reason = self._reason(error)
            if self.config.on_error == "error":
                raise self._error(index, self.samples, reason) from error
            return [self._message(index, [sample], reason) for sample in self.samples]
        checked: list[Outcome] = []
        for sample, outcome in zip(self.samples, outcomes, strict=True):
            problem = self._problem(index, outcome)
            if problem is not None and self.config.on_error == "error":
                raise self._error(index, [sample], problem)
            checked.append(outcome if problem is None else self._message(index, [sample], problem))
        return checked

    def _problem(self, index: int, outcome: Outcome) -> str | None:
        if outcome is None or isinstance(outcome, str):
            return outcome
        largest = abs(outcome) * max(1.0, abs(self.config.functions[index].weight))
        limit = f"{LARGEST_VALUE:g}, above which nothing can be learned"
        return f"returned {outcome:g}; with its weight that exceeds {limit}" if largest > LARGEST_VALUE else None

    def _reason(self, error: Exception) -> str:
        if isinstance(error, WorkerTimeoutError):
            return f"took more than {self.config.timeout_s:g} s; make it faster, or raise reward.timeout_s"
        if isinstance(error, WorkerError):
            return f"ended its process: {error}"
        known = isinstance(error, RollplexError)
        return str(error) if known else f"could not be given its columns: {type(error).__name__}: {error}"

    def _message(self, index: int, samples: Sequence[Sample], reason: str) -> str:
        name, function = self.names[index], self.config.functions[index]
        which = repr(name) if name == function.name else f"{name!r} ({function.function})"
        who = f"samples {', '.join(str(sample.sample) for sample in samples)}"
        if len(samples) == 1:
            text = samples[0].text
            shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
            who = f"sample {samples[0].sample} ({shown!r})"
        return f"reward function {which}, {self.prompt.source}, {who}: {reason}"

    def _error(self, index: int, samples: Sequence[Sample], reason: str) -> RewardError:
        remedy = 'mend the function, or set reward.on_error = "zero" to count such samples as 0'
        return RewardError(f"{self._message(index, samples, reason)}; {remedy}")


def _unique_names(functions: Sequence[RewardFunction]) -> tuple[str, ...]:
    names: list[str] = []
    for function in functions:
        name, repeat = function.name, 1
        while name in names or name in _METRICS:
            repeat += 1
            name = f"{function.name}_{repeat}"
        names.append(name)
    return tuple(names)
