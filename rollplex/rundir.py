"""What a run leaves behind, and how it survives being killed at any moment.

    DIRECTORY/
      config.toml         the resolved recipe
      metrics.jsonl       one object a line: step, kind (train or eval), numbers
      samples.jsonl       every response with its rewards
      bad_rows.jsonl      rows of the data that were left out
      tensorboard/        the metrics again, as events
      checkpoints/        step-000010/ ...: whole, or not there
      rollplex.lock       held by the process that writes; marks the directory as a run's

A checkpoint is written under a hidden name, flushed to the disk, and renamed; a manifest of file sizes, written last,
tells a whole one from a damaged one. After a crash, lines that belong to steps after the checkpoint are cut off. This
file knows no tensor and no model.
"""

import errno
import fcntl
import json
import logging
import math
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import tomli_w
from safetensors import SafetensorError

from rollplex.config import Config, parse_config
from rollplex.errors import CheckpointError, ConfigError

CONFIG, METRICS, SAMPLES, BAD_ROWS = "config.toml", "metrics.jsonl", "samples.jsonl", "bad_rows.jsonl"
TENSORBOARD, CHECKPOINTS, MANIFEST, LOCK = "tensorboard", "checkpoints", "manifest.json", "rollplex.lock"
MIN_FREE_BYTES = 64 * 2**20
"""Room for logs; a run that starts with less ends at its first checkpoint."""
FREE_TO_CHANGE = frozenset((
    "run", "eval", "data.eval", "data.num_workers", "data.prefetch_steps", "data.check_images", "reward.num_workers",
    "reward.timeout_s", "reward.on_error", "rollout.max_batch_samples", "rollout.max_batch_tokens",
    "rollout.block_size", "rollout.num_blocks", "train.steps", "train.microbatch_tokens", "train.optimizer_gpu_gib",
    "train.logprob_chunk_tokens", "train.recompute",
))  # fmt: skip
"""Fields and whole sections that may change when a run goes on, because they leave the mathematics as it was: where and
how long it runs, and how much it does at a time (a run that was short of memory can go on with smaller batches; results
then agree to rounding). `run.seed` is not among them, although `run` is."""
_HIDDEN = (".writing-", ".replaced-", ".deleting-")
_LOG_SUFFIXES = {".log", ".out", ".err"}
"""A job's own output is often sent into its run directory before the run begins."""
_LINE_BREAKS = str.maketrans({"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"})
"""JSON allows them in strings, but str.splitlines would break a row at them."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's place: `step` steps are done."""

    step: int
    path: Path


