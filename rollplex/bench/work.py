"""What the speed benches share: models with random weights, prompts and prefixes of a given shape, and timing."""

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from rollplex.errors import ConfigError
from rollplex.models.attention import PrefixKV
from rollplex.models.load import load_model, random_model
from rollplex.models.presets import PRESETS, preset_config
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import canned_prompts, tiny_config
from rollplex.types import Image, Prompt

SEED = 0
COPY_BYTES = 4 * 2**30
"""Of the copy that gives the memory's bandwidth: many times the cache."""
PRODUCT_SIZE = 8192
DISTINCT_IMAGES = 4
"""Of random pixels; more images share their memory, under keys of their own."""


def model_of(name: str, device: torch.device, dtype: torch.dtype) -> VisionLanguageModel:
    """A preset or "tiny" with random weights, or a checkpoint directory's or hub name's model."""
    if name == "tiny" or name in PRESETS:
        return random_model(tiny_config() if name == "tiny" else preset_config(name), SEED, dtype, device)
    if "/" not in name:
        raise ConfigError(f"--model {name}: use {', '.join((*PRESETS, 'tiny'))}, or a checkpoint directory or hub name")
    return load_model(name, dtype, device)


def random_prefix(model: VisionLanguageModel, length: int) -> PrefixKV:
    """A prefix's K and V as if they had been computed."""
    c = model.decoder.config
    shape = (c.num_layers, length, c.num_kv_heads, c.head_dim)
    return PrefixKV(*(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2)))


def image_prompts(model: VisionLanguageModel, num_prompts: int, num_images: int, pixels: int) -> tuple[Prompt, ...]:
    """Prompts of square images in host memory, about 10 tokens of text around each."""
    family: Any = model.family
    side = pixels // family.hf_config.vision_config.patch_size
    few = canned_prompts(family.hf_config, (DISTINCT_IMAGES,), SEED, (9,), ((1, side, side),))[0].images
    (prompt,) = canned_prompts(family.hf_config, (num_images,), SEED, (9,), ((1, side, side),), few)
    return tuple(replace(prompt, uid=uid, images=_renamed(prompt.images, uid)) for uid in range(num_prompts))


def _renamed(images: tuple[Image, ...], uid: int) -> tuple[Image, ...]:
    return tuple(replace(image, key=f"{uid}/{index}") for index, image in enumerate(images))


def text_prompt(model: VisionLanguageModel, num_tokens: int) -> Prompt:
    """A prompt of random text whose prefix has num_tokens."""
    family: Any = model.family
    return canned_prompts(family.hf_config, (0,), SEED, (num_tokens + 1,))[0]


def milliseconds(
    work: Callable[[], object], device: torch.device, least_s: float = 0.0, repeats: int = 5
) -> list[float]:
    """Times of single runs, sorted, after one untimed run; at least so many, and for at least so long."""
    work()
    times: list[float] = []
    while len(times) < repeats or sum(times) < 1e3 * least_s:
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def copy_bytes_per_s(device: torch.device) -> float:
    """Read plus written bytes per second of a device-to-device copy of random data."""
    source = torch.randint(256, (COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (median(milliseconds(lambda: target.copy_(source), device, repeats=9)) / 1e3)


def product_flops_per_s(device: torch.device) -> float:
    """FLOPs per second of a large bfloat16 matrix product of random data."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * PRODUCT_SIZE**3 / (median(milliseconds(lambda: a @ b, device, repeats=9)) / 1e3)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_blocks(num_rows: int, num_blocks: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Block tables as they are after a while: any order."""
    return np.random.default_rng(SEED).permutation(num_rows * num_blocks).reshape(num_rows, num_blocks).astype(np.int32)
