"""The loss against formulas written out here in plain float64 Python, and its gradient by finite differences."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollplex.algo.loss import Aggregation, Estimator, LossInputs, denominator, kl_penalty, policy_loss, token_weights
from rollplex.config import AlgoConfig

TOLERANCE = 1e-9
"""Relative, float64 against float64."""
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
AGGREGATIONS: tuple[Aggregation, ...] = ("token-mean", "sequence-mean", "constant-length")


def random_inputs(seed: int, num_tokens: int, spread: float = 0.4) -> LossInputs:
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(1.5, num_tokens)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return LossInputs(
        logprobs_T=tensor(logprobs),
        old_logprobs_T=tensor(logprobs + rng.normal(0, spread, num_tokens)),
        reference_logprobs_T=tensor(logprobs + rng.normal(0, spread, num_tokens)),
        entropy_T=tensor(rng.uniform(0, 3, num_tokens)),
        advantages_T=tensor(rng.normal(0, 1, num_tokens)),
        weights_T=tensor(rng.choice([0.0, 0.25, 1.0], num_tokens)),
    )


def independent_kl(logprob: float, reference: float, estimator: Estimator) -> float:
    ratio = math.exp(reference - logprob)
    return {"k1": logprob - reference, "k2": 0.5 * math.log(ratio) ** 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def independent_token_loss(
    config: AlgoConfig, logprob: float, old: float, reference: float, entropy: float, advantage: float
) -> float:
    """One token, by cases instead of min and clip."""
    ratio = math.exp(logprob - old)
    if advantage >= 0:
        objective = advantage * min(ratio, 1 + config.clip_high)
    else:
        objective = advantage * max(ratio, 1 - config.clip_low)
    if config.kl_in == "loss":
        objective -= config.kl_coefficient * independent_kl(logprob, reference, config.kl_estimator)
    return -(objective + config.entropy_coefficient * entropy)


def independent_loss(inputs: LossInputs, config: AlgoConfig) -> float:
    assert inputs.reference_logprobs_T is not None
    assert inputs.entropy_T is not None
    old = inputs.logprobs_T if inputs.old_logprobs_T is None else inputs.old_logprobs_T
    columns = (inputs.logprobs_T, old, inputs.reference_logprobs_T, inputs.entropy_T, inputs.advantages_T)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    weights = inputs.weights_T.tolist()
    return math.fsum(w * independent_token_loss(config, *row) for w, row in zip(weights, rows, strict=True))


algo_configs = st.builds(
    AlgoConfig,
    clip_low=st.floats(0.05, 0.5),
    clip_high=st.floats(0.05, 0.5),
    kl_coefficient=st.sampled_from([0.0, 0.04, 1.0]),
    kl_estimator=st.sampled_from(ESTIMATORS),
    kl_in=st.sampled_from(["loss", "reward"]),
    entropy_coefficient=st.sampled_from([0.0, 0.01, -0.5]),
)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), algo_configs)
def test_value_and_gradients(seed: int, num_tokens: int, config: AlgoConfig) -> None:
    inputs = random_inputs(seed, num_tokens)
    logprobs_T = inputs.logprobs_T.clone().requires_grad_()
    assert inputs.entropy_T is not None
    entropy_T = inputs.entropy_T.clone().requires_grad_()
    outputs = policy_loss(replace(inputs, logprobs_T=logprobs_T, entropy_T=entropy_T), config)
    assert outputs.loss.item() == pytest.approx(independent_loss(inputs, config), rel=TOLERANCE, abs=TOLERANCE)

    outputs.loss.backward()
    assert logprobs_T.grad is not None
    gradient = logprobs_T.grad.tolist()
    for index, expected in enumerate(finite_differences(inputs, config)):
        if expected is not None:
            assert gradient[index] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    if config.entropy_coefficient:
        assert entropy_T.grad is not None
        assert torch.equal(entropy_T.grad, -config.entropy_coefficient * inputs.weights_T)
    else:
        assert entropy_T.grad is None


def finite_differences(inputs: LossInputs, config: AlgoConfig, step: float = 1e-5) -> list[float | None]:
    """Central differences in each log-prob; None beside a kink of the clipping, where there is no derivative."""
    assert inputs.old_logprobs_T is not None
    derivatives: list[float | None] = []
    ratios = (inputs.logprobs_T - inputs.old_logprobs_T).exp().tolist()
    for index, ratio in enumerate(ratios):
        if min(abs(ratio - 1 - config.clip_high), abs(ratio - 1 + config.clip_low)) < 10 * step:
            derivatives.append(None)
            continue
        shifted = []
        for sign in (1, -1):
            logprobs_T = inputs.logprobs_T.clone()
            logprobs_T[index] += sign * step
            shifted.append(independent_loss(replace(inputs, logprobs_T=logprobs_T), config))
        derivatives.append((shifted[0] - shifted[1]) / (2 * step))
    return derivatives


@given(st.integers(0, 2**31), st.integers(1, 40))
def test_first_update_has_ratio_one_and_the_policy_gradient(seed: int, num_tokens: int) -> None:
    inputs = replace(random_inputs(seed, num_tokens), old_logprobs_T=None, reference_logprobs_T=None, entropy_T=None)
    logprobs_T = inputs.logprobs_T.clone().requires_grad_()
    outputs = policy_loss(replace(inputs, logprobs_T=logprobs_T), AlgoConfig())
    outputs.loss.backward()
    assert logprobs_T.grad is not None
    assert torch.equal(logprobs_T.grad, -(inputs.weights_T * inputs.advantages_T))
    if (inputs.weights_T > 0).any():
        assert outputs.stats.ratio_min.item() == outputs.stats.ratio_max.item() == 1.0
    assert outputs.stats.clipped.item() == 0
    assert outputs.stats.kl.item() == outputs.stats.entropy.item() == 0


def test_gradient_is_removed_only_beyond_the_bound_that_matters() -> None:
    ratios, advantages = [0.7, 0.7, 0.85, 1.25, 1.4, 1.4], [1.0, -1.0, -1.0, 1.0, 1.0, -1.0]
    logprobs_T = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    zeros_T = torch.zeros(6, dtype=torch.float64)
    inputs = LossInputs(logprobs_T, zeros_T, None, None, torch.tensor(advantages, dtype=torch.float64), zeros_T + 1)
    outputs = policy_loss(inputs, AlgoConfig(clip_low=0.2, clip_high=0.3))
    outputs.loss.backward()
    assert logprobs_T.grad is not None
    assert logprobs_T.grad.tolist() == pytest.approx([-0.7, 0.0, 0.85, -1.25, 0.0, 1.4])
    assert outputs.stats.clipped.item() == 2
    assert outputs.stats.ratio_min.item() == pytest.approx(0.7)
    assert outputs.stats.ratio_max.item() == pytest.approx(1.4)


@given(st.floats(-20, 0), st.floats(-20, 0), st.sampled_from(ESTIMATORS))
def test_kl_penalty(logprob: float, reference: float, estimator: Estimator) -> None:
    pair = [torch.tensor([value], dtype=torch.float64) for value in (logprob, reference)]
    actual = kl_penalty(pair[0], pair[1], estimator).item()
    assert actual == pytest.approx(independent_kl(logprob, reference, estimator), rel=1e-7, abs=1e-14)
    if estimator != "k1":
        assert actual >= 0


def test_kl_estimators_average_to_the_kl_and_their_gradients_are_as_documented() -> None:
    """Exact expectations over a small vocabulary, in place of sampling."""
    torch.manual_seed(0)
    z_V = torch.randn(7, dtype=torch.float64, requires_grad=True)
    logprobs_V = torch.log_softmax(z_V, 0)
    reference_V = torch.log_softmax(torch.randn(7, dtype=torch.float64), 0)
    probs_V = logprobs_V.exp().detach()
    forward = (logprobs_V.exp() * (logprobs_V - reference_V)).sum()
    backward = (reference_V.exp() * (reference_V - logprobs_V)).sum()
    expected = {"k1": torch.zeros_like(z_V), "k2": gradient(forward, z_V), "k3": gradient(backward, z_V)}
    for estimator in ESTIMATORS:
        mean = (probs_V * kl_penalty(logprobs_V, reference_V, estimator)).sum()
        if estimator != "k2":  # k2 is biased
            assert mean.item() == pytest.approx(forward.item(), rel=TOLERANCE)
        assert torch.allclose(gradient(mean, z_V), expected[estimator], atol=1e-12)


def gradient(value: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(value, of, retain_graph=True)[0]


def test_k3_keeps_its_digits_near_the_reference() -> None:
    difference = 1e-4
    kl = kl_penalty(torch.tensor([0.0]), torch.tensor([difference]), "k3").item()
    assert kl == pytest.approx(difference**2 / 2, rel=1e-2)  # exp(x) - 1 - x in float32 is off by 100 %


LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@given(LENGTHS, st.data(), st.sampled_from(AGGREGATIONS))
def test_aggregation(lengths: list[int], data: st.DataObject, kind: Aggregation) -> None:
    """Sum of weighted losses over the denominator, against the nested means that define each kind."""
    keep = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    max_new_tokens = 20
    rng = np.random.default_rng(len(lengths))
    losses = [rng.normal(size=length).tolist() for length in lengths]
    kept = [loss for loss, is_kept in zip(losses, keep, strict=True) if is_kept]
    weights = token_weights(lengths, kind, keep)
    assert weights.dtype == torch.float32
    assert len(weights) == sum(lengths)
    summed = float(weights.double() @ torch.tensor([term for loss in losses for term in loss], dtype=torch.float64))
    divisor = denominator(kind, sum(map(len, kept)), len(kept), max_new_tokens)
    if not kept:
        assert summed == divisor == 0
        return
    assert summed / divisor == pytest.approx(nested_mean(kept, kind, max_new_tokens), rel=1e-5, abs=1e-6)


def nested_mean(losses: Sequence[Sequence[float]], kind: Aggregation, max_new_tokens: int) -> float:
    if kind == "token-mean":
        return math.fsum(term for loss in losses for term in loss) / sum(len(loss) for loss in losses)
    if kind == "sequence-mean":
        return math.fsum(math.fsum(loss) / len(loss) for loss in losses) / len(losses)
    return math.fsum(math.fsum(loss) / max_new_tokens for loss in losses) / len(losses)


def test_weights_without_mask_keep_everything() -> None:
    assert token_weights([1, 2, 4], "sequence-mean").tolist() == [1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]
    assert token_weights([2, 1], "constant-length").tolist() == [1.0] * 3


@given(st.integers(0, 2**31), st.integers(2, 40), st.data())
def test_stats_of_parts_add_up(seed: int, num_tokens: int, data: st.DataObject) -> None:
    inputs = random_inputs(seed, num_tokens)
    config = AlgoConfig(kl_coefficient=0.1, entropy_coefficient=0.01)
    cut = data.draw(st.integers(1, num_tokens - 1))
    whole = policy_loss(inputs, config).stats
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    parts = [
        policy_loss(LossInputs(**{name: column[part] for name, column in columns.items()}), config).stats
        for part in (slice(None, cut), slice(cut, None))
    ]
    merged = parts[0] + parts[1]
    for field in fields(whole):
        value = getattr(whole, field.name)
        assert value.shape == ()
        assert not value.requires_grad
        assert getattr(merged, field.name).item() == pytest.approx(value.item(), rel=1e-6, abs=1e-12), field.name


def test_stats_count_unmasked_tokens_only() -> None:
    inputs = replace(random_inputs(3, 50), weights_T=torch.tensor([0.0, 0.5] * 25, dtype=torch.float64))
    config = AlgoConfig(kl_coefficient=0.1, kl_in="reward", kl_estimator="k1")
    stats = policy_loss(inputs, config).stats
    assert inputs.entropy_T is not None
    assert inputs.reference_logprobs_T is not None
    assert stats.tokens.item() == 25
    assert stats.entropy.item() == pytest.approx(math.fsum(inputs.entropy_T[1::2].tolist()))
    expected_kl = math.fsum((inputs.logprobs_T - inputs.reference_logprobs_T)[1::2].tolist())
    assert stats.kl.item() == pytest.approx(expected_kl)
    assert stats.loss.item() == stats.policy_loss.item()  # a KL in the reward is not in the loss


def test_masked_tokens_have_no_gradient() -> None:
    inputs = replace(random_inputs(5, 8), weights_T=torch.zeros(8, dtype=torch.float64))
    logprobs_T = inputs.logprobs_T.clone().requires_grad_()
    outputs = policy_loss(replace(inputs, logprobs_T=logprobs_T), AlgoConfig(kl_coefficient=1.0))
    outputs.loss.backward()
    assert logprobs_T.grad is not None
    assert not logprobs_T.grad.any()
    assert outputs.stats.tokens.item() == 0
    assert (outputs.stats.ratio_min.item(), outputs.stats.ratio_max.item()) == (math.inf, -math.inf)
