"""Claim: a rollout of long image prompts takes about as long as its bytes and operations, and never waits for the host.

Prompts of square images lie in host memory as the data workers leave them; time runs until the last token of the last
sample is on the host. Work is done as training does it: images through the tower, prefixes once per prompt, samples
decoded together. Lengths are all equal, or drawn log-normally, which leaves small batches at the end. How long it takes
to process the images in worker processes stands beside it.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollplex.bench.gpu_trace import busy_us, host_gap_fraction, traced
from rollplex.bench.work import SEED, image_prompts, model_of, synchronize
from rollplex.config import RolloutConfig, TrainConfig
from rollplex.errors import ConfigError
from rollplex.gpu.device import describe, peak_memory_bytes, select_device
from rollplex.gpu.regions import regions, unaccounted_fraction
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import VisionLanguageModel
from rollplex.phases.run import finish
from rollplex.pool import WorkerPool
from rollplex.rollout.engine import DecodeStep, Engine, Vocabulary
from rollplex.rollout.sampler import SamplingParams
from rollplex.trace import Trace
from rollplex.train.policy import Scorer
from rollplex.train.prompts import PromptPasses
from rollplex.types import Prompt

MEDIAN_TOKENS, SIGMA = 512, 0.8
"""Of the log-normal lengths."""
TRACED_TOKENS = 512
"""Longest response of the traced run."""
PEER = {
    "name": "vLLM 0.26 on one H200, FA3, CUDA graphs, prefix caching (docs/log.md)",
    "work": "3B, 8 prompts of 8 images of 896x896, G=8, 512 tokens",
    "seconds": 12.8, "media_seconds": 2.9, "seconds_to_all_first_tokens": 6.2, "decode_step_ms": 7.2,
}  # fmt: skip


def run(
    model: str, prompts: int, images: int, pixels: int, group: int, new_tokens: int, lengths: str, longest: int,
    device: str, runs: int = 3,
) -> dict[str, object]:  # fmt: skip
    """Seconds from pixels to the last token, by phase, and what the GPU waited."""
    if lengths not in ("fixed", "lognormal"):
        raise ConfigError(f"--lengths {lengths}: use fixed or lognormal")
    on = select_device(device)
    weights = model_of(model, on, torch.bfloat16 if on.type == "cuda" else torch.float32)
    limits = None if lengths == "fixed" else _lognormal(prompts * group, longest)
    most = new_tokens if limits is None else longest
    config = RolloutConfig(max_new_tokens=most, group_size=group, max_batch_samples=min(256, prompts * group))
    engine = Engine(weights, Vocabulary(frozenset(), weights.decoder.config.vocab_size, str), config, SEED)
    rollout = _Rollout(weights, engine, image_prompts(weights, prompts, images, pixels), group, limits)
    rollout.run()  # compiles, captures, and takes its memory
    times = sorted(rollout.timed() for _ in range(runs if limits is None else 1))
    phases = rollout.phases()
    result: dict[str, Any] = {
        "bench": "generate",
        "model": model,
        "device": describe(on),
        "prompts": prompts,
        "images_per_prompt": images,
        "pixels": pixels,
        "prompt_tokens": len(rollout.prompts[0].ids),
        "group": group,
        "lengths": lengths,
        "longest": most,
        "tokens": rollout.num_tokens,
        "seconds": times[len(times) // 2],
        "spread_seconds": [times[0], times[-1]],
        "tokens_per_s": rollout.num_tokens / times[len(times) // 2],
        **phases,
        "kv_blocks": engine.num_blocks,
        "media_processing": _media(prompts * images, pixels),
        "peer": PEER,
    }
    if on.type == "cuda":
        result |= _waiting(rollout) | rollout.memory()
    return result


class _Rollout:
    """One rollout, again and again."""

    def __init__(
        self, model: VisionLanguageModel, engine: Engine, prompts: Sequence[Prompt], group: int,
        limits: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.model, self.engine, self.prompts, self._group, self._limits = model, engine, prompts, group, limits
        self._scorer = Scorer(model, TrainConfig(), 1.0)
        self.num_tokens = self.num_steps = 0
        self.num_samples = len(prompts) * group
        self._kept: list[object] = []

    def run(self, mark: Callable[[str], None] = lambda phase: None) -> None:
        """Vision, prefill, decode; `mark` is called after each."""
        self._kept = []
        indices = range(len(self.prompts))
        passes = PromptPasses(self.prompts, self.engine.prefill_tokens, Trace())
        encoded = [passes.encode(self._scorer, index) for index in indices]
        mark("vision")
        prefixes: list[PrefixState] = [finish(passes.prefix(self._scorer, index, indices)) for index in indices]
        mark("prefill")
        self.num_tokens = self.num_steps = 0
        for event in self.engine.decode(
            self.prompts, prefixes.__getitem__, step=0, group_size=self._group, params=SamplingParams(),
            limits=self._limits,
        ):  # fmt: skip
            assert isinstance(event, DecodeStep)
            self.num_tokens += event.num_decoded
            self.num_steps += event.num_decoded > 0
        mark("decode")
        self._kept = [encoded, prefixes]

    def beginning(self) -> None:
        """The same, with samples that end early: a trace of thousands of steps would not fit."""
        most = self._limits
        self._limits = [min(TRACED_TOKENS, limit) for limit in most or [TRACED_TOKENS] * self.num_samples]
        self.run()
        self._limits = most

    def timed(self) -> float:
        """Seconds of one rollout."""
        synchronize(self.model.device)
        start = time.perf_counter()
        self.run()
        synchronize(self.model.device)
        return time.perf_counter() - start

    def phases(self) -> dict[str, object]:
        """Seconds of each phase, in a run that waits after each, and milliseconds of a decode step."""
        seconds: dict[str, float] = {}
        synchronize(self.model.device)
        before = time.perf_counter()

        def mark(phase: str) -> None:
            nonlocal before
            synchronize(self.model.device)
            seconds[phase] = time.perf_counter() - before
            before += seconds[phase]

        self.run(mark)
        return {
            "phase_seconds": seconds,
            "decode_steps": self.num_steps,
            "decode_step_ms": seconds["decode"] / self.num_steps * 1e3,
        }

    def memory(self) -> dict[str, object]:
        """What lies in the GPU's memory after a rollout whose prefixes are kept, and its peak."""
        encoded, prefixes = self._kept
        assert isinstance(encoded, list) and isinstance(prefixes, list)
        found = regions(
            {
                "decoder weights": self.model.decoder.parameters(),
                "vision weights": self.model.vision.parameters(),
                "suffix K/V": (self.engine.pages.k_LSKD, self.engine.pages.v_LSKD),
                "prefix K/V": (x for state in prefixes for x in (state.kv.k_LPKD, state.kv.v_LPKD)),
                "prefix ids and angles": (x for state in prefixes for x in _small(state)),
                "image features": (feature for each in encoded for feature in each.features),
                "decode workspace": self.engine.tokens.workspace(),
            }
        )
        return {
            "memory_bytes": {region.name: region.num_bytes for region in found},
            "allocated_bytes": torch.cuda.memory_allocated(self.model.device),
            "unaccounted_fraction": unaccounted_fraction(found, self.model.device),
            "peak_bytes": peak_memory_bytes(self.model.device),
        }


