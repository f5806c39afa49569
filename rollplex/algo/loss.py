"""The policy loss, in the papers' order: ratio, clipped surrogate, KL to the reference, entropy, weighted sum.

    ratio_t = exp(logprob_t - old_t)                                           PPO, arXiv 1707.06347, eq. 6
    l_t  = -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t)   eq. 7; two bounds: DAPO, 2503.14476
    l_t += kl_coefficient KL_t - entropy_coefficient H_t                       GRPO, arXiv 2402.03300, eq. 3
    loss = sum_t w_t l_t / denominator

The denominator needs the whole batch, which is not known while the first groups are already in their backward pass.
So the loss here is the unscaled sum, and the optimizer divides once. This file knows no model, no packing and no
device; a microbatch is just T tokens with an advantage and a weight each.

A masked response (truncated, with algo.mask_truncated) has weight 0 and counts nowhere: not in the denominator's
tokens, not in its responses, not in the statistics. TRL also gives it weight 0, but of its denominators only "bnpo"
leaves it out; its "grpo" and "dr_grpo" still count the response, and "dapo" its tokens, so that masking there also
shrinks the step.

Shapes: T tokens of one microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollplex.config import AlgoConfig

Aggregation = Literal["token-mean", "sequence-mean", "constant-length"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One microbatch, float32, one entry per response token.

    logprobs_T: the policy's, differentiable. old_logprobs_T: the sampling policy's; None where the policy is that
    policy, and the ratio is 1. reference_logprobs_T: None without a KL term. entropy_T: differentiable where
    entropy_coefficient is not 0; None where nobody measures it. advantages_T: of the token's response.
    weights_T: from `token_weights`.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor | None
    reference_logprobs_T: Tensor | None
    entropy_T: Tensor | None
    advantages_T: Tensor
    weights_T: Tensor


@dataclass(frozen=True, eq=False)
class LossStats:
    """What a microbatch adds to the step's metrics: 0-d float32 tensors, so that nothing waits for the device.

    loss, policy_loss: weighted sums, to divide by the batch's denominator.
    kl, entropy, clipped: sums over unmasked tokens, to divide by `tokens`. clipped counts tokens whose gradient the
    clipping removed. ratio_min, ratio_max: over unmasked tokens; inf and -inf where there are none.
    """

    loss: Tensor
    policy_loss: Tensor
    kl: Tensor
    entropy: Tensor
    clipped: Tensor
    ratio_min: Tensor
    ratio_max: Tensor
    tokens: Tensor

    def __add__(self, other: "LossStats") -> "LossStats":
        return LossStats(
            loss=self.loss + other.loss,
            policy_loss=self.policy_loss + other.policy_loss,
            kl=self.kl + other.kl,
            entropy=self.entropy + other.entropy,
            clipped=self.clipped + other.clipped,
            ratio_min=torch.minimum(self.ratio_min, other.ratio_min),
            ratio_max=torch.maximum(self.ratio_max, other.ratio_max),
            tokens=self.tokens + other.tokens,
        )


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """loss: 0-d, the unscaled sum to call backward on. stats: detached."""

    loss: Tensor
    stats: LossStats


def policy_loss(inputs: LossInputs, config: AlgoConfig) -> LossOutputs:
    """The clipped policy loss of one microbatch of at least one token, summed and not yet divided."""
    assert len(inputs.logprobs_T) > 0, "a microbatch has at least one token"
    logprobs_T, advantages_T = inputs.logprobs_T, inputs.advantages_T
    old_T = logprobs_T.detach() if inputs.old_logprobs_T is None else inputs.old_logprobs_T
    ratio_T = torch.exp(logprobs_T - old_T)
    clipped_ratio_T = torch.clamp(ratio_T, 1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate_T = -torch.minimum(ratio_T * advantages_T, clipped_ratio_T * advantages_T)

    loss_T = surrogate_T
    kl_T = torch.zeros_like(advantages_T)
    if inputs.reference_logprobs_T is not None:
        kl_T = kl_penalty(logprobs_T, inputs.reference_logprobs_T, config.kl_estimator)
        if config.kl_in == "loss":
            loss_T = loss_T + config.kl_coefficient * kl_T
    entropy_T = torch.zeros_like(advantages_T) if inputs.entropy_T is None else inputs.entropy_T
    if config.entropy_coefficient != 0.0:
        assert inputs.entropy_T is not None, "an entropy coefficient needs the entropy"
        loss_T = loss_T - config.entropy_coefficient * entropy_T

    loss = (inputs.weights_T * loss_T).sum()
    return LossOutputs(loss, _stats(inputs, config, loss, surrogate_T, kl_T, entropy_T, ratio_T))


def kl_penalty(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy sampled.

    With log r = reference - policy: k1 = -log r, k2 = (log r)^2 / 2, k3 = (r - 1) - log r
    (http://joschu.net/blog/kl-approx.html). In the loss it is differentiated as it stands: the expected gradient of
    k2 is that of the KL, that of k1 is zero, that of k3 is that of KL(reference || policy). For the reward, pass
    detached log-probs and subtract kl_coefficient times a response's sum.
    """
    log_ratio_T = reference_logprobs_T - logprobs_T
    if estimator == "k1":
        return -log_ratio_T
    if estimator == "k2":
        return log_ratio_T.square() / 2
    return torch.expm1(log_ratio_T) - log_ratio_T  # expm1: near the reference, exp(x) - 1 would cancel


def token_weights(lengths: Sequence[int], kind: Aggregation, keep: Sequence[bool] | None = None) -> Tensor:
    """Weights float32 [sum(lengths)] of the packed responses' tokens; keep[i] false masks response i."""
    kept = [True] * len(lengths) if keep is None else keep
    per_response = [
        0.0 if not is_kept else 1.0 / length if kind == "sequence-mean" else 1.0
        for length, is_kept in zip(lengths, kept, strict=True)
    ]
    repeats = torch.tensor(lengths, dtype=torch.int64)
    return torch.tensor(per_response, dtype=torch.float32).repeat_interleave(repeats)


def denominator(kind: Aggregation, total_tokens: int, num_responses: int, max_new_tokens: int) -> float:
    """What the summed loss of a whole batch is divided by. Tokens and responses are those not masked; 0 if all are."""
    if kind == "token-mean":
        return float(total_tokens)
    if kind == "sequence-mean":
        return float(num_responses)
    return float(num_responses * max_new_tokens)


def _stats(
    inputs: LossInputs, config: AlgoConfig, loss: Tensor, surrogate_T: Tensor, kl_T: Tensor, entropy_T: Tensor,
    ratio_T: Tensor,
) -> LossStats:  # fmt: skip
    with torch.no_grad():
        counted_T = inputs.weights_T > 0
        too_low_T = (ratio_T < 1.0 - config.clip_low) & (inputs.advantages_T < 0)
        too_high_T = (ratio_T > 1.0 + config.clip_high) & (inputs.advantages_T > 0)
        return LossStats(
            loss=loss.detach(),
            policy_loss=(inputs.weights_T * surrogate_T).sum(),
            kl=(counted_T * kl_T).sum(),
            entropy=(counted_T * entropy_T).sum(),
            clipped=((too_low_T | too_high_T) & counted_T).sum(dtype=torch.float32),
            ratio_min=torch.where(counted_T, ratio_T, torch.inf).min(),
            ratio_max=torch.where(counted_T, ratio_T, -torch.inf).max(),
            tokens=counted_T.sum(dtype=torch.float32),
        )
