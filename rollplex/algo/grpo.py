"""GRPO and its close relatives, as functions of a recipe's [algo] section: from rewards to what the loss needs per
token.

    rewards of a group -> (minus KL, when it counts as reward) -> group-relative advantages -> one per response token

DeepSeekMath (arXiv 2402.03300), Dr. GRPO (arXiv 2503.20783) and DAPO's two clip bounds (arXiv 2503.14476) are settings
of it. Knows no model and no batch.

Shapes: G responses of one group; T their tokens, packed in order of sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.algo.advantage import group_advantages
from rollplex.algo.loss import denominator, kl_penalty, token_weights
from rollplex.config import AlgoConfig
from rollplex.types import Sample


@dataclass(frozen=True, eq=False)
class Credit:
    """What one group's responses are worth, token by token: float32 [T] on the host, and float32 [G] rewards."""

    rewards_G: Tensor
    advantages_T: Tensor
    weights_T: Tensor


def assign_credit(
    rewards: Sequence[float], samples: Sequence[Sample], config: AlgoConfig,
    logprobs_T: Tensor | None = None, reference_T: Tensor | None = None,
) -> Credit:  # fmt: skip
    """Advantages and weights of one group's tokens.

    logprobs_T, reference_T: the sampling policy's and the reference's log-probs, read only when KL counts as reward.
    """
    rewards_G = torch.tensor(rewards, dtype=torch.float32)
    lengths = [sample.length for sample in samples]
    shaped_G = rewards_G
    if config.kl_coefficient and config.kl_in == "reward":
        assert logprobs_T is not None and reference_T is not None
        kl_T = kl_penalty(logprobs_T.cpu(), reference_T.cpu(), config.kl_estimator)
        shaped_G = rewards_G - config.kl_coefficient * torch.stack([part.sum() for part in kl_T.split(lengths)])
    advantages_G = group_advantages(shaped_G, config.scale_advantages)
    advantages_T = advantages_G.repeat_interleave(torch.tensor(lengths))
    return Credit(rewards_G, advantages_T, token_weights(lengths, config.aggregation, counted(samples, config)))


def counted(samples: Sequence[Sample], config: AlgoConfig) -> list[bool]:
    """Which responses count in the loss."""
    return [not (config.mask_truncated and sample.finish_reason == "length") for sample in samples]


def batch_denominator(groups: Sequence[Sequence[Sample]], config: AlgoConfig, max_new_tokens: int) -> float:
    """What the summed loss of these groups is divided by."""
    lengths = [
        sample.length
        for samples in groups
        for sample, counts in zip(samples, counted(samples, config), strict=True)
        if counts
    ]
    return denominator(config.aggregation, sum(lengths), len(lengths), max_new_tokens)
