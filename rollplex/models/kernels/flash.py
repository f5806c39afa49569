"""Attention with its log-sum-exp, and the matching backward, on packed tensors.

    flash_forward   (q, k, v)               -> o, lse
    flash_backward  (grad_o, q, k, v, o, lse) -> grad_q, grad_k, grad_v
    merge           two parts over disjoint keys -> one
    sequence_attention   (q, k, v) of equally long sequences -> o, differentiable: torch's kernels, cuDNN's on CUDA

The backward takes `o` and `lse` as arguments because they may be those of a *merged* attention over more keys than `k`:
with P = exp(q k' - lse) and delta = rowsum(grad_o * o), the flash backward of each part is then the exact gradient with
respect to that part (Dao, FlashAttention-2, section 2.3: nothing else of the other keys enters).

The operators are torch's own: aten's flash kernels on CPU and (16-bit) on CUDA. `plain_forward` and `plain_backward`
are the same functions written out; they are the tests' oracle and serve float32 on CUDA, which aten's kernel does not
take.

Legend: T query tokens, S key tokens, N query heads, K key/value heads (N a multiple of K), D head dim, B segments.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollplex.gpu.device import upload

_aten = torch.ops.aten
CUDNN_HEAD_DIM = 128


@dataclass(frozen=True)
class Segments:
    """Lengths of the sequences packed into T tokens, in order; attention never crosses a boundary."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [B + 1], cumulative lengths from 0, on the device."""
        return upload(np.cumsum([0, *self.lengths], dtype=np.int32), self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


def flash_forward(
    q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, causal: bool, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """softmax(q k' / sqrt(D)) v and its log-sum-exp.

    Args:
        causal: token i of a sequence sees keys 0..i of it (then T = S).
        segments: the packed sequences of both q and k; None means one sequence.

    Returns:
        o [T, N, D] in q's dtype; lse [N, T] float32.
    """
    if q_TND.device.type == "cpu":
        runs = _runs(segments, q_TND, k_SKD, v_SKD)
        parts = [_cpu_forward(q, k, v, causal, count) for count, (q, k, v) in runs]
    elif q_TND.dtype == torch.float32:
        parts = [plain_forward(q, k, v, causal=causal) for q, k, v in _split(segments, q_TND, k_SKD, v_SKD)]
    else:
        return _cuda_forward(q_TND, k_SKD, v_SKD, causal, segments)
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def flash_backward(
    grad_TND: Tensor, q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_TND: Tensor, lse_NT: Tensor,
    *, causal: bool, segments: Segments | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, given the (possibly merged) output and log-sum-exp. Shapes and dtypes as q, k, v."""
    rows = (grad_TND, q_TND, k_SKD, v_SKD, o_TND, lse_NT.transpose(0, 1))
    if q_TND.device.type == "cpu":
        parts = [
            _cpu_backward(g, q, k, v, o, lse_TN, causal, count)
            for count, (g, q, k, v, o, lse_TN) in _runs(segments, *rows)
        ]
    elif q_TND.dtype == torch.float32:
        parts = [plain_backward(g, q, k, v, o, lse_TN.t(), causal) for g, q, k, v, o, lse_TN in _split(segments, *rows)]
    else:
        return _cuda_backward(grad_TND, q_TND, k_SKD, v_SKD, o_TND, lse_NT, causal, segments)
    grads_q, grads_k, grads_v = zip(*parts, strict=True)
    return torch.cat(grads_q), torch.cat(grads_k), torch.cat(grads_v)


def sequence_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool) -> Tensor:
    """softmax(q k' / sqrt(D)) v [B, N, S, D] of B sequences, differentiable.

    16-bit on CUDA with heads of 128 goes to cuDNN by name: there it is twice as fast as the flash kernel on long
    sequences, and backward gives the same bits every time (smaller heads: not always), but torch's own choice
    leaves it out where deterministic algorithms are asked for.
    """
    if q_BNSD.is_cuda and q_BNSD.dtype != torch.float32 and q_BNSD.shape[-1] == CUDNN_HEAD_DIM:
        o_BNSD: Tensor = _aten._scaled_dot_product_cudnn_attention(q_BNSD, k_BKSD, v_BKSD, None, True, 0.0, causal)[0]
        return o_BNSD
    return F.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=causal, enable_gqa=True)


def merge(o_a_TND: Tensor, lse_a_NT: Tensor, o_b_TND: Tensor, lse_b_NT: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint sets of keys, from the attention over each. float32 inside."""
    lse_NT = torch.logaddexp(lse_a_NT, lse_b_NT)
    weight_a_TN1 = (lse_a_NT - lse_NT).exp().transpose(0, 1).unsqueeze(-1)
    weight_b_TN1 = (lse_b_NT - lse_NT).exp().transpose(0, 1).unsqueeze(-1)
    return (o_a_TND.float() * weight_a_TN1 + o_b_TND.float() * weight_b_TN1).to(o_a_TND.dtype), lse_NT


def plain_forward(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """`flash_forward` of one sequence, written out in float32."""
    scores_NTS, _, v_NSD = _scores(q_TND, k_SKD, v_SKD, causal)
    lse_NT = scores_NTS.logsumexp(-1)
    o_NTD = (scores_NTS - lse_NT.unsqueeze(-1)).exp() @ v_NSD
    return o_NTD.transpose(0, 1).to(q_TND.dtype), lse_NT


def plain_backward(
    grad_TND: Tensor, q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_TND: Tensor, lse_NT: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`flash_backward` of one sequence, written out in float32."""
    scores_NTS, k_NSD, v_NSD = _scores(q_TND, k_SKD, v_SKD, causal)
    grad_NTD, q_NTD = grad_TND.float().transpose(0, 1), q_TND.float().transpose(0, 1)
    delta_NT1 = (grad_TND.float() * o_TND.float()).sum(-1).transpose(0, 1).unsqueeze(-1)
    p_NTS = (scores_NTS - lse_NT.unsqueeze(-1)).exp()
    grad_scores_NTS = p_NTS * (grad_NTD @ v_NSD.transpose(1, 2) - delta_NT1) * q_TND.shape[-1] ** -0.5

    def per_kv_head(grad_NSD: Tensor) -> Tensor:
        return grad_NSD.view(k_SKD.shape[1], -1, *grad_NSD.shape[1:]).sum(1).transpose(0, 1).to(k_SKD.dtype)

    grad_q_TND = (grad_scores_NTS @ k_NSD).transpose(0, 1).to(q_TND.dtype)
    grad_k_NSD, grad_v_NSD = grad_scores_NTS.transpose(1, 2) @ q_NTD, p_NTS.transpose(1, 2) @ grad_NTD
    return grad_q_TND, per_kv_head(grad_k_NSD), per_kv_head(grad_v_NSD)


def _scores(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    queries_per_kv_head = q_TND.shape[1] // k_SKD.shape[1]
    k_NSD = k_SKD.float().transpose(0, 1).repeat_interleave(queries_per_kv_head, dim=0)
    v_NSD = v_SKD.float().transpose(0, 1).repeat_interleave(queries_per_kv_head, dim=0)
    scores_NTS = q_TND.float().transpose(0, 1) @ k_NSD.transpose(1, 2) * q_TND.shape[-1] ** -0.5
    if causal:
        hidden_TS = torch.ones(scores_NTS.shape[1:], dtype=torch.bool, device=q_TND.device).triu(1)
        scores_NTS = scores_NTS.masked_fill(hidden_TS, float("-inf"))
    return scores_NTS, k_NSD, v_NSD


def _cpu_forward(q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, causal: bool, count: int) -> tuple[Tensor, Tensor]:
    q, k, v = (_heads(x, count) for x in (q_TND, k_SKD, v_SKD))
    o_BNTD, lse_BNT = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return o_BNTD.transpose(1, 2).flatten(0, 1), lse_BNT.transpose(0, 1).flatten(1)


def _cpu_backward(
    grad_TND: Tensor,
    q_TND: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    o_TND: Tensor,
    lse_TN: Tensor,
    causal: bool,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, o = (_heads(x, count) for x in (grad_TND, q_TND, k_SKD, v_SKD, o_TND))
    lse_BNT = lse_TN.reshape(count, -1, lse_TN.shape[1]).transpose(1, 2)
    grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, o, lse_BNT, 0.0, causal)
    grad_q, grad_k, grad_v = (x.transpose(1, 2).flatten(0, 1) for x in grads)
    return grad_q, grad_k, grad_v


def _heads(x_TND: Tensor, count: int) -> Tensor:
    """[B, N, T / B, D] of `count` equally long sequences."""
    return x_TND.view(count, -1, *x_TND.shape[1:]).transpose(1, 2)


def _runs(segments: Segments | None, *tensors: Tensor) -> list[tuple[int, tuple[Tensor, ...]]]:
    """Neighbours of equal length together, as (how many, their rows): the CPU's operators take batches."""
    if segments is None:
        return [(1, tensors)]
    runs = [(length, len(list(same))) for length, same in groupby(segments.lengths)]
    pieces = zip(*(tensor.split([length * count for length, count in runs]) for tensor in tensors), strict=True)
    return [(count, piece) for (_, count), piece in zip(runs, pieces, strict=True)]


def _split(segments: Segments | None, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    if segments is None:
        return [tensors]
    return list(zip(*(tensor.split(segments.lengths) for tensor in tensors), strict=True))


def _cuda_forward(
    q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, causal: bool, segments: Segments | None
) -> tuple[Tensor, Tensor]:
    q_segments, k_segments = _cuda_segments(q_TND, k_SKD, segments)
    o_TND, lse_NT, *_ = _aten._flash_attention_forward(
        q_TND, k_SKD, v_SKD, q_segments.offsets, k_segments.offsets, q_segments.longest, k_segments.longest,
        0.0, causal, False,
    )  # fmt: skip
    return o_TND, lse_NT


def _cuda_backward(
    grad_TND: Tensor, q_TND: Tensor, k_SKD: Tensor, v_SKD: Tensor, o_TND: Tensor, lse_NT: Tensor, causal: bool,
    segments: Segments | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q_segments, k_segments = _cuda_segments(q_TND, k_SKD, segments)
    state = torch.zeros(2, dtype=torch.uint64, device=q_TND.device)  # dropout's generator state: unused at 0.0
    grads = _aten._flash_attention_backward(
        grad_TND.contiguous(), q_TND, k_SKD, v_SKD, o_TND, lse_NT.contiguous(), q_segments.offsets,
        k_segments.offsets, q_segments.longest, k_segments.longest, 0.0, causal, state, state,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _cuda_segments(q_TND: Tensor, k_SKD: Tensor, segments: Segments | None) -> tuple[Segments, Segments]:
    if segments is not None:
        return segments, segments
    return Segments((q_TND.shape[0],), q_TND.device), Segments((k_SKD.shape[0],), k_SKD.device)
