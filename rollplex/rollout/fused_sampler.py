"""Drawing the next token in one pass over the logits, the noise made where it is used.

    a program per (row, chunk of 4,096 ids)   -> partial maxima and sums, the chunk's best id
    a program per row                         -> the drawn id, three log-probs

The same draw as `sampler.sample` with `noise.gumbel`, up to float32 rounding: those define what is computed here. There
is no float32 copy of the logits and no noise in memory. Chunks have one size, whatever the batch: a row's draw depends
on that row only, neither on the rows beside it nor on the number of SMs.

For each chunk, ids that may be drawn and banned ones are summed apart, each against its own maximum, so that a banned
id, however likely, costs the others no precision; raw and tempered log-probs are put together from both. What is not
finite in a row reaches its sums, and through them its log-probs; the id stays within the vocabulary all the same.

Filters have done their work before (fused_filters.py), and tell by two numbers per row what is left; what is not
counts as banned. This file knows no batch and no source of logits. Exponentials and logarithms are to base 2, as the
hardware has them.

Legend: B rows, V vocabulary, C chunks of a row, W words of a row's key.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.rollout import noise
from rollplex.rollout.fused_filters import Kept, ordered
from rollplex.rollout.sampler import Draw

_CHUNK = 4096  # 38 chunks of a vocabulary of 152,064: 304 programs for 8 rows
_TILE = 1024  # 8 ids to a thread at a time
_NUM_COLUMNS = 8  # partial results of a chunk
_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2.0))
_LARGEST_UNIFORM = tl.constexpr(noise.LARGEST_UNIFORM)
_MULTIPLIER_0, _MULTIPLIER_1 = tl.constexpr(noise.MULTIPLIER_0), tl.constexpr(noise.MULTIPLIER_1)
_WEYL_0, _WEYL_1 = tl.constexpr(noise.WEYL_0), tl.constexpr(noise.WEYL_1)
_NUM_ROUNDS = tl.constexpr(noise.NUM_ROUNDS)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    """FAST: the hardware's, 2^-22 from the truth, relative or absolute, whichever is more; the interpreter has none."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def _exponential(word, FAST: tl.constexpr):
    """-log(1 - w) of a random word's uniform w, to a relative error of 1e-6."""
    w = tl.minimum((word.to(tl.float32) + 0.5) * (2.0**-32), _LARGEST_UNIFORM)
    # Below 3/8, where 1 - w would lose w's last digits: -log(1 - w) / w by a polynomial through its Chebyshev points.
    series = -0.22854346 + w * 0.5956734
    series = 0.30015714 + w * series
    series = 0.17478424 + w * series
    series = 0.25251573 + w * series
    series = 0.33321222 + w * series
    series = 0.5000022 + w * series
    series = 1.0 + w * series
    return tl.where(w < 0.375, w * series, _log2(1.0 - w, FAST) * -_LN_2)


@triton.jit
def _words(counter, key_ptr):
    """Philox 4x32-10 as in noise.py: four words to a counter, [N, 4], in the order of the ids."""
    key_0 = tl.load(key_ptr).to(tl.uint32)
    key_1 = tl.load(key_ptr + 1).to(tl.uint32)
    word_0 = counter.to(tl.uint32)
    word_1 = tl.load(key_ptr + 2).to(tl.uint32)
    word_2 = tl.load(key_ptr + 3).to(tl.uint32)
    word_3 = tl.load(key_ptr + 4).to(tl.uint32)
    for _ in tl.static_range(_NUM_ROUNDS):
        # Both halves of a product by one instruction, where a product and `umulhi` are two.
        product_0 = word_0.to(tl.uint64) * _MULTIPLIER_0
        product_1 = word_2.to(tl.uint64) * _MULTIPLIER_1
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_1.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = tl.add(key_0, _WEYL_0, sanitize_overflow=False)
        key_1 = tl.add(key_1, _WEYL_1, sanitize_overflow=False)
    words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
    return tl.reshape(words, (counter.shape[0], 4))


@triton.jit
def _total(x_N4):
    return tl.sum(tl.sum(x_N4, 1), 0)


@triton.jit
def _largest(x_N4):
    return tl.max(tl.max(x_N4, 1), 0)


