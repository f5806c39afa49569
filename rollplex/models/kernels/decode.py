"""One decode step's attention: a group's prefix is read once for all its rows, each row's own K/V is paged.

    split kernel   programs (prefix item, kv head): all query heads of a tile of the group's rows over a token range
                   programs (row, suffix split, kv head): one row's query heads over a range of its own tokens;
                   the program that reaches the row's new token also stores that token's K/V in its page
                         | partial o and log-sum-exp of each range
    merge kernel   program (row, query head): the parts together, weighted by their log-sum-exp

All sizes that change from step to step are read from device tables, so both launches can be captured in a CUDA graph.
Where a prefix is cut is planned on the host from token counts alone, where a suffix is cut follows from its own length:
a row's bits depend on the lengths and row counts of the batch's groups (through the plan), on the row's own length and
on the tuning and the longest suffix allowed, never on the number of SMs, on timing or on what other rows contain.

It does not know samples, who owns a block, or where prefixes come from: groups carry plain addresses.

Legend: T rows, N query heads, K key/value heads, Q query heads per K, D head dim, M blocks of a row, B block size,
S parts of a row, I prefix items, G groups, F fields.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.models.attention import PagedKV
from rollplex.models.decoder import DecoderConfig
from rollplex.models.kernels.decode_plan import NARROW, DecodeTuning, max_items, plan_items

FEW_ROWS = 16
"""Rows up to which suffixes are cut finer, and parts merged by more threads, because programs are few."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, eq=False)
class DecodeTables:
    """A step's rows, on the device; the contents change between replays of a graph, the tensors do not."""

    blocks_TM: Tensor
    """int32, blocks of each row's suffix, in order."""
    lengths_T: Tensor
    """int32, suffix tokens of each row, the new one included; 0 is an idle row: nothing is stored, its output is 0."""
    groups_GF: Tensor
    """int64: first row, rows, prefix length, address of K, address of V (layer 0), elements from layer to layer.

    A prefix is [L, P, K, D], contiguous but for the layers; addresses and layers are aligned to 16 bytes."""
    items_IF: Tensor
    """int32: group (-1: unused, and so are all that follow), tile of rows, first token, end token."""
    splits_T: Tensor
    """int32, parts of each row's prefix."""


