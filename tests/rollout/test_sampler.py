"""Filters equal transformers' own; frequencies follow the reported log-probs; lost numbers never hide."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollplex.rollout.noise import gumbel, pack_keys
from rollplex.rollout.sampler import Draw, SamplingParams, filtered, sample

LOGPROB_ERROR = 1e-5  # absolute, float32 against float64
LARGEST_NOISE, SMALLEST_NOISE = 22.88, -2.82

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_p=st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.1, 1e-6]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 10_000]),
    min_p=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
)


def noise(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return gumbel(pack_keys(seed, 0, [0] * num_rows, [0] * num_rows, list(range(num_rows))), vocab_size)


def distinct_logits(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Random logits of a spread that differs from row to row; none are equal, so that sorting has one answer."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        order = torch.randperm(vocab_size, generator=generator)
        spread = 0.5 + 12.0 * torch.rand(1, generator=generator)
        rows.append(torch.erfinv((order + 0.5) / vocab_size * 2 - 1) * spread)
    return torch.stack(rows)


def transformers_filtered(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    ids = torch.LongTensor([[0]])
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits_BV)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    return MinPLogitsWarper(params.min_p)(ids, scores) if params.min_p else scores


def scalar_logprobs(logits: list[float], temperature: float) -> list[float]:
    top = max(logits)
    total = math.fsum(math.exp((value - top) / temperature) for value in logits)
    return [(value - top) / temperature - math.log(total) for value in logits]


def columns(draw: Draw) -> Tensor:
    return torch.stack([draw.raw_logprobs_B, draw.tempered_logprobs_B, draw.sampling_logprobs_B])


@given(PARAMS, st.integers(1, 6), st.integers(1, 150), st.integers(0, 10**6))
def test_filters_equal_transformers(params: SamplingParams, num_rows: int, vocab_size: int, seed: int) -> None:
    logits_BV = distinct_logits(num_rows, vocab_size, seed)
    assert torch.equal(filtered(logits_BV / params.temperature, params), transformers_filtered(logits_BV, params))


@pytest.mark.parametrize("params", [
    SamplingParams(top_k=3), SamplingParams(top_p=0.8), SamplingParams(min_p=0.2),
    SamplingParams(temperature=0.6, top_k=6, top_p=0.95, min_p=0.02),
])  # fmt: skip
def test_filters_keep_what_their_definitions_say(params: SamplingParams) -> None:
    logits = distinct_logits(1, 30, 5)[0].tolist()
    weights = {i: math.exp(value / params.temperature) for i, value in enumerate(logits)}
    if params.top_k:
        weights = dict(sorted(weights.items(), key=lambda item: -item[1])[: params.top_k])
    if params.top_p < 1.0:  # the fewest likeliest ids that hold top_p
        kept, mass, total = {}, 0.0, sum(weights.values())
        for i, weight in sorted(weights.items(), key=lambda item: -item[1]):
            if mass < params.top_p * total:
                kept[i] = weight
            mass += weight
        weights = kept
    weights = {i: weight for i, weight in weights.items() if weight >= params.min_p * max(weights.values())}
    kept_V = filtered(torch.tensor([logits]) / params.temperature, params)[0].isfinite()
    assert set(kept_V.nonzero().flatten().tolist()) == set(weights)
    assert 0 < len(weights) < 30


@given(PARAMS, st.integers(0, 10**6), st.integers(2, 40))
def test_log_probs_are_as_defined(params: SamplingParams, seed: int, vocab_size: int) -> None:
    logits_BV = distinct_logits(3, vocab_size, seed)
    banned_V = torch.arange(vocab_size) % 3 == 1
    draw = sample(logits_BV, noise(3, vocab_size, seed), params, banned_V)
    for row, token in enumerate(draw.ids_B.tolist()):
        logits = logits_BV[row].tolist()
        raw, tempered = scalar_logprobs(logits, 1.0)[token], scalar_logprobs(logits, params.temperature)[token]
        allowed_1V = logits_BV[row : row + 1].masked_fill(banned_V, -torch.inf)
        kept = transformers_filtered(allowed_1V, params)[0].isfinite().nonzero().flatten().tolist()
        sampling = scalar_logprobs([logits[i] for i in kept], params.temperature)[kept.index(token)]
        expected = torch.tensor([raw, tempered, sampling])
        torch.testing.assert_close(columns(draw)[:, row], expected, rtol=1e-5, atol=LOGPROB_ERROR)
    assert draw.ids_B.dtype == torch.int64
    assert columns(draw).dtype == torch.float32


@pytest.mark.parametrize("params", [
    SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(top_p=0.7), SamplingParams(min_p=0.1), SamplingParams(1.3, top_p=0.9, top_k=8, min_p=0.05),
])  # fmt: skip
def test_frequencies_follow_the_sampling_distribution(params: SamplingParams) -> None:
    count, vocab_size = 40_000, 12
    logits_V = torch.linspace(-2.0, 2.0, vocab_size)[
        torch.randperm(vocab_size, generator=torch.Generator().manual_seed(3))
    ]
    banned_V = torch.zeros(vocab_size, dtype=torch.bool)
    banned_V[int(logits_V.topk(2).indices[1])] = True
    draw = sample(logits_V.expand(count, -1), noise(count, vocab_size), params, banned_V)
    probabilities_V = transformers_filtered(logits_V.masked_fill(banned_V, -torch.inf)[None], params)[0].softmax(-1)
    observed_V = torch.bincount(draw.ids_B, minlength=vocab_size)
    possible_V = probabilities_V > 0
    assert observed_V[~possible_V].sum() == 0
    assert observed_V[banned_V].sum() == 0
    expected_V = (probabilities_V * count)[possible_V]
    degrees = int(possible_V.sum()) - 1
    chi_square = ((observed_V[possible_V] - expected_V) ** 2 / expected_V).sum()
    assert degrees > 0
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4  # above the 99.9 % point for 1 to 11 degrees
    torch.testing.assert_close(draw.sampling_logprobs_B.exp(), probabilities_V[draw.ids_B])


@settings(max_examples=200)
@given(
    PARAMS | st.just(SamplingParams(temperature=0.0)),
    st.lists(st.sampled_from([-1e4, -3.0, 0.0, 0.5, 2.0, 1e4, -math.inf]), min_size=2, max_size=12),
    st.data(),
)
def test_what_is_banned_or_filtered_is_never_drawn(
    params: SamplingParams, logits: list[float], data: st.DataObject
) -> None:
    banned = data.draw(st.lists(st.booleans(), min_size=len(logits), max_size=len(logits)))
    banned[0], logits[0] = False, 1.0  # one id that can be drawn
    kind = st.sampled_from([SMALLEST_NOISE, 0.0, LARGEST_NOISE])
    drawn_noise = data.draw(st.lists(kind, min_size=len(logits), max_size=len(logits)))
    against = [LARGEST_NOISE if no else SMALLEST_NOISE for no in banned]
    noise_BV = torch.tensor([drawn_noise, against])
    logits_BV = torch.tensor([logits, logits])
    draw = sample(logits_BV, noise_BV, params, torch.tensor(banned))
    assert columns(draw).isfinite().all()
    assert (columns(draw) <= 1e-6).all()
    for token in draw.ids_B.tolist():
        assert not banned[token]
        assert logits[token] > -math.inf
        if params.temperature > 0:
            allowed_1V = logits_BV[:1].masked_fill(torch.tensor(banned), -torch.inf)
            assert filtered(allowed_1V / params.temperature, params)[0, token].isfinite()


@given(PARAMS, st.integers(0, 10**6))
def test_rows_do_not_depend_on_the_batch(params: SamplingParams, seed: int) -> None:
    logits_BV, noise_BV = distinct_logits(6, 37, seed), noise(6, 37, seed)
    whole = sample(logits_BV, noise_BV, params)
    for rows in ([5], [2, 0], [4, 3, 1]):
        part = sample(logits_BV[rows], noise_BV[rows], params)
        assert torch.equal(part.ids_B, whole.ids_B[rows])
        assert torch.equal(columns(part), columns(whole)[:, rows])


@given(st.integers(0, 10**6), st.integers(0, 9), st.floats(0.1, 2.0))
def test_a_shift_of_all_logits_changes_nothing(seed: int, shift: int, temperature: float) -> None:
    logits_BV = (distinct_logits(4, 20, seed) * 8).round() / 8  # so that adding the shift is exact
    params = SamplingParams(temperature, top_k=7, top_p=0.9)
    one, other = (sample(logits_BV + offset, noise(4, 20, seed), params) for offset in (0, shift))
    torch.testing.assert_close(columns(one)[:2], columns(other)[:2], rtol=1e-4, atol=1e-4)
    assert torch.equal(one.ids_B, other.ids_B)


def test_greedy_takes_the_best_allowed_id() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 2.0], [5.0, 1.0, -1.0]])
    banned_V = torch.tensor([False, True, False])
    draw = sample(logits_BV, None, SamplingParams(temperature=0.0, top_p=0.5, top_k=1, min_p=0.5), banned_V)
    assert draw.ids_B.tolist() == [2, 0]
    expected_B = logits_BV.log_softmax(-1)[[0, 1], [2, 0]]
    assert torch.equal(draw.raw_logprobs_B, expected_B)
    assert torch.equal(draw.tempered_logprobs_B, expected_B)
    assert torch.equal(draw.sampling_logprobs_B, torch.zeros(2))


def test_a_low_temperature_approaches_greedy() -> None:
    logits_BV = distinct_logits(50, 30, 1)
    draw = sample(logits_BV, noise(50, 30), SamplingParams(temperature=1e-4))
    assert torch.equal(draw.ids_B, logits_BV.argmax(-1))


@pytest.mark.parametrize("params", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_filters_that_leave_one_id(params: SamplingParams) -> None:
    logits_BV = distinct_logits(40, 50, 2)
    assert (filtered(logits_BV, params).isfinite().sum(-1) == 1).all()
    best_V = torch.zeros(50, dtype=torch.bool)
    best_V[logits_BV.argmax(-1)[0]] = True
    draw = sample(logits_BV[:1], noise(1, 50), params, best_V)
    assert draw.ids_B.tolist() == logits_BV[:1].masked_fill(best_V, -torch.inf).argmax(-1).tolist()
    assert draw.sampling_logprobs_B.tolist() == [0.0]
    assert draw.raw_logprobs_B.item() < draw.sampling_logprobs_B.item()


def test_a_tiny_top_p_keeps_one_of_very_many_equal_ids() -> None:
    for vocab_size in (1000, 32_000, 151_936):
        assert filtered(torch.zeros(2, vocab_size), SamplingParams(top_p=1e-9)).isfinite().sum(-1).tolist() == [1, 1]


def test_a_share_reached_exactly_is_enough() -> None:
    kept_V = filtered(torch.zeros(1, 4), SamplingParams(top_p=0.5))[0].isfinite()
    assert kept_V.sum() == 2


def test_ties() -> None:
    logits_BV = torch.tensor([[2.0, 1.0, 2.0, 1.0, 1.0, 0.0]])
    kept = {
        SamplingParams(top_k=1): [0, 2],  # what is as likely as the k-th id stays
        SamplingParams(top_k=3): [0, 1, 2, 3, 4],
        SamplingParams(min_p=1.0): [0, 2],
        SamplingParams(top_p=0.99): [0, 1, 2, 3, 4, 5],
        SamplingParams(top_p=0.7): [0, 2, 4],  # 0.31 + 0.31 + one of the three 0.11
    }
    for params, expected in kept.items():
        for _ in range(3):
            assert filtered(logits_BV, params)[0].isfinite().nonzero().flatten().tolist() == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("bad", [
    [0.0, math.nan, 1.0, 2.0], [math.nan] * 4, [0.0, math.inf, 1.0, 2.0], [math.inf] * 4, [-math.inf] * 4,
    [math.nan, 0.0, 1.0, 2.0],  # at a banned id
    [math.inf, 0.0, 1.0, 2.0],
    [1.0, -math.inf, -math.inf, -math.inf],  # nothing but a banned id
])  # fmt: skip
def test_lost_numbers_stay_visible(temperature: float, filters: dict[str, float], bad: list[float]) -> None:
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    logits_BV = torch.tensor([bad, [0.0, 1.0, 2.0, 3.0]])
    banned_V = torch.tensor([True, False, False, False])
    draw = sample(logits_BV, noise(2, 4), params, banned_V)
    assert not columns(draw)[:, 0].isfinite().all()
    assert columns(draw)[:, 1].isfinite().all()  # the row beside it is not harmed


def test_inputs_are_not_changed() -> None:
    logits_BV, noise_BV = distinct_logits(3, 20, 0), noise(3, 20)
    copies = logits_BV.clone(), noise_BV.clone()
    sample(logits_BV, noise_BV, SamplingParams(0.7, 0.9, 5, 0.1), torch.arange(20) == 3)
    sample(logits_BV, None, SamplingParams(0.0))
    assert torch.equal(logits_BV, copies[0])
    assert torch.equal(noise_BV, copies[1])


def test_sampling_needs_noise() -> None:
    with pytest.raises(AssertionError, match="needs noise"):
        sample(torch.zeros(1, 3), None, SamplingParams())
