"""Claim: a whole training step of long image prompts takes about as long as its operations and bytes.

A step as `rollplex train` runs it - rollout, reference, update of all weights, serial runner - on random weights, from
pixel values in host memory to the new weights. Beside its seconds: each phase's, in one more step that waits for the
GPU after each of them, with the phase's operations, its bytes, and the share of the roofline that it reaches; memory by
phase and purpose; and, with sharing off, scoring and gradients where every sample computes its own prompt, as usual
trainers do.

Responses have no stop token, so all are of full length and the work is the same in every step.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rollplex.bench.roofline import decode_bytes, prefill_flops, suffix_flops
from rollplex.bench.tiny import CannedRewards
from rollplex.bench.work import (
    copy_bytes_per_s,
    image_prompts,
    milliseconds,
    model_of,
    product_flops_per_s,
    synchronize,
)
from rollplex.build import Runtime, memory_explained, training_stages
from rollplex.config import Config, apply_override, parse_config
from rollplex.gpu.device import describe, select_device
from rollplex.gpu.regions import regions
from rollplex.models.prefix import PrefixState
from rollplex.models.vision import VisionTower, vision_flops
from rollplex.phases.run import RUNNERS, finish
from rollplex.rollout.engine import Engine, Vocabulary
from rollplex.rollout.sampler import SamplingParams
from rollplex.step import Step, Workers
from rollplex.trace import Trace
from rollplex.train.offload import state_bytes
from rollplex.train.policy import Policy, Scored, Scorer
from rollplex.train.prompts import PromptPasses
from rollplex.types import Prompt, Sample

KL = 0.04
HOST_COPY_BYTES = 2**30
PEERS = (
    {"name": "TRL 1.16 on one H200, generation by transformers, liger kernels (docs/log.md)", "seconds": 162.9},
    {"name": "the same with vLLM 0.26 for generation, as its parts add up (docs/log.md)", "seconds": 108},
)
"""3B, 8 prompts of 8 images of 896x896, G=8, 512 tokens, KL 0.04, frozen vision tower."""
SCORING = ("reference.prefix", "reference.suffix", "policy.suffix", "policy.prefix_backward", "policy.update")


@dataclass(frozen=True)
class Shape:
    """A batch: square images per prompt, G responses of equal length to each."""

    prompts: int = 8
    images: int = 8
    pixels: int = 896
    group: int = 8
    new_tokens: int = 512


@dataclass(frozen=True)
class Work:
    """What a phase has to do at least: operations, bytes of device memory, bytes from (and to) host memory."""

    flops: int = 0
    num_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """Measured: of matrix products, of device copies (read plus written), of copies from pinned host memory."""

    flops_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float

    def bound_s(self, work: Work) -> float:
        """The least time for it, if all overlapped."""
        return max(
            work.flops / self.flops_per_s, work.num_bytes / self.bytes_per_s, work.host_bytes / self.host_bytes_per_s
        )


def run(
    model: str, shape: Shape, train_vision: bool, reference: bool, unshared: bool, steps: int,
    overrides: Sequence[str], device: str,
) -> dict[str, object]:  # fmt: skip
    """Seconds of a step and of its phases; `overrides` are those of a recipe, for example train.recompute=none."""
    on = select_device(device)
    config = recipe(model, shape, train_vision, reference, on, overrides)
    with memory_explained():
        workers = make_workers(model, config, on)
        runtime = Runtime(config, workers)
        prompts = image_prompts(workers.policy.model, shape.prompts, shape.images, shape.pixels)
        runtime.train(prompts, 0, Trace())  # compiles, captures, and takes its memory
        times = sorted(_seconds(runtime, prompts, 1 + number, on) for number in range(steps))
        measured = MeasuredTrace(workers, on)
        step = measured.run(runtime, prompts, 1 + steps)
        phases = _phases(measured, phase_work(workers, prompts, shape, train_vision), _rates(on))
        result: dict[str, Any] = {
            "bench": "step",
            "model": model,
            "device": describe(on),
            "shape": vars(shape),
            "prompt_tokens": len(prompts[0].ids),
            "train_vision": train_vision,
            "reference": reference,
            "overrides": list(overrides),
            "seconds": median(times),
            "spread_seconds": [times[0], times[-1]],
            "grad_norm": step.updates[-1].grad_norm,
            **phases,
            "optimizer_bytes": vars(state_bytes(workers.policy.optimizer.storage.chunks)),
            "peers": PEERS,
        }
        if on.type == "cuda":
            result |= measured.memory()
        if unshared:
            result["unshared"] = _unshared(
                workers, prompts[0], step.groups[0].responses, result["phases"], shape.prompts, on
            )
    return result


def recipe(
    model: str, shape: Shape, train_vision: bool, reference: bool, device: torch.device, overrides: Sequence[str]
) -> Config:
    """The step's recipe: published defaults, but for what the work is."""
    values: dict[str, Any] = {
        "model": {
            "path": model, "train_vision": train_vision, "dtype": "bfloat16" if device.type == "cuda" else "float32",
        },
        "data": {"train": "random"},
        "rollout": {"group_size": shape.group, "max_new_tokens": shape.new_tokens},
        "algo": {"kl_coefficient": KL if reference else 0.0},
        "train": {"prompts_per_step": shape.prompts},
        "run": {"runner": "serial", "device": device.type},
    }  # fmt: skip
    for override in overrides:
        apply_override(values, override)
    return parse_config(values)


