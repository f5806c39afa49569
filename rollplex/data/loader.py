"""The data set, checked once, and its prompts in batches, prepared ahead of need by worker processes.

    load_dataset   rows -> examine -> distinct image files -> measure -> Dataset of the good rows
    PromptLoader   batch k of a run: the same prompts whoever asks, whenever; its whole state is k
    eval_prompts   the first rows in file order, once

Pixels are made when a batch comes into the prefetch window, not at ingestion. This file knows no model and no step.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rollplex.config import Config
from rollplex.data.prompts import FileFinding, Finding, PromptSpec, examine, make_prompt, measure_files, parse
from rollplex.data.rows import RawRow, Rows, open_rows
from rollplex.errors import ConfigError, DataError, WorkerError
from rollplex.pool import WorkerPool
from rollplex.types import Prompt

_CHUNK = 32
"""Rows or files of one task: far more work than sending it costs, few enough for every worker to have some."""
_CHUNKS_AHEAD = 3
"""Tasks per worker in flight, so that none waits and few rows are in memory."""

Progress = Callable[[int, int], None]
"""Called with (done, total) rows and image files; the total grows as rows name files."""
Item = TypeVar("Item")
Found = TypeVar("Found", Finding, FileFinding)


@dataclass(frozen=True)
class BadRow:
    """A row that was left out: "file, row N", and why."""

    source: str
    reason: str


@dataclass(frozen=True, eq=False)
class Dataset:
    """The good rows of one data set, still as they are stored.

    token_counts: int64 [len], length of each prompt after placeholder expansion.
    bad_rows: those left out, in file order (empty unless data.on_bad_row is "skip").
    """

    spec: PromptSpec
    token_counts: npt.NDArray[np.int64]
    bad_rows: tuple[BadRow, ...]
    _rows: Rows
    _good: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self._good)

    @property
    def columns(self) -> tuple[str, ...]:
        """The first row's columns, as reward functions get them."""
        return tuple(parse(self.spec, self.row(0)).columns)

    def row(self, index: int) -> RawRow:
        """The stored row at this index among the good ones."""
        return self._rows[int(self._good[index])]


def load_dataset(
    config: Config, pool: WorkerPool, split: Literal["train", "eval"] = "train", progress: Progress | None = None
) -> Dataset:
    """Find the rows of `data.train` or `data.eval`, and check every one of them in worker processes.

    Raises:
        ConfigError: there is nothing at the location, or no location.
        DataError: a row is bad (data.on_bad_row = "error"), there is no row, or none is good.
    """
    field, location = f"data.{split}", getattr(config.data, split)
    if location is None:
        raise ConfigError(f"{field} is not set; set it to a file of prompts")
    rows = open_rows(location, field)
    if len(rows) == 0:
        raise DataError(f"{location}: there are no rows")
    spec = PromptSpec.from_config(config)
    ingestion = _Ingestion(spec, pool, config.data.num_workers, config.data.on_bad_row == "error", progress)
    reasons, tokens = ingestion.run(rows)
    bad = tuple(BadRow(rows[index].source, reason) for index, reason in sorted(reasons.items()))
    good = np.array([index for index in range(len(rows)) if index not in reasons], dtype=np.int64)
    if len(good) == 0:
        raise DataError(f"{location}: no good row is left of {len(rows)}; the first: {bad[0].source}: {bad[0].reason}")
    return Dataset(spec, tokens[good], bad, rows, good)


@dataclass
class _Ingestion:
    """One pass over all rows: first the rows, then each distinct image file, then the lengths."""

    spec: PromptSpec
    pool: WorkerPool
    num_workers: int
    stop_at_first: bool
    progress: Progress | None
    done: int = 0
    total: int = 0

    def run(self, rows: Rows) -> tuple[dict[int, str], npt.NDArray[np.int64]]:
        """Reasons of bad rows by index, and tokens of every row."""
        self.total = len(rows)
        files: dict[str, int] = {}
        files_of: list[tuple[int, ...]] = []
        tokens = np.zeros(len(rows), dtype=np.int64)
        reasons: dict[int, str] = {}
        for index, finding in enumerate(self._map(examine, (rows[i] for i in range(len(rows))), Finding)):
            files_of.append(tuple(files.setdefault(path, len(files)) for path in finding.files))
            tokens[index] = finding.tokens
            if finding.reason:
                self._refuse(rows, index, finding.reason, reasons)
            self._advance(len(rows) + len(files))
        measured = []
        for file_finding in self._map(measure_files, iter(files), FileFinding):
            measured.append(file_finding)
            self._advance(self.total)
        paths = list(files)
        for index, numbers in enumerate(files_of):
            tokens[index] += sum(measured[number].tokens for number in numbers)
            reason = reasons.get(index) or self._reason(paths, measured, numbers, int(tokens[index]))
            if reason and index not in reasons:
                self._refuse(rows, index, reason, reasons)
        return reasons, tokens

    def _reason(self, paths: list[str], measured: list[FileFinding], numbers: Sequence[int], tokens: int) -> str:
        for number in numbers:
            if measured[number].reason:
                return f"image {paths[number]!r}: {measured[number].reason}"
        if tokens > self.spec.max_prompt_tokens:
            return f"the prompt has {tokens} tokens, more than data.max_prompt_tokens = {self.spec.max_prompt_tokens}"
        return ""

    def _refuse(self, rows: Rows, index: int, reason: str, reasons: dict[int, str]) -> None:
        if self.stop_at_first:
            raise DataError(
                f'{rows[index].source}: {reason} (data.on_bad_row = "skip" leaves bad rows out and lists them)'
            )
        reasons[index] = reason

    def _advance(self, total: int) -> None:
        self.done += 1
        self.total = total
        if self.progress is not None:
            self.progress(self.done, self.total)

    def _map(
        self,
        function: Callable[[PromptSpec, Sequence[Item]], list[Found]],
        items: Iterator[Item],
        failed: Callable[[str], Found],
    ) -> Iterator[Found]:
        """Findings in the order of `items`, from workers that are a few chunks ahead."""
        window: deque[tuple[list[Item], Future[list[Found]] | None]] = deque()
        for chunk in _chunks(items, _CHUNK):
            window.append((chunk, self._submit(function, chunk)))
            if len(window) >= _CHUNKS_AHEAD * self.num_workers:
                yield from self._collect(function, failed, *window.popleft())
        for waiting in window:
            yield from self._collect(function, failed, *waiting)

    def _submit(
        self, function: Callable[[PromptSpec, Sequence[Item]], list[Found]], chunk: list[Item]
    ) -> Future[list[Found]] | None:
        try:
            return self.pool.submit(function, self.spec, chunk)
        except WorkerError:
            return None  # something in the chunk cannot be sent to another process

    def _collect(
        self,
        function: Callable[[PromptSpec, Sequence[Item]], list[Found]],
        failed: Callable[[str], Found],
        chunk: list[Item],
        future: Future[list[Found]] | None,
    ) -> list[Found]:
        """A chunk's findings; where it took its worker down, or cannot be sent, one by one to find the culprit."""
        try:
            if future is not None:
                return future.result()
        except WorkerError:
            pass
        findings = []
        for item in chunk:
            try:
                findings.extend(self.pool.submit(function, self.spec, [item]).result())
            except WorkerError as error:
                findings.append(failed(str(error)))
        return findings


