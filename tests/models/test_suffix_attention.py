"""Suffixes of several groups in one call: each over its own prefix, with the gradients that each gets alone."""

import pytest
import torch
from torch import Tensor

from rollplex.models.attention import PrefixKV, SuffixAttention
from rollplex.models.kernels.flash import Segments

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 4, 2, 16, 2
CPU = torch.device("cpu")
ROUNDING = 1e-5
"""Relative, float32."""
GROUPS = [(9, (3, 3, 5)), (0, (4,)), (30, (1, 6)), (1, (2, 2))]
"""Prefix tokens, and the lengths of the suffixes."""


def prefix_of(length: int, seed: int) -> PrefixKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (NUM_LAYERS, length, NUM_KV_HEADS, HEAD_DIM)
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return PrefixKV(k, v, torch.zeros(shape), torch.zeros(shape))


def rows(num_heads: int, seed: int) -> Tensor:
    total = sum(sum(lengths) for _, lengths in GROUPS)
    values = torch.randn((total, num_heads, HEAD_DIM), generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_()


def plain(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, prefix_k: Tensor, prefix_v: Tensor) -> Tensor:
    """One suffix over its prefix, by masked softmax over both."""
    group, length, num_prefix = NUM_HEADS // NUM_KV_HEADS, len(q_TND), len(prefix_k)
    k, v = (
        torch.cat(pair).repeat_interleave(group, 1).transpose(0, 1) for pair in ((prefix_k, k_TKD), (prefix_v, v_TKD))
    )
    scores = q_TND.transpose(0, 1) @ k.transpose(1, 2) * HEAD_DIM**-0.5
    hidden = torch.ones(length, num_prefix + length, dtype=torch.bool).triu(num_prefix + 1)
    o_NTD: Tensor = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
    return o_NTD.transpose(0, 1)


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert actual is not None and expected is not None
    assert float((actual - expected).detach().norm()) <= ROUNDING * float(expected.detach().norm())


def test_groups_together_are_each_group_by_plain_softmax() -> None:
    layer = 1
    q, k, v = rows(NUM_HEADS, 1), rows(NUM_KV_HEADS, 2), rows(NUM_KV_HEADS, 3)
    grad = rows(NUM_HEADS, 4).detach()
    prefixes = [prefix_of(length, 10 + index) for index, (length, _) in enumerate(GROUPS)]
    counts = [sum(lengths) for _, lengths in GROUPS]
    segments = Segments(tuple(length for _, lengths in GROUPS for length in lengths), CPU)
    o = SuffixAttention(list(zip(prefixes, counts, strict=True)), segments)(layer, q, k, v)
    o.backward(grad)

    expected, leaves, start = [], [x.detach().clone().requires_grad_() for x in (q, k, v)], 0
    kv = [[x[layer].clone().requires_grad_() for x in (prefix.k_LPKD, prefix.v_LPKD)] for prefix in prefixes]
    for (_, lengths), pair in zip(GROUPS, kv, strict=True):
        for length in lengths:
            expected.append(plain(*(x[start : start + length] for x in leaves), *pair))
            start += length
    close(o, torch.cat(expected))
    torch.cat(expected).backward(grad)
    for mine, theirs in zip((q, k, v), leaves, strict=True):
        close(mine.grad, theirs.grad)
    for prefix, pair in zip(prefixes, kv, strict=True):
        for gathered, leaf in zip((prefix.grad_k_LPKD, prefix.grad_v_LPKD), pair, strict=True):
            assert gathered is not None and not gathered[1 - layer].any()
            if prefix.length:
                close(gathered[layer], leaf.grad)


def test_a_groups_rows_and_prefix_are_no_others_business() -> None:
    """Another gradient of group 2's rows changes that group's gradients, and no bit of any other's."""
    counts = [sum(lengths) for _, lengths in GROUPS]
    segments = Segments(tuple(length for _, lengths in GROUPS for length in lengths), CPU)
    first = sum(counts[:2])
    own = slice(first, first + counts[2])
    found = []
    for scale in (1.0, 3.0):
        q, k, v = rows(NUM_HEADS, 1), rows(NUM_KV_HEADS, 2), rows(NUM_KV_HEADS, 3)
        grad = rows(NUM_HEADS, 4).detach().clone()
        grad[own] *= scale
        prefixes = [prefix_of(length, 10 + index) for index, (length, _) in enumerate(GROUPS)]
        SuffixAttention(list(zip(prefixes, counts, strict=True)), segments)(0, q, k, v).backward(grad)
        found.append(((q.grad, k.grad, v.grad), [prefix.grad_k_LPKD for prefix in prefixes]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one is not None and other is not None
        assert torch.equal(torch.cat([one[:first], one[own.stop :]]), torch.cat([other[:first], other[own.stop :]]))
        assert not torch.equal(one[own], other[own])
    for index, (one, other) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        assert one is not None and other is not None
        assert torch.equal(one, other) == (index != 2)


def test_rows_and_sequences_have_to_agree() -> None:
    with pytest.raises(AssertionError, match=r"prefixes for 5 rows, sequences \(3, 3\)"):
        SuffixAttention([(prefix_of(4, 1), 5)], Segments((3, 3), CPU))
