"""What a run leaves behind, and how it survives being killed.

    DIRECTORY/
      config.toml         the resolved recipe
      metrics.jsonl       one object a line: step, kind (train or eval), numbers
      samples.jsonl       every sample with its rewards
      bad_rows.jsonl      rows of the data that were left out
      tensorboard/        the same numbers as events
      checkpoints/        step-000010/ ...: whole, or not there
      lock                held by the process that writes

A checkpoint is written under a hidden name, flushed to the disk, and renamed; a manifest of file sizes, written last, tells
a whole one from a damaged one. After a crash, lines that belong to steps after the checkpoint are cut off. This file knows
no tensor and no model.
"""

import fcntl
import json
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import tomli_w

from rollplex.config import Config, load_config
from rollplex.errors import ConfigError

CONFIG, METRICS, SAMPLES, BAD_ROWS = "config.toml", "metrics.jsonl", "samples.jsonl", "bad_rows.jsonl"
CHECKPOINTS, TENSORBOARD, LOCK, MANIFEST = "checkpoints", "tensorboard", "lock", "manifest.json"
_OWN_NAMES = {CONFIG, METRICS, SAMPLES, BAD_ROWS, CHECKPOINTS, TENSORBOARD, LOCK}
FREE_TO_CHANGE = ("run", "eval", "data.num_workers", "data.prefetch_steps", "data.eval", "reward.num_workers",
                  "reward.timeout_s", "train.steps")  # fmt: skip
"""Fields, and whole sections, that may differ when a run goes on: they do not enter a step's arithmetic.

run.seed is the exception, see `_changes`. train.steps extends a run; a schedule that decays then decays over more steps."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: `step` steps are done."""

    step: int
    path: Path


