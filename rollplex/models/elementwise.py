"""The element-wise parts of a decoder layer: each written out in torch, and the function that picks the fused kernel.

    rms_norm       x                       -> norm(x)
    add_rms_norm   x, y                    -> x + y, norm(x + y)
    rotate_qkv     packed qkv, cos, sin    -> rotated queries, rotated keys, values
    silu_mul       packed gate and up      -> silu(gate) * up

`plain_...` are the definitions: they are what CPUs run, and the oracle of kernels/fused.py, which runs on CUDA for
bfloat16 and float32 and rounds less often (see there). All are differentiable. It knows no module and no configuration;
kernels (and Triton) are loaded at the first call on a GPU.

Legend: T tokens, H hidden, N query heads, K key/value heads, G query heads per K, D head dim, R = K (G + 2) D rows of
the packed projection, F intermediate.
"""

from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

_FUSED_DTYPES = (torch.bfloat16, torch.float32)

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [T, N, D], keys and values [T, K, D]."""


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, the mean square in float32."""
    if _is_fused(x_TH):
        fused_TH: Tensor = _kernels().rms_norm(x_TH, weight_H, eps)
        return fused_TH
    return plain_rms_norm(x_TH, weight_H, eps)


def add_rms_norm(x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum x + y, and its norm."""
    if _is_fused(x_TH):
        pair: tuple[Tensor, Tensor] = _kernels().add_rms_norm(x_TH, y_TH, weight_H, eps)
        return pair
    return plain_add_rms_norm(x_TH, y_TH, weight_H, eps)


def rotate_qkv(
    qkv_TR: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias_R: Tensor | None = None,
) -> Heads:
    """Rotated queries, rotated keys and values of a packed projection.

    Args:
        qkv_TR: per key/value head: its query heads, its key, its value.
        cos_TD: both halves equal, as `Decoder.rope` makes them: the fused kernel reads the first one only.
        sin_TD: likewise.
        bias_R: added first, and the sum rounded to qkv's dtype. `F.linear` with a bias rounds once where this, after
            `F.linear` without, rounds twice.
    """
    arguments = (qkv_TR, cos_TD, sin_TD, num_heads, num_kv_heads, head_dim, bias_R)
    if _is_fused(qkv_TR):
        heads: Heads = _kernels().rotate_qkv(*arguments)
        return heads
    return plain_rotate_qkv(*arguments)


def silu_mul(gate_up_TF: Tensor, num_slots: int) -> Tensor:
    """silu(gate) * up, [T, F], from [T, 2 F] in `num_slots` nested slots of (gate, up)."""
    if _is_fused(gate_up_TF):
        fused_TF: Tensor = _kernels().silu_mul(gate_up_TF, num_slots)
        return fused_TF
    return plain_silu_mul(gate_up_TF, num_slots)


def plain_rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """`rms_norm`, written out."""
    x32_TH = x_TH.float()
    scale_T1 = torch.rsqrt(x32_TH.pow(2).mean(-1, keepdim=True) + eps)
    return weight_H * (x32_TH * scale_T1).to(x_TH.dtype)


def plain_add_rms_norm(x_TH: Tensor, y_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, written out."""
    sum_TH = x_TH + y_TH
    return sum_TH, plain_rms_norm(sum_TH, weight_H, eps)


def plain_rotate_qkv(
    qkv_TR: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    bias_R: Tensor | None = None,
) -> Heads:
    """`rotate_qkv`, written out."""
    if bias_R is not None:
        qkv_TR = qkv_TR + bias_R
    slots_TKGD = qkv_TR.view(-1, num_kv_heads, num_heads // num_kv_heads + 2, head_dim)
    q_TND = slots_TKGD[:, :, :-2].reshape(-1, num_heads, head_dim)
    cos_T1D, sin_T1D = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    q_TND, k_TKD = (plain_rotate(x, cos_T1D, sin_T1D) for x in (q_TND, slots_TKGD[:, :, -2]))
    return q_TND, k_TKD, slots_TKGD[:, :, -1]


def plain_rotate(x_TND: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """Rotate halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a, b = x_TND.chunk(2, dim=-1)
    return x_TND * cos_T1D + torch.cat((-b, a), dim=-1) * sin_T1D


def plain_silu_mul(gate_up_TF: Tensor, num_slots: int) -> Tensor:
    """`silu_mul`, written out."""
    slots = gate_up_TF.view(gate_up_TF.shape[0], num_slots, 2, -1)
    return (F.silu(slots[:, :, 0]) * slots[:, :, 1]).reshape(gate_up_TF.shape[0], -1)


def _is_fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _FUSED_DTYPES


@cache
def _kernels() -> ModuleType:
    """Loaded on first use: CPU users need no Triton."""
    from rollplex.models.kernels import fused

    return fused