def make_workers(name: str, config: Config, device: torch.device) -> Workers:
    """Policy, reference and engine on random weights; rewards that are there at once."""
    dtype, temperature = getattr(torch, config.model.dtype), config.rollout.temperature
    model, reference = model_of(name, device, dtype), None
    if config.algo.kl_coefficient:
        twin = model_of(name, device, dtype).requires_grad_(False)
        if not config.model.train_vision:
            twin.vision = model.vision
        reference = Scorer(twin, config.train, temperature)
    policy = Policy(model, config.train, temperature, train_vision=config.model.train_vision)
    vocabulary = Vocabulary(frozenset(), model.decoder.config.vocab_size, str)
    engine = Engine(model, vocabulary, config.rollout, config.run.seed)
    return Workers(policy, reference, engine, CannedRewards())


def phase_work(workers: Workers, prompts: Sequence[Prompt], shape: Shape, train_vision: bool) -> dict[str, Work]:
    """What each phase has to do. Gradients: three forwards' operations; what is recomputed for suffixes counts nothing.

    The update reads gradients twice (norm, step), clears them, and reads and writes the state.
    """
    policy = workers.policy
    c, tower = policy.model.decoder.config, policy.model.vision
    assert isinstance(tower, VisionTower)
    vision = vision_flops(tower.config, [image.grid for prompt in prompts for image in prompt.images])
    prefix = sum(prefill_flops(c, prompt.prefix_length) for prompt in prompts)
    lengths = [prompt.prefix_length for prompt in prompts]
    suffix = sum(suffix_flops(c, length, shape.new_tokens) for length in lengths) * shape.group
    again = vision if train_vision else 0
    gradients = sum(buffer.nbytes for buffer in policy.gradients.buffers.values())
    weights = sum(parameter.nbytes for parameter in policy.trained.values())
    state = state_bytes(policy.optimizer.storage.chunks)
    update = Work(num_bytes=3 * gradients + weights + 2 * (state.device + state.host), host_bytes=state.host)
    found = {
        "vision.encode": Work(vision),
        "rollout.prefill": Work(prefix),
        "rollout.decode": Work(num_bytes=_decode_bytes(workers.engine, c, lengths, shape)),
        "reference.prefix": Work(prefix + again),
        "reference.suffix": Work(suffix),
        "policy.suffix": Work(3 * suffix),
        "policy.prefix_backward": Work(3 * (prefix + again)),
        "policy.update": update,
    }
    kept = found.keys() if workers.reference else [name for name in found if not name.startswith("reference")]
    return {name: found[name] for name in kept}


def _decode_bytes(engine: Engine, c: Any, lengths: Sequence[int], shape: Shape) -> int:
    """Of all decode steps: samples advance together, as many as the engine admits."""
    rows = len(lengths) * shape.group
    waves = -(-rows // engine.config.max_batch_samples)
    element = engine.pages.k_LSKD.element_size()
    one = decode_bytes(c, rows, shape.group, 0, 0, element_bytes=element)
    prefix = sum(decode_bytes(c, 1, 1, length, 0, element_bytes=element).prefix for length in lengths)
    suffix = decode_bytes(c, rows, 1, 0, 1, element_bytes=element).suffix
    tokens = shape.new_tokens
    return tokens * (waves * one.weights + prefix) + suffix * tokens * (tokens + 1) // 2


class MeasuredTrace(Trace):
    """Waits for the GPU at the end of every span but decoding's turns, which wait for their tokens themselves.

    Keeps, for each phase, the largest memory in use and what it was for.
    """

    def __init__(self, workers: Workers, device: torch.device) -> None:
        super().__init__()
        self._workers, self._device = workers, device
        self._step: Step | None = None
        self._phases: dict[str, dict[str, Any]] = {}

    def run(self, runtime: Runtime, prompts: Sequence[Prompt], number: int) -> Step:
        """One training step under this trace."""
        config = runtime.config
        self._step = step = Step(
            prompts, runtime.workers, config, self, number=number, group_size=config.rollout.group_size,
            params=SamplingParams(),
        )  # fmt: skip
        for stage in training_stages(config):
            stage(step)
        synchronize(self._device)
        RUNNERS[config.run.runner](step.graph, self)
        step.release_features()
        return step

    @contextmanager
    def span(self, name: str, *, lane: str = "", group: int = -1, sample: int = -1) -> Iterator[None]:
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        with super().span(name, lane=lane, group=group, sample=sample):
            yield
            if lane != "decode":
                synchronize(self._device)
        if cuda:
            self._look(name, torch.cuda.max_memory_allocated(self._device))

    def _look(self, name: str, peak: int) -> None:
        known = self._phases.get(name)
        if known is None or peak > known["peak_bytes"]:
            found = regions(_tensors(self._workers, self._step))
            self._phases[name] = {
                "peak_bytes": peak,
                "allocated_bytes": torch.cuda.memory_allocated(self._device),
                "regions": {region.name: region.num_bytes for region in found if region.num_bytes},
            }

    def memory(self) -> dict[str, object]:
        """Of each phase, at the end of its span with the highest peak."""
        return {
            "memory_by_phase": self._phases,
            "peak_bytes": max(phase["peak_bytes"] for phase in self._phases.values()),
        }


def _tensors(workers: Workers, step: Step | None) -> Mapping[str, Iterator[Tensor]]:
    """Everything that lies in the GPU's memory, by purpose."""
    policy, engine = workers.policy, workers.engine
    groups = step.groups if step else []
    prefixes = [group.prefix for group in groups if group.prefix is not None]
    frozen = [group.reference_prefix for group in groups if group.reference_prefix is not None]
    reference = workers.reference.model.parameters() if workers.reference else ()
    return {
        "policy weights": iter(policy.model.parameters()),
        "reference weights": iter(reference),
        "gradients": iter(policy.gradients.buffers.values()),
        "optimizer": (x for part in policy.optimizer.storage.tensors for x in part.values() if not x.is_cpu),
        "suffix K/V": iter((engine.pages.k_LSKD, engine.pages.v_LSKD)),
        "decode workspace": iter(engine.tokens.workspace()),
        "policy prefix K/V": _kv(prefixes),
        "policy prefix K/V gradients": (x for state in prefixes for x in (state.kv.grad_k_LPKD, state.kv.grad_v_LPKD)
                                        if x is not None),
        "policy prefix layer inputs": (x for state in prefixes for x in state.inputs),
        "reference prefix K/V": _kv(frozen),
        "image features": (x for state in (*prefixes, *frozen) for x in state.encoded.features),
    }  # fmt: skip


def _kv(states: Sequence[PrefixState]) -> Iterator[Tensor]:
    return (x for state in states for x in (state.kv.k_LPKD, state.kv.v_LPKD))


def _phases(trace: Trace, work: Mapping[str, Work], rates: Rates | None) -> dict[str, object]:
    """Each phase's seconds, work and bound, and the sums."""
    phases = {name: _phase(trace.seconds[name], each, rates) for name, each in work.items()}
    found: dict[str, object] = {"phases": phases, "flops": sum(each.flops for each in work.values())}
    if rates:
        found |= {"rates": vars(rates), "bound_seconds": sum(phase["bound_seconds"] for phase in phases.values())}
    return found


def _phase(seconds: float, work: Work, rates: Rates | None) -> dict[str, float]:
    found: dict[str, float] = {"seconds": seconds, "flops": work.flops, "bytes": work.num_bytes}
    if work.flops:
        found["tflops"] = work.flops / seconds / 1e12
    if work.host_bytes:
        found["host_bytes"] = work.host_bytes
    if rates:
        found["bound_seconds"] = rates.bound_s(work)
        found["fraction_of_bound"] = found["bound_seconds"] / seconds
    return found


def _unshared(
    workers: Workers, prompt: Prompt, samples: Sequence[Sample], phases: Mapping[str, Mapping[str, float]],
    num_prompts: int, device: torch.device,
) -> dict[str, float]:  # fmt: skip
    """Scoring and gradients of one group, with a prompt's passes for each of its samples.

    It is the computation of a trainer with gradient checkpointing: of the prompt one forward for the reference, and one
    forward, one recomputation and one backward for the policy; images once, for both.
    """

    def loss(tokens: slice, scored: Scored) -> Tensor:
        return -scored.logprobs_T.sum()

    def group() -> None:
        for sample in samples:
            passes = PromptPasses([prompt], 0, Trace())
            if workers.reference is not None:
                state = finish(passes.prefix(workers.reference, 0, [0]))
                finish(workers.reference.score(prompt, state, [sample]))
            state = finish(passes.prefix(workers.policy, 0, [0], for_training=True))
            finish(workers.policy.backward(prompt, state, [sample], loss))
            finish(workers.policy.prefix_backward(state))

    seconds = milliseconds(group, device, repeats=1)[0] / 1e3
    workers.policy.gradients.zero()
    update = phases["policy.update"]["seconds"]
    shared = sum(phases[name]["seconds"] for name in SCORING if name in phases)
    alone = seconds * num_prompts + update
    return {
        "seconds_of_one_group": seconds, "scoring_and_update_seconds": alone,
        "shared_scoring_and_update_seconds": shared, "sharing_gain": alone / shared,
    }  # fmt: skip


def _seconds(runtime: Runtime, prompts: Sequence[Prompt], number: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    runtime.train(prompts, number, Trace())
    synchronize(device)
    return time.perf_counter() - start


def _rates(device: torch.device) -> Rates | None:
    if device.type != "cuda":
        return None
    source = torch.randint(256, (HOST_COPY_BYTES,), dtype=torch.uint8).pin_memory()
    target = torch.empty(HOST_COPY_BYTES, dtype=torch.uint8, device=device)
    times = milliseconds(lambda: target.copy_(source, non_blocking=True), device)
    return Rates(product_flops_per_s(device), copy_bytes_per_s(device), HOST_COPY_BYTES / median(times) * 1e3)