class RunDirectory:
    """A run's files, in the hands of the one process that writes them."""

    def __init__(self, path: Path, config: Config, lock: IO[str]) -> None:
        """Use `open`: it checks the directory and takes the lock."""
        self.path = path
        self._config = config
        self._lock = lock
        self._events: Any = None
        self._purge_step: int | None = None
        self._reported = set[Path]()

    @classmethod
    def open(cls, path: str | Path, config: Config, resume: bool) -> Self:
        """Make the directory, or take up the run that it holds.

        Raises:
            ConfigError: it cannot be written, is short of space, is in use, holds other files, holds a run that must
                not be resumed, or a run of another recipe.
            CheckpointError: it holds checkpoints, and every one is damaged.
        """
        directory = Path(path)
        with _explained(directory):
            _make(directory)
            lock = _take_lock(directory)
            try:
                run = cls(directory, config, lock)
                run._clean_leftovers()
                run._check(resume)
                _replace(directory / CONFIG, [_to_toml(config)])
            except BaseException:
                lock.close()
                raise
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write out what is buffered, and let other processes have the directory."""
        if self._events is not None:
            self._events.close()
        self._lock.close()

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint; damaged ones are passed over with a warning.

        Raises:
            CheckpointError: there are checkpoints, and every one is damaged.
        """
        checkpoints = self._checkpoints()
        damages = list[str]()
        for checkpoint in reversed(checkpoints):
            damage = _damage(checkpoint.path)
            if damage is None:
                return checkpoint
            damages.append(f"{checkpoint.path} is damaged: {damage}")
            if checkpoint.path not in self._reported and len(checkpoints) > 1:
                self._reported.add(checkpoint.path)
                logger.warning("checkpoint %s; looking for an older one", damages[-1])
        if damages:
            raise CheckpointError(
                f"no whole checkpoint: {'; '.join(damages)}. Restore the files, or remove "
                f"{self.path / CHECKPOINTS} to begin anew"
            )
        return None

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A directory to write a checkpoint into; it becomes one, all at once, when the body ends without an error.

        Then the oldest beyond run.keep_checkpoints are removed.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints are as they were.
        """
        final = self.path / CHECKPOINTS / f"step-{step:06d}"
        writing = final.with_name(f".writing-{final.name}")
        try:
            final.parent.mkdir(exist_ok=True)
            _remove(writing)
            writing.mkdir()
            yield writing
            _seal(writing)
            self._flush_logs()
            _publish(writing, final)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{final} could not be written: {error}; earlier checkpoints are untouched. "
                "Make room or mend the cause, then start the run again: it goes on from the newest"
            ) from error
        finally:
            _remove(writing)
        self._prune()

    def rewind(self, step: int) -> None:
        """Make the logs say what they said when `step` steps were done; to be called once, before anything is logged.

        There is no checkpoint of step 0: a run that begins there logs everything again.
        """
        self._purge_step = step + 1 if step else 0
        for checkpoint in self._checkpoints():
            if checkpoint.step > step:
                aside = checkpoint.path.with_name(f"damaged-{checkpoint.path.name}")
                _remove(aside)
                checkpoint.path.rename(aside)
                logger.warning("checkpoint %s is now %s; it can be removed", checkpoint.path, aside.name)
        for name in (METRICS, SAMPLES):
            _keep_rows(self.path / name, lambda row: step > 0 and row["step"] <= step)

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Append one row of metrics ("train" or "eval"), and the same numbers as TensorBoard events."""
        self._append(METRICS, [{"step": step, "kind": kind, **values}])
        if self._config.run.tensorboard:
            events = self._tensorboard()
            for name, value in values.items():
                events.add_scalar(name if name.startswith(f"{kind}/") else f"{kind}/{name}", float(value), step)
            events.flush()

    def log_samples(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one row per sample."""
        self._append(SAMPLES, ({"step": step, **row} for row in rows))

    def log_bad_rows(self, split: str, rows: Iterable[tuple[str, str]]) -> None:
        """List the rows of a split that were left out, as (source, reason), in place of its earlier list."""
        _keep_rows(self.path / BAD_ROWS, lambda row: row["split"] != split)
        self._append(BAD_ROWS, ({"split": split, "source": source, "reason": reason} for source, reason in rows))

    def describe(self) -> list[str]:
        """Where what is, for the end of a run."""
        entries = {METRICS: "metrics", SAMPLES: "samples", TENSORBOARD: "TensorBoard", BAD_ROWS: "rows left out"}
        lines = [f"{label}: {self.path / name}" for name, label in entries.items() if (self.path / name).exists()]
        newest = self.newest_checkpoint()
        return [*lines, f"checkpoint: {newest.path}"] if newest else lines

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        path = self.path / name
        try:
            with path.open("ab") as file:
                file.write(b"".join(_encode(row) for row in rows))
        except OSError as error:
            raise CheckpointError(
                f"{path} could not be written: {error.strerror}; mend that, then start the run again: "
                "it goes on from the newest checkpoint"
            ) from error

    def _tensorboard(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds, and brings torch

            self._events = SummaryWriter(str(self.path / TENSORBOARD), purge_step=self._purge_step)
        return self._events

    def _flush_logs(self) -> None:
        """What a checkpoint presupposes is on the disk before it."""
        for name in (METRICS, SAMPLES):
            if (self.path / name).exists():
                _flush(self.path / name)
        _flush(self.path)

    def _checkpoints(self) -> list[Checkpoint]:
        folder = self.path / CHECKPOINTS
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{6,}", name))
        return [Checkpoint(step, folder / f"step-{step:06d}") for step in steps]

    def _prune(self) -> None:
        whole = [checkpoint.path for checkpoint in self._checkpoints() if _damage(checkpoint.path) is None]
        for path in whole[: -self._config.run.keep_checkpoints]:
            hidden = path.with_name(f".deleting-{path.name}")
            path.rename(hidden)
            _remove(hidden)

    def _clean_leftovers(self) -> None:
        """Undo or finish what a killed process had begun."""
        for leftover in sorted((self.path / CHECKPOINTS).glob(".*")):
            final = leftover.with_name(leftover.name.removeprefix(".replaced-"))
            if final != leftover and not final.exists():
                leftover.rename(final)
            elif leftover.name.startswith(_HIDDEN):
                _remove(leftover)

    def _check(self, resume: bool) -> None:
        newest = self.newest_checkpoint() if resume else None
        if not resume and self._checkpoints():
            raise _refusal(self.path, "it holds a run with checkpoints",
                           "use another directory, or run.resume=true to go on with that run")  # fmt: skip
        sizes = [entry.stat().st_size for entry in newest.path.rglob("*")] if newest else []
        wanted = MIN_FREE_BYTES + sum(sizes)
        free = shutil.disk_usage(self.path).free
        if free < wanted:
            raise _refusal(self.path, f"{free / 1e9:.2f} GB are free there, and {wanted / 1e9:.2f} GB are needed",
                           "make room, or use a directory on another disk")  # fmt: skip
        if newest:
            self._check_recipe()

    def _check_recipe(self) -> None:
        path = self.path / CONFIG
        try:
            stored = parse_config(tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise _refusal(self.path, f"its {CONFIG} cannot be read: {error}",
                           "mend that file, or use another directory") from error  # fmt: skip
        changes = [f"  {name}: was {old!r}, is {new!r}" for name, old, new in _changes(stored, self._config)]
        if changes:
            listed = "\n".join(changes)
            raise _refusal(
                self.path, f"it holds a run of another recipe:\n{listed}\n",
                f"use another directory, or the old values, or, if both mean the same, correct {path}",
            )  # fmt: skip


def _make(directory: Path) -> None:
    """Make the directory and mark it as a run's; refuse one with files that are no run's."""
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(entry.name for entry in directory.iterdir())
    foreign = [name for name in names if not name.startswith(".") and Path(name).suffix not in _LOG_SUFFIXES]
    if foreign and LOCK not in names:
        raise _refusal(directory, f"it holds {foreign[0]!r} and is no run directory", "use an empty or a new one")
    (directory / LOCK).touch()


def _take_lock(directory: Path) -> IO[str]:
    """The open lock file. The kernel lets go of it when the process ends, however it ends."""
    lock = (directory / LOCK).open("r+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with lock:
            holder = lock.read().strip() or "another process"
        raise _refusal(directory, f"it is in use by {holder}", "wait for that run, or use another directory") from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s): start no second run in it", directory, error.strerror)
    lock.truncate()
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


@contextmanager
def _explained(directory: Path) -> Iterator[None]:
    """Turn the system's errors into one that names the field."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            why = f"{error.filename} is a file, or inside of one, not a directory"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "no space is left there"
        else:
            why = f"it cannot be used ({error.strerror})"
        raise _refusal(directory, why, "use another directory, or mend that") from error


def _refusal(directory: Path, why: str, remedy: str) -> ConfigError:
    return ConfigError(f"run.directory = {str(directory)!r}: {why}; {remedy}")


def _to_toml(config: Config) -> bytes:
    """The recipe as TOML that reads back as an equal one."""
    try:
        text = tomli_w.dumps(config.model_dump(exclude_none=True))
        if parse_config(tomllib.loads(text)) == config:
            return text.encode("utf-8")
    except (TypeError, ValueError):
        pass  # a value that TOML does not have
    raise ConfigError(
        "reward.functions: kwargs hold a value that TOML cannot hold, so that the recipe cannot be stored; "
        "use strings, numbers, booleans, dates, lists and tables"
    )


def _changes(old: Config, new: Config) -> Iterator[tuple[str, Any, Any]]:
    """Fields that enter the mathematics and differ: name, old value, new value."""
    for section in type(new).model_fields:
        before, after = getattr(old, section), getattr(new, section)
        for field in type(after).model_fields:
            name, values = f"{section}.{field}", (getattr(before, field), getattr(after, field))
            free = name != "run.seed" and (section in FREE_TO_CHANGE or name in FREE_TO_CHANGE)
            if values[0] != values[1] and not free:
                yield name, *values


def _seal(directory: Path) -> None:
    """Flush a checkpoint's files to the disk, then its manifest, then its directories."""
    entries = sorted(directory.rglob("*"))
    files = [entry for entry in entries if entry.is_file()]
    for file in files:
        _flush(file)
    sizes = {file.relative_to(directory).as_posix(): file.stat().st_size for file in files}
    (directory / MANIFEST).write_text(json.dumps({"files": sizes}, indent=1), encoding="utf-8")
    for entry in (directory / MANIFEST, *(entry for entry in entries if entry.is_dir()), directory):
        _flush(entry)


def _publish(writing: Path, final: Path) -> None:
    """Give a sealed checkpoint its name; at every moment the old or the new one can be found (see _clean_leftovers)."""
    replaced = final.with_name(f".replaced-{final.name}")
    if final.exists():
        final.rename(replaced)
    writing.rename(final)
    _flush(final.parent)
    _remove(replaced)


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        sizes = dict(json.loads((checkpoint / MANIFEST).read_bytes())["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, TypeError, LookupError):
        return f"{MANIFEST} is not readable"
    for name, size in sizes.items():
        try:
            found = (checkpoint / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def _remove(directory: Path) -> None:
    """What cannot be removed now (a file server may hold on to open files) is removed when the run is opened again."""
    shutil.rmtree(directory, ignore_errors=True)


def _keep_rows(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Cut a JSONL file down to its whole rows that are wanted, all at once; it may be larger than memory."""

    def keeps(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and wanted(json.loads(line))
        except (ValueError, TypeError, LookupError):  # half-written when the process was killed
            return False

    if path.exists():
        with path.open("rb") as file:
            if all(keeps(line) for line in file):
                return
            file.seek(0)
            _replace(path, (line for line in file if keeps(line)))


def _replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file all at once: readers, and whoever comes after a crash, see the old one or the new one."""
    new = path.with_name(f".{path.name}.new")
    with new.open("wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(row: Mapping[str, object]) -> bytes:
    text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, default=str).translate(_LINE_BREAKS)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes its JSON escape


def _plain(value: object) -> object:
    """JSON has no NaN and no infinity: both become null."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
