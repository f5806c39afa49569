"""Group-relative advantages: how much better each response is than its siblings.

    GRPO       A_i = (r_i - mean(r)) / (std(r) + eps)     DeepSeekMath, arXiv 2402.03300, section 4.1.2
    Dr. GRPO   A_i =  r_i - mean(r)                       Understanding R1-Zero-like training, arXiv 2503.20783

A group whose rewards are all equal says nothing about the policy, and its advantages are exactly zero, whatever
rounding the mean has. Rewards come from host processes, so they are small CPU tensors. This file knows no tokens, no
loss and no batch: one group at a time.

Shapes: G responses of one group.
"""

import torch
from torch import Tensor

SCALE_EPS = 1e-4
"""Added to the standard deviation; TRL's value, so that published settings carry over."""


def has_signal(rewards_G: Tensor) -> bool:
    """Whether a group's rewards differ in float32, so that its responses can be ranked."""
    rewards_G = _as_float32(rewards_G)
    return bool((rewards_G != rewards_G[0]).any())


def group_advantages(rewards_G: Tensor, scale: bool, eps: float = SCALE_EPS) -> Tensor:
    """Advantages float32 [G] of one group's rewards [G].

    scale: divide by the standard deviation (unbiased, over G - 1) plus eps. Exactly zero for a group without signal,
    which includes a group of one.
    """
    rewards_G = _as_float32(rewards_G)
    if not has_signal(rewards_G):
        return torch.zeros_like(rewards_G)
    centered_G = rewards_G - rewards_G.mean()
    return centered_G / (rewards_G.std() + eps) if scale else centered_G


def _as_float32(rewards_G: Tensor) -> Tensor:
    assert rewards_G.ndim == 1, f"rewards of one group, got shape {tuple(rewards_G.shape)}"
    return rewards_G.to(torch.float32)
