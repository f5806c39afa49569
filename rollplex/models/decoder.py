"""The text decoder: one module for every phase. What attends to what is the `Attention` argument's business.

    x -> [ norm -> qkv -> rotary -> attention(layer, q, k, v) -> out -> + -> norm -> gate_up -> silu * -> down -> + ] x
    L -> norm

It does not know prefixes, suffixes, pages, batches or gradients; tokens are rows. Parameters are packed in nested
order: `qkv` is a concatenation over key/value heads of (its query heads, its key, its value), `gate_up` over up to 8
slots of (gate rows, up rows), so that the shard of any tensor-parallel degree that divides the slots is one contiguous
range of rows. Row-parallel weights (`out`, `down`) are stored transposed for the same reason and used as `.t()` views.

Legend: T tokens, H hidden, N query heads, K key/value heads, G query heads per K, D head dim, F intermediate, V
vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollplex.models.elementwise import add_rms_norm, rms_norm, rotate_qkv, silu_mul

GATE_UP_SLOTS = 8
"""Finest tensor-parallel degree of the feed-forward part that stays contiguous: 8 GPUs of one host."""


class Attention(Protocol):
    """What a layer calls: queries, keys (both rotated) and values of this layer's T tokens in, mixed values out."""

    def __call__(self, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Returns o [T, N, D]."""
        ...


@dataclass(frozen=True)
class DecoderConfig:
    """Shapes of a decoder; a family's adapter makes it from the Hugging Face config."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary frequencies that follow the temporal, height and width position; they add up to head_dim / 2."""
    tied_embeddings: bool
    padding_id: int | None = None
    """An id whose embedding is not trained (transformers' padding_idx), even where it occurs as text."""
    initializer_range: float = 0.02

    @property
    def num_gate_up_slots(self) -> int:
        return math.gcd(GATE_UP_SLOTS, self.intermediate)


@dataclass(frozen=True)
class Rope:
    """Rotary angles of T tokens, in the compute dtype: cos and sin [T, D], both halves equal."""

    cos_TD: Tensor
    sin_TD: Tensor

    def of(self, tokens: slice) -> "Rope":
        """The angles of some of the tokens."""
        return Rope(self.cos_TD[tokens], self.sin_TD[tokens])


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x_TH: Tensor) -> Tensor:
        return rms_norm(x_TH, self.weight, self.eps)


class Layer(nn.Module):
    """One decoder layer, in two halves around the attention call."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index, self.config = index, config
        qkv_rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.qkv = nn.Parameter(torch.empty(qkv_rows, config.hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(qkv_rows))
        self.out_t = nn.Parameter(torch.empty(config.num_heads * config.head_dim, config.hidden))
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate, config.hidden))
        self.down_t = nn.Parameter(torch.empty(config.intermediate, config.hidden))

    def forward(self, x_TH: Tensor, rope: Rope, attention: Attention) -> Tensor:
        q_TND, k_TKD, v_TKD = self.project(x_TH, rope)
        return self.finish(x_TH, attention(self.index, q_TND, k_TKD, v_TKD))

    def project(self, x_TH: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, N, D] and keys [T, K, D], and values [T, K, D]."""
        c = self.config
        qkv_TR = F.linear(self.attention_norm(x_TH), self.qkv, self.qkv_bias)
        return rotate_qkv(qkv_TR, rope.cos_TD, rope.sin_TD, c.num_heads, c.num_kv_heads, c.head_dim)

    def keys_and_values(self, x_TH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """All that is wanted of a layer whose output nobody reads: rotated keys and values, each [T, K, D]."""
        _, k_TKD, v_TKD = self.project(x_TH, rope)
        return k_TKD, v_TKD

    def finish(self, x_TH: Tensor, o_TND: Tensor) -> Tensor:
        """Output projection and feed-forward part, with both residual additions."""
        out_TH = F.linear(o_TND.reshape(x_TH.shape[0], -1), self.out_t.t())
        x_TH, normed_TH = add_rms_norm(x_TH, out_TH, self.mlp_norm.weight, self.mlp_norm.eps)
        hidden_TF = silu_mul(F.linear(normed_TH, self.gate_up), self.config.num_gate_up_slots)
        if x_TH.is_cuda and not torch.is_grad_enabled():
            return x_TH.addmm_(hidden_TF, self.down_t)  # the sum above is nobody else's
        return x_TH + F.linear(hidden_TF, self.down_t.t())


class Decoder(nn.Module):
    """Token embeddings, layers, final norm and output head (which may be the embedding table itself)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self._frequencies_on: dict[torch.device, Tensor] = {}
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.untied_head = (
            None if config.tied_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.hidden))
        )

    @property
    def head(self) -> Tensor:
        """Output head [V, H]."""
        return self.embedding if self.untied_head is None else self.untied_head

    def layer(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def rope(self, positions_3T: Tensor) -> Rope:
        """Multimodal rotary angles for (t, h, w) positions (Qwen2-VL, arXiv 2409.12191, section 2.1)."""
        c = self.config
        angles_3TD = positions_3T.float().unsqueeze(-1) * self._frequencies(positions_3T.device)
        sections = angles_3TD.split(c.mrope_section, dim=-1)
        angles_TD = torch.cat([section[i % 3] for i, section in enumerate(sections)], dim=-1)
        angles_TD = torch.cat((angles_TD, angles_TD), dim=-1)
        dtype = self.embedding.dtype
        return Rope(angles_TD.cos().to(dtype), angles_TD.sin().to(dtype))

    def _frequencies(self, device: torch.device) -> Tensor:
        """Rotary frequencies [D / 2]; computed on the CPU everywhere, and copied to a device once."""
        if device not in self._frequencies_on:
            exponents = torch.arange(0, self.config.head_dim, 2, dtype=torch.float32, device="cpu")
            frequencies = 1.0 / (self.config.rope_theta ** (exponents / self.config.head_dim))
            self._frequencies_on[device] = frequencies.to(device)
        return self._frequencies_on[device]

    def forward(self, x_TH: Tensor, rope: Rope, attention: Attention) -> Tensor:
        """Hidden states after the final norm [T, H], from token embeddings."""
        for index in range(self.config.num_layers):
            x_TH = self.layer(index)(x_TH, rope, attention)
        hidden_TH: Tensor = self.norm(x_TH)
        return hidden_TH

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Random weights as the family initialises them: normal matrices, zero biases, unit norms."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
