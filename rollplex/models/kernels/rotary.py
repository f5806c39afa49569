"""Rotary angles applied to packed projections in one pass: the vision tower's queries and keys, in place.

    [q | k | v] -> [rotated q | rotated k | v]      (a, b) -> (a cos - b sin, b cos + a sin), in float32

Without it the same costs a dozen passes over float32 copies. It knows no positions and no attention.

Legend: T tokens, N heads, D head dim, H = N D.
"""

# Triton's decorator and the kernel's parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate_queries_and_keys(qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_heads: int) -> Tensor:
    """Projections [T, 3 H] with their first two thirds rotated. `qkv` itself is changed; differentiable in it.

    Args:
        qkv: contiguous; nobody else may need it as it was.
        cos_TD, sin_TD: float32, contiguous; only their first halves are read, the second are taken to be equal.
    """
    out: Tensor = _Rotate.apply(qkv, cos_TD, sin_TD, num_heads)  # type: ignore[no-untyped-call]
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_heads: int) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        ctx.num_heads = num_heads
        ctx.mark_dirty(qkv)
        _rotate_in_place(qkv, cos_TD, sin_TD, num_heads, backwards=False)
        return qkv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos_TD, sin_TD = ctx.saved_tensors
        grad = grad.clone(memory_format=torch.contiguous_format)  # autograd may still need the one that it gave
        _rotate_in_place(grad, cos_TD, sin_TD, ctx.num_heads, backwards=True)
        return grad, None, None, None


def _rotate_in_place(qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_heads: int, *, backwards: bool) -> None:
    """Backwards, the angles are negated: the gradient, and the inverse, of a rotation."""
    assert qkv.is_contiguous() and cos_TD.is_contiguous() and sin_TD.is_contiguous()
    head_dim = cos_TD.shape[1]
    assert qkv.shape == (len(cos_TD), 3 * num_heads * head_dim)
    _rotate_kernel[(len(qkv),)](
        qkv, cos_TD, sin_TD,
        num_rotated=2 * num_heads, half=head_dim // 2, backwards=backwards,
        block_heads=triton.next_power_of_2(2 * num_heads), block_half=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip


@triton.jit
def _rotate_kernel(
    qkv, cos, sin, num_rotated: tl.constexpr, half: tl.constexpr, backwards: tl.constexpr,
    block_heads: tl.constexpr, block_half: tl.constexpr,
):  # fmt: skip
    """One token: all heads of its queries and keys."""
    token = tl.program_id(0).to(tl.int64)  # a packed batch can have more than 2**31 values
    heads = tl.arange(0, block_heads)[:, None]
    columns = tl.arange(0, block_half)[None, :]
    real = (heads < num_rotated) & (columns < half)
    a_at = qkv + token * (num_rotated // 2 * 3 * 2 * half) + heads * (2 * half) + columns
    angles_at = token * (2 * half) + columns
    c = tl.load(cos + angles_at, mask=columns < half, other=0.0)
    s = tl.load(sin + angles_at, mask=columns < half, other=0.0)
    if backwards:
        s = -s
    a = tl.load(a_at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(a_at + half, mask=real, other=0.0).to(tl.float32)
    tl.store(a_at, (a * c - b * s).to(qkv.dtype.element_ty), mask=real)
    tl.store(a_at + half, (b * c + a * s).to(qkv.dtype.element_ty), mask=real)
