"""The workers of a step on a tiny random model, without files and processes: what the exactness benches run on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollplex.algo.reward import Score
from rollplex.config import Config
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.engine import Engine, Vocabulary
from rollplex.step import Workers
from rollplex.testing import FIRST_SPECIAL_ID, tiny_model
from rollplex.train.optim import UpdateReport
from rollplex.train.policy import Policy, Scorer
from rollplex.types import Prompt, Sample

TINY_RECIPE: Mapping[str, Any] = {
    "model": {"path": "tiny", "dtype": "float32", "train_vision": True},
    "data": {"train": "canned"},
    "rollout": {"group_size": 4, "max_new_tokens": 24, "max_batch_samples": 13, "block_size": 4, "num_blocks": 48},
    "algo": {"kl_coefficient": 0.05},
    "train": {"learning_rate": 1e-3, "microbatch_tokens": 40, "logprob_chunk_tokens": 16},
}
"""Small budgets, so that admission, preemption and microbatches all happen."""
NUM_STOP_IDS = 24
"""Of about 280 ids, so that responses of a random model have ragged lengths."""


class CannedRewards:
    """Scores that depend on the response alone and arrive after a varying number of looks."""

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> "_CannedScores":
        totals = [float(int(sample.ids.sum()) % 7) for sample in samples]
        looks = int(sum(sample.ids[0] for sample in samples)) % 5
        return _CannedScores(tuple(Score(total, {"canned": total}, ()) for total in totals), looks)


@dataclass
class _CannedScores:
    scores: tuple[Score, ...]
    looks: int

    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def result(self) -> tuple[Score, ...]:
        return self.scores


class RecordingPolicy(Policy):
    """Keeps a copy of every update's summed gradients, divided by the batch's size, and of the weights after it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gradients_seen: list[dict[str, Tensor]] = []
        self.weights_seen: list[dict[str, Tensor]] = [self._weights()]

    def update(self, denominator: float, learning_rate: float) -> UpdateReport:
        buffers = self.gradients.buffers.items()
        self.gradients_seen.append({name: buffer.clone() / denominator for name, buffer in buffers})
        report = super().update(denominator, learning_rate)
        self.weights_seen.append(self._weights())
        return report

    def _weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def tiny_workers(config: Config, hf_config: Any, device: torch.device) -> Workers:
    """A recording policy, its frozen reference and an engine, on seeded random weights."""
    policy_model, reference_model = (_model(config, hf_config, device, seed) for seed in (1, 2))
    policy = RecordingPolicy(
        policy_model, config.train, config.rollout.temperature,
        train_vision=config.model.train_vision, entropy_gradient=config.algo.entropy_coefficient != 0.0,
    )  # fmt: skip
    reference_model.requires_grad_(False)
    reference = Scorer(reference_model, config.train, config.rollout.temperature)
    stop_ids = frozenset(int(token) for token in np.linspace(0, FIRST_SPECIAL_ID - 1, NUM_STOP_IDS))
    vocabulary = Vocabulary(stop_ids, hf_config.text_config.vocab_size, lambda ids: " ".join(map(str, ids)))
    engine = Engine(policy_model, vocabulary, config.rollout, config.run.seed)
    return Workers(policy, reference if config.algo.kl_coefficient else None, engine, CannedRewards())


def _model(config: Config, hf_config: Any, device: torch.device, seed: int) -> VisionLanguageModel:
    return tiny_model(hf_config, seed, getattr(torch, config.model.dtype), device)
