"""One step of a recipe on the tiny model, and the gradient that it should have, worked out the plain way.

The expected gradient comes from sampled ids and rewards alone: log-probs, entropies, the reference's and the old
log-probs are those of transformers' model on every full sequence by itself; the loss is written out by cases.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollplex.bench.tiny import TINY_RECIPE, RecordingPolicy, tiny_workers
from rollplex.build import Runtime
from rollplex.config import Config, parse_config
from rollplex.models.load import to_transformers
from rollplex.step import Group, Rewards, Step, Workers
from rollplex.testing import hf_inputs, tiny_config, tiny_model
from rollplex.trace import Trace
from rollplex.types import Prompt, Sample

CPU = torch.device("cpu")
BASE: Mapping[str, Mapping[str, Any]] = {
    **TINY_RECIPE,
    "rollout": {"group_size": 3, "max_new_tokens": 10, "max_batch_samples": 8, "block_size": 3, "num_blocks": 12},
    "algo": {},
}


def recipe(sections: Mapping[str, Mapping[str, Any]], runner: str = "overlapped") -> Config:
    values = {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {*BASE, *sections}}
    return parse_config({**values, "run": {"runner": runner, "device": "cpu"}})


@dataclass(frozen=True, eq=False)
class Run:
    """One step and everything around it; gradients and weights by update."""

    config: Config
    step: Step
    workers: Workers
    policy: RecordingPolicy
    trace: Trace
    reference_weights: Mapping[str, Tensor]

    @property
    def groups(self) -> Sequence[Group]:
        return self.step.groups


def run_step(
    config: Config,
    prompts: Sequence[Prompt],
    *,
    tie: bool = False,
    share_vision: bool = False,
    rewards: Rewards | None = None,
) -> Run:
    made = tiny_workers(config, tiny_config(tie=tie), CPU)
    workers = Workers(made.policy, made.reference, made.engine, rewards or made.rewards)
    reference_weights: dict[str, Tensor] = {}
    if workers.reference is not None:
        if share_vision:
            workers.reference.model.vision = workers.policy.model.vision
        parameters = workers.reference.model.named_parameters()
        reference_weights = {name: parameter.detach().clone() for name, parameter in parameters}
    policy, trace = workers.policy, Trace(keep_events=True)
    assert isinstance(policy, RecordingPolicy)
    step = Runtime(config, workers).train(prompts, 0, trace)
    return Run(config, step, workers, policy, trace, reference_weights)


def responses(run: Run) -> list[Sample]:
    return [sample for group in run.groups for sample in group.responses]


def twin_of(weights: Mapping[str, Tensor], tie: bool) -> Any:
    """transformers' model with these weights of ours, in float32."""
    model = tiny_model(tiny_config(tie=tie))
    model.load_state_dict({name: weight.float() for name, weight in weights.items()}, assign=True)
    return to_transformers(model).requires_grad_(True)