class RunDirectory:
    """A run's files, for the one process that writes them."""

    def __init__(self, path: Path, config: Config) -> None:
        self.path = path
        self._config = config
        self._lock = (path / LOCK).open("w")
        self._events: Any = None
        self._purge_step: int | None = None

    @classmethod
    def open(cls, path: str | Path, config: Config, resume: bool) -> Self:
        """Make the directory, or take up the run in it.

        Raises:
            ConfigError: it cannot be written, is in use, is no run directory, holds a run that must not be resumed, or
                holds a run of another recipe.
        """
        directory = Path(path)
        _make_writable(directory)
        run = cls(directory, config)
        try:
            run._take_lock()
            run._check(resume)
            if not (directory / CONFIG).exists() or resume:
                _write_whole(directory / CONFIG, tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))
            run._clean_leftovers()
        except BaseException:
            run.close()
            raise
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory."""
        if self._events is not None:
            self._events.close()
        self._lock.close()

    # ---- checkpoints

    def newest_checkpoint(self) -> Checkpoint | None:
        """The newest whole checkpoint; a damaged one is passed over with a warning."""
        for checkpoint in reversed(self._checkpoints()):
            damage = _damage(checkpoint.path)
            if damage is None:
                return checkpoint
            warnings.warn(f"checkpoint {checkpoint.path} is damaged ({damage}); using an older one", stacklevel=2)
        return None

    @contextmanager
    def new_checkpoint(self, step: int) -> Iterator[Path]:
        """A folder to write a checkpoint into; it becomes one, all at once, when the body has ended well."""
        parent = self.path / CHECKPOINTS
        parent.mkdir(exist_ok=True)
        final, hidden = parent / f"step-{step:06d}", parent / f".writing-{step:06d}"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        yield hidden
        files = sorted(file for file in hidden.rglob("*") if file.is_file())
        sizes = {str(file.relative_to(hidden)): file.stat().st_size for file in files}
        (hidden / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
        for entry in [*files, hidden / MANIFEST, *(d for d in hidden.rglob("*") if d.is_dir()), hidden]:
            _flush(entry)
        if final.exists():  # damaged, or the run went on from an older one
            self._delete(final)
        hidden.rename(final)
        _flush(parent)
        for old in self._checkpoints()[: -self._config.run.keep_checkpoints]:
            self._delete(old.path)

    def rewind(self, step: int) -> None:
        """Cut the logs back to what belongs to the first `step` steps."""
        self._purge_step = step + 1
        for name in (METRICS, SAMPLES):
            path = self.path / name
            if path.exists():
                _keep_lines(path, lambda row: int(row["step"]) <= step and step > 0)

    # ---- logs

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Append one line of metrics, and the same numbers as TensorBoard events."""
        self._append(METRICS, [{"step": step, "kind": kind, **values}])
        if self._config.run.tensorboard:
            events = self._tensorboard()
            for name, value in values.items():
                events.add_scalar(name if name.startswith(kind) else f"{kind}/{name}", value, step)
            events.flush()

    def log_samples(self, step: int, rows: Iterable[Mapping[str, object]]) -> None:
        """Append one line per sample."""
        self._append(SAMPLES, [{"step": step, **row} for row in rows])

    def log_bad_rows(self, split: str, rows: Iterable[tuple[str, str]]) -> None:
        """List the rows that were left out, as (source, reason)."""
        path = self.path / BAD_ROWS
        if path.exists():
            _keep_lines(path, lambda row: row["split"] != split)
        self._append(BAD_ROWS, [{"split": split, "source": source, "reason": reason} for source, reason in rows])

    def describe(self) -> list[str]:
        """Where what is, for the end of a run."""
        entries = {METRICS: "metrics", SAMPLES: "samples", TENSORBOARD: "TensorBoard events", BAD_ROWS: "rows left out"}
        lines = [f"{label}: {self.path / name}" for name, label in entries.items() if (self.path / name).exists()]
        newest = self.newest_checkpoint()
        return [*lines, f"checkpoint: {newest.path}"] if newest else lines

    def _append(self, name: str, rows: Iterable[Mapping[str, object]]) -> None:
        text = "".join(json.dumps(_finite(row), ensure_ascii=False) + "\n" for row in rows)
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def _tensorboard(self) -> Any:
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and brings torch

            self._events = SummaryWriter(str(self.path / TENSORBOARD), purge_step=self._purge_step)
        return self._events

    # ---- opening

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"run.directory = {str(self.path)!r}: another process is writing to it; wait for it, or use another directory"
            ) from error

    def _check(self, resume: bool) -> None:
        foreign = sorted(entry.name for entry in self.path.iterdir() if entry.name not in _OWN_NAMES)
        if foreign and not (self.path / CONFIG).exists():
            raise ConfigError(
                f"run.directory = {str(self.path)!r}: holds {foreign[0]!r} and is no run directory; use an empty one"
            )
        if not self._checkpoints():
            return
        if not resume:
            raise ConfigError(
                f"run.directory = {str(self.path)!r}: holds a run with checkpoints; use another directory, "
                "or run.resume = true to go on with it"
            )
        changes = self._changes()
        if changes:
            raise ConfigError(
                f"run.directory = {str(self.path)!r}: holds a run of another recipe: {'; '.join(changes)}; "
                "use another directory, or the same values"
            )

    def _changes(self) -> list[str]:
        """Fields of the stored recipe that enter a step's arithmetic and have another value now."""
        stored = _flat(load_config(self.path / CONFIG).model_dump(mode="json"))
        present = _flat(self._config.model_dump(mode="json"))
        return [
            f"{name} was {stored.get(name)!r} and is {value!r}"
            for name, value in present.items()
            if stored.get(name) != value and (name == "run.seed" or not name.startswith(FREE_TO_CHANGE))
        ]

    def _checkpoints(self) -> list[Checkpoint]:
        folder = self.path / CHECKPOINTS
        names = sorted(entry.name for entry in folder.glob("step-*")) if folder.is_dir() else []
        return sorted((Checkpoint(int(name[5:]), folder / name) for name in names if name[5:].isdigit()), key=_step_of)

    def _clean_leftovers(self) -> None:
        for leftover in (self.path / CHECKPOINTS).glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _delete(self, checkpoint: Path) -> None:
        """By renaming first: a crash in between leaves nothing that looks like a checkpoint."""
        hidden = checkpoint.with_name(f".deleting-{checkpoint.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        checkpoint.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _step_of(checkpoint: Checkpoint) -> int:
    return checkpoint.step


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / LOCK
        with probe.open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"run.directory = {str(directory)!r}: cannot be written ({error.strerror}); use another directory"
        ) from error


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint's files, or None."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{MANIFEST} is missing or broken"
    for name, size in sizes.items():
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
    return None


def _keep_lines(path: Path, wanted: Any) -> None:
    """Rewrite a JSONL file with its whole lines that are wanted, all at once."""
    kept = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:  # half-written when the run was killed
                continue
            if line.endswith("\n") and wanted(row):
                kept.append(line)
    _write_whole(path, "".join(kept))


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    _flush(temporary)
    temporary.rename(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(row: Mapping[str, object]) -> dict[str, object]:
    """JSON has no NaN and no infinity: both become null."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat
