"""`token_logprobs` on a GPU: one pass over each chunk's logits forward and one backward, beside the matrix products.

    forward, per chunk     logits = hidden @ weight.T        a product, rounded to the weights' dtype
                           score                             reads logits
    backward, per chunk    logits again                      a product; the last chunk's logits have been kept
                           logits_to_gradient_               reads logits, writes their gradient in their place
                           gradient @ weight                 a product: the hidden states' gradient
                           sum += gradient.T @ hidden        a product, added in float32 as it is made

So a chunk costs 4 products, one of them the recomputation, and tokens that fit in one chunk cost 3. Extra memory: one
chunk of logits, in the weights' dtype, held from forward to backward, and the weight's gradient. head.py defines what
is computed; arithmetic is float32.

A program takes one stretch of one token's row. A token's numbers depend on its logits and on the vocabulary's size
only: not on the tokens beside it, not on the number of SMs; nothing waits for the host. Logits of -inf are ids without
probability. A target outside the vocabulary gives NaN.

It knows no decoder and no loss.

Legend: T tokens, C tokens of one chunk, H hidden, V vocabulary, W row of logits in memory (V and padding), S stretches
of a row.
"""

# Triton's decorator and the kernels' parameters have no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rollplex.models.head import chunks

_STRETCH = 8192  # elements: 16 KB of bfloat16, and 19 programs even for a single token of a large vocabulary
_NUM_WARPS = 8
_ROW_ALIGNMENT = 64  # elements: rows start on 128 bytes, so all loads are 16 bytes wide, whatever the vocabulary


class Scores(NamedTuple):
    """Of each token, float32. The log-sum-exp of logits / temperature is largest / temperature + log_sum.

    It is kept in two parts: their sum, when logits are large, would round away what log-probabilities are made of.
    """

    largest_T: Tensor
    log_sum_T: Tensor
    entropy_T: Tensor
    logprobs_T: Tensor

    @staticmethod
    def empty(num_tokens: int, device: torch.device) -> "Scores":
        """Room for the scores of so many tokens."""
        return Scores(*(torch.empty(num_tokens, dtype=torch.float32, device=device) for _ in range(4)))

    def of(self, rows: slice) -> "Scores":
        """Some tokens', in the same memory."""
        return Scores(*(scores_T[rows] for scores_T in self))


@triton.jit
def _load_stretch(row_ptr, v, vocabulary, width):
    """Logits, -inf beyond the vocabulary; the padding is read too, so that the mask does not narrow the loads."""
    x = tl.load(row_ptr + v, mask=v < width, other=0.0).to(tl.float32)
    return tl.where(v < vocabulary, x, -float("inf"))


