"""Training state on disk: everything that the next step depends on.

    model/                  the policy, in Hugging Face format (usable by itself)
    optimizer.safetensors   moments, step count, and float32 masters where the model computes in bfloat16
    state.json              next step, policy version, updates skipped so far

Noise, data order and learning rate are functions of the step number, so they need no state. The directory's atomic
appearance is the run directory's business.
"""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollplex.errors import CheckpointError, ConfigError
from rollplex.models.load import save_model
from rollplex.train.optim import Optimizer
from rollplex.train.policy import Policy

MODEL = "model"
_OPTIMIZER, _STATE = "optimizer.safetensors", "state.json"
_HEADER_ALIGNMENT = 8
"""Bytes; what follows the header of a safetensors file is aligned to it."""


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands: `step` steps are done."""

    step: int
    version: int
    skipped_updates: int


def save_training(directory: Path, policy: Policy, state: TrainingState, source: str) -> None:
    """Write a checkpoint; `source` is the checkpoint whose tokenizer and processor files go with the model."""
    save_model(policy.model, directory / MODEL, source)
    _save_optimizer(directory / _OPTIMIZER, policy.optimizer)
    with (directory / _STATE).open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())


def _save_optimizer(path: Path, optimizer: Optimizer) -> None:
    """Write a safetensors file piece by piece: its library's writers want every tensor in host memory, and copy all."""
    shapes, entries, offset = optimizer.state_shapes(), dict[str, object](), 0
    for key, shape in shapes.items():
        end = offset + math.prod(shape) * torch.float32.itemsize
        entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for key in shapes:
            for piece in optimizer.state_pieces(key):
                file.write(memoryview(piece.numpy()))  # type: ignore[arg-type]


def checkpoint_bytes(policy: Policy) -> int:
    """Size of what save_training writes, but for a few small files."""
    return sum(parameter.nbytes for parameter in policy.model.parameters()) + policy.optimizer.state_bytes


def require_room(directory: Path, policy: Policy) -> None:
    """Refuse a run whose checkpoint would have no room, before there is anything to lose (ConfigError)."""
    num_bytes, free = checkpoint_bytes(policy), shutil.disk_usage(directory).free
    if free < num_bytes:
        raise ConfigError(
            f"run.directory = {str(directory)!r}: a checkpoint takes {num_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
            "are free there; make room, or use a directory on another disk"
        )


def load_state(directory: Path) -> TrainingState:
    """Where the checkpoint's run stood; raises CheckpointError naming the file."""
    path = directory / _STATE
    try:
        return TrainingState(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove this checkpoint to use an older one") from error


def restore_training(directory: Path, policy: Policy) -> TrainingState:
    """Bring a policy whose weights were loaded from `directory/model` to exactly the state that was saved."""
    state, path = load_state(directory), directory / _OPTIMIZER
    try:
        tensors = load_file(path)  # maps the file: pages are read when they are copied
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove this checkpoint to use an older one") from error
    policy.optimizer.load_state(tensors)
    policy.model.version = state.version
    return state
