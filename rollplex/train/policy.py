"""Scoring responses over prefixes that are computed once, and the policy's backward passes and updates.

    Scorer    a model that gives log-probs of responses: the frozen reference is one
    Learner   a scorer with gradients: backward over suffixes, backward over the prefix
    Policy    a learner whose weights change: update

Generators yield where another lane may take a turn: after a microbatch, or after a layer of a prefix. They know
prompts, samples and prefix states; not advantages, rewards or what the loss is - it is a function that they are given.
Groups that are given together share passes; which ones is decided elsewhere.

Legend: T tokens of responses, packed in order of group and sample; H hidden.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollplex.config import TrainConfig
from rollplex.gpu.device import upload
from rollplex.models.attention import SuffixAttention
from rollplex.models.head import token_logprobs
from rollplex.models.kernels.flash import Segments
from rollplex.models.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.train.optim import GradientAccumulator, Optimizer, UpdateReport
from rollplex.train.packing import Part, microbatches, suffix_arrays
from rollplex.types import Image, Prompt, Sample

Turns = Generator[None, None, None]


@dataclass(frozen=True, eq=False)
class Scored:
    """Log-probs and entropies of response tokens, float32 [T], at the rollout's temperature."""

    logprobs_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, eq=False)
class Responses:
    """A group's responses, and the prefix that they go on from."""

    prompt: Prompt
    prefix: PrefixState
    samples: Sequence[Sample]


GroupLoss = Callable[[slice, Scored], Tensor]
"""(which of the group's packed tokens, their scores) -> the summed loss to differentiate."""


class Scorer:
    """Log-probs of responses under one model, at the temperature that they are sampled with."""

    def __init__(self, model: VisionLanguageModel, config: TrainConfig, temperature: float) -> None:
        self.model, self.config, self.temperature = model, config, temperature

    @property
    def _head_gradient(self) -> Tensor | None:
        """Where the head's gradient is added directly; None: it goes through autograd, as every other."""
        return None

    @property
    def vision_key(self) -> tuple[int, int]:
        """Equal keys mean equal features for equal images: which tower, and which version of it."""
        return id(self.model.vision), 0

    def encode(self, images: Sequence[Image]) -> tuple[Tensor, ...]:
        """Features of images, without gradient."""
        with torch.no_grad():
            return self.model.encode(images)

    def prefixes(
        self, prompts: Sequence[Prompt], encoded: Sequence[Encoded], *, for_training: bool = False
    ) -> Generator[None, None, tuple[PrefixState, ...]]:
        """Compute prompts' prefixes in one pass."""
        return prefix_forward(self.model, prompts, encoded, for_training=for_training)

    def score(self, groups: Sequence[Responses]) -> Generator[None, None, list[Tensor]]:
        """Log-probs [T] of all responses of each group, without gradient."""
        found: list[list[Tensor]] = [[] for _ in groups]
        for parts in self._microbatches(groups):
            with torch.no_grad():
                scores = self._suffixes(groups, parts, with_entropy=False)
            for part, scored in zip(parts, scores, strict=True):
                found[part.group].append(scored.logprobs_T)
            yield
        return [torch.cat(of_group) for of_group in found]

    def _microbatches(self, groups: Sequence[Responses]) -> tuple[tuple[Part, ...], ...]:
        lengths = [[sample.length for sample in group.samples] for group in groups]
        return microbatches(lengths, self.config.microbatch_tokens)

    def _suffixes(self, groups: Sequence[Responses], parts: Sequence[Part], *, with_entropy: bool) -> list[Scored]:
        """One packed pass over some responses of some groups; the scores of each part."""
        model, device = self.model, self.model.device
        lengths = [part.tokens.stop - part.tokens.start for part in parts]
        prefixes = [groups[part.group].prefix.require(model.version) for part in parts]
        batch = suffix_arrays(
            [
                (groups[part.group].prompt, sample)
                for part in parts
                for sample in groups[part.group].samples[part.samples]
            ]
        )
        rope = model.decoder.rope(upload(batch.positions_3T, device))
        attention = SuffixAttention(list(zip(prefixes, lengths, strict=True)), Segments(batch.lengths, device))
        x_TH = model.embed(upload(batch.ids_T, device))
        for index in range(model.decoder.config.num_layers):
            layer = model.decoder.layer(index)
            if self.config.recompute == "layer" and torch.is_grad_enabled():
                recomputed = checkpoint(layer, x_TH, rope, attention, use_reentrant=False, preserve_rng_state=False)
                x_TH = cast(Tensor, recomputed)
            else:
                x_TH = layer(x_TH, rope, attention)
        logprobs_T, entropy_T = token_logprobs(
            model.decoder.norm(x_TH), model.decoder.head, upload(batch.targets_T, device),
            self.temperature, self.config.logprob_chunk_tokens, with_entropy,
            self._head_gradient if torch.is_grad_enabled() else None,
        )  # fmt: skip
        scores = zip(logprobs_T.split(lengths), entropy_T.split(lengths), strict=True)
        return [Scored(*of_part) for of_part in scores]


