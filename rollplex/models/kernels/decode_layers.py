"""The decoder's layers on the rows of one decode step: what `Layer` computes, in as few kernels as are worth it.

    many rows   as in decoder.py
    some rows   down and its addition in one kernel of skinny.py
    few rows    out and its addition, norm -> gate_up -> silu *, down and its addition: three kernels of skinny.py

These products take the time that their weights take to be read, and skinny.py's are faster where cuBLAS splits sums and
its neighbours only move rows. Which is which depends on the number of rows and on the weights' shapes only. It knows no
batch, no group and no graph.

Legend: T rows, H hidden, F intermediate.
"""

import torch.nn.functional as F
from torch import Tensor

from rollplex.models.decoder import Decoder, Layer, Rope
from rollplex.models.elementwise import add_rms_norm, silu_mul
from rollplex.models.kernels.decode import DecodeStep
from rollplex.models.kernels.skinny import Workspace, skinny_gate_up, skinny_linear

FEW_ROWS, SOME_ROWS = 32, 64
"""Where skinny.py is faster (measured on an H200 with 8, 32, 64 and 128 rows)."""
MIN_WEIGHT_BYTES = 16 * 2**20
"""Smaller `out` and `down` weights end sooner in cuBLAS."""


class DecodeLayers:
    """All layers of a decoder and its final norm, without gradients."""

    def __init__(self, decoder: Decoder, max_rows: int) -> None:
        c, weight = decoder.config, decoder.embedding
        shapes = [(c.hidden, c.num_heads * c.head_dim), (c.hidden, c.intermediate)]
        self._decoder = decoder
        self._workspace = Workspace.for_products(weight.device, min(SOME_ROWS, max_rows), shapes, weight.element_size())

    @property
    def workspace(self) -> tuple[Tensor, Tensor]:
        return self._workspace.partials, self._workspace.counters

    def __call__(self, x_TH: Tensor, rope: Rope, attention: DecodeStep) -> Tensor:
        """Hidden states after the final norm, from token embeddings. x_TH is used up."""
        for index in range(self._decoder.config.num_layers):
            layer = self._decoder.layer(index)
            o_TND = attention(index, *layer.project(x_TH, rope))
            finish = self._finish_few if len(x_TH) <= FEW_ROWS else self._finish_many
            x_TH = finish(layer, x_TH, o_TND.view(len(x_TH), -1))
        hidden_TH: Tensor = self._decoder.norm(x_TH)
        return hidden_TH

    def _finish_many(self, layer: Layer, x_TH: Tensor, o_TF: Tensor) -> Tensor:
        norm = layer.mlp_norm
        x_TH, normed_TH = add_rms_norm(x_TH, o_TF @ layer.out_t, norm.weight, norm.eps)
        hidden_TF = silu_mul(F.linear(normed_TH, layer.gate_up), layer.config.num_gate_up_slots)
        return self._add_product(x_TH, hidden_TF, layer.down_t)

    def _finish_few(self, layer: Layer, x_TH: Tensor, o_TF: Tensor) -> Tensor:
        norm, slots = (layer.mlp_norm.weight, layer.mlp_norm.eps), layer.config.num_gate_up_slots
        x_TH = self._add_product(x_TH, o_TF, layer.out_t)
        hidden_TF = skinny_gate_up(x_TH, layer.gate_up, slots, norm=norm, workspace=self._workspace)
        return self._add_product(x_TH, hidden_TF, layer.down_t)

    def _add_product(self, x_TH: Tensor, y_TF: Tensor, weight_FH: Tensor) -> Tensor:
        """x + y @ weight, in x's place."""
        if len(x_TH) > SOME_ROWS or weight_FH.nbytes < MIN_WEIGHT_BYTES:
            return x_TH.addmm_(y_TF, weight_FH)
        return skinny_linear(y_TF, weight_FH, transposed=True, residual_TR=x_TH, out_TR=x_TH, workspace=self._workspace)
