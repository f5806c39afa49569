"""Gradients summed, and the weight update: scale, one global norm, clip, AdamW, publish.

    backward passes --hook--> GradientAccumulator (sums) --Optimizer.update, chunk by chunk--> masters --> parameters

A float32 parameter is its own master; a bfloat16 parameter has one beside it. AdamW's arithmetic is torch's fused one.
Where masters and moments live, and how they come to the device, is offload.py's business. This file knows no loss, no
step graph and no other rank; where several ranks train, their sums are combined in `GradientAccumulator.buffers` before
the update.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from rollplex.config import TrainConfig
from rollplex.errors import CheckpointError
from rollplex.train.offload import CHUNK_ELEMENTS, MASTER, MOMENTS, Piece, StateStorage, plan_state

NORM_PIECE = 1 << 24
"""Elements per float64 sum of squares: a scaled copy of so many is made, and a CPU's torch widens that once more."""
NORM_FLOOR = 1e-6
"""Added to the norm before dividing by it, as torch's clip_grads_with_norm_ does."""
STEP = "step"
"""Key of the number of updates in the state; all other keys are `parameter name.kind`."""


class GradientAccumulator:
    """Sums of the parameters' gradients over any number of backward passes, in float32 or (half the memory) bfloat16.

    After each backward pass every parameter's gradient has been added to its buffer and released, so `.grad` is None;
    autograd calls the hooks as soon as a gradient is whole, so no two parameters' `.grad` exist at a time. A parameter
    that a batch never used keeps a buffer of zeros. A parameter belongs to one accumulator for its lifetime.

    A float32 sum keeps what a bfloat16 parameter's many small gradients would lose. A bfloat16 sum is rounded after
    each addition. Measured on a small model, that puts the gradient off by 0.3 % of its norm after 8 backward passes,
    0.6 % after 32 and 1.1 % after 128: it grows with the square root of their number.
    """

    def __init__(self, parameters: Mapping[str, Parameter], dtype: torch.dtype = torch.float32) -> None:
        self.buffers: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            assert parameter.requires_grad, f"{name} is frozen"
            assert parameter.grad is None, f"{name} already has a gradient"
            buffer = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            self.buffers[name] = buffer
            parameter.register_post_accumulate_grad_hook(lambda leaf, buffer=buffer: _take_grad(leaf, buffer))

    def zero(self) -> None:
        """Start a new batch."""
        for buffer in self.buffers.values():
            buffer.zero_()


