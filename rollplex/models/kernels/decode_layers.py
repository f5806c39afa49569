"""The decoder's layers on the rows of one decode step: what `Layer` computes, in as few kernels as are worth it.

    any rows   norm -> qkv -> attention that rotates on the way -> out -> add and norm -> gate_up -> silu * -> down, added
    few rows   the same, with products that are bound by their weights' bytes done by skinny.py where it is faster:
               out and down with their additions, norm -> gate_up -> silu * as one kernel

Which is which depends on the number of rows and on the weights' shapes only. It knows no batch, no group and no graph.

Legend: T rows, H hidden.
"""

import torch.nn.functional as F
from torch import Tensor

from rollplex.models.decoder import Decoder, Layer, Rope
from rollplex.models.elementwise import add_rms_norm, rms_norm, silu_mul
from rollplex.models.kernels.decode import DecodeStep
from rollplex.models.kernels.skinny import Workspace, skinny_gate_up, skinny_linear

FEW_ROWS = 32
"""Rows up to which skinny.py is faster than cuBLAS and its neighbours (measured on an H200 with 8, 32, 64 and 128)."""
MIN_WEIGHT_BYTES = 16 * 2**20
"""Smaller `out` and `down` weights end sooner in cuBLAS."""


class DecodeLayers:
    """All layers of a decoder and its final norm, without gradients."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        c, device = decoder.config, decoder.embedding.device
        shapes = [(c.hidden, c.num_heads * c.head_dim), (c.hidden, c.intermediate)]
        self._decoder = decoder
        self._workspace = Workspace.for_products(device, min(FEW_ROWS, max_rows), shapes)

    def __call__(self, x_TH: Tensor, rope: Rope, attention: DecodeStep) -> Tensor:
        """Hidden states after the final norm, from token embeddings. x_TH is used up."""
        for index in range(self._decoder.config.num_layers):
            layer = self._decoder.layer(index)
            qkv_TR = F.linear(layer.attention_norm(x_TH), layer.qkv, layer.qkv_bias)
            o_TH = attention.rotating(index, qkv_TR, rope).view(len(x_TH), -1)
            x_TH = self._few(layer, x_TH, o_TH) if len(x_TH) <= FEW_ROWS else self._many(layer, x_TH, o_TH)
        norm = self._decoder.norm
        return rms_norm(x_TH, norm.weight, norm.eps)

    def _many(self, layer: Layer, x_TH: Tensor, o_TH: Tensor) -> Tensor:
        norm = layer.mlp_norm
        x_TH, normed_TH = add_rms_norm(x_TH, o_TH @ layer.out_t, norm.weight, norm.eps)
        hidden_TF = silu_mul(F.linear(normed_TH, layer.gate_up), layer.config.num_gate_up_slots)
        return x_TH.addmm_(hidden_TF, layer.down_t)

    def _few(self, layer: Layer, x_TH: Tensor, o_TH: Tensor) -> Tensor:
        norm = layer.mlp_norm.weight, layer.mlp_norm.eps
        x_TH = self._add_product(x_TH, o_TH, layer.out_t)
        slots = layer.config.num_gate_up_slots
        hidden_TF = skinny_gate_up(x_TH, layer.gate_up, slots, norm=norm, workspace=self._workspace)
        return self._add_product(x_TH, hidden_TF, layer.down_t)

    def _add_product(self, x_TH: Tensor, y_TF: Tensor, weight_FH: Tensor) -> Tensor:
        if weight_FH.nbytes < MIN_WEIGHT_BYTES:
            return x_TH.addmm_(y_TF, weight_FH)
        return skinny_linear(
            y_TF, weight_FH, transposed=True, residual_TR=x_TH, out_TR=x_TH, workspace=self._workspace
        )
