"""Claim: a decode step reads what it must once, at the memory's bandwidth; a group's prefix once for all its samples.

Steps run as a rollout runs them, with upload and sampling, on random weights and K/V: `batch` samples in groups, each
group over a prefix of its own, all at the same suffix length. Beside each cell stand the time that the bytes take at
the bandwidth of a copy measured in the same run, the kernels of one step with their own bounds, and the same step with
every sample reading the prefix for itself.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from rollplex.bench.gpu_trace import GpuEvent, traced
from rollplex.bench.roofline import decode_bytes
from rollplex.bench.work import copy_bytes_per_s, milliseconds, model_of, random_blocks, random_prefix, synchronize
from rollplex.config import RolloutConfig
from rollplex.errors import ConfigError
from rollplex.gpu.device import describe, select_device
from rollplex.models.attention import PrefixKV
from rollplex.models.decoder import DecoderConfig
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.engine import Engine, Vocabulary
from rollplex.rollout.noise import pack_keys
from rollplex.rollout.rows import PendingTokens, Rows
from rollplex.rollout.sampler import SamplingParams

WARM_UP_STEPS = 5
PARAMS = SamplingParams()


def run(
    model: str, batches: Sequence[int], group: int, prefix: int, suffix: int, steps: int, device: str
) -> dict[str, object]:
    """Milliseconds per step of every batch size, their bounds, and the kernels."""
    for batch in batches:
        if batch % min(group, batch):
            raise ConfigError(f"--batch {batch}: groups of {group} do not fill it; use a multiple of --group {group}")
    on = select_device(device)
    dtype = torch.bfloat16 if on.type == "cuda" else torch.float32
    weights = model_of(model, on, dtype)
    bandwidth = copy_bytes_per_s(on) if on.type == "cuda" else None
    cells = [_cell(weights, batch, min(group, batch), prefix, suffix, steps, bandwidth) for batch in batches]
    return {
        "bench": "decode",
        "model": model,
        "device": describe(on),
        "dtype": str(dtype).removeprefix("torch."),
        "group": group,
        "prefix": prefix,
        "suffix": suffix,
        "copy_gb_per_s": bandwidth and bandwidth / 1e9,
        "cells": cells,
    }


def _cell(
    model: VisionLanguageModel, batch: int, group: int, prefix: int, suffix: int, steps: int, bandwidth: float | None
) -> dict[str, object]:
    config = RolloutConfig(max_new_tokens=suffix, max_batch_samples=batch)
    vocabulary = Vocabulary(frozenset(), model.decoder.config.vocab_size, str)
    engine = Engine(model, vocabulary, config, seed=0)
    engine.pages.k_LSKD.normal_()
    engine.pages.v_LSKD.normal_()
    groups = [random_prefix(model, prefix) for _ in range(batch // group)]
    found: dict[str, object] = {"batch": batch}
    for shared in (True, False):
        step = _step(engine, groups, batch, group, suffix, shared)
        times = _step_ms(step, model.device, steps)
        values = _against_bound(model, times, decode_bytes(
            model.decoder.config, batch, group, prefix, suffix, shared=shared, element_bytes=model.dtype.itemsize
        ).total, batch, bandwidth)  # fmt: skip
        if shared and bandwidth:
            values["kernels"] = _kernels(
                traced(step).events, model.decoder.config, batch, group, prefix, suffix, bandwidth
            )
        found |= values if shared else {"prefix_per_sample": values}
        if not shared:
            found["sharing_gain"] = values["step_ms"] / float(str(found["step_ms"]))
    return found


def _step(
    engine: Engine, groups: Sequence[PrefixKV], batch: int, group: int, suffix: int, shared: bool
) -> Callable[[], PendingTokens]:
    """Launches one whole step, with tokens that go from step to step on the device."""
    prefixes = [(kv, group) for kv in groups] if shared else [(groups[row // group], 1) for row in range(batch)]
    lag, rows = engine.tokens.lag, range(batch)
    keys = pack_keys(0, 0, [row // group for row in rows], [row % group for row in rows], [suffix] * batch).numpy()
    fixed = Rows(
        tuple(prefixes), np.zeros(batch, dtype=np.int64), np.arange(batch), np.full(batch, suffix),
        np.full(batch, suffix, dtype=np.int32), random_blocks(batch, engine.num_blocks // batch), keys,
    )  # fmt: skip
    engine.tokens.launch(fixed, PARAMS).read()
    if lag:
        fixed.ids_B[:] = -1
    return lambda: engine.tokens.launch(fixed, PARAMS)


def _step_ms(step: Callable[[], PendingTokens], device: torch.device, steps: int) -> list[float]:
    """Device time of each step while the host reads the one before, sorted."""
    for _ in range(WARM_UP_STEPS):
        step().read()
    if device.type != "cuda":
        return milliseconds(step, device, repeats=steps)
    marks, before = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)], None
    for mark in marks[:-1]:
        mark.record()
        pending = step()
        if before is not None:
            before.read()
        before = pending
    marks[-1].record()
    synchronize(device)
    return sorted(one.elapsed_time(other) for one, other in pairwise(marks))


def _against_bound(
    model: VisionLanguageModel, times: list[float], num_bytes: int, batch: int, bandwidth: float | None
) -> dict[str, Any]:
    step_ms = median(times)
    values: dict[str, Any] = {
        "step_ms": step_ms,
        "spread_ms": [times[len(times) // 10], times[-1 - len(times) // 10]],
        "tokens_per_s": batch / step_ms * 1e3,
        "bytes": num_bytes,
    }
    if bandwidth:
        values["bound_ms"] = num_bytes / bandwidth * 1e3
        values["fraction_of_bound"] = values["bound_ms"] / step_ms
    return values


PRODUCTS = ("qkv", "out", "gate_up", "down")


def _kernels(
    events: Sequence[GpuEvent], c: DecoderConfig, batch: int, group: int, prefix: int, suffix: int, bandwidth: float
) -> list[dict[str, object]]:
    """The step's kernels by what they do, with time and bound per call. Products come in a layer's order."""
    element, width = 2, c.hidden
    kv = 2 * c.num_kv_heads * c.head_dim * element * (batch // group * prefix + batch * suffix)
    heads, kv_heads = c.num_heads * c.head_dim, 2 * c.num_kv_heads * c.head_dim
    rows = {"qkv": heads + kv_heads, "out": heads, "gate_up": 2 * c.intermediate, "down": c.intermediate}
    bounds = {f"product {name}": rows[name] * width * element for name in PRODUCTS} | {
        "product head": c.vocab_size * width * element, "attention": kv,
    }  # fmt: skip
    spans: dict[tuple[str, str], list[float]] = {}
    product = -1
    for event in sorted(events, key=lambda event: event.start_us):
        reduces = "splitKreduce" in event.name
        if not reduces and any(mark in event.name for mark in ("nvjet", "gemm", "skinny", "cutlass")):
            product += 1
        role = "other"
        if reduces or any(mark in event.name for mark in ("nvjet", "gemm", "skinny", "cutlass")):
            last = product >= c.num_layers * len(PRODUCTS)
            role = "product head" if last else f"product {PRODUCTS[product % len(PRODUCTS)]}"
        elif "_split_kernel" in event.name:
            role = "attention"
        spans.setdefault((role, event.name), []).append(event.end_us - event.start_us)
    table: list[dict[str, object]] = [
        {
            "role": role, "name": name[:80], "calls": len(times), "us_per_call": median(times),
            "ms_per_step": sum(times) / 1e3,
            "bound_us": bounds[role] / bandwidth * 1e6 if role in bounds and "splitKreduce" not in name else None,
        }
        for (role, name), times in spans.items()
    ]  # fmt: skip
    return sorted(table, key=lambda row: -float(str(row["ms_per_step"])))
