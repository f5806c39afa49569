"""Weight files (safetensors): what a directory holds, and tensors read the simple way or as fast as the disk is.

    weight_files   directory -> per file its tensors, from headers that were checked against the files' sizes
    read_tensors   the simple way and the oracle: one tensor after the other through safetensors' own reader
    staged_rows    threads -> a few host buffers, used over and over -> device, as runs of a tensor's rows

             threads, preadv                    the caller's stream
    files -------------------> buffers (pinned) ------------------> buffer on the device -> rows -> whoever asked

So no second copy of the weights is in host memory. A file that is not whole is a CheckpointError that names it. Names
are only names here: this file knows no model.
"""

import json
import math
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollplex.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 2**20
"""What safetensors' own reader accepts."""
MAX_NAMES_IN_ERROR = 8
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool, "U8": torch.uint8,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
}  # fmt: skip
"""How safetensors' headers name the types that a checkpoint may hold by mistake or on purpose."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file; `start` is its first byte there."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_rows(self) -> int:
        """Entries of the first dimension."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class Rows:
    """Rows first..stop of a stored tensor."""

    tensor: StoredTensor
    first: int
    stop: int

    @property
    def start(self) -> int:
        """The first byte in the file."""
        return self.tensor.start + self.first * self.tensor.row_bytes

    @property
    def end(self) -> int:
        return self.tensor.start + self.stop * self.tensor.row_bytes


@dataclass(frozen=True)
class Staging:
    """How much is read at once: num_threads reads of up to buffer_bytes (more only for a single row that is larger)."""

    num_threads: int = 8
    buffer_bytes: int = 32 * 2**20
    spare_buffers: int = 4
    """Read, and waiting for the device or being copied there, while every thread reads."""


def weight_files(directory: Path) -> dict[Path, list[StoredTensor]]:
    """Every weight file of a checkpoint with its tensors, in the order in which they lie there; all files are whole."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: read_header(directory / SINGLE_FILE)}
    index = directory / INDEX_FILE
    if not index.is_file():
        patterns = ("*.bin", "*.pt", "*.pth", "*.safetensors")
        found = sorted(path.name for pattern in patterns for path in directory.glob(pattern))
        what = (
            f"only {listed(found)}; convert to safetensors with transformers' save_pretrained"
            if found
            else "no weights"
        )
        raise CheckpointError(f"{directory} has no {SINGLE_FILE} and no {INDEX_FILE}: {what}")
    names = _indexed_names(index)
    files = {directory / file: read_header(directory / file) for file in sorted(names)}
    for path, tensors in files.items():
        if differing := sorted(set(names[path.name]) ^ {tensor.name for tensor in tensors}):
            raise CheckpointError(f"{index} and {path.name} disagree on which tensors it holds: {listed(differing)}")
    return files


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a weight file, in the order in which they lie there.

    Raises:
        CheckpointError: the file is cut short, or is no safetensors file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"its header would be {length} bytes long, and the file has {size}")
            entries = json.loads(file.read(length))
        return _tensors(path, entries, 8 + length, size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}; fetch it again") from error


def read_tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, one after the other."""
    with safe_open(path, framework="pt") as file:
        for name in names:
            try:
                tensor = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{name} in {path} cannot be read: {error}; fetch the file again") from error
            yield name, tensor


def staged_rows(
    tensors: Iterable[StoredTensor], device: torch.device, staging: Staging
) -> Generator[tuple[Rows, Tensor], None, None]:
    """Every row of the tensors, on the device and in the stored dtype; valid until the next is asked for.

    Work on them belongs on the device's current stream. Close the generator when leaving it early.
    """
    on_device: Tensor | None = None
    with closing(read_batches(tensors, staging, pinned=device.type == "cuda")) as batches:
        for batch, buffer in batches:
            held = buffer.bytes[: batch[-1].end - batch[0].start]
            if buffer.copied is not None:
                if on_device is None:
                    on_device = torch.empty_like(buffer.bytes, device=device)
                held = on_device[: len(held)].copy_(held, non_blocking=True)
                buffer.copied.record(torch.cuda.current_stream(device))
            for rows in batch:
                yield rows, _as_rows(held[rows.start - batch[0].start : rows.end - batch[0].start], rows)


