"""What top-k, top-p and min-p leave of a row, found without sorting: a lower bound, and where equals are divided.

All three remove from below, so that what is left of a row is told by two numbers (`Kept`): the lowest value that is
kept, and, among ids of exactly that value, the first id that is kept. `sampler.filtered` defines what is kept: top-k
keeps all equals of the k-th; top-p, whose sort is stable, removes the lowest ids of equals first.

    a program per row:  largest value -> bound of top-k -> mass left -> bound of top-p, its equals -> bound of min-p

A bound is searched two bits at a time in the values' order-preserving bit patterns: the largest pattern such that what
is at or above it still counts k ids, or weighs top_p. bfloat16 values differ in the upper 16 bits only, which halves
the passes. Every pass reads the row anew; it lies in L2. Sums are float32, added in a fixed order. An id within their
rounding, about 1e-6 of the mass, of where top-p ends may be kept or not.

It knows no noise and no draw.

Legend: B rows, V vocabulary.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.rollout.sampler import SamplingParams

_TILE = 8192  # 16 values to a thread of 16 warps
_LOG2_E = math.log2(math.e)
_NO_ID = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, eq=False)
class Kept:
    """Per row the pattern of the lowest kept value (32 bits without sign) and the first id kept of it, int32 [B]."""

    bounds_B: Tensor
    first_ids_B: Tensor


@triton.jit
def ordered(x):
    """float32 values as 32-bit patterns in the same order; both zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE: tl.constexpr, BANNED: tl.constexpr):
    """Ids of a tile, and their logits; -inf for banned ones and beyond the vocabulary."""
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    if BANNED:
        is_banned = tl.load(banned_ptr + ids, mask=ids < vocab_size, other=0) != 0
        x = tl.where(is_banned, -float("inf"), x)
    return ids, x


