"""The step on a CUDA device: against the CPU, serial against overlapped bit for bit, kernels against float32."""

import pytest
import torch

from rollplex.bench import exactness, forwards, parity
from rollplex.gpu.device import select_device
from rollplex.models.attention import PrefixKV, SuffixAttention
from rollplex.models.kernels.flash import (
    Segments,
    flash_backward,
    flash_forward,
    merge,
    plain_backward,
    plain_forward,
    sequence_attention,
)
from rollplex.rollout.noise import gumbel, pack_keys
from rollplex.rollout.sampler import SamplingParams, sample

pytestmark = pytest.mark.gpu
KERNEL_ERROR = 0.01
"""Relative error of bfloat16 attention against float32: twice what rounding inputs and outputs gives."""
LENGTHS = (37, 1, 200, 64)


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(28, 4, 128), (16, 2, 128), (4, 4, 64), (8, 1, 32)]
)
def test_flash_kernels_against_float32(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    device, tokens, prefix = torch.device("cuda"), sum(LENGTHS), 333
    shapes = [
        (tokens, num_heads),
        (tokens, num_kv_heads),
        (tokens, num_kv_heads),
        (prefix, num_kv_heads),
        (prefix, num_kv_heads),
    ]
    q, k, v, prefix_k, prefix_v = (
        torch.randn(*shape, head_dim, device=device, dtype=torch.bfloat16) for shape in shapes
    )
    grad = torch.randn_like(q)
    segments = Segments(LENGTHS, device)
    own_o, own_lse = flash_forward(q, k, v, causal=True, segments=segments)
    prefix_o, prefix_lse = flash_forward(q, prefix_k, prefix_v, causal=False)
    o, lse = merge(prefix_o, prefix_lse, own_o, own_lse)
    grads = flash_backward(grad, q, k, v, o, lse, causal=True, segments=segments)
    prefix_grads = flash_backward(grad, q, prefix_k, prefix_v, o, lse, causal=False)

    start, expected_prefix = 0, [torch.zeros_like(prefix_k, dtype=torch.float32) for _ in range(2)]
    for length in LENGTHS:
        rows = slice(start, start := start + length)
        parts = [x[rows].float() for x in (q, k, v)]
        prefixes = prefix_k.float(), prefix_v.float()
        plain = plain_forward(*parts, causal=True)
        plain_o, plain_lse = merge(*plain_forward(parts[0], *prefixes, causal=False), *plain)
        assert _relative(o[rows], plain_o) < KERNEL_ERROR
        own = plain_backward(grad[rows].float(), parts[0], parts[1], parts[2], plain_o, plain_lse, True)
        over = plain_backward(grad[rows].float(), parts[0], *prefixes, plain_o, plain_lse, False)
        assert _relative(grads[0][rows].float() + prefix_grads[0][rows].float(), own[0] + over[0]) < KERNEL_ERROR
        assert _relative(grads[1][rows], own[1]) < KERNEL_ERROR
        assert _relative(grads[2][rows], own[2]) < KERNEL_ERROR
        expected_prefix[0] += over[1]
        expected_prefix[1] += over[2]
    assert _relative(prefix_grads[1], expected_prefix[0]) < KERNEL_ERROR
    assert _relative(prefix_grads[2], expected_prefix[1]) < KERNEL_ERROR


def test_suffixes_of_several_groups_give_what_each_gives_alone_and_the_same_bits_every_time() -> None:
    device = select_device("cuda")
    groups = [(333, (37, 1)), (0, (200,)), (64, (64, 5, 5)), (1, (9,))]  # prefix tokens, suffixes
    sizes = [sum(lengths) for _, lengths in groups]
    kv = [torch.randn(2, 1, prefix, 2, 128, device=device, dtype=torch.bfloat16) for prefix, _ in groups]
    q, k, v = (torch.randn(sum(sizes), heads, 128, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2))
    grad = torch.randn_like(q)

    def computed(chosen: range) -> list[torch.Tensor]:
        """Output and gradients of some neighbouring groups in one call, the prefixes' last."""
        rows = slice(sum(sizes[: chosen.start]), sum(sizes[: chosen.stop]))
        lengths = tuple(length for index in chosen for length in groups[index][1])
        prefixes = [PrefixKV(*kv[i], *torch.zeros_like(kv[i], dtype=torch.float32)) for i in chosen]
        leaves = [x[rows].detach().requires_grad_() for x in (q, k, v)]
        attention = SuffixAttention([(p, sizes[i]) for p, i in zip(prefixes, chosen, strict=True)],
                                    Segments(lengths, device))  # fmt: skip
        o = attention(0, *leaves)
        gradients = torch.autograd.grad(o, leaves, grad[rows])
        gathered = [x for p in prefixes for x in (p.grad_k_LPKD, p.grad_v_LPKD) if x is not None]
        return [o.detach(), *gradients, *gathered]

    every = range(len(groups))
    together, alone = computed(every), [computed(range(index, index + 1)) for index in every]
    assert all(torch.equal(*pair) for pair in zip(computed(every), together, strict=True))
    for place in range(4):
        assert _relative(together[place], torch.cat([each[place] for each in alone])) < KERNEL_ERROR
    for index, (prefix, _) in enumerate(groups):
        for place in range(2):
            if prefix:
                assert _relative(together[4 + 2 * index + place], alone[index][4 + place]) < KERNEL_ERROR


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_serial_and_overlapped_are_the_same_bits(dtype: str) -> None:
    result = exactness.run(3, "cuda", dtype)
    assert result["serial_overlapped_equal"] is True


def test_float32_gradient_is_that_of_transformers() -> None:
    result = exactness.run(2, "cuda", "float32")
    assert result["gradient_error"] <= 1e-5  # type: ignore[operator]
    assert result["logprob_difference"] <= 1e-4  # type: ignore[operator]


def test_parity_with_transformers() -> None:
    result = parity.run(32, "cuda", "float32")
    assert result["logit_error"] <= 1e-4  # type: ignore[operator]
    assert result["tokens_equal"] is True


@pytest.mark.parametrize("vocab_size", [304, 151_936])
def test_sampling_is_that_of_the_cpu(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(8, vocab_size, generator=generator) * 3
    noise_BV = gumbel(pack_keys(1, 2, range(8), range(8), range(8)), vocab_size)
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=500, min_p=0.001)
    cpu, gpu = (sample(logits_BV.to(device), noise_BV.to(device), params) for device in ("cpu", "cuda"))
    assert torch.equal(cpu.ids_B, gpu.ids_B.cpu())
    torch.testing.assert_close(cpu.sampling_logprobs_B, gpu.sampling_logprobs_B.cpu(), rtol=1e-4, atol=1e-4)
    on_gpu = gumbel(pack_keys(1, 2, range(8), range(8), range(8)).cuda(), vocab_size)
    torch.testing.assert_close(on_gpu.cpu(), noise_BV, rtol=1e-5, atol=1e-5)


def test_prefixes_are_computed_once() -> None:
    result = forwards.run(8, "cuda")
    assert (result["prefix_forwards_per_group"], result["prefix_backwards_per_group"]) == (2.0, 1.0)


@pytest.mark.parametrize("head_dim", [128, 64, 16])
def test_prefix_attention_gives_the_same_gradients_every_time(head_dim: int) -> None:
    device = select_device("cuda")
    q, k, v = (
        torch.randn(1, heads, 1500, head_dim, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    grad = torch.randn_like(q)
    runs = [torch.autograd.grad(sequence_attention(q, k, v, causal=True), (q, k, v), grad) for _ in range(4)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(run, runs[0], strict=True))
    plain, _ = plain_forward(*(x.detach()[0].transpose(0, 1).float() for x in (q, k, v)), causal=True)
    assert _relative(sequence_attention(q, k, v, causal=True)[0].transpose(0, 1), plain) < KERNEL_ERROR
