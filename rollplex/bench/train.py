"""Claim: gradients cost about what their operations cost, and a prompt is paid for once, not once per sample.

Some groups: a prefix each, computed forward with its layer inputs kept; their responses, packed, forward and backward
over the prefixes, the head included; then a prefix recomputed and backward, layer by layer. Beside it, the same
gradients with sharing off: every sample computes its own prompt and response as one sequence, forward and backward, as
usual trainers do. Prefix passes are measured on one group.
Operations counted are those of the model, three forwards for a forward and a backward; recomputation of suffixes, where
it is switched on, is work that does not count.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollplex.bench.gpu_trace import kernel_times, traced
from rollplex.bench.roofline import prefill_flops, suffix_flops
from rollplex.bench.work import milliseconds, model_of, product_flops_per_s, text_prompt
from rollplex.config import TrainConfig
from rollplex.gpu.device import describe, peak_memory_bytes, select_device
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import Encoded
from rollplex.phases.run import finish
from rollplex.train.policy import Learner, Responses, Scored
from rollplex.types import Prompt, Sample

REPEATS = 3
NUM_KERNELS = 14
TEXT_IDS = 200
"""Random tokens are below: every vocabulary has as many."""


def run(
    model: str, prefix: int, group: int, suffix: int, recompute: str, unshared: bool, device: str, groups: int = 1
) -> dict[str, object]:
    """Milliseconds and TFLOP/s of all groups' suffixes and of one prefix, and of whole sequences if `unshared`."""
    on = select_device(device)
    weights = model_of(model, on, torch.bfloat16 if on.type == "cuda" else torch.float32)
    config = TrainConfig.model_validate(
        {"recompute": recompute, "microbatch_tokens": max(16384, groups * group * suffix)}
    )
    learner = Learner(weights, config, 1.0, train_vision=False)
    work = _Pack(learner, text_prompt(weights, prefix), groups, group, suffix)
    c = weights.decoder.config
    forward, responses = prefill_flops(c, prefix), suffix_flops(c, prefix, suffix) * group * groups
    result: dict[str, Any] = {
        "bench": "train",
        "model": model,
        "device": describe(on),
        "prefix": prefix,
        "groups": groups,
        "group": group,
        "suffix_tokens": suffix,
        "recompute": recompute,
        "product_tflops": product_flops_per_s(on) / 1e12 if on.type == "cuda" else None,
        "prefix_forward": _measured(work.prefix_forward, forward, on),
        "suffix": _measured(work.suffixes, 3 * responses, on),
        "prefix_backward": _measured(work.prefix_backward, 3 * forward, on),
    }
    shared_ms = result["suffix"]["ms"] / groups + result["prefix_backward"]["ms"]
    result["shared_ms"] = shared_ms
    if unshared:
        alone = _Pack(learner, text_prompt(weights, 1), 1, 1, prefix + suffix)
        one = _measured(alone.suffixes, 3 * (forward + responses // (group * groups)), on)
        result["unshared"] = {"ms_per_sample": one["ms"], "ms": one["ms"] * group, "tflops": one["tflops"]}
        result["sharing_gain"] = one["ms"] * group / shared_ms
    if on.type == "cuda":
        result["peak_bytes"] = peak_memory_bytes(on)
    return result


class _Pack:
    """Groups of a prompt and random responses, and the passes over them."""

    def __init__(self, learner: Learner, prompt: Prompt, groups: int, group: int, suffix: int) -> None:
        self._learner, self._prompt = learner, prompt
        rng, zeros = np.random.default_rng(0), np.zeros(suffix, dtype=np.float32)
        self._groups = [
            Responses(prompt, self.prefix_forward(), [
                Sample(index, sample, rng.integers(0, TEXT_IDS, suffix), zeros, zeros, zeros, "length", "", 0, 1)
                for sample in range(group)
            ])
            for index in range(groups)
        ]  # fmt: skip

    def prefix_forward(self) -> PrefixState:
        learner = self._learner
        return finish(learner.prefixes([self._prompt], [Encoded((), ())], for_training=True))[0]

    def suffixes(self) -> list[Tensor]:
        def loss(tokens: slice, scored: Scored) -> Tensor:
            return -scored.logprobs_T.sum()

        return finish(self._learner.backward(self._groups, [loss] * len(self._groups)))

    def prefix_backward(self) -> None:
        finish(self._learner.prefix_backward(self._groups[0].prefix))


def _measured(work: Callable[[], object], flops: int, device: torch.device) -> dict[str, Any]:
    times = milliseconds(work, device, repeats=REPEATS)
    found: dict[str, Any] = {"ms": median(times), "flops": flops, "tflops": flops / median(times) / 1e9}
    if device.type == "cuda":
        found["kernels"] = [
            {"name": kernel.name[:80], "calls": kernel.calls, "ms": kernel.total_us / 1e3}
            for kernel in kernel_times(traced(work).events)[:NUM_KERNELS]
        ]
    return found
