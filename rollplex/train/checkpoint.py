"""Training state on disk: everything that the next step depends on.

    model/                  the policy, in Hugging Face format (usable by itself)
    optimizer.safetensors   moments, step counts, and float32 masters where the model computes in bfloat16
    state.json              next step, policy version, updates skipped so far

Noise, data order and learning rate are functions of the step number, so they need no state. The directory's atomic
appearance is the run directory's business.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollplex.errors import CheckpointError, ConfigError
from rollplex.models.load import save_model
from rollplex.train.policy import Policy

MODEL = "model"
_OPTIMIZER, _STATE = "optimizer.safetensors", "state.json"


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands: `step` steps are done."""

    step: int
    version: int
    skipped_updates: int


def save_training(directory: Path, policy: Policy, state: TrainingState, source: str) -> None:
    """Write a checkpoint; `source` is the checkpoint whose tokenizer and processor files go with the model."""
    save_model(policy.model, directory / MODEL, source)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in policy.optimizer.state().items()}
    save_file(tensors, directory / _OPTIMIZER)
    with (directory / _STATE).open("w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())


def checkpoint_bytes(policy: Policy) -> int:
    """Size of what save_training writes, but for a few small files."""
    tensors = [*policy.model.parameters(), *policy.optimizer.state().values()]
    return sum(tensor.nbytes for tensor in tensors)


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
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove this checkpoint to use an older one") from error
    policy.optimizer.load_state(tensors)
    policy.model.version = state.version
    return state
