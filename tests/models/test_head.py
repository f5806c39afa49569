"""The chunked head against the obvious one, gradients by finite differences, and what it holds in memory."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.models.head import logits, token_logprobs, token_logprobs_at_once

FLOAT32_TOLERANCE = 1e-5
"""Relative to the largest entry. Orders of addition differ, and the last bit of a logit of 40 is 4e-6."""
BFLOAT16_TOLERANCE = 2e-2
"""Relative to the largest entry of a gradient: the chunks' weight gradients are rounded to 8 bits before their sum."""

Head = Callable[..., tuple[Tensor, Tensor]]


def make(num_tokens: int, vocabulary: int = 50, hidden: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_TH = torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64).to(dtype)
    weight_VH = torch.randn(vocabulary, hidden, generator=generator, dtype=torch.float64).to(dtype)
    targets_T = torch.randint(vocabulary, (num_tokens,), generator=generator)
    return [hidden_TH.requires_grad_(), weight_VH.requires_grad_(), targets_T]


def run(head: Head, tensors: list[Tensor], chunk_tokens: int, with_entropy: bool = True) -> list[Tensor]:
    """Outputs and gradients of a loss that weighs both outputs unevenly."""
    hidden_TH, weight_VH = (tensor.detach().clone().requires_grad_() for tensor in tensors[:2])
    logprobs_T, entropy_T = head(hidden_TH, weight_VH, tensors[2], 0.7, chunk_tokens, with_entropy)
    weights_T = torch.linspace(-1, 2, len(logprobs_T))
    loss = (weights_T * logprobs_T).sum()
    if with_entropy:
        loss = loss + (weights_T.flip(0) * entropy_T).sum()
    loss.backward()
    assert hidden_TH.grad is not None
    assert weight_VH.grad is not None
    assert hidden_TH.grad.dtype == hidden_TH.dtype
    assert weight_VH.grad.dtype == weight_VH.dtype
    return [logprobs_T.detach(), entropy_T.detach(), hidden_TH.grad, weight_VH.grad]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 33), st.integers(1, 40), st.booleans())
def test_equals_the_obvious_version(num_tokens: int, chunk_tokens: int, with_entropy: bool) -> None:
    tensors = make(num_tokens)
    fast = run(token_logprobs, tensors, chunk_tokens, with_entropy)
    slow = run(token_logprobs_at_once, tensors, chunk_tokens, with_entropy)
    for actual, expected in zip(fast, slow, strict=True):
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype == torch.float32
        assert relative_error(actual, expected) <= FLOAT32_TOLERANCE


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_bfloat16(chunk_tokens: int) -> None:
    tensors = make(29, dtype=torch.bfloat16)
    fast = run(token_logprobs, tensors, chunk_tokens)
    slow = run(token_logprobs_at_once, tensors, chunk_tokens)
    assert fast[0].dtype == fast[1].dtype == torch.float32
    for actual, expected in zip(fast, slow, strict=True):
        assert relative_error(actual, expected) <= BFLOAT16_TOLERANCE


@pytest.mark.parametrize("chunk_tokens", [1, 3, 5, 8])
def test_gradcheck(chunk_tokens: int) -> None:
    hidden_TH, weight_VH, targets_T = make(5, vocabulary=6, hidden=4, dtype=torch.float64)

    def function(hidden_TH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden_TH, weight_VH, targets_T, 1.3, chunk_tokens)

    assert torch.autograd.gradcheck(function, (hidden_TH, weight_VH))


def test_only_entropy_or_only_logprobs_in_the_loss() -> None:
    hidden_TH, weight_VH, targets_T = make(6)
    for output in (0, 1):
        gradients = [
            torch.autograd.grad(head(hidden_TH, weight_VH, targets_T, 1.0, 4)[output].sum(), [hidden_TH, weight_VH])
            for head in (token_logprobs, token_logprobs_at_once)
        ]
        for actual, expected in zip(*gradients, strict=True):
            assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_entropy_is_detached_on_request() -> None:
    hidden_TH, weight_VH, targets_T = make(6)
    logprobs_T, entropy_T = token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, 4, with_entropy=False)
    assert logprobs_T.requires_grad
    assert not entropy_T.requires_grad
    assert torch.equal(entropy_T, token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, 4)[1])


