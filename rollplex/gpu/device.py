"""Which device a run uses, asked once, and its arithmetic made repeatable; and how arrays get there."""

import os
import resource
import sys
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from rollplex.errors import ConfigError


def select_device(name: str) -> torch.device:
    """The device for `run.device`: "auto" takes CUDA where there is one. On CUDA, repeatable kernels are switched on.

    Raises:
        ConfigError: CUDA was asked for and there is none, or something else was.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f'run.device = {name!r}: use "auto", "cpu" or "cuda"')
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError('run.device = "cuda": torch sees no CUDA device; use run.device = "auto" or "cpu"')
    if name == "cpu" or not available:
        return torch.device("cpu")
    # Attention's backward adds in any order by default; the fill is a debugging aid that costs a pass over every
    # tensor.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product, which needs it then
    torch.use_deterministic_algorithms(True, warn_only=False)
    torch.backends.cudnn.allow_tf32 = False  # convolutions would round float32 operands to 10 bits
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return torch.device("cuda", torch.cuda.current_device())


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device. On CUDA through pinned memory, in stream order: the host does not wait for the copy."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def describe(device: torch.device) -> str:
    """One line for the log."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} threads, torch {torch.__version__}"


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
