"""Group advantages against the papers' formulas in float64, and what must hold for any rewards."""

import math
import statistics
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex.algo.advantage import group_advantages, has_signal

FLOAT32_TOLERANCE = 1e-5
rewards_of_a_group = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=16)


def independent_advantages(rewards: list[float], scale: bool, eps: float) -> list[float]:
    mean = math.fsum(rewards) / len(rewards)
    spread = statistics.stdev(rewards) + eps if scale else 1.0
    return [(reward - mean) / spread for reward in rewards]


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=16), st.booleans())
def test_formula(rewards: list[int], scale: bool) -> None:
    values = [reward / 4 for reward in rewards]
    expected = independent_advantages(values, scale, eps=1e-4)
    actual = group_advantages(torch.tensor(values), scale)
    assert actual.dtype == torch.float32
    assert actual.tolist() == pytest.approx(expected, rel=FLOAT32_TOLERANCE, abs=FLOAT32_TOLERANCE)


@given(st.floats(-10, 10), st.integers(1, 16), st.booleans())
def test_equal_rewards_give_exact_zeros(reward: float, group_size: int, scale: bool) -> None:
    rewards = torch.full((group_size,), reward, dtype=torch.float64)
    assert not has_signal(rewards)
    assert group_advantages(rewards, scale).tolist() == [0.0] * group_size


def test_rounded_mean_does_not_leak() -> None:
    rewards = torch.full((7,), 0.1)
    values = [group for group in (torch.full((size,), 0.1) for size in range(2, 64)) if group.mean() != group[0]]
    assert values, "some group size rounds its mean, or this test shows nothing"
    assert all(not group_advantages(group, True).any() for group in [rewards, *values])


@given(rewards_of_a_group)
def test_sign_follows_reward_and_sum_is_zero(rewards: list[float]) -> None:
    advantages = group_advantages(torch.tensor(rewards), scale=False)
    assert has_signal(torch.tensor(rewards)) == (len(set(rewards)) > 1)
    assert abs(advantages.double().sum().item()) <= 1e-5 * len(rewards)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(advantages[a] <= advantages[b] for a, b in pairwise(order))


def test_scaling_uses_the_unbiased_deviation_and_eps() -> None:
    # mean 0.5, deviations +-0.5, unbiased std sqrt(4 * 0.25 / 3)
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), scale=True, eps=0.1)
    assert advantages.tolist() == pytest.approx([sign * 0.5 / (math.sqrt(1 / 3) + 0.1) for sign in (1, -1, -1, 1)])


def test_a_group_of_one_has_no_signal() -> None:
    assert group_advantages(torch.tensor([3.0]), scale=True).tolist() == [0.0]
