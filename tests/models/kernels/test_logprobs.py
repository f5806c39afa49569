"""The fused head against the obvious one: scores and gradients of given logits, then the whole function."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollplex.models import head
from rollplex.models.kernels import logprobs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of infinities

FLOAT32_TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 1e-2
"""Relative to the largest entry: gradients of logits, and of the hidden states, are rounded to 8 bits."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])

Head = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(params=[64, 8192], ids=["many_stretches", "one_stretch"])
def stretch(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_STRETCH", request.param)


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def targets(num_tokens: int, vocabulary: int, device: torch.device) -> Tensor:
    return torch.randint(vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(9)).to(device)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """NaN, which no bound admits, if anything is."""
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def padded(logits_CV: Tensor) -> Tensor:
    """Rows as the head keeps them, the padding poisoned."""
    width = -(-logits_CV.shape[1] // 64) * 64
    logits_CW = torch.full((len(logits_CV), width), torch.nan, dtype=logits_CV.dtype, device=logits_CV.device)
    logits_CW[:, : logits_CV.shape[1]] = logits_CV
    return logits_CW


def run_kernels(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, g_C: Tensor, h_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy, and gradient of sum(g logprob + h entropy)."""
    vocabulary, logits_CW = logits_CV.shape[1], padded(logits_CV)
    scores = logprobs.Scores.empty(len(logits_CV), logits_CV.device)
    for each in scores:
        each.fill_(torch.nan)
    logprobs.score(logits_CW, vocabulary, targets_C, temperature, scores)
    assert torch.allclose(logits_CW[:, :vocabulary], logits_CV, rtol=0, atol=0, equal_nan=True)  # only read
    logprobs.logits_to_gradient_(logits_CW, vocabulary, targets_C, temperature, scores, g_C, h_C)
    return scores.logprobs_T, scores.entropy_T, logits_CW[:, :vocabulary]


def run_definition(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, g_C: Tensor, h_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64, ids without probability left out."""
    leaf_CV = logits_CV.double().requires_grad_()
    logprobs_CV = torch.log_softmax(leaf_CV / temperature, dim=-1)
    possible_CV = logprobs_CV.exp() > 0
    entropy_C = -torch.where(possible_CV, logprobs_CV.exp() * logprobs_CV, 0.0).sum(-1)
    logprobs_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
    loss = (g_C * logprobs_C).sum() + (0.0 if h_C is None else (h_C * entropy_C).sum())
    (grad_CV,) = torch.autograd.grad(loss, leaf_CV)
    return logprobs_C.detach(), entropy_C.detach(), grad_CV


@DTYPES
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "logprobs"])
@pytest.mark.parametrize(("num_tokens", "vocabulary"), [(1, 1), (1, 64), (3, 65), (4, 131), (2, 1000)])
@pytest.mark.usefixtures("stretch")
def test_kernels_are_the_definition(
    num_tokens: int, vocabulary: int, with_entropy: bool, temperature: float, dtype: torch.dtype, device: torch.device
) -> None:
    logits_CV = (normal(num_tokens, vocabulary, seed=0, device=device) * 3).to(dtype)
    targets_C = targets(num_tokens, vocabulary, device)
    g_C = normal(num_tokens, seed=1, device=device)
    h_C = normal(num_tokens, seed=2, device=device) if with_entropy else None
    arguments = (logits_CV, targets_C, temperature, g_C, h_C)
    found, expected = run_kernels(*arguments), run_definition(*arguments)
    if vocabulary == 1:
        assert not any(each.any() for each in found)
        return
    tolerances = [FLOAT32_TOLERANCE, FLOAT32_TOLERANCE, FLOAT32_TOLERANCE if dtype == torch.float32 else 2**-8]
    for each, other, tolerance in zip(found, expected, tolerances, strict=True):
        assert relative_error(each, other) < tolerance


@DTYPES
@pytest.mark.usefixtures("stretch")
def test_extreme_logits(dtype: torch.dtype, device: torch.device) -> None:
    """A peak, a peak in the depth, a depth, all equal and large, large and close together."""
    logits_CV = normal(5, 200, seed=0, device=device)
    logits_CV[0, 150] = 1e4
    logits_CV[1] -= 1e4
    logits_CV[1, 3] = 1e4
    logits_CV[2, 70:] = -1e4
    logits_CV[3] = 1e4
    logits_CV[4] += 1e4
    logits_CV = logits_CV.to(dtype)
    targets_C = torch.tensor([150, 4, 5, 6, 7], device=device)
    g_C, h_C = normal(5, seed=1, device=device), normal(5, seed=2, device=device)
    found = run_kernels(logits_CV, targets_C, 1.0, g_C, h_C)
    for each, other in zip(found, run_definition(logits_CV, targets_C, 1.0, g_C, h_C), strict=True):
        for row, other_row in zip(each, other, strict=True):
            assert torch.allclose(row.double(), other_row, rtol=2**-8 if each.ndim == 2 else 1e-5, atol=1e-5)


@DTYPES
@pytest.mark.usefixtures("stretch")
def test_ids_without_probability(dtype: torch.dtype, device: torch.device) -> None:
    """-inf here and there, in whole stretches, for all but one id, and for the target itself."""
    logits_CV = normal(4, 300, seed=0, device=device).to(dtype)
    logits_CV[0, ::3] = -torch.inf
    logits_CV[1, :200] = -torch.inf
    logits_CV[2] = -torch.inf
    logits_CV[2, 77] = -300.0
    logits_CV[3, 10] = -torch.inf
    targets_C = torch.tensor([1, 250, 77, 10], device=device)
    g_C, h_C = normal(4, seed=1, device=device), normal(4, seed=2, device=device)
    found = run_kernels(logits_CV, targets_C, 0.8, g_C, h_C)
    assert found[0][3] == -torch.inf
    assert found[0][2] == found[1][2] == 0
    assert torch.isfinite(found[1]).all()
    assert torch.isfinite(found[2]).all()
    assert not found[2][2].any()
    alone = run_kernels(
        logits_CV[0:1, logits_CV[0] > -torch.inf], torch.tensor([0], device=device), 0.8, g_C[:1], h_C[:1]
    )
    assert torch.allclose(found[0][:1], alone[0], atol=1e-5)
    assert torch.allclose(found[1][:1], alone[1], atol=1e-5)
    assert torch.allclose(found[2][0, logits_CV[0] > -torch.inf].float(), alone[2][0].float(), rtol=2**-7, atol=1e-5)
    assert not found[2][0, ::3].any()


@pytest.mark.usefixtures("stretch")
def test_what_is_not_a_number_is_seen(device: torch.device) -> None:
    """NaN among the logits, an infinite logit, no possible id, a target outside the vocabulary: that token's alone."""
    logits_CV = normal(6, 130, seed=0, device=device)
    logits_CV[0, 100] = torch.nan
    logits_CV[1, 100] = torch.inf
    logits_CV[2] = -torch.inf
    targets_C = torch.tensor([1, 2, 3, 130, -1, 4], device=device)
    ones_C = torch.ones(6, device=device)
    found_logprobs, found_entropy, grad_CV = run_kernels(logits_CV, targets_C, 1.0, ones_C, ones_C)
    assert torch.isnan(found_logprobs).tolist() == [True, True, True, True, True, False]
    assert torch.isnan(found_entropy).tolist() == [True, True, True, False, False, False]
    assert torch.isnan(grad_CV).all(-1).tolist() == [True, True, True, False, False, False]


@pytest.mark.usefixtures("stretch")
def test_a_token_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits_CV, targets_C = normal(7, 150, seed=0, device=device), targets(7, 150, device)
    g_C, h_C = normal(7, seed=1, device=device), normal(7, seed=2, device=device)
    together = run_kernels(logits_CV, targets_C, 0.9, g_C, h_C)
    for row in (slice(0, 1), slice(3, 4), slice(6, 7)):
        alone = run_kernels(logits_CV[row], targets_C[row], 0.9, g_C[row], h_C[row])
        assert all(torch.equal(x, y[row]) for x, y in zip(alone, together, strict=True))


def make(
    num_tokens: int, device: torch.device, dtype: torch.dtype, vocabulary: int = 77, hidden: int = 16
) -> list[Tensor]:
    hidden_TH = normal(num_tokens, hidden, seed=0, device=device, dtype=dtype)
    weight_VH = normal(vocabulary, hidden, seed=1, device=device, dtype=dtype)
    return [hidden_TH, weight_VH, targets(num_tokens, vocabulary, device)]


def run(
    function: Head, tensors: list[Tensor], chunk_tokens: int, with_entropy: bool = True, **others: Any
) -> list[Tensor]:
    """Outputs and gradients of a loss that weighs both outputs unevenly."""
    hidden_TH, weight_VH = (tensor.detach().clone().requires_grad_() for tensor in tensors[:2])
    logprobs_T, entropy_T = function(hidden_TH, weight_VH, tensors[2], 0.7, chunk_tokens, with_entropy, **others)
    weights_T = torch.linspace(-1, 2, len(logprobs_T), device=hidden_TH.device)
    loss = (weights_T * logprobs_T).sum()
    if with_entropy:
        loss = loss + (weights_T.flip(0) * entropy_T).sum()
    loss.backward()
    outputs = [logprobs_T.detach(), entropy_T.detach(), hidden_TH.grad, weight_VH.grad]
    return [each for each in outputs if each is not None]


@pytest.mark.parametrize("with_entropy", [True, False], ids=["entropy", "logprobs"])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
@DTYPES
@pytest.mark.usefixtures("stretch")
def test_equals_the_obvious_version(
    dtype: torch.dtype, chunk_tokens: int, with_entropy: bool, device: torch.device
) -> None:
    tensors = make(9, device, dtype)
    found = run(logprobs.token_logprobs, tensors, chunk_tokens, with_entropy)
    expected = run(head.token_logprobs_at_once, tensors, chunk_tokens, with_entropy)
    tolerance = FLOAT32_TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    for each, other in zip(found, expected, strict=True):
        assert each.dtype == other.dtype
        assert relative_error(each, other) < tolerance


def test_gradient_goes_to_a_float32_sum(device: torch.device) -> None:
    tensors = make(9, device, torch.bfloat16)
    sum_VH = normal(77, 16, seed=3, device=device)
    before_VH = sum_VH.clone()
    found = run(logprobs.token_logprobs, tensors, 4, weight_gradient_VH=sum_VH)
    expected = run(logprobs.token_logprobs, tensors, 4)
    assert len(found) == 3
    assert all(torch.equal(*pair) for pair in zip(found, expected[:3], strict=True))
    assert relative_error(sum_VH - before_VH, expected[3]) < 2**-8
    exact = run(head.token_logprobs_at_once, [tensors[0].float(), tensors[1].float(), tensors[2]], 4)[3]
    assert (sum_VH - before_VH - exact).norm() <= (expected[3].float() - exact).norm()


@pytest.mark.parametrize("output", [0, 1], ids=["logprobs", "entropy"])
@pytest.mark.parametrize("trained", [0, 1], ids=["hidden", "weight"])
def test_one_output_and_one_input(output: int, trained: int, device: torch.device) -> None:
    tensors = make(6, device, torch.float32)
    gradients = []
    for function in (logprobs.token_logprobs, head.token_logprobs_at_once):
        inputs = [tensor.detach().clone().requires_grad_(i == trained) for i, tensor in enumerate(tensors[:2])]
        function(inputs[0], inputs[1], tensors[2], 1.0, 4)[
            output
        ].sum().backward()  # gradients of a sum are not contiguous
        assert inputs[1 - trained].grad is None
        gradients.append(inputs[trained].grad)
    assert relative_error(*gradients) < FLOAT32_TOLERANCE  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_same_bits_twice_also_from_a_second_backward(chunk_tokens: int, device: torch.device) -> None:
    tensors = make(10, device, torch.bfloat16)
    first, second = (run(logprobs.token_logprobs, tensors, chunk_tokens) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    hidden_TH, weight_VH = (tensor.detach().clone().requires_grad_() for tensor in tensors[:2])
    logprobs_T, _ = logprobs.token_logprobs(hidden_TH, weight_VH, tensors[2], 0.7, chunk_tokens)
    gradients = [
        torch.autograd.grad(logprobs_T.sum(), [hidden_TH, weight_VH], retain_graph=retain) for retain in (True, False)
    ]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_no_tokens(device: torch.device) -> None:
    outputs = run(logprobs.token_logprobs, make(0, device, torch.float32), 4)
    assert [tuple(output.shape) for output in outputs] == [(0,), (0,), (0, 16), (77, 16)]
    assert not outputs[3].any()


def test_entropy_is_detached_on_request(device: torch.device) -> None:
    hidden_TH, weight_VH, targets_T = make(6, device, torch.float32)
    logprobs_T, entropy_T = logprobs.token_logprobs(hidden_TH.requires_grad_(), weight_VH, targets_T, 1.0, 4, False)
    assert logprobs_T.requires_grad
    assert not entropy_T.requires_grad
    with torch.no_grad():
        assert not logprobs.token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, 4)[0].requires_grad


class Products(TorchDispatchMode):
    """Counts matrix products, and remembers the most elements of any tensor (but for the interpreter's bytes)."""

    elements: int = 0
    products: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.is_floating_point():
            self.elements = max(self.elements, output.numel())
        self.products += str(func).startswith(("aten.mm", "aten.addmm"))
        return output


@pytest.mark.parametrize(("chunk_tokens", "products"), [(8, 8 * 4 - 1), (64, 3)])
def test_holds_one_chunk_and_makes_the_last_one_once(chunk_tokens: int, products: int, device: torch.device) -> None:
    hidden_TH, weight_VH, targets_T = make(64, device, torch.float32, vocabulary=200, hidden=4)
    hidden_TH.requires_grad_()
    weight_VH.requires_grad_()
    with Products() as mode:  # type: ignore[no-untyped-call]
        logprobs_T, entropy_T = logprobs.token_logprobs(hidden_TH, weight_VH, targets_T, 1.0, chunk_tokens)
        torch.autograd.grad((logprobs_T + entropy_T).sum(), [hidden_TH, weight_VH])
    assert mode.elements == chunk_tokens * 256
    assert mode.products == products


@pytest.mark.gpu
def test_dispatch_takes_the_kernels_on_a_gpu(device: torch.device) -> None:
    tensors = make(9, device, torch.bfloat16)
    pairs = zip(run(head.token_logprobs, tensors, 4), run(logprobs.token_logprobs, tensors, 4), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.gpu
def test_real_vocabulary(device: torch.device) -> None:
    tensors = make(300, device, torch.bfloat16, vocabulary=151_937, hidden=256)
    tensors[0] /= 16
    found = run(logprobs.token_logprobs, tensors, 128)
    expected = run(head.token_logprobs_at_once, tensors, 128)
    for each, other in zip(found, expected, strict=True):
        assert relative_error(each, other) < BFLOAT16_TOLERANCE
