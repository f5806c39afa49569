"""Gradients summed in float32, and the weight update: scale, one global norm, clip, AdamW, publish.

    backward passes --hook--> GradientAccumulator (float32 sums) --Optimizer.update--> float32 masters --> parameters

A float32 parameter is its own master; a bfloat16 parameter has one beside it. AdamW's and the clipping's arithmetic
are torch's. This file knows no loss, no step graph and no other rank; where several ranks train, their sums are
combined in `GradientAccumulator.buffers` before the update.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_

from rollplex.config import TrainConfig
from rollplex.errors import CheckpointError

NORM_PIECE = 1 << 24
"""Elements per float64 sum of squares: on a CPU torch widens a copy of the whole input, here 128 MiB at most."""

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""What AdamW keeps per parameter, under torch's names; the state's keys are `parameter name.one of these`."""


class GradientAccumulator:
    """Float32 sums of the parameters' gradients over any number of backward passes.

    After each backward pass every parameter's gradient has been added to its buffer and released, so `.grad` is None
    and a bfloat16 parameter's many small gradients are not lost in a bfloat16 sum. A parameter that a batch never
    used keeps a buffer of zeros. A parameter belongs to one accumulator for its lifetime.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.buffers: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            assert parameter.requires_grad, f"{name} is frozen"
            assert parameter.grad is None, f"{name} already has a gradient"
            buffer = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            self.buffers[name] = buffer
            parameter.register_post_accumulate_grad_hook(lambda leaf, buffer=buffer: _take_grad(leaf, buffer))

    def zero(self) -> None:
        """Start a new batch."""
        for buffer in self.buffers.values():
            buffer.zero_()


@torch.no_grad()
def _take_grad(parameter: Tensor, buffer: Tensor) -> None:
    assert parameter.grad is not None
    buffer.add_(parameter.grad)
    parameter.grad = None


@dataclass(frozen=True)
class UpdateReport:
    """grad_norm: of the scaled gradient, before clipping (inf or nan where it was; 0 for an empty batch).

    skipped: nothing was changed. learning_rate: the one asked for.
    """

    grad_norm: float
    skipped: bool
    learning_rate: float


class Optimizer:
    """AdamW on float32 masters of the named parameters; matrices are decayed, norms and biases are not.

    A parameter without gradient in a batch (the vision tower, when no prompt had an image) is updated with gradient
    zero: its moments fade and its decay applies. Were it left out, the update would depend on which batch, microbatch
    or rank a prompt happened to be in.
    """

    def __init__(self, named_parameters: Mapping[str, Parameter], config: TrainConfig) -> None:
        self.parameters = dict(named_parameters)
        self.max_grad_norm = config.max_grad_norm
        self.masters: dict[str, Tensor] = {
            name: parameter if parameter.dtype == torch.float32 else parameter.detach().to(torch.float32)
            for name, parameter in self.parameters.items()
        }
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        vectors = [master for master in self.masters.values() if master.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True,
        )  # fmt: skip
        # Moments exist from the start, not from the first step: memory is planned, and state() is always whole.
        for master in self.masters.values():
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }

    @torch.no_grad()
    def update(self, accumulator: GradientAccumulator, denominator: float, lr: float) -> UpdateReport:
        """One weight update from the accumulated sums divided by denominator; the sums are zero afterwards.

        A denominator of 0 (every response masked) or a norm that is not finite changes nothing: neither weights nor
        moments nor step counts. Reading the norm is the step's one wait for the device.
        """
        assert accumulator.buffers.keys() == self.masters.keys(), "accumulator and optimizer hold different parameters"
        grad_norm = self._set_scaled_gradients(accumulator, denominator) if denominator > 0 else 0.0
        skipped = denominator <= 0 or not math.isfinite(grad_norm)
        if not skipped:
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self._publish()
        self.adamw.zero_grad(set_to_none=True)
        accumulator.zero()
        return UpdateReport(grad_norm, skipped, lr)

    def _set_scaled_gradients(self, accumulator: GradientAccumulator, denominator: float) -> float:
        for name, buffer in accumulator.buffers.items():
            self.masters[name].grad = buffer.mul_(1.0 / denominator)
        norm = _global_norm(accumulator.buffers.values())
        clip_grads_with_norm_(self.masters.values(), self.max_grad_norm, norm)
        return float(norm)

    def _publish(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])

    def state(self) -> dict[str, Tensor]:
        """The live tensors (not copies) by `parameter.exp_avg`, `.exp_avg_sq`, `.step`, and `.master` if it has one."""
        state: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            state |= {f"{name}.{moment}": self.adamw.state[master][moment] for moment in MOMENTS}
            if master is not self.parameters[name]:
                state[f"{name}.{MASTER}"] = master
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state as `state()` gives it; bfloat16 parameters become their masters, rounded.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor has another shape or dtype. Nothing is changed.
        """
        own = self.state()
        if missing := sorted(own.keys() - state.keys()):
            raise CheckpointError(f"optimizer state has no {missing[0]!r} ({len(missing)} missing); {_REMEDY}")
        if unknown := sorted(state.keys() - own.keys()):
            raise CheckpointError(f"optimizer state has unknown {unknown[0]!r} ({len(unknown)} unknown); {_REMEDY}")
        for name, tensor in own.items():
            if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise CheckpointError(
                    f"optimizer state {name!r} is {state[name].dtype} {tuple(state[name].shape)}, "
                    f"the model needs {tensor.dtype} {tuple(tensor.shape)}; {_REMEDY}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._publish()


def _global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """0-d float32 norm over all gradients, summed in float64.

    On a CPU torch's float32 norm, which clip_grad_norm_ uses, is 13 % off for 200 million equal entries (an embedding).
    """
    pieces = [piece for gradient in gradients for piece in gradient.reshape(-1).split(NORM_PIECE)]
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm.to(torch.float32)


_REMEDY = "resume with the model, model.dtype and model.train_vision that wrote it"


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of training step 0 <= step < config.steps: linear warm-up, then the schedule.

    Warm-up step i has (i + 1) / warmup_steps of the full rate: unlike transformers, which begins at zero, because a
    step costs a whole rollout. The decay starts from the full rate at step warmup_steps and reaches
    min_learning_rate_ratio at step config.steps, one after the last.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    if config.schedule == "constant":
        remaining = 1.0
    elif config.schedule == "linear":
        remaining = 1.0 - progress
    else:
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = config.min_learning_rate_ratio
    return config.learning_rate * (floor + (1.0 - floor) * remaining)
