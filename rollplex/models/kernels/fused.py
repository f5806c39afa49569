"""The element-wise parts of a decoder layer, one pass over memory each, forward and backward.

    rms_norm, add_rms_norm    a program per row; backward: a fixed number of programs, each over every 512th row
    rotate_qkv                a program per few (token, head) rows of the packed projection
    silu_mul                  a program per (token, stretch of the intermediate size)

Same signatures as `plain_...` in elementwise.py, which define what is computed. Arithmetic is float32. A norm rounds as
its definition does (the normalised row, then its product with the weight); `rotate_qkv` and `silu_mul` round their
result once, where the definitions round every product.

Everything runs in a captured CUDA graph. A row's result depends on that row and on the sizes only, never on the rows
beside it or on the number of SMs. Sums over tokens (the gradient of a norm's weight) are added in a fixed order.

It knows no layer, no module and no attention.

Legend: T tokens, H hidden, N query heads, K key/value heads, G query heads per K, D head dim, S = K (G + 2) heads of
the packed projection, R = S D its rows, F intermediate, P programs.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollplex.models.elementwise import Heads

_NUM_ROW_BLOCKS = 512  # about 4 programs on each SM of an H200, and 7 MB of partial sums for a hidden size of 3,584
_FEW_ROWS = 1 << 14  # up to here heads are spread over as many programs as possible; beyond, each moves 16 KB


@triton.jit
def _rms_norm_kernel(
    x_ptr, y_ptr, weight_ptr, sum_ptr, out_ptr, x_stride, y_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    x = tl.load(x_ptr + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * y_stride + h, mask=inside, other=0.0).to(tl.float32)
        total = (x + y).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + h, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    normalized = (x * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * SIZE + h, (weight * normalized).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(
    grad_out_ptr, grad_sum_ptr, x_ptr, weight_ptr, grad_x_ptr, partial_ptr, num_rows, x_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Gradients of every P-th row, and this program's part of the weight's gradient."""
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    h = tl.arange(0, BLOCK)
    inside = h < SIZE
    weight = tl.load(weight_ptr + h, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for index in range(program, num_rows, num_programs):
        row = tl.cast(index, tl.int64)
        x = tl.load(x_ptr + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
        grad_out = tl.load(grad_out_ptr + row * SIZE + h, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
        normalized = x * scale
        grad_weight += grad_out * normalized.to(x_ptr.dtype.element_ty).to(tl.float32)
        grad = grad_out * weight
        grad_x = scale * (grad - normalized * (tl.sum(grad * normalized, 0) / SIZE))
        if ADD:
            grad_x += tl.load(grad_sum_ptr + row * SIZE + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row * SIZE + h, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    tl.store(partial_ptr + program.to(tl.int64) * SIZE + h, grad_weight, mask=inside)


@triton.jit
def _head_pointers(
    q_ptr, k_ptr, v_ptr, token, slot, d,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Where a packed head is unpacked to, for each of the three that it may be."""
    head, member = slot // (GROUP + 2), slot % (GROUP + 2)
    kv_row = (token * NUM_KV_HEADS + head).to(tl.int64)
    q_row = kv_row * GROUP + member
    q = q_ptr + q_row[:, None] * HEAD_DIM + d[None, :]
    kv_offsets = kv_row[:, None] * HEAD_DIM + d[None, :]
    return member, q, k_ptr + kv_offsets, v_ptr + kv_offsets


@triton.jit
def _one_of(q, k, v, is_q, is_k, is_v):
    """Values behind the pointers whose mask is set; at most one is, and what is masked out adds 0."""
    total = tl.load(q, mask=is_q, other=0.0).to(tl.float32) + tl.load(k, mask=is_k, other=0.0).to(tl.float32)
    return total + tl.load(v, mask=is_v, other=0.0).to(tl.float32)


@triton.jit
def _rotate_kernel(
    packed_ptr, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, num_rows, cos_stride, sin_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, BIAS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Rows (token, slot) of the packed projection, unpacked and rotated; or packed and rotated back."""
    HALF: tl.constexpr = HEAD_DIM // 2
    SLOTS: tl.constexpr = NUM_KV_HEADS * (GROUP + 2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HALF_BLOCK)
    token, slot = row // SLOTS, row % SLOTS
    inside = (row < num_rows)[:, None] & (d < HALF)[None, :]
    member, q, k, v = _head_pointers(q_ptr, k_ptr, v_ptr, token, slot, d, NUM_KV_HEADS, GROUP, HEAD_DIM)
    is_q = inside & (member < GROUP)[:, None]
    is_k = inside & (member == GROUP)[:, None]
    is_v = inside & (member > GROUP)[:, None]
    packed = packed_ptr + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :]
    if BACKWARD:
        a = _one_of(q, k, v, is_q, is_k, is_v)
        b = _one_of(q + HALF, k + HALF, v + HALF, is_q, is_k, is_v)
    else:
        a = tl.load(packed, mask=inside, other=0.0)
        b = tl.load(packed + HALF, mask=inside, other=0.0)
        if BIAS:
            bias = bias_ptr + slot[:, None] * HEAD_DIM + d[None, :]
            a = (a.to(tl.float32) + tl.load(bias, mask=inside, other=0.0).to(tl.float32)).to(a.dtype)
            b = (b.to(tl.float32) + tl.load(bias + HALF, mask=inside, other=0.0).to(tl.float32)).to(b.dtype)
    turns = is_q | is_k
    cos = tl.load(cos_ptr + token.to(tl.int64)[:, None] * cos_stride + d[None, :], mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token.to(tl.int64)[:, None] * sin_stride + d[None, :], mask=turns, other=0.0).to(tl.float32)
    if BACKWARD:
        sin = -sin
    a32, b32 = a.to(tl.float32), b.to(tl.float32)
    # A value passes as it is, whatever it is: infinity times 0 would not.
    first = tl.where(turns, a32 * cos - b32 * sin, a32).to(packed_ptr.dtype.element_ty)
    second = tl.where(turns, b32 * cos + a32 * sin, b32).to(packed_ptr.dtype.element_ty)
    if BACKWARD:
        tl.store(packed, first, mask=inside)
        tl.store(packed + HALF, second, mask=inside)
    else:
        tl.store(q, first, mask=is_q)
        tl.store(q + HALF, second, mask=is_q)
        tl.store(k, first, mask=is_k)
        tl.store(k + HALF, second, mask=is_k)
        tl.store(v, first, mask=is_v)
        tl.store(v + HALF, second, mask=is_v)


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, out_ptr, grad_ptr, grad_gate_up_ptr,
    SIZE: tl.constexpr, SLOT: tl.constexpr, BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One stretch of one token's intermediate row; backward: of its gate and up gradients."""
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = f < SIZE
    gate_at = row * (2 * SIZE) + (f + f // SLOT * SLOT)
    gate = tl.load(gate_up_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + gate_at + SLOT, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        grad = tl.load(grad_ptr + row * SIZE + f, mask=inside, other=0.0).to(tl.float32)
        grad_gate = grad * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid)))
        grad_up = grad * (gate * sigmoid)
        dtype = grad_gate_up_ptr.dtype.element_ty
        tl.store(grad_gate_up_ptr + gate_at, grad_gate.to(dtype), mask=inside)
        tl.store(grad_gate_up_ptr + gate_at + SLOT, grad_up.to(dtype), mask=inside)
    else:
        tl.store(out_ptr + row * SIZE + f, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight."""
    x_TH = _rows(x_TH)
    if _needs_gradient(x_TH, weight_H):
        out_TH: Tensor = _RmsNorm.apply(x_TH, weight_H, eps)  # type: ignore[no-untyped-call]
        return out_TH
    return _rms_norm(x_TH, None, weight_H, eps)[1]


def add_rms_norm(x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    x_TH, y_TH = _rows(x_TH), _rows(y_TH)
    if _needs_gradient(x_TH, y_TH, weight_H):
        pair: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x_TH, y_TH, weight_H, eps)  # type: ignore[no-untyped-call]
        return pair
    return _rms_norm(x_TH, y_TH, weight_H, eps)


def rotate_qkv(
    qkv_TR: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias_R: Tensor | None = None,
) -> Heads:
    """Rotated queries [T, N, D], rotated keys and values [T, K, D], contiguous; cos and sin have no gradient."""
    sizes = (num_heads, num_kv_heads, head_dim)
    qkv_TR, cos_TD, sin_TD = qkv_TR.contiguous(), _rows(cos_TD), _rows(sin_TD)
    if _needs_gradient(qkv_TR, bias_R):
        heads: Heads = _Rotate.apply(qkv_TR, cos_TD, sin_TD, bias_R, sizes)  # type: ignore[no-untyped-call]
        return heads
    return _rotate(qkv_TR, cos_TD, sin_TD, bias_R, sizes)


def silu_mul(gate_up_TF: Tensor, num_slots: int) -> Tensor:
    """silu(gate) * up, [T, F]."""
    gate_up_TF = gate_up_TF.contiguous()
    if _needs_gradient(gate_up_TF):
        out_TF: Tensor = _SiluMul.apply(gate_up_TF, num_slots)  # type: ignore[no-untyped-call]
        return out_TF
    return _silu_mul(gate_up_TF, num_slots)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x_TH, weight_H)
        ctx.eps = eps
        return _rms_norm(x_TH, None, weight_H, eps)[1]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out_TH: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TH, weight_H = ctx.saved_tensors
        grad_x_TH, grad_weight_H = _rms_norm_backward(grad_out_TH, None, x_TH, weight_H, ctx.eps)
        return grad_x_TH, grad_weight_H, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        sum_TH, out_TH = _rms_norm(x_TH, y_TH, weight_H, eps)
        ctx.save_for_backward(sum_TH, weight_H)
        ctx.eps = eps
        return sum_TH, out_TH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sum_TH: Tensor, grad_out_TH: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        sum_TH, weight_H = ctx.saved_tensors
        grad_TH, grad_weight_H = _rms_norm_backward(grad_out_TH, grad_sum_TH, sum_TH, weight_H, ctx.eps)
        return grad_TH, grad_TH, grad_weight_H, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_TR: Tensor, cos_TD: Tensor, sin_TD: Tensor, bias_R: Tensor | None, sizes: tuple[int, int, int]
    ) -> Heads:
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.sizes = sizes
        return _rotate(qkv_TR, cos_TD, sin_TD, bias_R, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_q_TND: Tensor, grad_k_TKD: Tensor, grad_v_TKD: Tensor
    ) -> tuple[Tensor, None, None, Tensor | None, None]:
        heads = (grad_q_TND.contiguous(), grad_k_TKD.contiguous(), grad_v_TKD.contiguous())
        cos_TD, sin_TD = ctx.saved_tensors
        grad_TR = _rotate_backward(heads, cos_TD, sin_TD, ctx.sizes)
        return grad_TR, None, None, grad_TR.sum(0) if ctx.needs_input_grad[3] else None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF: Tensor, num_slots: int) -> Tensor:
        ctx.save_for_backward(gate_up_TF)
        ctx.num_slots = num_slots
        return _silu_mul(gate_up_TF, num_slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor, None]:
        (gate_up_TF,) = ctx.saved_tensors
        grad_gate_up_TF = torch.empty_like(gate_up_TF)
        _launch_silu_mul(gate_up_TF, gate_up_TF, grad_TF.contiguous(), grad_gate_up_TF, ctx.num_slots, backward=True)
        return grad_gate_up_TF, None


def _rms_norm(x_TH: Tensor, y_TH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y (x itself if there is no y) and its norm."""
    num_tokens, size = x_TH.shape
    out_TH = torch.empty((num_tokens, size), dtype=x_TH.dtype, device=x_TH.device)
    sum_TH = x_TH if y_TH is None else torch.empty_like(out_TH)
    y = x_TH if y_TH is None else y_TH
    block = triton.next_power_of_2(size)
    if num_tokens > 0:
        _rms_norm_kernel[(num_tokens,)](
            x_TH, y, weight_H, sum_TH, out_TH, x_TH.stride(0), y.stride(0), eps,
            SIZE=size, BLOCK=block, ADD=y_TH is not None, num_warps=_norm_warps(block),
        )  # fmt: skip
    return sum_TH, out_TH


def _rms_norm_backward(
    grad_out_TH: Tensor, grad_sum_TH: Tensor | None, x_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the normalised rows (with `grad_sum` added) and of the weight."""
    num_tokens, size = x_TH.shape
    grad_out_TH = grad_out_TH.contiguous()
    grad_x_TH = torch.empty_like(grad_out_TH)
    if num_tokens == 0:
        return grad_x_TH, torch.zeros_like(weight_H)
    num_programs = min(num_tokens, _NUM_ROW_BLOCKS)
    partial_PH = torch.empty((num_programs, size), dtype=torch.float32, device=x_TH.device)
    block = triton.next_power_of_2(size)
    _rms_norm_backward_kernel[(num_programs,)](
        grad_out_TH, grad_out_TH if grad_sum_TH is None else grad_sum_TH.contiguous(), x_TH, weight_H,
        grad_x_TH, partial_PH, num_tokens, x_TH.stride(0), eps,
        SIZE=size, BLOCK=block, ADD=grad_sum_TH is not None, num_warps=_norm_warps(block),
    )  # fmt: skip
    return grad_x_TH, partial_PH.sum(0).to(weight_H.dtype)


def _rotate(
    qkv_TR: Tensor, cos_TD: Tensor, sin_TD: Tensor, bias_R: Tensor | None, sizes: tuple[int, int, int]
) -> Heads:
    num_tokens, (num_heads, num_kv_heads, head_dim) = qkv_TR.shape[0], sizes
    q_TND = qkv_TR.new_empty((num_tokens, num_heads, head_dim))
    k_TKD, v_TKD = (qkv_TR.new_empty((num_tokens, num_kv_heads, head_dim)) for _ in range(2))
    _launch_rotate(qkv_TR, bias_R, cos_TD, sin_TD, (q_TND, k_TKD, v_TKD), sizes, backward=False)
    return q_TND, k_TKD, v_TKD


def _rotate_backward(heads: Heads, cos_TD: Tensor, sin_TD: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    num_heads, num_kv_heads, head_dim = sizes
    q_TND = heads[0]
    grad_TR = q_TND.new_empty((q_TND.shape[0], (num_heads + 2 * num_kv_heads) * head_dim))
    _launch_rotate(grad_TR, None, cos_TD, sin_TD, heads, sizes, backward=True)
    return grad_TR


def _launch_rotate(
    packed_TR: Tensor,
    bias_R: Tensor | None,
    cos_TD: Tensor,
    sin_TD: Tensor,
    heads: Heads,
    sizes: tuple[int, int, int],
    *,
    backward: bool,
) -> None:
    num_heads, num_kv_heads, head_dim = sizes
    num_rows = packed_TR.shape[0] * (num_heads + 2 * num_kv_heads)
    rows, num_warps = (8, 2) if num_rows <= _FEW_ROWS else (64, 8)
    if num_rows > 0:
        _rotate_kernel[(triton.cdiv(num_rows, rows),)](
            packed_TR, packed_TR if bias_R is None else bias_R, cos_TD, sin_TD, *heads, num_rows,
            cos_TD.stride(0), sin_TD.stride(0),
            NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2), ROWS=rows, BIAS=bias_R is not None, BACKWARD=backward,
            num_warps=num_warps,
        )  # fmt: skip


def _silu_mul(gate_up_TF: Tensor, num_slots: int) -> Tensor:
    out_TF = gate_up_TF.new_empty((gate_up_TF.shape[0], gate_up_TF.shape[1] // 2))
    _launch_silu_mul(gate_up_TF, out_TF, out_TF, out_TF, num_slots, backward=False)
    return out_TF


def _launch_silu_mul(
    gate_up_TF: Tensor, out_TF: Tensor, grad_TF: Tensor, grad_gate_up_TF: Tensor, num_slots: int, *, backward: bool
) -> None:
    num_tokens, size = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    block = min(1024, triton.next_power_of_2(size))  # 8 values, one access of 16 bytes, to a thread
    if num_tokens > 0:
        _silu_mul_kernel[(num_tokens, triton.cdiv(size, block))](
            gate_up_TF, out_TF, grad_TF, grad_gate_up_TF,
            SIZE=size, SLOT=size // num_slots, BLOCK=block, BACKWARD=backward, num_warps=4,
        )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Rows that are contiguous each; they may be apart."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _norm_warps(block: int) -> int:
    """16 values to a thread; it depends on the row's size only, and with it the order of the row's sum."""
    return min(16, max(1, block // 512))
