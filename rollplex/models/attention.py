"""The three ways in which a decoder layer attends, behind the decoder's `Attention` protocol.

    PrefixAttention   packed causal attention over prompts' prefixes; hands out their keys and values
    SuffixAttention   suffix tokens of some groups: each sees its group's whole prefix and, causally, its own sequence
    DecodeAttention   one new token per sample: the group's prefix is read once for all its samples, own K/V is paged

They know layers by number and prefixes by their K/V tensors; not where those come from, nor what becomes of the output.

Legend: T tokens, N query heads, K key/value heads, G query heads per K, D head dim, P prefix tokens, L layers, S
history slots.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollplex.models.kernels.flash import Segments, flash_backward, flash_forward, merge, sequence_attention

KeepKV = Callable[[int, Tensor, Tensor], None]
"""Called with (layer, k [T, K, D], v [T, K, D]) before attention."""


class PrefixAttention:
    """Causal attention over packed prefixes; `keep` receives every layer's K and V.

    One sequence goes to `sequence_attention`, which is differentiable; several go to the flash kernel, which is not.
    """

    def __init__(self, keep: KeepKV, segments: Segments | None = None) -> None:
        self._keep, self._segments = keep, segments

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        self._keep(layer, k_TKD, v_TKD)
        if self._segments is not None and len(self._segments.lengths) > 1:
            return flash_forward(q_TND, k_TKD, v_TKD, causal=True, segments=self._segments)[0]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TND, k_TKD, v_TKD))
        return sequence_attention(q, k, v, causal=True)[0].transpose(0, 1)


@dataclass(frozen=True)
class PrefixKV:
    """Keys and values of one prefix, and where their gradients are summed (float32) when there is a backward pass."""

    k_LPKD: Tensor
    v_LPKD: Tensor
    grad_k_LPKD: Tensor | None = None
    grad_v_LPKD: Tensor | None = None

    @property
    def length(self) -> int:
        """Prefix tokens, P; may be 0."""
        return self.k_LPKD.shape[1]


SharedPrefix = tuple[PrefixKV, int]
"""A prefix, and how many of the packed rows attend to it; rows of one group are adjacent, in order of the prefixes."""


class SuffixAttention:
    """Packed suffixes of some groups, each over its own group's prefix.

    The two parts are merged by log-sum-exp. Backward is exact for q and the suffix's own k and v through autograd; the
    prefix's gradients are added to `grad_k_LPKD` and `grad_v_LPKD` of its PrefixKV, outside autograd, because several
    microbatches of a group may add to them before the prefix's one backward pass.
    """

    def __init__(self, prefixes: Sequence[SharedPrefix], segments: Segments, keep: KeepKV | None = None) -> None:
        num_rows = sum(rows for _, rows in prefixes)
        assert num_rows == sum(segments.lengths), f"prefixes for {num_rows} rows, sequences {segments.lengths}"
        self._prefixes, self._segments, self._keep = prefixes, segments, keep

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        if self._keep is not None:
            self._keep(layer, k_TKD, v_TKD)
        o_TND: Tensor = _MergedAttention.apply(  # type: ignore[no-untyped-call]
            q_TND, k_TKD, v_TKD, self._prefixes, layer, self._segments
        )
        return o_TND


class _MergedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, prefixes: Sequence[SharedPrefix], layer: int,
        segments: Segments,
    ) -> Tensor:  # fmt: skip
        own = flash_forward(q_TND, k_TKD, v_TKD, causal=True, segments=segments)
        o_TND, lse_NT = _merge_prefixes(q_TND, *own, prefixes, layer)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, o_TND, lse_NT)
        ctx.prefixes, ctx.layer, ctx.segments = prefixes, layer, segments
        return o_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        grad_q, grad_k, grad_v = flash_backward(grad_TND, q, k, v, o, lse, causal=True, segments=ctx.segments)
        for prefix, rows in _rows(ctx.prefixes):
            if not prefix.length:
                continue
            assert prefix.grad_k_LPKD is not None and prefix.grad_v_LPKD is not None, (
                "a backward pass through a prefix needs somewhere to add its gradient"
            )
            k_PKD, v_PKD = prefix.k_LPKD[ctx.layer], prefix.v_LPKD[ctx.layer]
            prefix_q, prefix_k, prefix_v = flash_backward(
                grad_TND[rows], q[rows], k_PKD, v_PKD, o[rows], lse[:, rows], causal=False
            )
            grad_q[rows] += prefix_q
            prefix.grad_k_LPKD[ctx.layer] += prefix_k
            prefix.grad_v_LPKD[ctx.layer] += prefix_v
        return grad_q, grad_k, grad_v, None, None, None


def _rows(prefixes: Sequence[SharedPrefix]) -> Iterator[tuple[PrefixKV, slice]]:
    """Each prefix, and its rows."""
    stop = 0
    for prefix, num_rows in prefixes:
        stop += num_rows
        yield prefix, slice(stop - num_rows, stop)


def _merge_prefixes(
    q_TND: Tensor, own_o_TND: Tensor, own_lse_NT: Tensor, prefixes: Sequence[SharedPrefix], layer: int
) -> tuple[Tensor, Tensor]:
    """Attention over each row's prefix too, from that over its own keys: a kernel per prefix, one merge for all."""
    if not any(prefix.length for prefix, _ in prefixes):
        return own_o_TND, own_lse_NT
    parts = []
    for prefix, rows in _rows(prefixes):
        if prefix.length:
            parts.append(flash_forward(q_TND[rows], prefix.k_LPKD[layer], prefix.v_LPKD[layer], causal=False))
        else:  # over no keys: these rows' own output keeps its bits
            nothing_lse_NT = torch.full_like(own_lse_NT[:, rows], float("-inf"))
            parts.append((torch.zeros_like(own_o_TND[rows]), nothing_lse_NT))
    if len(parts) == 1:
        return merge(*parts[0], own_o_TND, own_lse_NT)
    return merge(torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts], 1), own_o_TND, own_lse_NT)