@dataclass(frozen=True, eq=False)
class GroupedDecodeAttention:
    """Pages and scratch of all decode steps of an engine; `on` a step's tables it is an `Attention`."""

    pages: PagedKV
    block_size: int
    num_heads: int
    max_items: int
    num_suffix_splits: int
    o_TNSD: Tensor
    lse_TNS: Tensor
    tuning: DecodeTuning

    @classmethod
    def allocate(
        cls, config: DecoderConfig, pages: PagedKV, max_rows: int, max_blocks: int, block_size: int,
        tuning: DecodeTuning | None = None,
    ) -> "GroupedDecodeAttention":  # fmt: skip
        """Scratch for steps of up to `max_rows` rows with up to `max_blocks` blocks each; all layers share it."""
        tuning = tuning or DecodeTuning()
        if pages.k_LSKD.dtype == torch.float32:
            tuning = tuning.for_float32()
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        assert pages.k_LSKD.shape[2:] == (num_kv_heads, head_dim) and pages.k_LSKD.is_contiguous()
        assert num_heads // num_kv_heads <= NARROW and head_dim % 8 == 0, "one small tile; loads of 16 bytes"
        own = max(1, min(tuning.max_suffix_splits, -(-max_blocks * block_size // tuning.suffix_split)))
        parts, device = tuning.max_prefix_splits + own, pages.k_LSKD.device
        o_TNSD = torch.empty(max_rows, num_heads, parts, head_dim, dtype=torch.float32, device=device)
        lse_TNS = torch.empty(max_rows, num_heads, parts, dtype=torch.float32, device=device)
        items = max_items(max_rows, num_heads // num_kv_heads, num_kv_heads, tuning)
        return cls(pages, block_size, num_heads, items, own, o_TNSD, lse_TNS, tuning)

    def plan(
        self, prefix_lengths: Sequence[int], rows_per_group: Sequence[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """`plan_items` for these shapes."""
        num_kv_heads, tuning = self.pages.k_LSKD.shape[2], self.tuning
        return plan_items(
            prefix_lengths, rows_per_group, self.num_heads // num_kv_heads, num_kv_heads, tuning.block_m,
            tuning.target_programs, tuning.max_prefix_splits,
        )  # fmt: skip

    def on(self, tables: DecodeTables) -> "DecodeStep":
        return DecodeStep(self, tables)


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The decoder's `Attention` for the rows in the tables."""

    attention: GroupedDecodeAttention
    tables: DecodeTables

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """o [T, N, D] of one new token per row, whose K and V (rotated already) are stored in its page."""
        at, on, tuning = self.attention, self.tables, self.attention.tuning
        (num_rows, num_heads, head_dim), num_kv_heads = q_TND.shape, k_TKD.shape[1]
        assert num_rows == on.lengths_T.shape[0] <= at.o_TNSD.shape[0] and num_heads == at.num_heads
        q_TND, k_TKD, v_TKD = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (q_TND, k_TKD, v_TKD))
        assert q_TND.dtype == at.pages.k_LSKD.dtype
        queries, parts = num_heads // num_kv_heads, at.o_TNSD.shape[2]
        block_d = max(16, triton.next_power_of_2(head_dim))
        num_items = min(on.items_IF.shape[0], max_items(num_rows, queries, num_kv_heads, tuning))
        o_TND = torch.empty_like(q_TND, memory_format=torch.contiguous_format)
        few = num_rows <= FEW_ROWS
        suffix_split = tuning.suffix_split if few else 2 * tuning.suffix_split
        own = {
            "SUFFIX_SPLITS": at.num_suffix_splits, "SUFFIX_SPLIT": suffix_split, "BLOCK_N": tuning.block_n,
            "HEADS": num_heads, "HEAD_DIM": head_dim, "BLOCK_D": block_d, "PARTS": parts,
        }  # fmt: skip
        _split_kernel[(num_items * num_kv_heads + num_rows * at.num_suffix_splits * num_kv_heads,)](
            q_TND, k_TKD, v_TKD, at.pages.k_LSKD[layer], at.pages.v_LSKD[layer],
            on.blocks_TM, on.lengths_T, on.groups_GF, on.items_IF, on.splits_T, at.o_TNSD, at.lse_TNS,
            layer, num_items, q_TND.stride(0), k_TKD.stride(0), v_TKD.stride(0), on.blocks_TM.stride(0),
            head_dim**-0.5 * LOG2_E, **own, KV_HEADS=num_kv_heads, QUERIES=queries, BLOCK_SIZE=at.block_size,
            BLOCK_M=tuning.block_m, NARROW_M=NARROW, ALIGN=16 // q_TND.element_size(),
            STAGES=tuning.num_stages, num_warps=tuning.num_warps, maxnreg=tuning.max_registers,
        )  # fmt: skip
        _merge_kernel[(num_rows * num_heads,)](
            at.o_TNSD,
            at.lse_TNS,
            on.lengths_T,
            on.splits_T,
            o_TND,
            **own,
            BLOCK_S=32 if few else 16,
            num_warps=4 if few else 2,
        )
        return o_TND


@triton.jit
def _suffix_range(length, SUFFIX_SPLITS: tl.constexpr, SUFFIX_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tokens of each part of a suffix, a multiple of the tile: long suffixes have longer parts, not more."""
    return tl.maximum(SUFFIX_SPLIT, tl.cdiv(tl.cdiv(length, SUFFIX_SPLITS), BLOCK_N) * BLOCK_N)


@triton.jit
def _attend(
    q, k_head, v_head, blocks, first, end, scale, top, total, acc,
    PAGED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax of a tile of queries over tokens first..end; `top` and the scores are in powers of two.

    Every tile holds a token of the range, so that after it `top` is finite in every row.
    """
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    # The blocks of a tile are looked up a tile ahead: an address that waits for a load in the same turn of the loop
    # would keep the compiler from fetching several tiles at a time.
    WHOLE: tl.constexpr = PAGED and BLOCK_SIZE % BLOCK_N == 0  # a tile lies in one block
    if WHOLE:
        next_block = tl.load(blocks + first // BLOCK_SIZE)
    elif PAGED:
        next_block = tl.load(blocks + (first + n) // BLOCK_SIZE, mask=first + n < end, other=0)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        inside = start + n < end
        mask = inside[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (d < HEAD_DIM)[None, :]
        ahead = start + BLOCK_N
        if WHOLE:
            slot = next_block.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
            next_block = tl.load(blocks + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            offsets = slot * TOKEN + (n[:, None] * TOKEN + d[None, :])
        elif PAGED:
            slots = next_block.to(tl.int64) * BLOCK_SIZE + (start + n) % BLOCK_SIZE
            next_block = tl.load(blocks + (ahead + n) // BLOCK_SIZE, mask=ahead + n < end, other=0)
            offsets = slots[:, None] * TOKEN + d[None, :]
        else:
            offsets = tl.cast(start, tl.int64) * TOKEN + (n[:, None] * TOKEN + d[None, :])
        k = tl.load(k_head + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        decay = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * decay + tl.sum(p, 1)
        v = tl.load(v_head + offsets, mask=mask, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit
def _keep_part(o_ptr, lse_ptr, top, total, acc, part, inside, d, HEAD_DIM: tl.constexpr):
    """Store a part's output and log-sum-exp; `part` is its place in [T, N, S]."""
    tl.store(lse_ptr + part, top + tl.log2(total), mask=inside)
    mask = inside[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(o_ptr + part[:, None] * HEAD_DIM + d[None, :], acc / total[:, None], mask=mask)


@triton.jit
def _prefix_part(
    q_ptr, k_head, v_head, o_ptr, lse_ptr, first_row, num_heads_rows, tile_start, head, split, first, end, q_stride,
    scale, ROWS: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of (sample, query head) rows of one group over tokens first..end of its prefix."""
    d = tl.arange(0, BLOCK_D)
    index = tile_start + tl.arange(0, ROWS)
    inside = index < num_heads_rows
    row = (first_row + index // QUERIES).to(tl.int64)
    query_head = head * QUERIES + index % QUERIES
    q_offsets = row[:, None] * q_stride + query_head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    top, total, acc = _attend(
        q, k_head, v_head, q_ptr, first, end, scale, top, total, acc,
        False, 1, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
    )  # fmt: skip
    _keep_part(o_ptr, lse_ptr, top, total, acc, (row * HEADS + query_head) * PARTS + split, inside, d, HEAD_DIM)


@triton.jit
def _prefix_program(
    item, head, q_ptr, pages_ptr, groups_ptr, items_ptr, splits_ptr, o_ptr, lse_ptr, layer, q_stride, scale,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, NARROW_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group = tl.load(items_ptr + item * 4)
    if group >= 0:
        tile_start = tl.load(items_ptr + item * 4 + 1) * BLOCK_M
        first = tl.load(items_ptr + item * 4 + 2)
        end = tl.load(items_ptr + item * 4 + 3)
        fields = groups_ptr + group * 6
        first_row = tl.load(fields).to(tl.int32)
        heads_rows = tl.load(fields + 1).to(tl.int32) * QUERIES
        length = tl.load(fields + 2)
        # All parts are equally long but the last, which ends where the prefix does.
        split = tl.where(end == length, tl.load(splits_ptr + first_row) - 1, first // (end - first))
        offset = tl.multiple_of(tl.load(fields + 5), ALIGN) * layer + head * HEAD_DIM
        k_ptr = tl.multiple_of(tl.load(fields + 3).to(tl.pointer_type(pages_ptr.dtype.element_ty)), 16) + offset
        v_ptr = tl.multiple_of(tl.load(fields + 4).to(tl.pointer_type(pages_ptr.dtype.element_ty)), 16) + offset
        if heads_rows - tile_start <= NARROW_M:
            _prefix_part(
                q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, first_row, heads_rows, tile_start, head, split, first, end,
                q_stride, scale, NARROW_M, QUERIES, HEADS, PARTS, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip
        else:
            _prefix_part(
                q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, first_row, heads_rows, tile_start, head, split, first, end,
                q_stride, scale, BLOCK_M, QUERIES, HEADS, PARTS, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
            )  # fmt: skip


@triton.jit
def _new_token(
    k_ptr, v_ptr, k_head, v_head, blocks, position,
    BLOCK_SIZE: tl.constexpr, TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One head's new K and V in float32, after storing them at `position` of the row's pages."""
    d = tl.arange(0, BLOCK_D)
    k = tl.load(k_ptr + d, mask=d < HEAD_DIM, other=0.0)
    v = tl.load(v_ptr + d, mask=d < HEAD_DIM, other=0.0)
    block = tl.load(blocks + position // BLOCK_SIZE).to(tl.int64)
    slot = (block * BLOCK_SIZE + position % BLOCK_SIZE) * TOKEN
    tl.store(k_head + slot + d, k, mask=d < HEAD_DIM)
    tl.store(v_head + slot + d, v, mask=d < HEAD_DIM)
    return k.to(tl.float32), v.to(tl.float32)


@triton.jit
def _suffix_program(
    row, split, head, q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, blocks_ptr, lengths_ptr, splits_ptr, o_ptr,
    lse_ptr, q_stride, k_stride, v_stride, blocks_stride, scale,
    SUFFIX_SPLITS: tl.constexpr, SUFFIX_SPLIT: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, NARROW_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    length = tl.load(lengths_ptr + row)
    size = _suffix_range(length, SUFFIX_SPLITS, SUFFIX_SPLIT, BLOCK_N)
    first = split * size
    if first < length:
        d = tl.arange(0, BLOCK_D)
        index = tl.arange(0, NARROW_M)
        inside = index < QUERIES
        query_head = head * QUERIES + index
        row64 = tl.cast(row, tl.int64)
        q_offsets = row64 * q_stride + query_head[:, None] * HEAD_DIM + d[None, :]
        q = tl.load(q_ptr + q_offsets, mask=inside[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        blocks = blocks_ptr + row64 * blocks_stride
        k_head = k_pages_ptr + head * HEAD_DIM
        v_head = v_pages_ptr + head * HEAD_DIM
        top = tl.full((NARROW_M,), float("-inf"), tl.float32)
        total = tl.zeros((NARROW_M,), tl.float32)
        acc = tl.zeros((NARROW_M, BLOCK_D), tl.float32)
        last = length - 1
        if first + size >= length:  # the new token is this program's: it comes first, and goes to its page
            new_k, new_v = _new_token(
                k_ptr + row64 * k_stride + head * HEAD_DIM, v_ptr + row64 * v_stride + head * HEAD_DIM,
                k_head, v_head, blocks, last, BLOCK_SIZE, TOKEN, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
            top = tl.sum(q.to(tl.float32) * new_k[None, :], 1) * scale
            total = tl.full((NARROW_M,), 1.0, tl.float32)
            acc += new_v[None, :]
        top, total, acc = _attend(
            q, k_head, v_head, blocks, first, tl.minimum(first + size, last), scale, top, total, acc,
            True, BLOCK_SIZE, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_N, STAGES,
        )  # fmt: skip
        part = (row64 * HEADS + query_head) * PARTS + tl.load(splits_ptr + row) + split
        _keep_part(o_ptr, lse_ptr, top, total, acc, part, inside, d, HEAD_DIM)


@triton.jit(do_not_specialize=["layer", "num_items"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, blocks_ptr, lengths_ptr, groups_ptr, items_ptr, splits_ptr,
    o_ptr, lse_ptr, layer, num_items, q_stride, k_stride, v_stride, blocks_stride, scale,
    SUFFIX_SPLITS: tl.constexpr, SUFFIX_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, NARROW_M: tl.constexpr,
    ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Heads are neighbours, as they are in memory; prefix items come first, being the longest."""
    TOKEN: tl.constexpr = KV_HEADS * HEAD_DIM
    program = tl.program_id(0)
    head = program % KV_HEADS
    item = program // KV_HEADS
    if item < num_items:
        _prefix_program(
            item, head, q_ptr, k_pages_ptr, groups_ptr, items_ptr, splits_ptr, o_ptr, lse_ptr, layer, q_stride, scale,
            QUERIES, HEADS, PARTS, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_M, NARROW_M, BLOCK_N, ALIGN, STAGES,
        )  # fmt: skip
    else:
        own = item - num_items
        _suffix_program(
            own // SUFFIX_SPLITS, own % SUFFIX_SPLITS, head, q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr,
            blocks_ptr, lengths_ptr, splits_ptr, o_ptr, lse_ptr, q_stride, k_stride, v_stride, blocks_stride, scale,
            SUFFIX_SPLITS, SUFFIX_SPLIT, QUERIES, HEADS, PARTS, TOKEN, HEAD_DIM, BLOCK_D, BLOCK_SIZE, NARROW_M,
            BLOCK_N, STAGES,
        )  # fmt: skip


@triton.jit
def _merge_kernel(
    part_o_ptr, part_lse_ptr, lengths_ptr, splits_ptr, o_ptr,
    SUFFIX_SPLITS: tl.constexpr, SUFFIX_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row's query head: all its parts, weighted, in their order."""
    program = tl.program_id(0)
    row = program // HEADS
    base = tl.cast(program, tl.int64) * PARTS
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_S)
    length = tl.load(lengths_ptr + row)
    size = _suffix_range(length, SUFFIX_SPLITS, SUFFIX_SPLIT, BLOCK_N)
    num_parts = tl.load(splits_ptr + row) + tl.cdiv(length, size)
    num_parts = tl.where(length > 0, num_parts, 0)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_parts, BLOCK_S):
        inside = start + s < num_parts
        lse = tl.load(part_lse_ptr + base + start + s, mask=inside, other=float("-inf"))
        mask = inside[:, None] & (d < HEAD_DIM)[None, :]
        o = tl.load(part_o_ptr + (base + start + s)[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        decay = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(o * weight[:, None], 0)
        top = new_top
    o = acc / tl.where(num_parts > 0, total, 1.0)
    tl.store(o_ptr + tl.cast(program, tl.int64) * HEAD_DIM + d, o.to(o_ptr.dtype.element_ty), mask=d < HEAD_DIM)
