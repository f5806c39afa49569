"""One step as numbers: what is logged, named once.

Every value is a float. Log-probs of the sampler and of the trainer are compared in each step, because their difference
is the first sign of a step that is not on-policy.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollplex.algo.advantage import has_signal
from rollplex.algo.grpo import batch_denominator
from rollplex.gpu.device import peak_memory_bytes
from rollplex.step import Group, Step
from rollplex.trace import Trace


def training_metrics(step: Step, trace: Trace, seconds: float) -> dict[str, float]:
    """Metrics of a finished training step that took `seconds`."""
    return {
        **reward_metrics(step.groups),
        **_loss_metrics(step),
        **_update_metrics(step),
        **_logprob_metrics(step.groups),
        **{name: float(count) for name, count in sorted(trace.counts.items())},
        **{f"phase/{name}": value for name, value in trace.seconds.items()},
        "time/step": seconds,
        "tokens_per_s": trace.counts["tokens.generated"] / seconds,
        "memory/peak_bytes": float(peak_memory_bytes(step.workers.policy.model.device)),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and responses of any rollout."""
    rewards = [reward for group in groups for reward in group.rewards]
    samples = [sample for group in groups for sample in group.responses]
    scores = [score for group in groups for score in group.scores.values()]
    without_signal = sum(not has_signal(torch.tensor(group.rewards)) for group in groups)
    lengths = [sample.length for sample in samples]
    metrics = {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/failures": float(sum(len(score.failures) for score in scores)),
        "groups_without_signal": without_signal / len(groups),
        "response/length_mean": statistics.fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": statistics.fmean(sample.finish_reason == "length" for sample in samples),
    }
    for name in scores[0].parts:
        values = [value for score in scores if (value := score.parts[name]) is not None]
        if values:
            metrics[f"reward/{name}"] = statistics.fmean(values)
    return metrics


def held_out_metrics(prompts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One evaluation, from the reward metrics of each of its prompts."""
    # A function that does not apply to one prompt may apply to the next: prompts have different names.
    names = dict.fromkeys(name for metrics in prompts for name in metrics)
    per_prompt = [name for name in names if not name.startswith(("groups_", "reward/std"))]
    values = {name: [metrics[name] for metrics in prompts if name in metrics] for name in per_prompt}
    return {
        **{f"eval/{name}": statistics.fmean(numbers) for name, numbers in values.items()},
        "eval/reward/failures": sum(values["reward/failures"]),
        "eval/response/length_max": max(values["response/length_max"]),
        "eval/prompts": float(len(prompts)),
    }


def sample_rows(groups: Sequence[Group], kind: str) -> Iterator[dict[str, object]]:
    """One row per sample for samples.jsonl: prompt, completion, rewards, and what its log-probs were like."""
    for group in groups:
        for index, sample in sorted(group.samples.items()):
            score = group.scores[index]
            yield {
                "kind": kind,
                "source": group.prompt.source,
                "uid": group.prompt.uid,
                "sample": index,
                "prompt": group.prompt.content,
                "completion": sample.text,
                "reward": score.total,
                "rewards": dict(score.parts),
                "failures": list(score.failures),
                "tokens": sample.length,
                "finish_reason": sample.finish_reason,
                "policy_version": sample.version,
                "logprob_mean": float(sample.raw_logprobs.mean()),
                "logprob_min": float(sample.raw_logprobs.min()),
                "sampling_logprob_mean": float(sample.sampling_logprobs.mean()),
            }


def _loss_metrics(step: Step) -> dict[str, float]:
    """Means over every token of every update of the step."""
    stats = [item for group in step.groups for item in group.stats]
    total = sum(stats[1:], stats[0])
    tokens = max(float(total.tokens), 1.0)
    config = step.config
    responses = [group.responses for group in step.groups]
    denominator = batch_denominator(responses, config.algo, config.rollout.max_new_tokens) * config.algo.epochs
    return {
        "loss": float(total.loss) / max(denominator, 1.0),
        "kl": float(total.kl) / tokens,
        "entropy": float(total.entropy) / tokens,
        "clip_fraction": float(total.clipped) / tokens,
        "ratio/min": float(total.ratio_min),
        "ratio/max": float(total.ratio_max),
    }


def _update_metrics(step: Step) -> dict[str, float]:
    return {
        "grad_norm": statistics.fmean(update.grad_norm for update in step.updates),
        "learning_rate": step.updates[-1].learning_rate,
        "updates/skipped": float(sum(update.skipped for update in step.updates)),
        "policy_version": float(step.workers.policy.version),
    }


def logprob_differences(groups: Sequence[Group]) -> Tensor:
    """Absolute differences, by token, of the trainer's log-probs (under the weights that sampled) and the sampler's."""
    differences = []
    for group in groups:
        trainer_T = group.trained_T if group.old_T is None else group.old_T
        assert trainer_T is not None
        sampler = [torch.from_numpy(sample.tempered_logprobs) for sample in group.responses]
        differences.append((trainer_T.cpu() - torch.cat(sampler)).abs())
    return torch.cat(differences)


def _logprob_metrics(groups: Sequence[Group]) -> dict[str, float]:
    differences_T = logprob_differences(groups)
    return {
        "logprob_difference/max": float(differences_T.max()),
        "logprob_difference/mean": float(differences_T.mean()),
    }
