"""Claim: serial and overlapped steps are equal bit for bit, and their gradient is that of the plain computation.

Two runs of the same steps on a tiny random model, one with each runner, are compared in every sampled token, log-prob,
gradient and weight. Each step's gradient is also computed by transformers and autograd, on every full sequence by
itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollplex.bench.tiny import TINY_RECIPE, RecordingPolicy, tiny_workers
from rollplex.build import Runtime
from rollplex.config import AlgoConfig, Config, parse_config
from rollplex.gpu.device import select_device
from rollplex.metrics import logprob_differences
from rollplex.models.load import to_transformers
from rollplex.models.vlm import VisionLanguageModel
from rollplex.step import Group
from rollplex.testing import canned_prompts, hf_inputs, tiny_config, tiny_model
from rollplex.trace import Trace
from rollplex.train.optim import GradientAccumulator
from rollplex.types import Sample

IMAGES_PER_PROMPT = (0, 2, 1, 2, 1)


@dataclass(frozen=True, eq=False)
class Record:
    """What one step computed; `before` and `after` are all weights around its update."""

    groups: Sequence[Group]
    before: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


def run(steps: int, device: str = "cpu", dtype: str = "float32") -> dict[str, object]:
    """Compare the runners over `steps` steps, and the gradients with transformers' and autograd's."""
    records = {runner: run_steps(recipe(runner, device, dtype), steps) for runner in ("serial", "overlapped")}
    pairs = list(zip(records["serial"], records["overlapped"], strict=True))
    errors = [gradient_errors(record, recipe("serial", device, dtype).algo) for record in records["overlapped"]]
    samples = [sample for record in records["serial"] for group in record.groups for sample in group.responses]
    return {
        "bench": "exactness",
        "device": device,
        "dtype": dtype,
        "steps": steps,
        "groups": len(IMAGES_PER_PROMPT),
        "group_size": TINY_RECIPE["rollout"]["group_size"],
        "samples": len(samples),
        "response_lengths": sorted({sample.length for sample in samples}),
        "serial_overlapped_equal": all(records_equal(*pair) for pair in pairs),
        "gradient_error": max(max(pair) for pair in errors),
        "gradient_error_all_parameters": max(together for together, _ in errors),
        "gradient_error_worst_parameter": max(worst for _, worst in errors),
        "logprob_difference": max(
            float(logprob_differences(record.groups).max()) for each in records.values() for record in each
        ),
    }


def recipe(runner: str, device: str, dtype: str, **algo: Any) -> Config:
    """The tiny recipe; `algo` overrides fields of its section."""
    values = {**TINY_RECIPE, "run": {"runner": runner, "device": device}}
    values["model"] = {**TINY_RECIPE["model"], "dtype": dtype}
    values["algo"] = {**TINY_RECIPE["algo"], **algo}
    return parse_config(values)


def run_steps(config: Config, steps: int) -> list[Record]:
    """Run steps from seeded weights, and keep what they computed."""
    hf_config = tiny_config()
    workers = tiny_workers(config, hf_config, select_device(config.run.device))
    policy, runtime = workers.policy, Runtime(config, workers)
    assert isinstance(policy, RecordingPolicy)
    records = []
    for number in range(steps):
        prompts = canned_prompts(hf_config, IMAGES_PER_PROMPT, seed=number)
        groups = runtime.train(prompts, number, Trace()).groups
        records.append(Record(groups, policy.weights_seen[-2], policy.gradients_seen[-1], policy.weights_seen[-1]))
    return records


def records_equal(one: Record, other: Record) -> bool:
    """Whether two steps agree in every bit of every token, log-prob, gradient and weight."""
    samples = [[sample for group in record.groups for sample in group.responses] for record in (one, other)]
    if not all(_samples_equal(*pair) for pair in zip(*samples, strict=True)):
        return False
    for attribute in ("trained_T", "reference_T"):
        pairs = [(getattr(a, attribute), getattr(b, attribute)) for a, b in zip(one.groups, other.groups, strict=True)]
        if not all((a is None and b is None) or torch.equal(a, b) for a, b in pairs):
            return False
    return all(
        torch.equal(tensors[name], getattr(other, kind)[name])
        for kind, tensors in (("gradients", one.gradients), ("after", one.after))
        for name in tensors
    )


def _samples_equal(one: Sample, other: Sample) -> bool:
    arrays = ("ids", "raw_logprobs", "tempered_logprobs", "sampling_logprobs")
    same = all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in arrays)
    return same and (one.finish_reason, one.decode_step) == (other.finish_reason, other.decode_step)


def gradient_errors(record: Record, algo: AlgoConfig) -> tuple[float, float]:
    """Relative error of a step's gradient: over all parameters together, and of the worst parameter.

    The plain computation is always float32 on the CPU, from the same weights.
    """
    model = tiny_model(tiny_config())
    model.load_state_dict({name: weight.cpu().float() for name, weight in record.before.items()}, assign=True)
    expected = plain_gradients(model, record.groups, algo)
    return relative_errors(published(model, record.gradients), expected)


def published(model: VisionLanguageModel, packed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of packed tensors, by published name."""
    unpack: Any = model.family.unpack  # type: ignore[attr-defined]
    return {name: part for packed_name, tensor in packed.items() for name, part in unpack(packed_name, tensor)}


def relative_errors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Norm of the difference over the norm of what is expected: over all tensors together, and of the worst tensor."""
    differences, norms = [], []
    for name, gradient in found.items():
        reference = expected[name].to(gradient.device).double()
        differences.append(float((gradient.double() - reference).norm()))
        norms.append(float(reference.norm()))
    total = sum(value**2 for value in differences) ** 0.5 / sum(value**2 for value in norms) ** 0.5
    return total, max(difference / norm for difference, norm in zip(differences, norms, strict=True))


def plain_gradients(model: VisionLanguageModel, groups: Sequence[Group], algo: AlgoConfig) -> dict[str, Tensor]:
    """Gradients by published name: transformers' model on each full sequence by itself, the loss written out.

    Token-mean aggregation, one update per batch (so the ratio is 1), KL estimator k3 in the loss. In the model's
    precision, on its device; summed over sequences in float32.
    """
    twin, device = to_transformers(model).requires_grad_(True), model.device
    parameters = {name.replace("model.visual.", "visual.").replace("language_model.", ""): parameter
                  for name, parameter in twin.named_parameters()}  # fmt: skip
    sums = GradientAccumulator(parameters)
    num_tokens = sum(sample.length for group in groups for sample in group.responses)
    for group in groups:
        assert group.credit is not None and group.reference_T is not None
        advantages_T, reference_T = group.credit.advantages_T.to(device), group.reference_T.to(device)
        start = 0
        for sample in group.responses:
            tokens = slice(start, start := start + sample.length)
            inputs = {name: tensor.to(device) for name, tensor in hf_inputs(group.prompt, sample.ids).items()}
            logits = twin(**inputs, use_cache=False).logits[0].float()
            predictions = logits[len(group.prompt.ids) - 1 : -1].log_softmax(-1)
            logprobs_T = predictions.gather(1, torch.from_numpy(sample.ids).to(device)[:, None])[:, 0]
            ratio_T = (logprobs_T - logprobs_T.detach()).exp()
            log_r_T = reference_T[tokens] - logprobs_T
            kl_T = log_r_T.exp() - log_r_T - 1
            loss_T = -ratio_T * advantages_T[tokens] + algo.kl_coefficient * kl_T
            (loss_T.sum() / num_tokens).backward()
    return sums.buffers