class PromptLoader:
    """An endless iterator over batches of exactly `batch_size` prompts.

    Epochs follow each other without a gap, each in its own seeded order; prompt number i of a run has
    uid = epoch * len(dataset) + row = i's place, so equal arguments give equal batches, and `start_batch` resumes.

    pool: worker processes that decode and process media, `prefetch_steps` batches ahead.

    Raises:
        ConfigError: the data set is smaller than a batch.
        DataError: while iterating: a row that was good at ingestion cannot be processed any more.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int,
        shuffle: bool,
        pool: WorkerPool,
        prefetch_steps: int = 2,
        start_batch: int = 0,
    ) -> None:
        if len(dataset) < batch_size:
            raise ConfigError(
                f"train.prompts_per_step = {batch_size}: the data set has only {len(dataset)} good rows; "
                "lower it, or give more data"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._pool = pool
        self._prefetch_steps = prefetch_steps
        self._position = start_batch
        self._ahead: deque[list[tuple[str, Future[Prompt]]]] = deque()
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def position(self) -> int:
        """Batches given out since the run's beginning: give it as `start_batch` to go on from here."""
        return self._position

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Prompt, ...]:
        while len(self._ahead) < 1 + self._prefetch_steps:
            self._ahead.append(self._submit(self._position + len(self._ahead)))
        batch = tuple(_result(source, future) for source, future in self._ahead[0])
        self._ahead.popleft()
        self._position += 1
        return batch

    def _submit(self, batch: int) -> list[tuple[str, Future[Prompt]]]:
        first = batch * self._batch_size
        return [self._submit_prompt(number) for number in range(first, first + self._batch_size)]

    def _submit_prompt(self, number: int) -> tuple[str, Future[Prompt]]:
        epoch, place = divmod(number, len(self._dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = epoch_order(len(self._dataset), self._seed, epoch, self._shuffle)
        row = int(self._order[place])
        return _submit_row(self._dataset, row, epoch * len(self._dataset) + row, self._pool)


def eval_prompts(
    dataset: Dataset, pool: WorkerPool, batch_size: int, max_prompts: int | None = None
) -> Iterator[tuple[Prompt, ...]]:
    """The first `max_prompts` rows (all by default) in file order, once, in batches; the last may be shorter.

    One batch is prepared ahead of the one given out.
    """
    num_prompts = len(dataset) if max_prompts is None else min(max_prompts, len(dataset))
    ahead: deque[list[tuple[str, Future[Prompt]]]] = deque()
    for rows in _chunks(iter(range(num_prompts)), batch_size):
        ahead.append([_submit_row(dataset, row, row, pool) for row in rows])
        if len(ahead) > 1:
            yield tuple(_result(source, future) for source, future in ahead.popleft())
    for batch in ahead:
        yield tuple(_result(source, future) for source, future in batch)


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The order of rows in one epoch: int64 [num_rows], a function of the arguments alone.

    Sorts by raw random words, because numpy keeps the stream of its bit generators from version to version, but not
    the results of `Generator.permutation`: a run resumed after an upgrade goes on in the same order.
    """
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _submit_row(dataset: Dataset, row: int, uid: int, pool: WorkerPool) -> tuple[str, Future[Prompt]]:
    raw = dataset.row(row)
    return raw.source, pool.submit(make_prompt, dataset.spec, raw, uid)


def _result(source: str, future: Future[Prompt]) -> Prompt:
    try:
        return future.result()
    except WorkerError as error:
        raise WorkerError(f"{source}: {error}") from error


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    chunk = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