def _waiting(rollout: _Rollout) -> dict[str, object]:
    """Of the time from the host's first call to the GPU's last event: what the GPU waited for the host, and worked."""
    trace = traced(rollout.beginning)
    return {
        "host_gap_fraction": host_gap_fraction(trace),
        "gpu_busy_fraction": busy_us(trace.events) / (max(event.end_us for event in trace.events) - trace.start_us),
    }


def _small(state: PrefixState) -> Iterator[Tensor]:
    yield from (state.ids_P, state.image_rows_I, state.rope.cos_TD, state.rope.sin_TD)


def _lognormal(count: int, longest: int) -> list[int]:
    drawn = np.random.default_rng(SEED).lognormal(math.log(MEDIAN_TOKENS), SIGMA, count)
    return [int(value) for value in np.clip(drawn, 1, longest)]


def _media(num_images: int, pixels: int) -> dict[str, object]:
    """Seconds until that many images are patches in this process, by as many workers as there are cores."""
    workers = min(os.cpu_count() or 1, num_images, 16)
    with _pool(workers) as pool:
        for future in [pool.submit(patches_of, SEED, 28) for _ in range(workers)]:  # workers have started
            future.result()
        start = time.perf_counter()
        futures = [pool.submit(patches_of, index, pixels) for index in range(num_images)]
        num_patches = sum(len(future.result()) for future in futures)
        return {
            "images": num_images, "workers": workers, "seconds": time.perf_counter() - start, "patches": num_patches,
        }  # fmt: skip


@contextmanager
def _pool(workers: int) -> Iterator[WorkerPool]:
    pool = WorkerPool(workers)
    try:
        yield pool
    finally:
        pool.close()


def patches_of(seed: int, pixels: int) -> npt.NDArray[np.float32]:
    """A random picture of that side, as the published image processor cuts it. Runs in worker processes."""
    side = np.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(min_pixels=28**2, max_pixels=16384 * 28**2)
    patches: npt.NDArray[np.float32] = processor(PIL.Image.fromarray(side), return_tensors="np")["pixel_values"]
    return patches