class Learner(Scorer):
    """A model whose gradients are summed, and nothing else: what an update makes of them is Policy's business."""

    def __init__(
        self, model: VisionLanguageModel, config: TrainConfig, temperature: float,
        *, train_vision: bool, entropy_gradient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(model, config, temperature)
        self.train_vision, self._entropy_gradient = train_vision, entropy_gradient
        model.requires_grad_(False)
        self.trained = dict(model.trained_parameters(train_vision))
        for parameter in self.trained.values():
            parameter.requires_grad_(True)
        self.gradients = GradientAccumulator(self.trained, getattr(torch, config.gradient_dtype))

    @property
    def version(self) -> int:
        """Updates that the weights have seen."""
        return self.model.version

    @property
    def vision_key(self) -> tuple[int, int]:
        return id(self.model.vision), self.version if self.train_vision else 0

    @property
    def _head_gradient(self) -> Tensor | None:
        """On a GPU: the sum itself, of all tensors the largest, is not copied; CPUs keep the order of additions."""
        name = "decoder.embedding" if self.model.decoder.untied_head is None else "decoder.untied_head"
        buffer = self.gradients.buffers.get(name)
        return buffer if buffer is not None and buffer.is_cuda and buffer.dtype == torch.float32 else None

    def backward(self, groups: Sequence[Responses], losses: Sequence[GroupLoss]) -> Generator[None, None, list[Tensor]]:
        """Forward and backward over groups' responses: adds to the gradients of the weights and of the prefixes' K/V.

        losses: of each group. Returns each group's log-probs [T], detached.
        """
        found: list[list[Tensor]] = [[] for _ in groups]
        for parts in self._microbatches(groups):
            with torch.enable_grad():
                scores = self._suffixes(groups, parts, with_entropy=self._entropy_gradient)
                pairs = list(zip(parts, scores, strict=True))
                torch.autograd.backward([losses[part.group](part.tokens, scored) for part, scored in pairs])
            for part, scored in pairs:
                found[part.group].append(scored.logprobs_T.detach())
            yield
        return [torch.cat(of_group) for of_group in found]

    def prefix_backward(self, prefix: PrefixState) -> Turns:
        """Backward over a group's prefix, from the K/V gradients that its suffixes have left in it."""
        return prefix_backward(self.model, prefix, train_vision=self.train_vision)


class Policy(Learner):
    """The model that is trained."""

    def __init__(
        self, model: VisionLanguageModel, config: TrainConfig, temperature: float,
        *, train_vision: bool, entropy_gradient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            model, config, temperature, train_vision=train_vision, entropy_gradient=entropy_gradient
        )  # fmt: skip
        self.optimizer = Optimizer(self.trained, config)

    def update(self, denominator: float, learning_rate: float) -> UpdateReport:
        """Divide the gradients, clip, step, and publish the new version (none when the update was skipped)."""
        report = self.optimizer.update(self.gradients, denominator, learning_rate)
        self.model.version += not report.skipped
        return report