class Buffer:
    """Host memory that takes one batch after the other; pinned for a CUDA device, else pageable."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._num_bytes = num_bytes
        self.copied = torch.cuda.Event(blocking=True) if pinned else None
        """Recorded behind the copy to the device; the next read into this buffer waits for it."""

    def read(self, file: int, path: Path, start: int, end: int) -> None:
        """Fill the front of the buffer with bytes start..end of a file."""
        if not len(self.bytes):  # here, because pinning takes as long as reading: threads do it side by side
            self.bytes = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self.copied is not None)
        if self.copied is not None:
            self.copied.synchronize()
        into = memoryview(self.bytes.numpy())[: end - start]  # type: ignore[arg-type]
        done = 0
        while done < len(into):
            try:
                count = os.preadv(file, [into[done:]], start + done)  # may return less than was asked for
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}; fetch it again") from error
            if not count:
                raise CheckpointError(
                    f"{path} is no whole safetensors file any more: it ends at byte {start + done}; fetch it again"
                )
            done += count


def read_batches(
    tensors: Iterable[StoredTensor], staging: Staging, pinned: bool
) -> Generator[tuple[Sequence[Rows], Buffer], None, None]:
    """Neighbouring rows and the buffer that holds their bytes, in the order of files and places.

    A buffer is read into again once the next batch is asked for and, if pinned, its event has passed.
    """
    plan = _batches(tensors, staging.buffer_bytes)
    num_buffers = min(len(plan), staging.num_threads + staging.spare_buffers)
    largest = max((batch[-1].end - batch[0].start for batch in plan), default=0)
    buffers = [Buffer(largest, pinned) for _ in range(num_buffers)]
    waiting = iter(plan)
    with _opened({batch[0].tensor.path for batch in plan}) as files, ThreadPoolExecutor(staging.num_threads) as pool:

        def start(batch: Sequence[Rows], buffer: Buffer) -> tuple[Sequence[Rows], Buffer, Future[None]]:
            path = batch[0].tensor.path
            return batch, buffer, pool.submit(buffer.read, files[path], path, batch[0].start, batch[-1].end)

        reading = deque(start(batch, buffer) for buffer, batch in zip(buffers, waiting, strict=False))
        try:
            while reading:
                batch, buffer, read = reading.popleft()
                read.result()
                yield batch, buffer
                if (following := next(waiting, None)) is not None:
                    reading.append(start(following, buffer))
        finally:
            for _, _, read in reading:
                read.cancel()


def listed(names: Sequence[str]) -> str:
    """The first few names, for an error."""
    shown = ", ".join(names[:MAX_NAMES_IN_ERROR])
    return shown if len(names) <= MAX_NAMES_IN_ERROR else f"{shown} and {len(names) - MAX_NAMES_IN_ERROR} more"


def read_json(path: Path, if_missing: str) -> dict[str, Any]:
    """A JSON object of a checkpoint."""
    if not path.is_file():
        raise CheckpointError(if_missing)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def _indexed_names(index: Path) -> dict[str, list[str]]:
    """File name -> names of its tensors, as the index says; the files are there."""
    weight_map = read_json(index, f"{index} is missing").get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(file, str) for file in weight_map.values())
    ):
        raise CheckpointError(f"{index}: has no weight_map from tensor to file")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names.setdefault(file, []).append(name)
    for file, held in names.items():
        if Path(file).name != file or not (index.parent / file).is_file():
            missing = f"{index} names {file!r} for {listed(held)}, but there is no such file"
            raise CheckpointError(f"{missing}; fetch the whole checkpoint")
    return names


def _tensors(path: Path, entries: dict[str, Any], base: int, size: int) -> list[StoredTensor]:
    """A header's entries, which have to cover the file from `base` to its end without a hole."""
    tensors = list[StoredTensor]()
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{name} in {path}: dtype {entry['dtype']!r} is no weight's; use the unquantized checkpoint"
            )
        shape = tuple(int(length) for length in entry["shape"])
        start, stop = (base + int(offset) for offset in entry["data_offsets"])
        tensors.append(StoredTensor(path, name, DTYPES[entry["dtype"]], shape, start))
        if min(shape, default=0) < 0 or stop - start != tensors[-1].num_bytes:
            raise ValueError(f"{name} of shape {list(shape)} is said to be at bytes {start} to {stop}")
    tensors.sort(key=lambda tensor: (tensor.start, tensor.num_bytes))
    end = base
    for tensor in tensors:
        if tensor.start != end:
            raise ValueError(f"{tensor.name} begins at byte {tensor.start}, and what is before it ends at {end}")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end}, and the file has {size}")
    return tensors


def _batches(tensors: Iterable[StoredTensor], most_bytes: int) -> list[list[Rows]]:
    """Runs of bytes of one file, each of whole rows and at most most_bytes long, unless a single row is longer."""
    batches, end, room = list[list[Rows]](), -1, 0
    for tensor in sorted(tensors, key=lambda tensor: (tensor.path, tensor.start)):
        first = 0
        while first < tensor.num_rows and tensor.row_bytes:
            place = tensor.start + first * tensor.row_bytes
            if not batches or batches[-1][0].tensor.path != tensor.path or place != end or room < tensor.row_bytes:
                batches.append([])
                room = max(most_bytes, tensor.row_bytes)
            stop = min(tensor.num_rows, first + room // tensor.row_bytes)
            batches[-1].append(Rows(tensor, first, stop))
            end, room = batches[-1][-1].end, room - (stop - first) * tensor.row_bytes
            first = stop
    return batches


@contextmanager
def _opened(paths: Iterable[Path]) -> Iterator[dict[Path, int]]:
    """Descriptors for reading."""
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for path in paths:
            try:
                files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}; fetch it again") from error
            stack.callback(os.close, files[path])
        yield files


def _as_rows(held: Tensor, rows: Rows) -> Tensor:
    """Bytes as rows; a file may have tensors at places that are no multiple of their element's size."""
    if held.storage_offset() % rows.tensor.dtype.itemsize:
        held = held.clone()
    return held.view(rows.tensor.dtype).view(rows.stop - rows.first, *rows.tensor.shape[1:])
