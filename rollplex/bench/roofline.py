"""What has to be done at least: bytes that a decode step must read, and operations of a prefill; from shapes alone.

A multiply and an add count as two operations; nothing that need not be computed counts. Vision towers are counted in
models/vision.py.
"""

from dataclasses import dataclass

from rollplex.models.decoder import DecoderConfig


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes that one decode step must read."""

    weights: int
    prefix: int
    suffix: int

    @property
    def total(self) -> int:
        return self.weights + self.prefix + self.suffix


def layer_matrix_elements(c: DecoderConfig) -> int:
    """Weights of one layer's four products: (N + 2 K) D H + N D H + 3 F H."""
    return c.hidden * ((2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.intermediate)


def kv_bytes_per_token(c: DecoderConfig, element_bytes: int = 2) -> int:
    """K and V of one token in all layers: 2 L K D elements."""
    return 2 * c.num_layers * c.num_kv_heads * c.head_dim * element_bytes


def decode_bytes(
    c: DecoderConfig, batch: int, group: int, prefix: int, suffix: int, *, shared: bool = True, element_bytes: int = 2
) -> DecodeBytes:
    """One step: every weight but the embedding table once, each prefix once (not shared: per sample), each suffix.

    The output head counts once, also where it is the embedding table. Norms and biases (0.01 %) are left out.
    """
    token = kv_bytes_per_token(c, element_bytes)
    weights = (c.num_layers * layer_matrix_elements(c) + c.vocab_size * c.hidden) * element_bytes
    return DecodeBytes(weights, (batch // group if shared else batch) * prefix * token, batch * suffix * token)


def prefill_flops(c: DecoderConfig, num_tokens: int) -> int:
    """A prefix of T tokens: 2 T per weight, and causal attention's 4 T^2 / 2 N D per layer.

    Of the last layer only keys and values are needed: 2 T H 2 K D. The head is not.
    """
    attention = 2 * num_tokens**2 * c.num_heads * c.head_dim
    whole = c.num_layers - 1
    last = 4 * num_tokens * c.hidden * c.num_kv_heads * c.head_dim
    return whole * (2 * num_tokens * layer_matrix_elements(c) + attention) + last


def suffix_flops(c: DecoderConfig, prefix: int, num_tokens: int) -> int:
    """A response of T tokens over P of its prompt, head included: 2 T per weight and 4 T (P + T / 2) N D per layer."""
    layer = 2 * num_tokens * layer_matrix_elements(c)
    attention = 2 * num_tokens * (2 * prefix + num_tokens) * c.num_heads * c.head_dim
    return c.num_layers * (layer + attention) + 2 * num_tokens * c.vocab_size * c.hidden
