"""Claim: weights are loaded about as fast as their files can be read, and no second copy of them is in host memory.

A process of its own writes a checkpoint with random weights (so that this one's peak of host memory is the loading's
alone), which is loaded in both ways and read once more without being kept. Nothing is dropped from the page cache:
after writing, the files are in it as far as there is room.
"""

import math
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from rollplex.errors import RollplexError
from rollplex.gpu.device import describe, peak_memory_bytes, select_device
from rollplex.models.load import load_plain, load_staged, named_hf_tensors, random_model, save_model
from rollplex.models.presets import preset_config
from rollplex.models.shards import Staging, StoredTensor, read_batches, read_tensors, weight_files
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import tiny_config

SEED = 0
HOST = torch.device("cpu")
Result = TypeVar("Result")


def run(
    model: str = "3b",
    device: str = "auto",
    dtype: str = "bfloat16",
    shard_gb: float = 5.0,
    directory: str | None = None,
) -> dict[str, object]:
    """Speed of load_staged, beside load_plain's and that of reading alone, and the host memory that it takes.

    host_bytes_beside_weights is by how much this process's peak rises, without the model itself if it is on the CPU.

    Args:
        model: a preset, or "tiny".
        shard_gb: largest weight file.
        directory: where a temporary directory for the checkpoint is made; by default the system's place for them.
    """
    on, wanted, staging = select_device(device), getattr(torch, dtype), Staging()
    with tempfile.TemporaryDirectory(dir=directory) as path:
        _write_elsewhere(path, model, device, dtype, int(shard_gb * 1e9))
        tensors = [tensor for held in weight_files(Path(path)).values() for tensor in held]
        num_bytes = sum(tensor.num_bytes for tensor in tensors)
        torch.empty(1, device=on)  # the device's own start is no part of loading
        before = peak_memory_bytes(HOST)
        loaded, load_s = _timed(lambda: load_staged(path, wanted, on, staging))
        host_bytes = peak_memory_bytes(HOST) - before
        if on == HOST:
            host_bytes -= sum(parameter.nbytes for parameter in loaded.parameters())
        equal = _equal(loaded, tensors)
        del loaded
        _, read_s = _timed(lambda: _read(tensors, staging, pinned=on.type == "cuda"))
        _, plain_s = _timed(lambda: load_plain(path, wanted, on))
    return {
        "bench": "load",
        "model": model,
        "device": describe(on),
        "dtype": dtype,
        "parameters": sum(math.prod(tensor.shape) for tensor in tensors),
        "gb": num_bytes / 1e9,
        "files": len({tensor.path for tensor in tensors}),
        "threads": staging.num_threads,
        "load_s": load_s,
        "load_gb_per_s": num_bytes / 1e9 / load_s,
        "read_gb_per_s": num_bytes / 1e9 / read_s,
        "plain_gb_per_s": num_bytes / 1e9 / plain_s,
        "host_bytes_beside_weights": host_bytes,
        "equal": equal,
    }


def _write_elsewhere(path: str, model: str, device: str, dtype: str, max_shard_bytes: int) -> None:
    """Run _write in a fresh process."""
    if model != "tiny":
        preset_config(model)  # an unknown name is an error here
    arguments = (path, model, device, dtype, max_shard_bytes)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments)
    writer.start()
    writer.join()
    if writer.exitcode:
        raise RollplexError(
            f"the process that writes the checkpoint ended with {writer.exitcode}; see its output above"
        )


def _write(path: str, model: str, device: str, dtype: str, max_shard_bytes: int) -> None:
    config: Any = tiny_config() if model == "tiny" else preset_config(model)
    save_model(random_model(config, SEED, getattr(torch, dtype), select_device(device)), path, None, max_shard_bytes)


def _read(tensors: Sequence[StoredTensor], staging: Staging, pinned: bool) -> None:
    """What load_staged reads, in the same way, and nothing more."""
    for _ in read_batches(tensors, staging, pinned):
        pass


def _equal(model: VisionLanguageModel, tensors: Sequence[StoredTensor]) -> bool:
    """Whether every weight is what safetensors' own reader finds, bit for bit; one tensor at a time."""
    paths = {tensor.name: tensor.path for tensor in tensors}

    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, ours in named_hf_tensors(model):
            _, theirs = next(read_tensors(paths[name], [name]))
            yield ours, theirs.to(ours.device)

    return all(ours.dtype == theirs.dtype and torch.equal(ours, theirs) for ours, theirs in pairs())


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it returns, and seconds until the device has done it."""
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start