@dataclass(frozen=True)
class PagedKV:
    """Storage of every decoded suffix: slot = block * block_size + offset. k and v [L, slots, K, D]."""

    k_LSKD: Tensor
    v_LSKD: Tensor

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Put one token's K and V into each slot."""
        self.k_LSKD[layer].index_copy_(0, slots_T, k_TKD)
        self.v_LSKD[layer].index_copy_(0, slots_T, v_TKD)


class DecodeAttention:
    """One decode step of T samples; rows of one group are adjacent.

    Args:
        pages: where the samples' own K and V live.
        slots_T: where this step's K and V of each sample go.
        history_TS: slots of each sample's suffix so far, this step's included, in order; padded to the longest.
        history_lengths_T: how many of them are real.
        prefixes: each group's prefix and its number of rows, in row order.
    """

    def __init__(
        self, pages: PagedKV, slots_T: Tensor, history_TS: Tensor, history_lengths_T: Tensor,
        prefixes: Sequence[SharedPrefix],
    ) -> None:  # fmt: skip
        self._pages, self._slots_T, self._history_TS, self._prefixes = pages, slots_T, history_TS, prefixes
        positions_S = torch.arange(history_TS.shape[1], device=history_TS.device)
        self._padding_TS = positions_S >= history_lengths_T.unsqueeze(1)

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        self._pages.write(layer, self._slots_T, k_TKD, v_TKD)
        return _merge_prefixes(q_TND, *self._own(layer, q_TND), self._prefixes, layer)[0]

    def _own(self, layer: int, q_TND: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of each sample over its own suffix, in float32: o [T, N, D] and lse [N, T]."""
        k_TSKD = self._pages.k_LSKD[layer][self._history_TS].float()
        v_TSKD = self._pages.v_LSKD[layer][self._history_TS].float()
        q_TKGD = q_TND.float().view(q_TND.shape[0], k_TSKD.shape[2], -1, q_TND.shape[-1])
        scores_TKGS = torch.einsum("tkgd,tskd->tkgs", q_TKGD, k_TSKD) * q_TND.shape[-1] ** -0.5
        scores_TKGS = scores_TKGS.masked_fill(self._padding_TS[:, None, None, :], float("-inf"))
        lse_TKG = scores_TKGS.logsumexp(-1)
        weights_TKGS = (scores_TKGS - lse_TKG.unsqueeze(-1)).exp()
        o_TKGD = torch.einsum("tkgs,tskd->tkgd", weights_TKGS, v_TSKD)
        return o_TKGD.reshape(q_TND.shape).to(q_TND.dtype), lse_TKG.reshape(q_TND.shape[:2]).transpose(0, 1)
