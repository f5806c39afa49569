"""Claim: a prefix is computed forward once per model, recomputed once, and goes backward once, for any group size.

Token-layer passes are counted where they happen: every call of a decoder layer, or of its K and V where nothing else is
needed, and every backward pass through one. A usual trainer computes each sample's whole sequence in every phase.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from rollplex.bench.exactness import recipe
from rollplex.bench.tiny import tiny_workers
from rollplex.build import Runtime
from rollplex.config import parse_config
from rollplex.gpu.device import select_device
from rollplex.models.attention import PrefixAttention
from rollplex.models.decoder import Attention, Layer, Rope
from rollplex.testing import canned_prompts, tiny_config
from rollplex.trace import Trace

IMAGES_PER_PROMPT = (1, 2, 0)


def run(group: int = 8, device: str = "cpu") -> dict[str, object]:
    """Run one step with a reference and count what ran on prefixes, in units of one prefix through all layers."""
    values = recipe("overlapped", device, "float32").model_dump()
    values["rollout"] |= {"group_size": group, "num_blocks": None}
    config, hf_config = parse_config(values), tiny_config()
    workers = tiny_workers(config, hf_config, select_device(device))
    assert workers.reference is not None
    prompts = canned_prompts(hf_config, IMAGES_PER_PROMPT)
    models = {"policy": workers.policy.model, "reference": workers.reference.model}
    with counted_prefix_passes({name: list(model.decoder.layers) for name, model in models.items()}) as passes:
        Runtime(config, workers).train(prompts, 0, Trace())
    unit = sum(prompt.prefix_length for prompt in prompts) * workers.policy.model.decoder.config.num_layers
    counts = {name: count / unit for name, count in sorted(passes.items())}
    forwards = counts["policy forward"] + counts["reference forward"]
    # A usual trainer, with recomputation: once in the rollout; per sample reference, update, recomputation.
    naive_forwards, naive_backwards = 1 + group + 2 * group, group
    return {
        "bench": "forwards",
        "device": device,
        "group": group,
        "prefix_tokens": sum(prompt.prefix_length for prompt in prompts),
        "prefix_forwards_per_group": forwards,
        "prefix_recomputations_per_group": counts["policy recomputation"],
        "prefix_backwards_per_group": counts["policy backward"],
        "token_layer_passes": dict(sorted(passes.items())),
        "naive_prefix_forwards_per_group": naive_forwards,
        "naive_prefix_backwards_per_group": naive_backwards,
    }


@contextmanager
def counted_prefix_passes(layers: dict[str, list[torch.nn.Module]]) -> Iterator[Counter[str]]:
    """Count tokens that pass through layers as part of a prefix, by model and direction, while the context is open."""
    passes: Counter[str] = Counter()
    names = {id(layer): name for name, modules in layers.items() for layer in modules}
    forward, keys_and_values = Layer.forward, Layer.keys_and_values

    def seen(layer: Layer, x_TH: Tensor) -> None:
        recomputed = x_TH.requires_grad
        passes[f"{names[id(layer)]} {'recomputation' if recomputed else 'forward'}"] += len(x_TH)
        if recomputed:
            x_TH.register_hook(lambda _: passes.update({f"{names[id(layer)]} backward": len(x_TH)}))

    def counting_forward(self: Layer, x_TH: Tensor, rope: Rope, attention: Attention) -> Tensor:
        if isinstance(attention, PrefixAttention):
            seen(self, x_TH)
        return forward(self, x_TH, rope, attention)

    def counting_keys_and_values(self: Layer, x_TH: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        seen(self, x_TH)
        return keys_and_values(self, x_TH, rope)

    Layer.forward, Layer.keys_and_values = counting_forward, counting_keys_and_values  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        Layer.forward, Layer.keys_and_values = forward, keys_and_values  # type: ignore[method-assign]
