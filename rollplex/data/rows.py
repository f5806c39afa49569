"""Where rows are, and how to get one: JSONL and JSON files, parquet files, and Python functions.

A row stays as it is stored (a line of a file, a slice of an Arrow table, an item of a sequence) until it is needed.
Parsing a JSON line happens in a worker process. This file knows no column.
"""

import glob
import importlib
import importlib.util
import itertools
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow
import pyarrow.parquet

from rollplex.errors import ConfigError, DataError

_BOM = b"\xef\xbb\xbf"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar")
_FORMATS = "JSONL (.jsonl, .json), parquet (.parquet), or module:function / file.py:function"


@dataclass(frozen=True)
class RawRow:
    """One row as it is stored.

    value: bytes of a JSON line, or the row itself (which may be something else than a mapping: checked later).
    source: "file, row N", N from 1; for JSONL the line's number.
    folder: where relative paths begin.
    problem: why the row could not even be fetched, or "".
    """

    value: Any
    source: str
    folder: str
    problem: str = ""


class Rows(Protocol):
    """A sequence of stored rows."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> RawRow: ...


def open_rows(location: str, field: str) -> Rows:
    """Find the rows at `location`: a file, a glob of files (in sorted order), `module:function` or `file.py:function`.

    field: the recipe's field that holds the location, for messages.

    Raises:
        ConfigError: nothing readable is there.
        DataError: a file is empty or broken as a whole.
    """
    if Path(location).is_file():
        return _open_file(Path(location), field)
    function = re.fullmatch(r"(.+\.py|[A-Za-z_][\w.]*):([A-Za-z_]\w*)", location)
    if function is not None:
        return _call(function[1], function[2], location, field)
    if Path(location).is_dir():
        raise ConfigError(f"{field} = {location!r} is a directory; name a file or a glob, such as {location}/*.parquet")
    paths = sorted(Path(path) for path in glob.glob(location, recursive=True) if Path(path).is_file())
    if not paths:
        raise ConfigError(f"{field} = {location!r}: no such file; give {_FORMATS}")
    return _Concatenation([_open_file(path, field) for path in paths])


def _open_file(path: Path, field: str) -> Rows:
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        raise ConfigError(f"{field} = {str(path)!r}: compressed files are not supported; decompress it first")
    if suffix not in (".jsonl", ".json", ".parquet"):
        raise ConfigError(f"{field} = {str(path)!r}: unknown format {suffix!r}; give {_FORMATS}")
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        if suffix == ".parquet":
            return _ParquetRows(path)
        return _JsonArray(path) if suffix == ".json" and _begins_array(path) else _JsonLines(path)
    except OSError as error:  # pyarrow's own errors for a broken file are OSError too
        raise DataError(f"{path}: the file cannot be read: {error}") from error


class _Concatenation:
    """Several files, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0, *itertools.accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> RawRow:
        part = bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]


class _JsonLines:
    """A JSONL file, as the byte ranges of its lines; blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = str(path.parent)
        offsets, numbers, start = [], [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.removeprefix(_BOM if number == 1 else b"").strip():
                    offsets.append(start)
                    numbers.append(number)
                start += len(line)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._numbers = np.array(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> RawRow:
        source = f"{self._path}, row {self._numbers[index]}"
        try:
            with self._path.open("rb") as file:
                file.seek(int(self._offsets[index]))
                return RawRow(file.readline().removeprefix(_BOM), source, self._folder)
        except OSError as error:
            return RawRow(None, source, self._folder, f"the file cannot be read any more: {error.strerror}")


class _JsonArray:
    """A .json file that holds one array of rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._rows: list[Any] = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise DataError(f"{path}: not a valid JSON array: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> RawRow:
        return RawRow(self._rows[index], f"{self._path}, row {index + 1}", str(self._path.parent))


class _ParquetRows:
    """A parquet file, held as an Arrow table; images stay encoded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._table = pyarrow.parquet.ParquetFile(path).read()
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not a readable parquet file: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> RawRow:
        (row,) = self._table.slice(index, 1).to_pylist()
        return RawRow(row, f"{self._path}, row {index + 1}", str(self._path.parent))


class _SequenceRows:
    """Rows that a user's function returned: anything with a length and integer indices."""

    def __init__(self, rows: Any, location: str, folder: str) -> None:
        self._rows = rows
        self._location = location
        self._folder = folder

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> RawRow:
        source = f"{self._location}, row {index + 1}"
        try:
            row = self._rows[index]
            return RawRow(dict(row) if isinstance(row, Mapping) else row, source, self._folder)
        except Exception as error:  # the user's sequence may decode media itself
            return RawRow(None, source, self._folder, f"fetching the row failed: {error!r}")


def _begins_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(_BOM).lstrip().startswith(b"[")


def _call(origin: str, name: str, location: str, field: str) -> Rows:
    """Call a user's function and take its rows."""
    module = (
        _import_file(origin, location, field) if origin.endswith(".py") else _import_module(origin, location, field)
    )
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field} = {location!r}: {origin} has no function {name!r}")
    try:
        rows = function()
    except Exception as error:  # the user's code
        raise ConfigError(f"{field} = {location!r}: the function failed: {error!r}") from error
    indexable = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    if not indexable or isinstance(rows, (str, bytes, Mapping)):
        raise ConfigError(
            f"{field} = {location!r}: the function returned {type(rows).__name__}; return a sequence of rows, for "
            "example a list of dicts or one split of a datasets.Dataset"
        )
    folder = str(Path(origin).parent) if origin.endswith(".py") else "."
    return _SequenceRows(rows, location, folder)


def _import_module(origin: str, location: str, field: str) -> Any:
    try:
        return importlib.import_module(origin)
    except Exception as error:  # importing runs the user's code
        raise ConfigError(
            f"{field} = {location!r}: importing {origin} failed: {error!r}; name an installed module, or a file as "
            f"path/to/file.py:{location.rpartition(':')[2]}"
        ) from error


def _import_file(origin: str, location: str, field: str) -> Any:
    path = Path(origin)
    if not path.is_file():
        raise ConfigError(f"{field} = {location!r}: there is no file {origin}")
    name = "rollplex_user_rows_" + re.sub(r"\W", "_", str(path.resolve()))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs the user's code
        del sys.modules[name]
        raise ConfigError(f"{field} = {location!r}: running {origin} failed: {error!r}") from error
    return module