@pytest.mark.parametrize("trained", [0, 1])
def test_only_one_input_requires_grad(trained: int) -> None:
    tensors = make(9)
    expected = run(token_logprobs, tensors, 4)[2 + trained]
    inputs = [tensor.detach().clone().requires_grad_(index == trained) for index, tensor in enumerate(tensors[:2])]
    logprobs_T, entropy_T = token_logprobs(inputs[0], inputs[1], tensors[2], 0.7, 4)
    weights_T = torch.linspace(-1, 2, 9)
    ((weights_T * logprobs_T).sum() + (weights_T.flip(0) * entropy_T).sum()).backward()
    assert inputs[1 - trained].grad is None
    assert torch.equal(inputs[trained].grad, expected)  # type: ignore[arg-type]


def test_weight_gradient_is_added_to_a_given_sum() -> None:
    for dtype, tolerance in [(torch.float32, FLOAT32_TOLERANCE), (torch.bfloat16, 2**-8)]:
        tensors = make(9, dtype=dtype)
        expected = run(token_logprobs, tensors, 4)
        hidden_TH, weight_VH = (tensor.detach().clone().requires_grad_() for tensor in tensors[:2])
        sum_VH = torch.ones(50, 16)
        logprobs_T, entropy_T = token_logprobs(hidden_TH, weight_VH, tensors[2], 0.7, 4, weight_gradient_VH=sum_VH)
        weights_T = torch.linspace(-1, 2, 9)
        ((weights_T * logprobs_T).sum() + (weights_T.flip(0) * entropy_T).sum()).backward()
        assert torch.equal(hidden_TH.grad, expected[2])  # type: ignore[arg-type]
        assert weight_VH.grad is None
        assert relative_error(sum_VH - 1, expected[3]) <= tolerance


def test_no_tokens() -> None:
    outputs = run(token_logprobs, make(0), 4)
    assert [output.shape for output in outputs] == [(0,), (0,), (0, 16), (50, 16)]
    assert not outputs[3].any()


def test_chunk_size_changes_rounding_only() -> None:
    tensors = make(64, vocabulary=300, hidden=64)
    whole = run(token_logprobs, tensors, 64)
    for chunk_tokens in (1, 7, 32, 1000):
        for actual, expected in zip(run(token_logprobs, tensors, chunk_tokens), whole, strict=True):
            assert relative_error(actual, expected) <= (0 if chunk_tokens == 1000 else FLOAT32_TOLERANCE)


def test_repeats_bit_for_bit() -> None:
    tensors = make(21)
    for first, second in zip(run(token_logprobs, tensors, 8), run(token_logprobs, tensors, 8), strict=True):
        assert torch.equal(first, second)


def test_saves_only_its_inputs_and_two_numbers_per_token() -> None:
    hidden_TH, weight_VH, targets_T = make(12)

    def saved_shapes() -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []

        def remember(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, 4)
        return shapes

    assert sorted(saved_shapes()) == sorted([(12, 16), (50, 16), (12,), (12,), (12,)])
    with torch.no_grad():
        assert saved_shapes() == []
        assert not any(output.requires_grad for output in token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, 4))


class LargestOutput(TorchDispatchMode):
    """Remembers the most elements that any operation gave out."""

    elements: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor):
            self.elements = max(self.elements, output.numel())
        return output


def test_never_holds_all_logits() -> None:
    num_tokens, vocabulary, hidden, chunk_tokens = 64, 200, 4, 8
    hidden_TH, weight_VH, targets_T = make(num_tokens, vocabulary, hidden)

    def largest(head: Head) -> int:
        with LargestOutput() as mode:  # type: ignore[no-untyped-call]
            logprobs_T, entropy_T = head(hidden_TH, weight_VH, targets_T, 1.0, chunk_tokens)
            torch.autograd.grad((logprobs_T + entropy_T).sum(), [hidden_TH, weight_VH])
        elements: int = mode.elements
        return elements

    assert largest(token_logprobs_at_once) == num_tokens * vocabulary
    assert largest(token_logprobs) == chunk_tokens * vocabulary


def test_logits_are_wide() -> None:
    for dtype, wide in [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]:
        hidden_BH, weight_VH, _ = make(3, dtype=dtype)
        actual = logits(hidden_BH, weight_VH)
        assert actual.dtype == wide
        assert torch.equal(actual, torch.nn.functional.linear(hidden_BH, weight_VH).to(wide))
