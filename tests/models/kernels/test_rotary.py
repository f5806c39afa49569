"""The rotation of packed queries and keys, against the formula and autograd."""

import pytest
import torch
from torch import Tensor

from rollplex.models.kernels.rotary import rotate_queries_and_keys

SHAPES = [(5, 2, 16), (3, 3, 80), (1, 1, 4)]
"""Tokens, heads, head dim; none a power of two in all."""


def angles_of(num_tokens: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = torch.randn(num_tokens, head_dim // 2, device=device)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def expected_of(qkv: Tensor, cos_TD: Tensor, sin_TD: Tensor, num_heads: int) -> Tensor:
    parts = qkv.float().view(len(qkv), 3, num_heads, -1)
    a, b = parts.chunk(2, dim=-1)
    turned = parts * cos_TD[:, None, None] + torch.cat([-b, a], dim=-1) * sin_TD[:, None, None]
    return torch.cat([turned[:, :2], parts[:, 2:]], dim=1).view(qkv.shape).to(qkv.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), SHAPES)
def test_queries_and_keys_are_rotated_and_values_are_not(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    qkv = torch.randn(num_tokens, 3 * num_heads * head_dim, device=device, dtype=dtype)
    cos_TD, sin_TD = angles_of(num_tokens, head_dim, device)
    expected = expected_of(qkv, cos_TD, sin_TD, num_heads)
    around = torch.full((num_tokens + 2, qkv.shape[1]), float("nan"), device=device, dtype=dtype)
    around[1:-1] = qkv
    cos_TD[:, head_dim // 2 :] = sin_TD[:, head_dim // 2 :] = float("nan")  # not read
    actual = rotate_queries_and_keys(around[1:-1], cos_TD, sin_TD, num_heads)
    assert actual.data_ptr() == around[1].data_ptr(), "in place"
    tolerance = 5e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    assert around[0].isnan().all() and around[-1].isnan().all()


@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), SHAPES)
def test_the_gradient_is_that_of_the_formula(
    num_tokens: int, num_heads: int, head_dim: int, device: torch.device
) -> None:
    x = torch.randn(num_tokens, 7, device=device)
    matrix = torch.randn(7, 3 * num_heads * head_dim, device=device, requires_grad=True)
    cos_TD, sin_TD = angles_of(num_tokens, head_dim, device)
    weight = torch.randn(num_tokens, 3 * num_heads * head_dim, device=device)
    kept = weight.clone()
    gradients = []
    for rotate in (rotate_queries_and_keys, expected_of):
        rotated = rotate(x @ matrix, cos_TD, sin_TD, num_heads)
        (gradient,) = torch.autograd.grad(rotated, matrix, weight)
        gradients.append(gradient)
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(weight, kept), "the gradient that came in is left alone"