@torch.no_grad()
def _take_grad(parameter: Tensor, buffer: Tensor) -> None:
    if parameter.grad is not None:  # None: it was added to the buffer directly, and autograd got nothing
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

    The bits of an update depend neither on chunk_elements nor on where the state lives. Parameters are updated in the
    memory that they have when the optimizer is made.
    """

    def __init__(
        self, named_parameters: Mapping[str, Parameter], config: TrainConfig, chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.parameters, self.config = dict(named_parameters), config
        first = next(iter(self.parameters.values()))
        for name, parameter in self.parameters.items():
            assert parameter.is_contiguous(), f"{name} is not contiguous"
            assert parameter.device == first.device, f"{name} is on {parameter.device}, others on {first.device}"
        self._flat = {name: parameter.detach().view(-1) for name, parameter in self.parameters.items()}
        self._narrow = {name for name, flat in self._flat.items() if flat.dtype != torch.float32}
        sizes = {name: flat.numel() for name, flat in self._flat.items()}
        chunks = plan_state(sizes, self._narrow, config.optimizer_gpu_gib, chunk_elements)
        # All of it exists from the start, not from the first step: memory is planned, and the state is always whole.
        self.storage = StateStorage(chunks, first.device)
        self._step = torch.zeros((), dtype=torch.float32, device=first.device)
        for name in self._narrow:
            for span, master in self.storage.pieces(name, MASTER):
                master.copy_(self._flat[name][span])

    @torch.no_grad()
    def update(self, accumulator: GradientAccumulator, denominator: float, lr: float) -> UpdateReport:
        """One weight update from the accumulated sums divided by denominator; the sums are zero afterwards.

        A denominator of 0 (every response masked) or a norm that is not finite changes nothing: neither weights nor
        moments nor the step count. Reading the norm is the step's one wait for the device.
        """
        buffers, grad_norm, skipped = accumulator.buffers, 0.0, True
        assert buffers.keys() == self._flat.keys(), "accumulator and optimizer hold different parameters"
        if denominator > 0:
            scale = 1.0 / denominator
            norm = _global_norm(buffers.values(), scale)
            clip = (self.config.max_grad_norm / (norm + NORM_FLOOR)).clamp(max=1.0)
            grad_norm = float(norm)
            skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._step += 1
            flat = {name: buffer.view(-1) for name, buffer in buffers.items()}
            for chunk, state in self.storage.visit():
                for piece in chunk.pieces:
                    self._update(piece, state, _scaled(flat[piece.name][piece.span], scale).mul_(clip), lr)
        accumulator.zero()
        return UpdateReport(grad_norm, skipped, lr)

    def _update(self, piece: Piece, state: Mapping[str, Tensor], gradient: Tensor, lr: float) -> None:
        """AdamW on one piece of a parameter."""
        parameter, own = self._flat[piece.name][piece.span], {kind: flat[piece.place] for kind, flat in state.items()}
        master = own.get(MASTER, parameter)
        decay = self.config.weight_decay if self.parameters[piece.name].ndim >= 2 else 0.0
        torch._fused_adamw_(
            [master], [gradient], [own["exp_avg"]], [own["exp_avg_sq"]], [], [self._step],
            lr=lr, beta1=self.config.betas[0], beta2=self.config.betas[1], eps=self.config.eps, weight_decay=decay,
            amsgrad=False, maximize=False,
        )  # fmt: skip
        if master is not parameter:
            parameter.copy_(master)

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the state's tensors, all float32: `parameter.exp_avg`, `.exp_avg_sq`, `.master` if any; `step`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, parameter in self.parameters.items():
            kinds = (MASTER, *MOMENTS) if name in self._narrow else MOMENTS
            shapes |= {f"{name}.{kind}": tuple(parameter.shape) for kind in kinds}
        return shapes | {STEP: ()}

    @property
    def state_bytes(self) -> int:
        """Size of the whole state."""
        return sum(math.prod(shape) * torch.float32.itemsize for shape in self.state_shapes().values())

    def state_pieces(self, key: str) -> Iterator[Tensor]:
        """One tensor of the state, flat, in consecutive pieces on the CPU: live values or copies, to be read only."""
        self.storage.settle()
        pieces = [self._step.view(1)] if key == STEP else [piece for _, piece in self._live(key)]
        yield from (piece.cpu() for piece in pieces)

    def state(self) -> dict[str, Tensor]:
        """A copy of the whole state by key, on the CPU; to be saved by pieces instead where it is large."""
        return {
            key: torch.cat([*self.state_pieces(key), torch.empty(0)]).view(shape)
            for key, shape in self.state_shapes().items()
        }

    def _live(self, key: str) -> list[tuple[slice, Tensor]]:
        name, _, kind = key.rpartition(".")
        return self.storage.pieces(name, kind)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over a state as `state()` gives it; bfloat16 parameters become their masters, rounded.

        Raises:
            CheckpointError: a name is missing or unknown, or a tensor has another shape or dtype. Nothing is changed.
        """
        own = self.state_shapes()
        if missing := sorted(own.keys() - state.keys()):
            raise CheckpointError(f"optimizer state has no {missing[0]!r} ({len(missing)} missing); {_REMEDY}")
        if unknown := sorted(state.keys() - own.keys()):
            raise CheckpointError(f"optimizer state has unknown {unknown[0]!r} ({len(unknown)} unknown); {_REMEDY}")
        for key, shape in own.items():
            if state[key].shape != shape or state[key].dtype != torch.float32:
                raise CheckpointError(
                    f"optimizer state {key!r} is {state[key].dtype} {tuple(state[key].shape)}, "
                    f"the model needs {torch.float32} {shape}; {_REMEDY}"
                )
        self.storage.settle()
        self._step.copy_(state[STEP])
        for key in own.keys() - {STEP}:
            for span, piece in self._live(key):
                piece.copy_(state[key].view(-1)[span])
        for name in self._narrow:
            for span, master in self.storage.pieces(name, MASTER):
                self._flat[name][span].copy_(master)


def _scaled(gradient: Tensor, scale: float) -> Tensor:
    """A float32 copy, multiplied."""
    return gradient * scale if gradient.dtype == torch.float32 else gradient.to(torch.float32).mul_(scale)


def _global_norm(gradients: Iterable[Tensor], scale: float = 1.0) -> Tensor:
    """0-d float32 norm over all gradients times scale, summed in float64.

    On a CPU torch's float32 norm, which clip_grad_norm_ uses, is 13 % off for 200 million equal entries (an embedding).
    """
    pieces = [piece for gradient in gradients for piece in gradient.reshape(-1).split(NORM_PIECE)]
    norms = torch.stack([torch.linalg.vector_norm(_scaled(piece, scale), dtype=torch.float64) for piece in pieces])
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
