"""The fused draw against `sample` on `gumbel` noise: ids, three log-probs, ragged vocabularies, lost numbers."""

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is loaded

import triton
import triton.language as tl

from rollplex.rollout import fused_filters, fused_sampler
from rollplex.rollout.fused_filters import find_kept
from rollplex.rollout.fused_sampler import fused_sample
from rollplex.rollout.noise import LARGEST_UNIFORM, gumbel, pack_keys
from rollplex.rollout.sampler import Draw, SamplingParams, filtered, sample

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, of infinities

LOGPROB_ERROR = 1e-5
UNDECIDED = 1e-5
"""Two perturbed values that are as close may change places."""
NOISE_ERROR = 1e-6
ON_GPU = torch.cuda.is_available()
CHUNK = fused_sampler._CHUNK if ON_GPU else 128  # the interpreter is slow
NO_FILTERS = SamplingParams()
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_sampler, "_CHUNK", CHUNK)
    monkeypatch.setattr(fused_sampler, "_TILE", min(CHUNK, fused_sampler._TILE))
    monkeypatch.setattr(fused_filters, "_TILE", fused_filters._TILE if ON_GPU else 2 * CHUNK)


def keys(num_rows: int, device: torch.device, seed: int = 0) -> Tensor:
    rows = range(num_rows)
    return pack_keys(seed, 7, [2**33 + 3 + row // 2 for row in rows], list(rows), [5 * row for row in rows]).to(device)


def random_logits(num_rows: int, vocab_size: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 4).to(device)


def poisoned(num_rows: int, device: torch.device) -> Draw:
    columns = torch.full((3, num_rows), NAN, device=device)
    return Draw(torch.full((num_rows,), -1, device=device), *columns)


def columns(draw: Draw) -> Tensor:
    return torch.stack((draw.raw_logprobs_B, draw.tempered_logprobs_B, draw.sampling_logprobs_B))


def check(
    logits_BV: Tensor, temperature: float, banned_V: Tensor | None, seed: int = 0, filters: SamplingParams = NO_FILTERS
) -> Draw:
    """The same draw as `sample`'s, but for rows whose two best values are too close to call."""
    num_rows, vocab_size = logits_BV.shape
    keys_BW = keys(num_rows, logits_BV.device, seed)
    noise_BV = gumbel(keys_BW, vocab_size)
    params = replace(filters, temperature=temperature)
    expected = sample(logits_BV.float(), noise_BV, params, banned_V)
    out = poisoned(num_rows, logits_BV.device)
    found = fused_sample(logits_BV, keys_BW, temperature, banned_V, out, find_kept(logits_BV, params, banned_V))
    assert found is out
    same_B = found.ids_B == expected.ids_B
    if temperature == 0.0:
        assert same_B.all()
    else:
        allowed_BV = logits_BV.float() if banned_V is None else logits_BV.float().masked_fill(banned_V, -INFINITY)
        values_BV = filtered(allowed_BV / temperature, params) + noise_BV
        best_B = values_BV.max(-1).values
        assert (best_B - values_BV.gather(1, found.ids_B[:, None])[:, 0] <= UNDECIDED).all()
        assert same_B.float().mean() >= 0.5
    errors_3B = (columns(found) - columns(expected)).abs()[:, same_B]
    assert (errors_3B <= LOGPROB_ERROR * columns(expected).abs().clamp(min=1.0)[:, same_B]).all()
    return found


@pytest.mark.parametrize(("temperature", "banned", "dtype"), [
    (0.0, False, torch.float32), (0.0, True, torch.bfloat16), (0.7, False, torch.bfloat16),
    (0.7, True, torch.float32), (1.0, False, torch.float32), (1.0, True, torch.bfloat16),
])  # fmt: skip
def test_draw_is_the_sampler_s(
    temperature: float, banned: bool, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_sampler, "_TILE", CHUNK // 2)
    vocab_size = 3 * CHUNK - 16
    logits_BV = random_logits(2, vocab_size, device).to(dtype)
    banned_V = None
    if banned:
        banned_V = torch.arange(vocab_size, device=device) % 3 == 1
        banned_V[CHUNK : 2 * CHUNK] = False
    check(logits_BV, temperature, banned_V)


@pytest.mark.parametrize("vocab_size", [1, 50, CHUNK + 1, CHUNK + 6])
def test_vocabularies_of_any_size(vocab_size: int, device: torch.device) -> None:
    logits_BV = random_logits(2, vocab_size, device)
    check(logits_BV, 0.8, None)
    if vocab_size > 1:
        banned_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        banned_V[-1] = True
        logits_BV[:, -1] = 1e4  # far above all: it must neither be drawn nor swallow the sums of the others
        for temperature in (0.0, 0.8):
            found = check(logits_BV, temperature, banned_V)
            assert (found.ids_B < vocab_size - 1).all()
            assert (found.raw_logprobs_B < -9e3).all()


def test_likely_ids_spread_over_chunks(device: torch.device) -> None:
    logits_BV = torch.zeros(12, 2 * CHUNK, device=device)
    logits_BV[:, :: CHUNK // 4] = 18.0
    drawn = check(logits_BV, 1.0, None, seed=2).ids_B
    assert (drawn < CHUNK).any() and (drawn >= CHUNK).any() and len(drawn.unique()) > 4


def test_of_equal_logits_the_first_is_taken(device: torch.device) -> None:
    logits_BV = torch.zeros(2, 2 * CHUNK, device=device)
    logits_BV[0, [90, 95, CHUNK + 1]] = 3.0
    banned_V = torch.zeros(2 * CHUNK, dtype=torch.bool, device=device)
    banned_V[[0, 1, 90]] = True
    assert check(logits_BV, 0.0, None).ids_B.tolist() == [90, 0]
    assert check(logits_BV, 0.0, banned_V).ids_B.tolist() == [95, 2]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("lost", "position"), [(NAN, 0), (NAN, CHUNK + 5), (INFINITY, 77)])
def test_lost_numbers_show_in_their_row_only(
    lost: float, position: int, temperature: float, device: torch.device
) -> None:
    vocab_size = CHUNK + 8
    logits_BV = random_logits(2, vocab_size, device)
    whole = fused_sample(logits_BV, keys(2, device), temperature)
    logits_BV[1, position] = lost
    draw = fused_sample(logits_BV, keys(2, device), temperature, None, poisoned(2, device))
    assert not columns(draw)[:, 1].isfinite().any()
    assert 0 <= int(draw.ids_B[1]) < vocab_size
    assert torch.equal(columns(draw)[:, 0], columns(whole)[:, 0])
    assert draw.ids_B[0] == whole.ids_B[0]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_rows_of_nothing_but_lost_numbers(temperature: float, device: torch.device) -> None:
    logits_BV = torch.tensor([NAN, -INFINITY, INFINITY], device=device)[:, None].repeat(1, 100)
    draw = fused_sample(logits_BV, keys(3, device), temperature, None, poisoned(3, device))
    assert not columns(draw).isfinite().any()
    assert ((draw.ids_B >= 0) & (draw.ids_B < 100)).all()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_banned_ids(temperature: float, device: torch.device) -> None:
    """A lost number at a banned id leaves the sampling distribution whole; and all may be banned."""
    logits_BV = random_logits(2, 64, device)
    banned_V = torch.zeros(64, dtype=torch.bool, device=device)
    banned_V[9] = True
    whole = fused_sample(logits_BV, keys(2, device), temperature, banned_V)
    logits_BV[0, 9] = NAN
    draw = fused_sample(logits_BV, keys(2, device), temperature, banned_V, poisoned(2, device))
    assert torch.equal(draw.ids_B, whole.ids_B)
    assert torch.equal(draw.sampling_logprobs_B, whole.sampling_logprobs_B)
    assert draw.raw_logprobs_B.isnan().tolist() == draw.tempered_logprobs_B.isnan().tolist() == [True, False]
    nothing = fused_sample(logits_BV, keys(2, device), temperature, torch.ones_like(banned_V), poisoned(2, device))
    assert not nothing.sampling_logprobs_B.isfinite().any()
    assert ((nothing.ids_B >= 0) & (nothing.ids_B < 64)).all()


def test_ids_without_probability_are_not_drawn(device: torch.device) -> None:
    logits_BV = torch.full((2, 2 * CHUNK), -INFINITY, device=device)
    logits_BV[0, [3, CHUNK + 70]] = 1.0
    logits_BV[1, 2 * CHUNK - 1] = -50.0
    draw = check(logits_BV, 1.0, None)
    assert draw.ids_B[0] in (3, CHUNK + 70)
    assert draw.ids_B[1] == 2 * CHUNK - 1
    assert check(logits_BV, 0.0, None).ids_B.tolist() == [3, 2 * CHUNK - 1]


def test_a_row_is_drawn_the_same_in_any_batch(device: torch.device) -> None:
    storage_BV = random_logits(3, 2 * CHUNK + 16, device)
    logits_BV, keys_BW = storage_BV[:, : CHUNK + 16], keys(3, device)
    together = fused_sample(logits_BV, keys_BW, 0.9)
    for row in range(3):
        alone = fused_sample(logits_BV[row : row + 1], keys_BW[row : row + 1], 0.9)
        assert torch.equal(columns(alone)[:, 0], columns(together)[:, row])
        assert alone.ids_B[0] == together.ids_B[row]
    assert fused_sample(logits_BV[:0], keys_BW[:0], 0.9).ids_B.shape == (0,)


def distinct(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    order = torch.stack(
        [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(i)) for i in range(num_rows)]
    )
    return (torch.erfinv((order + 0.5) / vocab_size * 2 - 1) * 4).to(device)


def kept_ids(logits_BV: Tensor, params: SamplingParams, banned_V: Tensor | None) -> Tensor:
    kept = find_kept(logits_BV, params, banned_V)
    assert kept is not None
    bounds_B1 = kept.bounds_B.long()[:, None] & 0xFFFFFFFF
    bits_BV = (logits_BV.float() + 0.0).view(torch.int32).long() & 0xFFFFFFFF
    patterns_BV = torch.where(bits_BV >= 2**31, bits_BV ^ 0xFFFFFFFF, bits_BV | 2**31)
    ids_V = torch.arange(logits_BV.shape[1], device=logits_BV.device)
    late_BV = ids_V >= kept.first_ids_B[:, None]
    mask_BV = (patterns_BV > bounds_B1) | ((patterns_BV == bounds_B1) & late_BV)
    return mask_BV if banned_V is None else mask_BV & ~banned_V


FILTERS = [
    SamplingParams(0.7, top_k=5), SamplingParams(1.0, top_p=0.9), SamplingParams(1.0, top_p=0.3),
    SamplingParams(0.7, min_p=0.1), SamplingParams(1.3, top_p=0.8, top_k=30, min_p=0.05),
    SamplingParams(1.0, top_p=1e-6), SamplingParams(1.0, top_k=1),
]  # fmt: skip


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_filters_keep_what_the_sampler_s_keep(params: SamplingParams, dtype: torch.dtype, device: torch.device) -> None:
    """Of bfloat16 values many are equal: which of them stay is told too."""
    vocab_size = 2 * CHUNK - 30
    logits_BV = distinct(1 if dtype == torch.float32 else 2, vocab_size, device).to(dtype)
    banned_V = torch.arange(vocab_size, device=device) % 5 == 1 if params.top_k else None
    allowed_BV = logits_BV.float() if banned_V is None else logits_BV.float().masked_fill(banned_V, -INFINITY)
    expected_BV = filtered(allowed_BV / params.temperature, params).isfinite()
    assert torch.equal(kept_ids(logits_BV, params, banned_V), expected_BV)


def test_equals_are_divided_by_their_ids(device: torch.device) -> None:
    logits_BV = torch.zeros(3, 40, device=device, dtype=torch.bfloat16)
    logits_BV[1, 7] = 2.0
    logits_BV[2, 20:] = -0.0
    logits_BV[2, :10] = -1.0
    for top_p in (0.07, 0.93):
        params = SamplingParams(top_p=top_p)
        assert torch.equal(kept_ids(logits_BV, params, None), filtered(logits_BV.float(), params).isfinite())


@pytest.mark.parametrize("banned", [False, True], ids=["all", "banned"])
def test_filtered_draw_is_the_sampler_s(banned: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_filters, "_TILE", CHUNK)
    vocab_size = CHUNK + 8
    banned_V = torch.arange(vocab_size, device=device) % 3 == 1
    params = SamplingParams(0.7, top_k=20, top_p=0.9, min_p=0.02)
    logits_BV = distinct(2, vocab_size, device).to(torch.bfloat16)
    check(logits_BV, params.temperature, banned_V if banned else None, filters=params)


def test_filters_do_not_hide_lost_numbers(device: torch.device) -> None:
    logits_BV = distinct(3, 50, device)
    logits_BV[0, 3], logits_BV[1, 4] = NAN, INFINITY
    params = SamplingParams(0.7, top_k=20, top_p=0.9, min_p=0.02)
    draw = fused_sample(logits_BV, keys(3, device), 0.7, None, poisoned(3, device), find_kept(logits_BV, params))
    assert columns(draw).isfinite().all(0).tolist() == [False, False, True]
    assert ((draw.ids_B >= 0) & (draw.ids_B < 50)).all()


def test_nothing_to_filter(device: torch.device) -> None:
    logits_BV = distinct(1, 50, device)
    assert find_kept(logits_BV, SamplingParams(top_k=50)) is None
    assert find_kept(logits_BV, SamplingParams(0.0, top_p=0.5)) is None


@triton.jit  # type: ignore[untyped-decorator]
def _noise_kernel(words_ptr, out_ptr, FAST: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 1024)
    word = tl.load(words_ptr + at).to(tl.uint32)
    tl.store(out_ptr + at, fused_sampler._exponential(word, FAST))


def test_noise_is_accurate_from_end_to_end(device: torch.device) -> None:
    middle = torch.linspace(0, 2**32 - 1, 512, dtype=torch.float64).round().long()
    small = torch.logspace(0, 31.99, 384, base=2, dtype=torch.float64).long()
    words = torch.cat((middle, small, torch.arange(64), 2**32 - 1 - torch.arange(64)))
    found = torch.full((1024,), NAN, device=device)
    _noise_kernel[(1,)](words.to(device), found, FAST=device.type == "cuda")
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=LARGEST_UNIFORM).double()
    exact = -torch.log1p(-uniform)
    assert ((found.cpu().double() - exact).abs() / exact).max() < NOISE_ERROR
