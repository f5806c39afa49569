"""Fused element-wise kernels against their definitions: values, gradients, ragged sizes, every branch of a launch."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from rollplex.models import elementwise
from rollplex.models.kernels import fused

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, of infinities

FLOAT32_ERROR = 1e-5
BFLOAT16_ERROR = 1e-2
"""Two roundings to 8 bits, relative to the largest of a tensor."""
EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def angles(num_tokens: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = normal(num_tokens, head_dim // 2, seed=90, device=device) * 3
    both = torch.cat((half, half), dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def check(found: Tensor, expected: Tensor) -> None:
    """Close to the definition in float32; in bfloat16, roundings apart."""
    assert found.shape == expected.shape
    tolerance = FLOAT32_ERROR if found.dtype == torch.float32 else BFLOAT16_ERROR
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < tolerance, float(error)


def check_gradients(function: Callable[..., object], plain: Callable[..., object], inputs: list[Tensor]) -> None:
    """Of a random weighting of all outputs, with respect to all inputs."""

    def gradients(run: Callable[..., object]) -> tuple[list[Tensor], list[Tensor]]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        result = run(*leaves)
        outputs = [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]
        weights = [normal(*o.shape, seed=70 + i, device=o.device, dtype=o.dtype) for i, o in enumerate(outputs)]
        return [o.detach() for o in outputs], list(torch.autograd.grad(outputs, leaves, weights))

    for found, expected in zip(gradients(function), gradients(plain), strict=True):
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype
            check(x, y)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 8), (3, 72), (5, 1024)], ids=str)
def test_norm_is_its_definition(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = normal(*shape, seed=0, device=device, dtype=dtype) * 5
    y = normal(*shape, seed=1, device=device, dtype=dtype)
    weight = normal(shape[1], seed=2, device=device, dtype=dtype)
    check(fused.rms_norm(x, weight, EPS), elementwise.plain_rms_norm(x, weight, EPS))
    found_sum, found = fused.add_rms_norm(x, y, weight, EPS)
    expected_sum, expected = elementwise.plain_add_rms_norm(x, y, weight, EPS)
    assert torch.equal(found_sum, expected_sum)
    check(found, expected)


def test_norm_reads_rows_that_are_apart(device: torch.device) -> None:
    both = normal(4, 2, 16, seed=0, device=device)
    x, weight = both[:, 1], normal(16, seed=1, device=device)
    assert torch.equal(fused.rms_norm(x, weight, EPS), fused.rms_norm(x.contiguous(), weight, EPS))
    assert torch.equal(fused.add_rms_norm(x, both[:, 0], weight, EPS)[0], x + both[:, 0])
    assert fused.rms_norm(x[:0], weight, EPS).shape == (0, 16)


@DTYPES
def test_norm_gradients(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_NUM_ROW_BLOCKS", 3)  # rows per program: 3, 2 and 2
    x = normal(7, 40, seed=0, device=device, dtype=dtype) * 5
    y, weight = normal(7, 40, seed=1, device=device, dtype=dtype), normal(40, seed=2, device=device, dtype=dtype)
    check_gradients(partial(fused.rms_norm, eps=EPS), partial(elementwise.plain_rms_norm, eps=EPS), [x, weight])
    check_gradients(
        partial(fused.add_rms_norm, eps=EPS), partial(elementwise.plain_add_rms_norm, eps=EPS), [x, y, weight]
    )


@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("few_rows", [True, False], ids=["few", "many"])
@pytest.mark.parametrize("heads", [(7, 1, 16), (4, 2, 24), (3, 3, 8)], ids=str)
def test_heads_are_unpacked_and_rotated(
    heads: tuple[int, int, int],
    few_rows: bool,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused, "_FEW_ROWS", 1 << 14 if few_rows else 0)
    num_heads, num_kv_heads, head_dim = heads
    size = (num_heads + 2 * num_kv_heads) * head_dim
    cos, sin = angles(5, head_dim, device, dtype)
    inputs = [normal(5, size, seed=0, device=device, dtype=dtype)]
    if bias:
        inputs.append(normal(size, seed=1, device=device, dtype=dtype))

    def run(function: Callable[..., object]) -> Callable[..., object]:
        return lambda qkv, bias_R=None: function(qkv, cos, sin, *heads, bias_R)

    check_gradients(run(fused.rotate_qkv), run(elementwise.plain_rotate_qkv), inputs)
    assert all(x.is_contiguous() for x in fused.rotate_qkv(inputs[0], cos, sin, *heads))


def test_values_pass_untouched(device: torch.device) -> None:
    qkv = torch.full((2, 3 * 16), torch.inf, device=device)
    cos, sin = angles(2, 16, device, torch.float32)
    assert fused.rotate_qkv(qkv, cos, sin, 1, 1, 16)[2].isposinf().all()


@DTYPES
@pytest.mark.parametrize(("size", "num_slots"), [(16, 1), (48, 8), (1104, 2)])
def test_silu_mul(size: int, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = normal(3, 2 * size, seed=0, device=device, dtype=dtype) * 4
    check_gradients(
        lambda x: fused.silu_mul(x, num_slots), lambda x: elementwise.plain_silu_mul(x, num_slots), [gate_up]
    )


def test_bfloat16_is_at_least_as_close_to_float32_as_the_definition(device: torch.device) -> None:
    gate_up = normal(4, 2 * 64, seed=0, device=device, dtype=torch.bfloat16) * 4
    exact = elementwise.plain_silu_mul(gate_up.float(), 2)
    found, plain = fused.silu_mul(gate_up, 2), elementwise.plain_silu_mul(gate_up, 2)
    assert (found - exact).norm() <= (plain - exact).norm()


@pytest.mark.gpu
def test_dispatch_takes_the_kernels_on_a_gpu(device: torch.device) -> None:
    x = normal(5, 64, seed=0, device=device, dtype=torch.bfloat16) * 5
    weight = normal(64, seed=1, device=device, dtype=torch.bfloat16)
    cos, sin = angles(5, 16, device, torch.bfloat16)
    assert torch.equal(elementwise.silu_mul(x, 2), fused.silu_mul(x, 2))
    assert torch.equal(elementwise.rms_norm(x, weight, EPS), fused.rms_norm(x, weight, EPS))
    assert torch.equal(elementwise.add_rms_norm(x, x, weight, EPS)[1], fused.add_rms_norm(x, x, weight, EPS)[1])
    assert torch.equal(elementwise.rotate_qkv(x, cos, sin, 2, 1, 16)[0], fused.rotate_qkv(x, cos, sin, 2, 1, 16)[0])


def test_dispatch_takes_the_definitions_on_a_cpu() -> None:
    x = normal(5, 64, seed=0, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert torch.equal(elementwise.silu_mul(x, 2), elementwise.plain_silu_mul(x, 2))
