"""Prefix once: a prompt's prefix is computed forward once per model version, and backward once.

    prefix_forward    keeps K and V of every layer, and (for training) every layer's input
    prefix_backward   last layer to first: recompute the layer from its input, backward with the gradient of its output
                      (from the layer above) and of its K and V (summed over all suffixes of the group)

Nothing reads the last layer's output of a prefix, so of the last layer only K and V are computed, in both directions.
Both are generators that yield after each layer, for the runner to take turns; no grad mode is held across a yield.

Legend: P prefix tokens, H hidden, K key/value heads, D head dim, L layers.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rollplex.errors import StaleStateError
from rollplex.gpu.device import upload
from rollplex.models.attention import PrefixAttention, PrefixKV
from rollplex.models.decoder import Rope
from rollplex.models.kernels.flash import Segments
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.types import Prompt


@dataclass(eq=False)
class PrefixState:
    """One prompt's prefix under one version of one model.

    image_rows_I: where the image features are.
    inputs: each layer's input [P, H], kept for the backward pass; empty when it was not asked for.
    """

    version: int
    ids_P: Tensor
    image_rows_I: Tensor
    rope: Rope
    encoded: Encoded
    kv: PrefixKV
    inputs: list[Tensor]

    def require(self, version: int) -> PrefixKV:
        """The K/V, if they were made with this version of the weights."""
        if version != self.version:
            raise StaleStateError(f"a prefix computed with policy version {self.version} was used at version {version}")
        return self.kv


def prefix_forward(
    model: VisionLanguageModel, prompts: Sequence[Prompt], encoded: Sequence[Encoded], *, for_training: bool
) -> Generator[None, None, tuple[PrefixState, ...]]:
    """Compute prefixes packed into one pass, in order of prompts.

    `for_training` keeps layer inputs and makes room for the gradients of K and V. The states are views of what the
    pass has made, which is freed with the last of them.
    """
    c, device, lengths = model.decoder.config, model.device, [prompt.prefix_length for prompt in prompts]
    shape = (c.num_layers, sum(lengths), c.num_kv_heads, c.head_dim)
    k_LPKD, v_LPKD = (torch.empty(shape, dtype=model.dtype, device=device) for _ in range(2))
    inputs: list[Tensor] = []

    def keep(layer: int, k_PKD: Tensor, v_PKD: Tensor) -> None:
        k_LPKD[layer], v_LPKD[layer] = k_PKD, v_PKD

    attention = PrefixAttention(keep, Segments(tuple(length for length in lengths if length), device))
    with torch.no_grad():
        ids = np.concatenate([prompt.ids[:-1] for prompt in prompts])
        ids_P, rows_I = upload(ids, device), model.image_rows(ids)
        rope = model.decoder.rope(upload(np.concatenate([prompt.positions[:, :-1] for prompt in prompts], 1), device))
        x_PH = model.embed(ids_P, [feature for each in encoded for feature in each.features], rows_I)
    for index in range(c.num_layers if sum(lengths) else 0):
        layer = model.decoder.layer(index)
        with torch.no_grad():
            if for_training:
                inputs.append(x_PH)
            if index == c.num_layers - 1:
                keep(index, *layer.keys_and_values(x_PH, rope))
            else:
                x_PH = layer(x_PH, rope, attention)
        yield
    stops = list(accumulate(lengths))
    spans = [slice(stop - length, stop) for stop, length in zip(stops, lengths, strict=True)]

    def state(span: slice, encoded: Encoded) -> PrefixState:
        rows_I = model.image_rows(ids[span])
        kv = PrefixKV(k_LPKD[:, span], v_LPKD[:, span])
        if for_training:
            gradients = (torch.zeros(kv.k_LPKD.shape, dtype=torch.float32, device=device) for _ in range(2))
            kv = PrefixKV(kv.k_LPKD, kv.v_LPKD, *gradients)
        return PrefixState(
            model.version, ids_P[span], rows_I, rope.of(span), encoded, kv, [x_PH[span] for x_PH in inputs]
        )  # fmt: skip

    return tuple(state(*pair) for pair in zip(spans, encoded, strict=True))


def prefix_backward(
    model: VisionLanguageModel, state: PrefixState, *, train_vision: bool
) -> Generator[None, None, None]:
    """Add the prefix's part of the gradient to the parameters, from the gradients gathered in `state.kv`."""
    kv, last = state.require(model.version), model.decoder.config.num_layers - 1
    if not kv.length:
        return
    assert state.inputs and kv.grad_k_LPKD is not None and kv.grad_v_LPKD is not None, (
        "prefix was not kept for training"
    )
    grad_PH: Tensor | None = None
    for index in reversed(range(last + 1)):
        layer, kept = model.decoder.layer(index), dict[str, Tensor]()

        def keep(_: int, k_PKD: Tensor, v_PKD: Tensor, kept: dict[str, Tensor] = kept) -> None:
            kept.update(k=k_PKD, v=v_PKD)

        with torch.enable_grad():
            x_PH = state.inputs[index].detach().requires_grad_()
            if index == last:
                keep(index, *layer.keys_and_values(x_PH, state.rope))
                outputs, gradients = [], []
            else:
                outputs, gradients = [layer(x_PH, state.rope, PrefixAttention(keep))], [grad_PH]
        dtype = x_PH.dtype
        gradients += [kv.grad_k_LPKD[index].to(dtype), kv.grad_v_LPKD[index].to(dtype)]
        torch.autograd.backward([*outputs, kept["k"], kept["v"]], gradients)
        grad_PH = x_PH.grad
        yield
    assert grad_PH is not None
    _embedding_backward(model, state, grad_PH, train_vision)


def _embedding_backward(model: VisionLanguageModel, state: PrefixState, grad_PH: Tensor, train_vision: bool) -> None:
    """Through the embedding table and, pass by pass, the vision tower (recomputed)."""
    with torch.enable_grad():
        features = [feature.detach().requires_grad_(train_vision) for feature in state.encoded.features]
        model.embed(state.ids_P, features, state.image_rows_I).backward(grad_PH)
        if not train_vision:
            return
        gradients = iter([feature.grad for feature in features])
        for images in model.vision_passes(state.encoded.images):
            torch.autograd.backward(model.encode(images), [next(gradients) for _ in images])
