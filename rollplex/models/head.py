"""The output head: hidden states to logits, and to the log-probability and entropy of given tokens.

The logits of a whole microbatch are the largest tensor of a training step (16,384 tokens x 152,064 ids are 10 GB in
float32), and only two numbers per token are wanted. So `token_logprobs` goes over the tokens in chunks, forward and
backward, and keeps per token no more than the log-sum-exp and the entropy; backward makes each chunk's logits again.
`token_logprobs_at_once` is the same function as one would write it first.

Logits are computed in the weights' dtype and then widened to float32, as transformers does. On a GPU,
kernels/logprobs.py widens them in registers; here is what CPUs run, and float64. This file knows no decoder, no
sampling filter and no loss.

Shapes: T tokens, C tokens of one chunk, B sequences, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_FUSED_DTYPES = (torch.bfloat16, torch.float32)


def logits(hidden_BH: Tensor, weight_VH: Tensor) -> Tensor:
    """Logits float32 [B, V] (float64 for float64 inputs, which only tests use)."""
    logits_BV = hidden_BH @ weight_VH.t()
    return logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    weight_gradient_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution, both float32 [T].

    The distribution is softmax(logits / temperature); targets_T are int64. At most chunk_tokens rows of logits exist
    at a time. The result is differentiable in hidden_TH and in weight_VH, whichever requires it. with_entropy false
    returns the entropy without gradient, which saves work in the backward pass.

    The same chunk_tokens gives the same bits. Another one gives the same result to rounding only: matrix products add
    in an order that depends on their size, and the weight's gradient is a float32 sum over the chunks.

    With weight_gradient_VH, float32, the backward pass adds the weight's gradient there and gives autograd none: no
    second sum of that size, and no rounding of it to the weight's dtype.
    """
    assert temperature > 0, temperature
    assert chunk_tokens >= 1, chunk_tokens
    assert hidden_TH.dtype == weight_VH.dtype, f"hidden {hidden_TH.dtype}, weight {weight_VH.dtype}"
    assert weight_gradient_VH is None or weight_gradient_VH.dtype == torch.float32, weight_gradient_VH.dtype
    arguments = (hidden_TH, weight_VH, targets_T, temperature, chunk_tokens, with_entropy, weight_gradient_VH)
    if hidden_TH.is_cuda and hidden_TH.dtype in _FUSED_DTYPES:
        from rollplex.models.kernels import logprobs  # on first use: CPU users need no Triton

        return logprobs.token_logprobs(*arguments)
    logprobs_T, entropy_T = _TokenLogprobs.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs_T, entropy_T


def token_logprobs_at_once(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """The slow, obvious `token_logprobs`: all logits at once, gradients by autograd; chunk_tokens is not used."""
    logprobs_TV = torch.log_softmax(logits(hidden_TH, weight_VH) / temperature, dim=-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1)
    logprobs_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
    return logprobs_T, entropy_T if with_entropy else entropy_T.detach()


class _TokenLogprobs(torch.autograd.Function):
    """With z = logits / temperature: dlogprob / dz_j = onehot_j - p_j, dentropy / dz_j = -p_j (log p_j + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        targets_T: Tensor,
        temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        weight_gradient_VH: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_TH.dtype, torch.float32)
        lse_T = torch.empty(len(hidden_TH), dtype=wide, device=hidden_TH.device)
        logprobs_T, entropy_T = torch.empty_like(lse_T), torch.empty_like(lse_T)
        for rows in chunks(len(hidden_TH), chunk_tokens):
            z_CV = logits(hidden_TH[rows], weight_VH).div_(temperature)
            torch.logsumexp(z_CV, dim=-1, out=lse_T[rows])
            logprobs_CV = z_CV.sub_(lse_T[rows, None])
            logprobs_T[rows] = logprobs_CV.gather(1, targets_T[rows, None])[:, 0]
            entropy_T[rows] = -(logprobs_CV.exp() * logprobs_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, lse_T, entropy_T if with_entropy else None)
        ctx.temperature, ctx.chunk_tokens, ctx.weight_gradient_VH = temperature, chunk_tokens, weight_gradient_VH
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden_TH, weight_VH, targets_T, lse_T, entropy_T = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # float32 over the chunks: a bfloat16 sum would lose what the later ones add
        grad_weight_VH = ctx.weight_gradient_VH
        is_own = grad_weight_VH is None and needs_weight
        if is_own:
            grad_weight_VH = torch.zeros_like(weight_VH, dtype=lse_T.dtype)
        if grad_logprobs_T is None:
            grad_logprobs_T = torch.zeros_like(lse_T)
        for rows in chunks(len(hidden_TH), ctx.chunk_tokens):
            logprobs_CV = logits(hidden_TH[rows], weight_VH).div_(ctx.temperature).sub_(lse_T[rows, None])
            probs_CV = logprobs_CV.exp()
            grad_CV = probs_CV * -grad_logprobs_T[rows, None]
            if entropy_T is not None and grad_entropy_T is not None:
                grad_CV -= probs_CV.mul_(logprobs_CV.add_(entropy_T[rows, None])).mul_(grad_entropy_T[rows, None])
            grad_CV.scatter_add_(1, targets_T[rows, None], grad_logprobs_T[rows, None])
            grad_CV = grad_CV.div_(ctx.temperature).to(weight_VH.dtype)
            if grad_hidden_TH is not None:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[rows])
            if needs_weight:
                grad_weight_VH += grad_CV.t() @ hidden_TH[rows]
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype) if is_own else None, *(None,) * 5


def chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """The rows of each chunk."""
    return (slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens))
