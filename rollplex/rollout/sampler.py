"""Drawing the next token: temperature, top-k, top-p, min-p and banned ids, by Gumbel-max on given noise.

Three log-probs of the drawn token are kept apart, because three parties want different ones:

    raw       log softmax(logits)                    the model itself
    tempered  log softmax(logits / temperature)      what training differentiates
    sampling  after banned ids and filters           what the token was really drawn from

At temperature 0 the draw is the likeliest allowed id: tempered is raw, and sampling is 0.

argmax(log p + Gumbel noise) is a draw from p (Maddison et al., A* sampling, 2014). Filters apply in Hugging Face's
order: top-k, top-p, min-p, each on what the one before has left. Nothing here waits for the device; logits that are
not finite give log-probs that are not finite, for the caller to notice. It knows no sample, no batch and no source of
noise.

Shapes: B rows, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """temperature: 0 is greedy. top_p: 1 keeps all. top_k: 0 keeps all. min_p: 0 keeps all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True, eq=False)
class Draw:
    """The drawn ids, int64 [B], and their log-probs, float32 [B]."""

    ids_B: Tensor
    raw_logprobs_B: Tensor
    tempered_logprobs_B: Tensor
    sampling_logprobs_B: Tensor


def sample(logits_BV: Tensor, noise_BV: Tensor | None, params: SamplingParams, banned_V: Tensor | None = None) -> Draw:
    """Draw one id per row.

    Args:
        logits_BV: float32.
        noise_BV: standard Gumbel noise; None only at temperature 0.
        banned_V: ids never drawn; they still count in the raw and tempered distributions.
    """
    raw_BV = logits_BV.log_softmax(-1)
    allowed_BV = logits_BV if banned_V is None else logits_BV.masked_fill(banned_V, -torch.inf)
    if params.temperature == 0.0:
        ids_B = allowed_BV.argmax(-1)
        raw_B, logits_B = _pick(raw_BV, ids_B), _pick(allowed_BV, ids_B)
        # Not plain zeros: what is not finite must stay visible, and with it a row that has no id to draw.
        return Draw(ids_B, raw_B, raw_B, logits_B - logits_B)
    assert noise_BV is not None, "sampling at a temperature needs noise"
    tempered_BV = (logits_BV / params.temperature).log_softmax(-1)
    sampling_BV = filtered(allowed_BV / params.temperature, params).log_softmax(-1)
    ids_B = (sampling_BV + noise_BV).argmax(-1)
    return Draw(ids_B, _pick(raw_BV, ids_B), _pick(tempered_BV, ids_B), _pick(sampling_BV, ids_B))


def filtered(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Logits with -inf for what top-k, then top-p, then min-p remove; at least the most likely id stays."""
    if 0 < params.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if params.top_p < 1.0:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, stable=True)
        mass_below_BV = _cumulative(sorted_BV.softmax(-1))
        remove_BV = mass_below_BV <= 1.0 - params.top_p
        remove_BV[:, -1] = False
        logits_BV = logits_BV.masked_fill(remove_BV.scatter(1, order_BV, remove_BV), -torch.inf)
    if params.min_p > 0.0:
        probabilities_BV = logits_BV.softmax(-1)
        least_B1 = params.min_p * probabilities_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(probabilities_BV < least_B1, -torch.inf)
    return logits_BV


def _cumulative(values_BV: Tensor) -> Tensor:
    """Running sums of each row. CUDA's cumsum adds in any order: there, by products with triangular ones."""
    if values_BV.device.type == "cpu":
        return values_BV.cumsum(-1)
    num_rows, size = values_BV.shape
    width = math.isqrt(size - 1) + 1
    padded_BCW = F.pad(values_BV, (0, width * width - size)).view(num_rows, width, width)
    ones_WW = torch.ones(width, width, device=values_BV.device).triu()
    within_BCW = padded_BCW @ ones_WW
    before_BC = within_BCW[:, :, -1] @ ones_WW.triu(1)
    return (within_BCW + before_BC.unsqueeze(-1)).view(num_rows, -1)[:, :size]


def _pick(values_BV: Tensor, ids_B: Tensor) -> Tensor:
    return values_BV.gather(1, ids_B.unsqueeze(1)).squeeze(1)