@triton.jit
def _finite_or_zero(x):
    """A maximum to subtract: of nothing it is -inf, and then there is nothing to subtract it from."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _load(
    logits_ptr, banned_ptr, ids, vocab_size, bound, first_id, BANNED: tl.constexpr, FILTERED: tl.constexpr
):  # fmt: skip
    """Logits of ids that may be drawn, and of the others (banned, from here on); -inf elsewhere."""
    x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
    if not BANNED and not FILTERED:
        return x, x
    allowed = ids >= 0
    if BANNED:
        allowed = tl.load(banned_ptr + ids, mask=ids < vocab_size, other=0) == 0
    if FILTERED:
        pattern = ordered(x)
        allowed = allowed & ((pattern > bound) | ((pattern == bound) & (ids >= first_id)))
    return tl.where(allowed, x, -float("inf")), tl.where(allowed, -float("inf"), x)


@triton.jit
def _chunk(
    logits_ptr, key_ptr, banned_ptr, out_ptr, column, best_ptr, chunk, vocab_size, scale,
    bound, first_id,
    CHUNK: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, BANNED: tl.constexpr,
    FILTERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Results of one chunk, in two passes over it; the second finds it in the cache."""
    SPLIT: tl.constexpr = BANNED or FILTERED
    first_counter = chunk * (CHUNK // 4)
    local = tl.arange(0, TILE // 4)
    within = tl.arange(0, 4)
    top_N4 = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    top_banned_N4 = top_N4
    for tile in range(CHUNK // TILE):
        ids_N4 = (first_counter + tile * (TILE // 4) + local)[:, None] * 4 + within[None, :]
        x_N4, banned_N4 = _load(logits_ptr, banned_ptr, ids_N4, vocab_size, bound, first_id, BANNED, FILTERED)
        top_N4 = tl.maximum(top_N4, x_N4)
        if SPLIT:
            top_banned_N4 = tl.maximum(top_banned_N4, banned_N4)
    top = _largest(top_N4)
    top_banned = _largest(top_banned_N4) if SPLIT else -float("inf")
    shift, shift_banned = _finite_or_zero(top), _finite_or_zero(top_banned)
    sum_N4 = tl.zeros((TILE // 4, 4), tl.float32)
    sum_banned_N4, raw_N4, raw_banned_N4 = sum_N4, sum_N4, sum_N4
    best_N4 = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    best_id_N4 = (first_counter + local)[:, None] * 4 + within[None, :]
    for tile in range(CHUNK // TILE):
        counter_N = first_counter + tile * (TILE // 4) + local
        ids_N4 = counter_N[:, None] * 4 + within[None, :]
        x_N4, banned_N4 = _load(logits_ptr, banned_ptr, ids_N4, vocab_size, bound, first_id, BANNED, FILTERED)
        tempered_N4 = (x_N4 - shift) * scale
        sum_N4 += _exp2(tempered_N4, FAST)
        if TEMPERED:
            raw_N4 += _exp2((x_N4 - shift) * _LOG2_E, FAST)
        if SPLIT:
            sum_banned_N4 += _exp2((banned_N4 - shift_banned) * scale, FAST)
            if TEMPERED:
                raw_banned_N4 += _exp2((banned_N4 - shift_banned) * _LOG2_E, FAST)
        value_N4 = x_N4
        if not GREEDY:
            value_N4 = tempered_N4 - _log2(_exponential(_words(counter_N, key_ptr), FAST), FAST)
        better_N4 = value_N4 > best_N4
        best_N4 = tl.where(better_N4, value_N4, best_N4)
        best_id_N4 = tl.where(better_N4, ids_N4, best_id_N4)
    best = _largest(best_N4)
    tl.store(best_ptr, tl.min(tl.min(tl.where(best_N4 == best, best_id_N4, _NO_ID), 1), 0))
    tl.store(out_ptr, top)
    tl.store(out_ptr + column, top_banned)
    tl.store(out_ptr + 2 * column, _total(sum_N4))
    tl.store(out_ptr + 3 * column, _total(sum_banned_N4) if SPLIT else 0.0)
    if TEMPERED:
        tl.store(out_ptr + 4 * column, _total(raw_N4))
        tl.store(out_ptr + 5 * column, _total(raw_banned_N4) if SPLIT else 0.0)
    tl.store(out_ptr + 6 * column, best)


@triton.jit
def _chunk_kernel(
    logits_ptr, keys_ptr, banned_ptr, bounds_ptr, first_ids_ptr, partial_ptr, best_ptr,
    vocab_size, row_stride, scale,
    CHUNK: tl.constexpr, TILE: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, BANNED: tl.constexpr,
    FILTERED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Partial results of one chunk, a column each; those of allowed ids and those of banned ones take turns.

    0, 1: the largest logit. 2, 3: tempered sums. 4, 5: raw sums (if TEMPERED). 6: the best perturbed logit, relative to
    the largest allowed one, tempered, to base 2; if GREEDY, the best logit.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    num_chunks, num_rows = tl.num_programs(0), tl.num_programs(1)
    logits_ptr += row.to(tl.int64) * row_stride
    keys_ptr += row * 5
    at = row * num_chunks + chunk
    column = num_rows * num_chunks
    bound, first_id = 0, 0
    if FILTERED:
        bound, first_id = tl.load(bounds_ptr + row).to(tl.uint32, bitcast=True), tl.load(first_ids_ptr + row)
    some_banned = False
    if BANNED:
        # Most chunks have no banned id: four flags to a word tell. The last chunk does not ask.
        counter = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
        flags = tl.load(banned_ptr.to(tl.pointer_type(tl.int32)) + counter, mask=counter < vocab_size // 4, other=1)
        some_banned = tl.max(flags, 0) != 0
    if some_banned:
        _chunk(
            logits_ptr, keys_ptr, banned_ptr, partial_ptr + at, column, best_ptr + at, chunk, vocab_size, scale,
            bound, first_id, CHUNK, TILE, GREEDY, TEMPERED, True, FILTERED, FAST,
        )  # fmt: skip
    else:
        _chunk(
            logits_ptr, keys_ptr, banned_ptr, partial_ptr + at, column, best_ptr + at, chunk, vocab_size, scale,
            bound, first_id, CHUNK, TILE, GREEDY, TEMPERED, False, FILTERED, FAST,
        )  # fmt: skip


@triton.jit
def _merged(sums, largest, reference, scale):
    """Sum over chunks, each chunk's against its own maximum, against `reference`."""
    return tl.sum(sums * tl.exp2((largest - reference) * scale), 0)


@triton.jit
def _row_kernel(
    logits_ptr, partial_ptr, best_ptr, ids_ptr, raw_ptr, tempered_ptr, sampling_ptr,
    vocab_size, row_stride, num_chunks, scale,
    BLOCK: tl.constexpr, GREEDY: tl.constexpr, TEMPERED: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.arange(0, BLOCK)
    inside = chunk < num_chunks
    at = partial_ptr + row * num_chunks + chunk
    column = tl.num_programs(0) * num_chunks
    largest = tl.load(at, mask=inside, other=-float("inf"))
    sums = tl.load(at + 2 * column, mask=inside, other=0.0)
    reference = tl.max(largest, 0)
    shift = _finite_or_zero(reference)
    sampling_sum = _merged(sums, largest, shift, scale)
    raw_sums = sums
    if TEMPERED:
        raw_sums = tl.load(at + 4 * column, mask=inside, other=0.0)
    raw_shift = shift
    tempered_sum = sampling_sum
    raw_sum = sampling_sum
    if SPLIT:
        largest_banned = tl.load(at + column, mask=inside, other=-float("inf"))
        sums_banned = tl.load(at + 3 * column, mask=inside, other=0.0)
        raw_shift = _finite_or_zero(tl.maximum(reference, tl.max(largest_banned, 0)))
        tempered_sum = _merged(sums, largest, raw_shift, scale) + _merged(sums_banned, largest_banned, raw_shift, scale)
        raw_sum = tempered_sum
    if TEMPERED:
        raw_sum = _merged(raw_sums, largest, raw_shift, _LOG2_E)
        if SPLIT:
            raw_sums_banned = tl.load(at + 5 * column, mask=inside, other=0.0)
            raw_sum += _merged(raw_sums_banned, largest_banned, raw_shift, _LOG2_E)
    value = tl.load(at + 6 * column, mask=inside, other=-float("inf"))
    if not GREEDY:
        value += (largest - shift) * scale
    first = tl.load(best_ptr + row * num_chunks + chunk, mask=inside, other=_NO_ID)
    # Without a best value (all are NaN) there is no id either.
    drawn = tl.minimum(tl.min(tl.where(value == tl.max(value, 0), first, _NO_ID), 0), vocab_size - 1)
    logit = tl.load(logits_ptr + row.to(tl.int64) * row_stride + drawn).to(tl.float32)
    raw = ((logit - raw_shift) * _LOG2_E - tl.log2(raw_sum)) * _LN_2
    tempered = raw
    if TEMPERED:
        tempered = ((logit - raw_shift) * scale - tl.log2(tempered_sum)) * _LN_2
    sampling = sampling_sum - sampling_sum if GREEDY else ((logit - shift) * scale - tl.log2(sampling_sum)) * _LN_2
    # Nothing to draw from, or a logit that is infinite.
    sampling = tl.where(tl.abs(reference) < float("inf"), sampling, float("nan"))
    tl.store(ids_ptr + row, drawn.to(tl.int64))
    tl.store(raw_ptr + row, raw)
    tl.store(tempered_ptr + row, tempered)
    tl.store(sampling_ptr + row, sampling)


def fused_sample(
    logits_BV: Tensor,
    keys_BW: Tensor,
    temperature: float,
    banned_V: Tensor | None = None,
    out: Draw | None = None,
    kept: Kept | None = None,
) -> Draw:
    """Draw one id per row, from all ids that are neither banned nor filtered out. Equal values: the lowest id.

    Args:
        logits_BV: bfloat16 or float32; rows contiguous.
        keys_BW: `noise.pack_keys`, int64 [B, 5] on the logits' device; not read at temperature 0.
        banned_V: bool; ids never drawn; they still count in the raw and tempered distributions.
        out: where to write the draw; new tensors otherwise.
        kept: what `find_kept` found for these logits.
    """
    num_rows, vocab_size = logits_BV.shape
    assert logits_BV.stride(1) == 1 and keys_BW.is_contiguous() and keys_BW.shape == (num_rows, 5)
    device, num_chunks = logits_BV.device, triton.cdiv(vocab_size, _CHUNK)
    draw = _empty_draw(num_rows, device) if out is None else out
    if num_rows == 0:
        return draw
    partials = torch.empty((_NUM_COLUMNS, num_rows, num_chunks), dtype=torch.float32, device=device)
    best_BC = partials[-1].view(torch.int32)
    greedy, banned, filtered = temperature == 0.0, banned_V is not None, kept is not None
    branches = {"GREEDY": greedy, "TEMPERED": not greedy and temperature != 1.0}
    scale, row_stride = _LOG2_E.value / (1.0 if greedy else temperature), logits_BV.stride(0)
    _chunk_kernel[(num_chunks, num_rows)](
        logits_BV, keys_BW, best_BC if banned_V is None else banned_V.view(torch.uint8),
        best_BC if kept is None else kept.bounds_B, best_BC if kept is None else kept.first_ids_B,
        partials, best_BC, vocab_size, row_stride, scale,
        CHUNK=_CHUNK, TILE=_TILE, BANNED=banned, FILTERED=filtered, FAST=logits_BV.is_cuda,
        num_warps=4, maxnreg=80, **branches,
    )  # fmt: skip
    _row_kernel[(num_rows,)](
        logits_BV, partials, best_BC,
        draw.ids_B, draw.raw_logprobs_B, draw.tempered_logprobs_B, draw.sampling_logprobs_B,
        vocab_size, row_stride, num_chunks, scale,
        BLOCK=triton.next_power_of_2(num_chunks), SPLIT=banned or filtered, num_warps=1, **branches,
    )  # fmt: skip
    return draw


def _empty_draw(num_rows: int, device: torch.device) -> Draw:
    ids_B = torch.empty(num_rows, dtype=torch.int64, device=device)
    raw_B, tempered_B, sampling_B = torch.empty((3, num_rows), dtype=torch.float32, device=device)
    return Draw(ids_B, raw_B, tempered_B, sampling_B)