def score(twin: Any, prompt: Prompt, sample: Sample, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response's tokens at a temperature."""
    logits = twin(**hf_inputs(prompt, sample.ids), use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
    logprobs_TV = (logits / temperature).log_softmax(-1)
    chosen = [logprobs_TV[index, token] for index, token in enumerate(sample.ids.tolist())]
    return torch.stack(chosen), -(logprobs_TV.exp() * logprobs_TV).sum(-1)


Tokens = dict[tuple[int, int], Tensor]
"""One value per response token, by group and sample."""


@torch.no_grad()
def all_logprobs(weights: Mapping[str, Tensor], run: Run, tie: bool) -> Tokens:
    twin, temperature = twin_of(weights, tie), run.config.rollout.temperature
    return {
        (index, sample.sample): score(twin, group.prompt, sample, temperature)[0]
        for index, group in enumerate(run.groups)
        for sample in group.responses
    }


def kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    x = reference - logprobs
    return {"k1": -x, "k2": 0.5 * x * x, "k3": x.exp() - 1.0 - x}[estimator]


def advantages(run: Run, old: Tokens, reference: Tokens) -> list[list[float]]:
    """By group and sample, from the rewards that CannedRewards gives to these ids."""
    algo, result = run.config.algo, []
    for index, group in enumerate(run.groups):
        rewards = []
        for sample in group.responses:
            reward = float(int(sample.ids.sum()) % 7)
            if algo.kl_coefficient and algo.kl_in == "reward":
                key = index, sample.sample
                reward -= algo.kl_coefficient * float(kl(old[key], reference[key], algo.kl_estimator).sum())
            rewards.append(reward)
        centered = np.array(rewards) - np.mean(rewards)
        scale = np.std(rewards, ddof=1) + 1e-4 if algo.scale_advantages else 1.0
        result.append([float(value) for value in centered / scale])
    return result


def token_losses(
    config: Config, logprobs: Tensor, entropy: Tensor, old: Tensor, reference: Tensor | None, advantage: float
) -> tuple[Tensor, int]:
    """Loss of each token, case by case; and how many the clipping leaves without a gradient of the surrogate."""
    algo, losses, clipped = config.algo, [], 0
    for index, logprob in enumerate(logprobs):
        ratio = (logprob - old[index]).exp()
        if advantage > 0 and ratio.item() > 1 + algo.clip_high:
            objective, clipped = torch.tensor(advantage * (1 + algo.clip_high)), clipped + 1
        elif advantage < 0 and ratio.item() < 1 - algo.clip_low:
            objective, clipped = torch.tensor(advantage * (1 - algo.clip_low)), clipped + 1
        else:
            objective = advantage * ratio
        if reference is not None and algo.kl_in == "loss":
            objective = objective - algo.kl_coefficient * kl(logprob, reference[index], algo.kl_estimator)
        losses.append(-(objective + algo.entropy_coefficient * entropy[index]))
    return torch.stack(losses), clipped


def expected_update(
    run: Run, update: int, groups: Sequence[int], old: Tokens, reference: Tokens, tie: bool
) -> tuple[dict[str, Tensor], int]:
    """Gradients by published name of one update over some groups, and the number of clipped tokens."""
    config, worth = run.config, advantages(run, old, reference)
    twin = twin_of(run.policy.weights_seen[update], tie)
    counted = [
        (group, sample)
        for group in groups
        for sample in run.groups[group].responses
        if not (config.algo.mask_truncated and sample.finish_reason == "length")
    ]
    clipped = 0
    for group, sample in counted:
        logprobs, entropy = score(twin, run.groups[group].prompt, sample, config.rollout.temperature)
        key = group, sample.sample
        before = old[key] if config.algo.num_updates > 1 else logprobs.detach()
        losses, removed = token_losses(
            config, logprobs, entropy, before, reference.get(key), worth[group][sample.sample]
        )
        clipped += removed
        total = {
            "token-mean": losses.sum() / sum(other.length for _, other in counted),
            "sequence-mean": losses.mean() / len(counted),
            "constant-length": losses.sum() / (len(counted) * config.rollout.max_new_tokens),
        }[config.algo.aggregation]
        total.backward()
    names = {name.replace("model.visual.", "visual.").replace("language_model.", ""): parameter
             for name, parameter in twin.named_parameters()}  # fmt: skip
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in names.items()}, clipped


def relative_errors(run: Run, gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, float]:
    """Over all parameters together, and of the worst one."""
    pairs = [
        (gradient.double(), expected[name].double())
        for packed_name, packed in gradients.items()
        for name, gradient in run.policy.model.family.unpack(packed_name, packed)  # type: ignore[attr-defined]
    ]
    errors = [float((one - other).norm()) for one, other in pairs]
    norms = [float(other.norm()) for _, other in pairs]
    worst = max(error / norm if norm else float(error > 0) for error, norm in zip(errors, norms, strict=True))
    return float(np.linalg.norm(errors) / np.linalg.norm(norms)), worst