@triton.jit
def _search(
    logits_ptr, banned_ptr, vocab_size, least, target, top, scale,
    WEIGHED: tl.constexpr, TILE: tl.constexpr, NUM_TILES: tl.constexpr, STEPS: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """The largest pattern such that values at or above it, of those at or above `least`, number or weigh `target`."""
    bound = least * 0
    for step in range(STEPS):
        quarter = (bound * 0 + 1) << tl.cast(30 - 2 * step, tl.uint32)
        first = tl.zeros((TILE,), tl.float32)
        second, third = first, first
        for tile in range(NUM_TILES):
            _, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
            pattern = ordered(x)
            weight = tl.where(pattern >= least, tl.exp2((x - top) * scale) if WEIGHED else 1.0, 0.0)
            first += tl.where(pattern >= bound + quarter, weight, 0.0)
            second += tl.where(pattern >= bound + 2 * quarter, weight, 0.0)
            third += tl.where(pattern >= bound + 3 * quarter, weight, 0.0)
        digit = (tl.sum(first, 0) >= target).to(tl.uint32)
        digit += (tl.sum(second, 0) >= target).to(tl.uint32) + (tl.sum(third, 0) >= target).to(tl.uint32)
        bound += digit * quarter
    return bound


@triton.jit
def _divide_equals(
    logits_ptr, banned_ptr, vocab_size, least, bound, mass, top, scale,
    TILE: tl.constexpr, NUM_TILES: tl.constexpr, BANNED: tl.constexpr,
):  # fmt: skip
    """The lowest value's own pattern, and the first of its ids that is needed for `mass`; at least the last one is."""
    lowest = tl.full((TILE,), 0xFFFFFFFF, tl.uint32)
    for tile in range(NUM_TILES):
        _, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
        pattern = ordered(x)
        lowest = tl.minimum(lowest, tl.where((pattern >= bound) & (pattern >= least), pattern, 0xFFFFFFFF))
    value = tl.min(lowest, 0)
    above, equal, equal_weight = (
        tl.zeros((TILE,), tl.float32),
        tl.zeros((TILE,), tl.int32),
        tl.zeros((TILE,), tl.float32),
    )
    for tile in range(NUM_TILES):
        _, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
        pattern, weight = ordered(x), tl.exp2((x - top) * scale)
        above += tl.where(pattern > value, weight, 0.0)
        equal += (pattern == value).to(tl.int32)
        equal_weight = tl.maximum(equal_weight, tl.where(pattern == value, weight, 0.0))
    num_equal = tl.sum(equal, 0)
    needed = tl.ceil((mass - tl.sum(above, 0)) / tl.max(equal_weight, 0))
    # Values without any weight are all kept. So are all, if the comparison with a lost number fails.
    num_removed = tl.where(needed < num_equal, num_equal - tl.maximum(needed, 1.0).to(tl.int32), 0)
    num_before = num_removed * 0
    first_id = num_removed * 0 + _NO_ID
    for tile in range(NUM_TILES):
        ids, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
        is_equal = (ordered(x) == value).to(tl.int32)
        rank = num_before + tl.cumsum(is_equal, 0) - is_equal
        first_id = tl.minimum(first_id, tl.min(tl.where((is_equal != 0) & (rank >= num_removed), ids, _NO_ID), 0))
        num_before += tl.sum(is_equal, 0)
    return value, first_id


@triton.jit
def _filter_kernel(
    logits_ptr, banned_ptr, bounds_ptr, first_ids_ptr, vocab_size, row_stride, scale, top_k, top_p, reach,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BANNED: tl.constexpr,
    TILE: tl.constexpr, NUM_TILES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    largest = tl.full((TILE,), -float("inf"), tl.float32)
    for tile in range(NUM_TILES):
        _, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
        largest = tl.maximum(largest, x)
    top = tl.max(largest, 0)
    bound = ordered(top) * 0
    first_id = row * 0
    if TOP_K:
        bound = _search(
            logits_ptr, banned_ptr, vocab_size, bound, top_k * 1.0, top, scale, False, TILE, NUM_TILES, STEPS, BANNED
        )
    if TOP_P:
        weights = tl.zeros((TILE,), tl.float32)
        for tile in range(NUM_TILES):
            _, x = _tile(logits_ptr, banned_ptr, tile, vocab_size, TILE, BANNED)
            weights += tl.where(ordered(x) >= bound, tl.exp2((x - top) * scale), 0.0)
        mass = top_p * tl.sum(weights, 0)
        least = bound
        bound = _search(
            logits_ptr, banned_ptr, vocab_size, least, mass, top, scale, True, TILE, NUM_TILES, STEPS, BANNED
        )
        # Nothing weighs more than all: at least the largest value stays.
        bound = tl.minimum(bound, ordered(top))
        bound, first_id = _divide_equals(
            logits_ptr, banned_ptr, vocab_size, least, bound, mass, top, scale, TILE, NUM_TILES, BANNED
        )
    if MIN_P:
        likely = ordered(top + reach)
        first_id = tl.where(likely > bound, 0, first_id)
        bound = tl.maximum(likely, bound)
    tl.store(bounds_ptr + row, bound.to(tl.int32, bitcast=True))
    tl.store(first_ids_ptr + row, first_id)


def find_kept(logits_BV: Tensor, params: SamplingParams, banned_V: Tensor | None = None) -> Kept | None:
    """What the filters leave of each row; None if there is no filter, or nothing to filter at temperature 0.

    Args:
        logits_BV: bfloat16 or float32, before the temperature; rows contiguous.
        banned_V: bool; ids that no filter sees.
    """
    num_rows, vocab_size = logits_BV.shape
    top_k, top_p, min_p = 0 < params.top_k < vocab_size, params.top_p < 1.0, params.min_p > 0.0
    if params.temperature == 0.0 or not (top_k or top_p or min_p):
        return None
    bounds_B, first_ids_B = torch.empty((2, num_rows), dtype=torch.int32, device=logits_BV.device)
    if num_rows > 0:
        _filter_kernel[(num_rows,)](
            logits_BV, bounds_B if banned_V is None else banned_V.view(torch.uint8), bounds_B, first_ids_B,
            vocab_size, logits_BV.stride(0), _LOG2_E / params.temperature, params.top_k, params.top_p,
            params.temperature * math.log(params.min_p) if min_p else 0.0,
            TOP_K=top_k, TOP_P=top_p, MIN_P=min_p, BANNED=banned_V is not None,
            TILE=_TILE, NUM_TILES=triton.cdiv(vocab_size, _TILE), STEPS=8 if logits_BV.dtype == torch.bfloat16 else 16,
            num_warps=16,
        )  # fmt: skip
    return Kept(bounds_B, first_ids_B)
