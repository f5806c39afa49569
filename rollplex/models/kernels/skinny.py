"""Matrix products of a decode step: up to 128 tokens against weights that are read from memory once.

    skinny_linear    [norm ->] x W' [+ bias] [+ residual]        qkv, out, down, head
    skinny_gate_up   norm -> silu(gate) * up                     the first half of the feed-forward part

Time is the weights' bytes, so everything else hides behind their stream. One program owns a tile of weight rows and a
range of the contraction, and computes the product transposed (weights x tokens'), where the weight tile is the tall
operand that the tensor cores want and the tokens, padded to 16, 32, 64 or 128, the narrow one:

    tiles of output columns x splits of the contraction -> partial sums -> the tile's last program adds them, in order

Where there are too few columns to fill a GPU the contraction is split. Partial sums go to a `Workspace` in float32, an
integer counter tells which program of a tile arrives last, and that one adds them in the order of the splits: whoever
is last, the bits are the same. A `Plan` depends on shapes only, so neither do they depend on the number of SMs.

Rounding: sums are float32. The norm is applied on both sides of the sum: the tokens are multiplied by the norm's weight
and rounded to their dtype (once, where `RMSNorm` rounds twice), and the sum is multiplied by 1 / rms in float32, whose
mean square is taken from the very tiles that the product reads. Bias, silu and residual are float32, and the output is
rounded once.

It knows neither layers nor attention, and no shards: a shard's weights are weights.

Legend: T tokens, R weight rows (output columns), H contraction, F intermediate, S splits.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TOKENS = 128
_MIN_TOKEN_TILE = 16  # the narrowest tile of tl.dot in the interpreter; on the GPU it costs nothing against the weights


@triton.jit
def _weight_rows(tile, width, num_slots, BN: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr):
    """Weight rows of one tile [BN]; of a gated pair, 8 gate rows and their 8 up rows take turns.

    Beyond the last one they repeat it, except if transposed: then they must be seen to be contiguous.
    """
    j = tl.arange(0, BN)
    if TRANSPOSED:
        return (tile * BN + j).to(tl.int64)
    if not GATED:
        return tl.minimum(tile * BN + j, width - 1).to(tl.int64)
    column = tl.minimum(tile * (BN // 2) + (j // 16) * 8 + j % 8, width - 1)
    slot_width = width // num_slots
    slot = column // slot_width
    return (column + (slot + (j // 8) % 2) * slot_width).to(tl.int64)


@triton.jit
def _product(
    x_ptr, weight_ptr, norm_ptr, rows_N, begin, end, num_tokens, width, depth, x_stride, weight_stride,
    TRANSPOSED: tl.constexpr, NORM: tl.constexpr, EVEN: tl.constexpr,
    TT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Over the contraction's chunks begin..end: weights x tokens' [BN, TT] and the tokens' sums of squares [TT]."""
    k = tl.arange(0, BK)
    weight_base = weight_ptr + rows_N[None, :] if TRANSPOSED else weight_ptr + rows_N[:, None] * weight_stride
    tokens = tl.minimum(tl.arange(0, TT), num_tokens - 1).to(tl.int64)
    x_base = x_ptr + tokens[:, None] * x_stride
    acc = tl.zeros((BN, TT), tl.float32)
    squares = tl.zeros((TT, BK // 8), tl.float32)
    for chunk in range(begin, end):
        at = chunk * BK + k
        if TRANSPOSED:
            pointers = weight_base + at[:, None].to(tl.int64) * weight_stride
            inside = (at[:, None] < depth) & (rows_N[None, :] < width)
        else:
            pointers = weight_base + at[None, :]
            inside = at[None, :] < depth
        if EVEN:
            weights = tl.load(pointers, eviction_policy="evict_first")
            x = tl.load(x_base + at[None, :])
        else:
            weights = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_base + at[None, :], mask=at[None, :] < depth, other=0.0)
        if NORM:
            scale = tl.load(norm_ptr + at, mask=at < depth, other=0.0).to(tl.float32)
            x32 = x.to(tl.float32)
            squares += tl.sum(tl.reshape(x32 * x32, (TT, BK // 8, 8)), 2)
            x = (x32 * scale[None, :]).to(x.dtype)
        if TRANSPOSED:
            weights = tl.trans(weights)
        acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    return acc, tl.sum(squares, 1)


@triton.jit
def _finish(
    acc, squares, bias_ptr, residual_ptr, out_ptr, tile, width, num_tokens, depth, eps, residual_stride, out_stride,
    NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    TT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Norm, bias or silu, residual; then the tile's only store."""
    COLUMNS: tl.constexpr = BN // 2 if GATED else BN
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.arange(0, TT)
    inside = (token[:, None] < num_tokens) & (column[None, :] < width)
    if NORM:
        acc *= tl.rsqrt(squares / depth + eps)[None, :]
    if GATED:
        pairs = tl.permute(tl.reshape(acc, (BN // 16, 2, 8, TT)), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        acc = tl.reshape(gate * tl.sigmoid(gate) * up, (COLUMNS, TT))
    y = tl.trans(acc)
    if BIAS:
        y += tl.load(bias_ptr + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        before = residual_ptr + token[:, None].to(tl.int64) * residual_stride + column[None, :]
        y += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    after = out_ptr + token[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(after, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _skinny_kernel(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, counter_ptr,
    num_tokens, width, depth, num_slots, eps, x_stride, weight_stride, residual_stride, out_stride,
    TRANSPOSED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr,
    TT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs own neighbouring columns: of a transposed weight these lie side by side in memory.
    num_tiles = tl.num_programs(0) // SPLITS
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    num_chunks = tl.cdiv(depth, BK)
    rows_N = _weight_rows(tile, width, num_slots, BN, TRANSPOSED, GATED)
    acc, squares = _product(
        x_ptr, weight_ptr, norm_ptr, rows_N, split * num_chunks // SPLITS, (split + 1) * num_chunks // SPLITS,
        num_tokens, width, depth, x_stride, weight_stride, TRANSPOSED, NORM, EVEN, TT, BN, BK,
    )  # fmt: skip
    if SPLITS == 1:
        _finish(
            acc, squares, bias_ptr, residual_ptr, out_ptr, tile, width, num_tokens, depth, eps,
            residual_stride, out_stride, NORM, BIAS, RESIDUAL, GATED, TT, BN,
        )  # fmt: skip
    else:
        AREA: tl.constexpr = (BN + NORM) * TT
        own = partial_ptr + (tile * SPLITS + split).to(tl.int64) * AREA
        token = tl.arange(0, TT)
        offsets = tl.arange(0, BN)[:, None] * TT + token[None, :]
        tl.store(own + offsets, acc)
        if NORM:
            tl.store(own + BN * TT + token, squares)
        tl.debug_barrier()  # every thread's part is written before one of them counts the program in
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            first = partial_ptr + (tile * SPLITS).to(tl.int64) * AREA
            total = tl.zeros((BN, TT), tl.float32)
            total_squares = tl.zeros((TT,), tl.float32)
            for s in tl.static_range(0, SPLITS):
                # .cg: from L2, where the other programs' sums are; this SM's L1 may never have seen them.
                total += tl.load(first + s * AREA + offsets, cache_modifier=".cg")
                if NORM:
                    total_squares += tl.load(first + s * AREA + BN * TT + token, cache_modifier=".cg")
            tl.store(counter_ptr + tile, 0)  # for the next launch
            _finish(
                total, total_squares, bias_ptr, residual_ptr, out_ptr, tile, width, num_tokens, depth, eps,
                residual_stride, out_stride, NORM, BIAS, RESIDUAL, GATED, TT, BN,
            )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How one product is cut, chosen by shapes: one plan, one set of bits, on any number of SMs."""

    rows: int
    """Weight rows of a tile, at least 64: the tensor cores' height."""
    depth: int
    """Contraction per step of the pipeline."""
    splits: int
    """Programs that share a tile's contraction."""
    warps: int = 4
    stages: int = 4
    max_registers: int | None = None
    """Per thread, where one more program on each SM is worth a few of them."""

    def grid(self, num_columns: int, gated: bool) -> int:
        return -(-num_columns // (self.rows // 2 if gated else self.rows)) * self.splits

    def num_partials(self, num_tokens: int, num_columns: int, gated: bool) -> int:
        """Floats of scratch: the sums of every split, with one row for sums of squares."""
        return self.grid(num_columns, gated) * (self.rows + 1) * token_tile(num_tokens) if self.splits > 1 else 0


@dataclass(frozen=True)
class Workspace:
    """Scratch of split products. Launches that share one must run in order, one after the other."""

    partials: Tensor
    """float32."""
    counters: Tensor
    """int32, zero between launches."""

    @classmethod
    def allocate(cls, device: torch.device, num_partials: int, num_tiles: int) -> "Workspace":
        return cls(
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )

    @classmethod
    def for_products(
        cls, device: torch.device, num_tokens: int, shapes: Iterable[tuple[int, int]], element_bytes: int = 2
    ) -> "Workspace":
        """Enough for `skinny_linear` with default plans, up to `num_tokens`, and weights of (R, H) `shapes`."""
        shapes = tuple(shapes)
        sizes = {1, *(2**i for i in range(num_tokens.bit_length())), num_tokens}
        plans = [(t, r, plan_linear(t, r, h, element_bytes)) for t in sizes for r, h in shapes]
        num_partials = max((plan.num_partials(t, r, False) for t, r, plan in plans), default=0)
        return cls.allocate(device, num_partials, max((plan.grid(r, False) for _, r, plan in plans), default=0))


def token_tile(num_tokens: int) -> int:
    """The tokens that a program computes, padding included."""
    assert 1 <= num_tokens <= MAX_TOKENS, f"{num_tokens} tokens: this is for 1 to {MAX_TOKENS}"
    return max(_MIN_TOKEN_TILE, 1 << (num_tokens - 1).bit_length())


def plan_linear(num_tokens: int, num_rows: int, depth: int, element_bytes: int = 2) -> Plan:
    """A plan that keeps 3 to 4 programs on each SM of a large GPU, all of them at once: then they end at once."""
    tile, step = token_tile(num_tokens), 128 // element_bytes
    if num_rows >= _MANY_ROWS:
        return plan_gate_up(num_tokens, num_rows, element_bytes)
    if tile == 64:
        step *= 2
    wanted = round((_WIDE_PROGRAMS if tile == 64 else _PROGRAMS) / triton.cdiv(num_rows, 64))
    splits = max(1, min(wanted, triton.cdiv(depth, step) // _MIN_STEPS))
    return Plan(rows=64, depth=step, splits=splits, stages=4 if tile <= 64 else 3)


def plan_gate_up(num_tokens: int, num_rows: int, element_bytes: int = 2) -> Plan:
    """Tiles of 64 columns, gate and up: the contraction whole."""
    tile, step = token_tile(num_tokens), 128 // element_bytes
    if tile > 64:
        return Plan(rows=128, depth=step, splits=1, warps=8, stages=3, max_registers=128)
    return Plan(rows=128, depth=step, splits=1, stages=4 if tile <= 32 and num_rows < _MANY_ROWS else 3)


_PROGRAMS = 384
"""Programs wanted of a product: about three for each of 132 SMs. A constant, because the bits depend on it."""
_WIDE_PROGRAMS = 120
"""The same for tiles of 64 tokens, whose partial sums are larger: one for each."""
_MIN_STEPS = 4
"""Steps of a split, at least: a pipeline's worth."""
_MANY_ROWS = 32768
"""From here on there are programs enough without splits."""


def skinny_linear(
    x_TH: Tensor, weight: Tensor, *, transposed: bool, bias_R: Tensor | None = None,
    residual_TR: Tensor | None = None, norm: tuple[Tensor, float] | None = None, out_TR: Tensor | None = None,
    workspace: Workspace, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """norm(x) W' + bias + residual.

    Args:
        weight: [R, H], or [H, R] if `transposed`, contiguous rows; R and H are multiples of 16.
        norm: the RMSNorm before the product: weight [H] and epsilon.
        out_TR: where to write; may be `residual_TR`.
        workspace: large enough for the plan.

    Returns:
        [T, R] in x's dtype.
    """
    num_rows, depth = reversed(weight.shape) if transposed else weight.shape
    plan = plan or plan_linear(x_TH.shape[0], num_rows, depth, x_TH.element_size())
    out_TR = x_TH.new_empty(x_TH.shape[0], num_rows) if out_TR is None else out_TR
    operands = _Operands(x_TH, weight, out_TR, bias_R, residual_TR, norm, transposed=transposed)
    _launch(operands, plan, workspace)
    return out_TR


def skinny_gate_up(
    x_TH: Tensor, weight_RH: Tensor, num_slots: int, *, norm: tuple[Tensor, float] | None = None,
    out_TF: Tensor | None = None, workspace: Workspace, plan: Plan | None = None,
) -> Tensor:  # fmt: skip
    """silu(gate) * up of norm(x), for weights in `num_slots` nested slots of (gate rows, up rows), R = 2 F.

    Returns:
        [T, F] in x's dtype.
    """
    num_columns = weight_RH.shape[0] // 2
    assert num_columns % num_slots == 0, f"{num_columns} columns do not divide into {num_slots} slots"
    plan = plan or plan_gate_up(x_TH.shape[0], weight_RH.shape[0], x_TH.element_size())
    out_TF = x_TH.new_empty(x_TH.shape[0], num_columns) if out_TF is None else out_TF
    _launch(_Operands(x_TH, weight_RH, out_TF, None, None, norm, num_slots=num_slots), plan, workspace)
    return out_TF


@dataclass(frozen=True)
class _Operands:
    """What one launch reads and writes; `num_slots` makes it a gated pair."""

    x: Tensor
    weight: Tensor
    out: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm: tuple[Tensor, float] | None
    transposed: bool = False
    num_slots: int = 0

    def __post_init__(self) -> None:
        depth = self.weight.shape[0 if self.transposed else 1]
        assert self.x.shape == (self.out.shape[0], depth) and self.x.dtype == self.weight.dtype == self.out.dtype
        assert depth % 16 == 0 and self.out.shape[1] % 16 == 0, f"{tuple(self.weight.shape)}: not multiples of 16"
        rows = [self.x, self.weight, self.out] + ([] if self.residual is None else [self.residual])
        assert all(tensor.stride(1) == 1 and tensor.stride(0) % 8 == 0 for tensor in rows), "rows must be contiguous"
        assert self.residual is None or self.residual.shape == self.out.shape


def _launch(o: _Operands, plan: Plan, workspace: Workspace) -> None:
    num_tokens, depth = o.x.shape
    num_columns, gated = o.out.shape[1], o.num_slots > 0
    programs = plan.grid(num_columns, gated)
    assert plan.num_partials(num_tokens, num_columns, gated) <= workspace.partials.numel(), "workspace too small"
    assert plan.splits == 1 or programs // plan.splits <= workspace.counters.numel(), "workspace too small"
    norm, eps = o.norm or (o.x, 0.0)
    residual = o.x if o.residual is None else o.residual
    even_rows = not o.transposed or num_columns % plan.rows == 0
    _skinny_kernel[(programs,)](
        o.x, o.weight, norm, o.x if o.bias is None else o.bias, residual, o.out, workspace.partials, workspace.counters,
        num_tokens, num_columns, depth, o.num_slots, eps,
        o.x.stride(0), o.weight.stride(0), residual.stride(0), o.out.stride(0),
        TRANSPOSED=o.transposed, NORM=o.norm is not None, BIAS=o.bias is not None, RESIDUAL=o.residual is not None,
        GATED=gated, EVEN=depth % plan.depth == 0 and even_rows,
        TT=token_tile(num_tokens), BN=plan.rows, BK=plan.depth, SPLITS=plan.splits,
        num_warps=plan.warps, num_stages=plan.stages, maxnreg=plan.max_registers,
    )  # fmt: skip
