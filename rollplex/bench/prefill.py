"""Claim: prefixes and images are computed about as fast as the GPU multiplies matrices.

One text prompt's prefix through the decoder, and square images through the vision tower in one pass, on random weights;
operations are those of roofline.py and models/vision.py. A long run at full rate is limited by the card's power.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from rollplex.bench.gpu_trace import kernel_times, traced
from rollplex.bench.roofline import prefill_flops
from rollplex.bench.work import image_prompts, milliseconds, model_of, product_flops_per_s, text_prompt
from rollplex.gpu.device import describe, select_device
from rollplex.models.prefix import prefix_forward
from rollplex.models.vision import VisionTower, vision_flops
from rollplex.models.vlm import Encoded
from rollplex.phases.run import finish

LEAST_S = 2.0
"""Each part runs for so long: power limits show after a while only."""
NUM_KERNELS = 12


def run(model: str, tokens: int, images: int, pixels: int, device: str) -> dict[str, object]:
    """Milliseconds and TFLOP/s of both parts."""
    on = select_device(device)
    weights = model_of(model, on, torch.bfloat16 if on.type == "cuda" else torch.float32)
    prompt = text_prompt(weights, tokens)
    pictures = image_prompts(weights, 1, images, pixels)[0].images
    tower = weights.vision
    assert isinstance(tower, VisionTower)

    def prefill() -> object:
        return finish(prefix_forward(weights, [prompt], [Encoded((), ())], for_training=False))

    @torch.no_grad()
    def encode() -> object:
        return weights.encode(pictures)

    flops = prefill_flops(weights.decoder.config, tokens)
    tower_flops = vision_flops(tower.config, [image.grid for image in pictures])
    return {
        "bench": "prefill",
        "model": model,
        "device": describe(on),
        "product_tflops": product_flops_per_s(on) / 1e12 if on.type == "cuda" else None,
        "prefill": {"tokens": tokens} | _measured(prefill, flops, on),
        "vision": {"images": images, "pixels": pixels} | _measured(encode, tower_flops, on),
    }


def _measured(work: Callable[[], object], flops: int, device: torch.device) -> dict[str, Any]:
    times = milliseconds(work, device, LEAST_S if device.type == "cuda" else 0.0)
    found: dict[str, Any] = {
        "ms": median(times),
        "spread_ms": [times[len(times) // 10], times[-1 - len(times) // 10]],
        "flops": flops,
        "tflops": flops / median(times) / 1e9,
    }
    if device.type == "cuda":
        found["kernels"] = [
            {"name": kernel.name[:80], "calls": kernel.calls, "ms": kernel.total_us / 1e3}
            for kernel in kernel_times(traced(work).events)[:NUM_KERNELS]
        ]
    return found