@triton.jit
def _stretch_kernel(
    logits_ptr, partial_ptr, vocabulary, width, scale,
    NUM_STRETCHES: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """Largest logit of a stretch; with u = scale (logit - largest), the sums of 2^u and of 2^u u."""
    program = tl.program_id(0)
    row = (program // NUM_STRETCHES).to(tl.int64)
    v = program % NUM_STRETCHES * STRETCH + tl.arange(0, STRETCH)
    x = _load_stretch(logits_ptr + row * width, v, vocabulary, width)
    largest = tl.max(x, 0)
    u = (x - tl.where(largest == -float("inf"), 0.0, largest)) * scale
    e = tl.exp2(u)
    partial_ptr += program.to(tl.int64) * 3
    tl.store(partial_ptr, largest)
    tl.store(partial_ptr + 1, tl.sum(e, 0))
    tl.store(partial_ptr + 2, tl.sum(tl.where(e == 0.0, 0.0, e * u), 0))  # not 0 times infinity


@triton.jit
def _combine_kernel(
    logits_ptr, targets_ptr, partial_ptr, largest_ptr, log_sum_ptr, entropy_ptr, logprobs_ptr, vocabulary, width, scale,
    NUM_STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's stretches, brought to a common largest logit."""
    row = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK)
    at = partial_ptr + (row * NUM_STRETCHES + s) * 3
    inside = s < NUM_STRETCHES
    part = tl.load(at, mask=inside, other=-float("inf"))
    largest = tl.max(part, 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    shift = tl.where(part == -float("inf"), 0.0, (part - largest) * scale)  # an empty stretch has sums of 0
    sums = tl.load(at + 1, mask=inside, other=0.0)
    weighted = tl.load(at + 2, mask=inside, other=0.0) + shift * sums
    factor = tl.exp2(shift)
    total = tl.sum(factor * sums, 0)
    log2_total = tl.log2(total)
    target = tl.load(targets_ptr + row)
    known = (target >= 0) & (target < vocabulary)
    x = tl.load(logits_ptr + row * width + target, mask=known, other=float("nan")).to(tl.float32)
    ln2 = 0.6931471805599453
    tl.store(largest_ptr + row, largest)
    tl.store(log_sum_ptr + row, log2_total * ln2)
    tl.store(entropy_ptr + row, (log2_total - tl.sum(factor * weighted, 0) / total) * ln2)
    tl.store(logprobs_ptr + row, ((x - largest) * scale - log2_total) * ln2)


@triton.jit
def _gradient_kernel(
    logits_ptr, targets_ptr, largest_ptr, log_sum_ptr, entropy_ptr, grad_logprobs_ptr, grad_entropy_ptr,
    vocabulary, width, inverse_temperature,
    NUM_STRETCHES: tl.constexpr, STRETCH: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """A stretch of logits becomes its gradient, (g (onehot - p) - h p (log p + entropy)) / temperature."""
    program = tl.program_id(0)
    row = (program // NUM_STRETCHES).to(tl.int64)
    v = program % NUM_STRETCHES * STRETCH + tl.arange(0, STRETCH)
    x = _load_stretch(logits_ptr + row * width, v, vocabulary, width)
    logprobs = (x - tl.load(largest_ptr + row)) * inverse_temperature - tl.load(log_sum_ptr + row)
    p = tl.exp(logprobs)
    g = tl.load(grad_logprobs_ptr + row)
    factor = -g
    if ENTROPY:
        factor -= tl.load(grad_entropy_ptr + row) * (logprobs + tl.load(entropy_ptr + row))
        factor = tl.where(p == 0.0, 0.0, factor)  # not 0 times infinity
    grad = p * factor + tl.where(v == tl.load(targets_ptr + row), g, 0.0)
    grad = (grad * inverse_temperature).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * width + v, grad, mask=v < width)


def token_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    weight_gradient_VH: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`head.token_logprobs`."""
    logprobs_T, entropy_T = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, targets_T, temperature, chunk_tokens, with_entropy, weight_gradient_VH
    )
    return logprobs_T, entropy_T


class _TokenLogprobs(torch.autograd.Function):
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
        num_tokens, vocabulary = len(hidden_TH), len(weight_VH)
        targets_T = targets_T.contiguous()
        scores = Scores.empty(num_tokens, hidden_TH.device)
        room_CW = _room(hidden_TH, vocabulary, chunk_tokens)
        for rows in chunks(num_tokens, chunk_tokens):
            logits_CW = _logits(hidden_TH[rows], weight_VH, room_CW)
            score(logits_CW, vocabulary, targets_T[rows], temperature, scores.of(rows))
        ctx.save_for_backward(hidden_TH, weight_VH, targets_T, *scores[:3])
        ctx.temperature, ctx.chunk_tokens, ctx.weight_gradient_VH = temperature, chunk_tokens, weight_gradient_VH
        # Backward needs this room in any case, and finds the last chunk's logits in it.
        ctx.room_CW = room_CW if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(scores.entropy_T)
        return scores.logprobs_T, scores.entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden_TH, weight_VH = ctx.saved_tensors[:2]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.empty_like(hidden_TH) if needs_hidden else None
        # float32 over the chunks: a bfloat16 sum would lose what the later ones add
        sum_VH = ctx.weight_gradient_VH
        is_own = sum_VH is None and needs_weight
        if is_own:
            sum_VH = (torch.empty_like if len(hidden_TH) else torch.zeros_like)(weight_VH, dtype=torch.float32)
        beta = 0.0 if is_own else 1.0  # the first product overwrites what is in a sum of our own
        for rows, grad_CV in _chunk_gradients(ctx, grad_logprobs_T, grad_entropy_T):
            if needs_hidden:
                torch.mm(grad_CV, weight_VH, out=grad_hidden_TH[rows])  # type: ignore[index]
            if needs_weight:
                _add_product(sum_VH, grad_CV.t(), hidden_TH[rows], beta)
                beta = 1.0
        return grad_hidden_TH, sum_VH.to(weight_VH.dtype) if is_own else None, *(None,) * 5


def _chunk_gradients(
    ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
) -> Iterator[tuple[slice, Tensor]]:
    """Gradients with respect to the logits, from the last chunk to the first, all in the same room."""
    hidden_TH, weight_VH, targets_T, largest_T, log_sum_T, entropy_T = ctx.saved_tensors
    scores = Scores(largest_T, log_sum_T, entropy_T, largest_T)  # nothing reads the log-probabilities
    vocabulary = len(weight_VH)
    grad_logprobs_T = torch.zeros_like(largest_T) if grad_logprobs_T is None else grad_logprobs_T.contiguous()
    grad_entropy_T = None if grad_entropy_T is None else grad_entropy_T.contiguous()
    room_CW, ctx.room_CW = ctx.room_CW, None  # once: a second backward makes the last chunk's logits again
    has_logits = room_CW is not None
    if room_CW is None:
        room_CW = _room(hidden_TH, vocabulary, ctx.chunk_tokens)
    for rows in reversed(list(chunks(len(hidden_TH), ctx.chunk_tokens))):
        logits_CW = room_CW[: rows.stop - rows.start] if has_logits else _logits(hidden_TH[rows], weight_VH, room_CW)
        has_logits = False
        logits_to_gradient_(
            logits_CW, vocabulary, targets_T[rows], ctx.temperature, scores.of(rows), grad_logprobs_T[rows],
            None if grad_entropy_T is None else grad_entropy_T[rows],
        )  # fmt: skip
        yield rows, logits_CW[:, :vocabulary]


def score(logits_CW: Tensor, vocabulary: int, targets_C: Tensor, temperature: float, scores: Scores) -> None:
    """Write the scores of softmax(logits / temperature); all are contiguous."""
    num_rows, width = logits_CW.shape
    stretch = _stretch(vocabulary)
    num_stretches, scale = triton.cdiv(vocabulary, stretch), 1 / (temperature * math.log(2))
    partial_CS3 = torch.empty((num_rows, num_stretches, 3), dtype=torch.float32, device=logits_CW.device)
    _stretch_kernel[(num_rows * num_stretches,)](
        logits_CW, partial_CS3, vocabulary, width, scale,
        NUM_STRETCHES=num_stretches, STRETCH=stretch, num_warps=_NUM_WARPS,
    )  # fmt: skip
    _combine_kernel[(num_rows,)](
        logits_CW, targets_C, partial_CS3, *scores, vocabulary, width, scale,
        NUM_STRETCHES=num_stretches, BLOCK=triton.next_power_of_2(num_stretches), num_warps=1,
    )  # fmt: skip


def logits_to_gradient_(
    logits_CW: Tensor,
    vocabulary: int,
    targets_C: Tensor,
    temperature: float,
    scores: Scores,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> None:
    """Put the loss's gradient with respect to the logits in their place; all are contiguous. Padding is undefined."""
    num_rows, width = logits_CW.shape
    stretch = _stretch(vocabulary)
    num_stretches = triton.cdiv(vocabulary, stretch)
    _gradient_kernel[(num_rows * num_stretches,)](
        logits_CW, targets_C, *scores[:3], grad_logprobs_C,
        grad_logprobs_C if grad_entropy_C is None else grad_entropy_C, vocabulary, width, 1 / temperature,
        NUM_STRETCHES=num_stretches, STRETCH=stretch, ENTROPY=grad_entropy_C is not None, num_warps=_NUM_WARPS,
    )  # fmt: skip


def _room(hidden_TH: Tensor, vocabulary: int, chunk_tokens: int) -> Tensor:
    """Memory for one chunk's logits."""
    width = triton.cdiv(vocabulary, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return hidden_TH.new_empty((min(chunk_tokens, len(hidden_TH)), width))


def _logits(hidden_CH: Tensor, weight_VH: Tensor, room_CW: Tensor) -> Tensor:
    """Logits, written to the first rows of the room."""
    logits_CW = room_CW[: len(hidden_CH)]
    torch.mm(hidden_CH, weight_VH.t(), out=logits_CW[:, : len(weight_VH)])
    return logits_CW


def _add_product(sum_VH: Tensor, grad_VC: Tensor, hidden_CH: Tensor, beta: float) -> None:
    """sum = beta sum + grad @ hidden, not rounded before it is added; CUDA only where grad is narrower than the sum."""
    if grad_VC.dtype == sum_VH.dtype:
        torch.addmm(sum_VH, grad_VC, hidden_CH, beta=beta, out=sum_VH)
    elif sum_VH.is_cuda:
        torch.addmm(sum_VH, grad_VC, hidden_CH, sum_VH.dtype, beta=beta, out=sum_VH)
    else:
        torch.addmm(sum_VH, grad_VC.to(sum_VH.dtype), hidden_CH.to(sum_VH.dtype), beta=beta, out=sum_VH)


def _stretch(vocabulary: int) -> int:
    """Elements of a row for one program."""
    stretch: int = min(_STRETCH, triton.next_power_of_2(vocabulary))
    return stretch
