"""A step's metrics against the same numbers worked out from its groups, one by one."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollplex.algo.reward import Score
from rollplex.bench.tiny import TINY_RECIPE, CannedRewards, tiny_workers
from rollplex.build import Runtime
from rollplex.config import parse_config
from rollplex.metrics import logprob_differences, reward_metrics, sample_rows, training_metrics
from rollplex.step import Group, Step, Workers
from rollplex.testing import canned_prompts, tiny_config
from rollplex.trace import Trace
from rollplex.types import Prompt, Sample

PROMPTS = canned_prompts(tiny_config(), (0, 1, 2), seed=4)


class PartlyFailing(CannedRewards):
    """Two functions, one of which does not apply to odd samples and fails for sample 2."""

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Any:
        pending = super().submit(prompt, samples)
        pending.scores = tuple(
            Score(score.total, {"a": score.total, "b": None if sample.sample % 2 else 0.5},
                  ("b failed",) if sample.sample == 2 else ())
            for score, sample in zip(pending.result(), samples, strict=True)
        )  # fmt: skip
        return pending


def run(algo: dict[str, Any], rewards: Any = None, **train: Any) -> tuple[Step, Trace, dict[str, float]]:
    values = {**TINY_RECIPE, "algo": algo, "train": {**TINY_RECIPE["train"], **train}, "run": {"device": "cpu"}}
    values["rollout"] = {**TINY_RECIPE["rollout"], "max_new_tokens": 10}
    config = parse_config(values)
    made = tiny_workers(config, tiny_config(), torch.device("cpu"))
    workers = Workers(made.policy, made.reference, made.engine, rewards or made.rewards)
    trace = Trace()
    step = Runtime(config, workers).train(PROMPTS, 0, trace)
    return step, trace, training_metrics(step, trace, 2.0)


def all_samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.responses]


def test_metrics_of_one_update() -> None:
    step, trace, metrics = run({"kl_coefficient": 0.1})
    assert all(type(value) is float for value in metrics.values())
    samples = all_samples(step.groups)
    tokens = sum(sample.length for sample in samples)
    rewards = np.array([reward for group in step.groups for reward in group.rewards])
    expected = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/canned": rewards.mean(),
        "reward/failures": 0.0,
        "response/length_mean": tokens / 12,
        "response/length_max": max(sample.length for sample in samples),
        "response/truncated": sum(sample.finish_reason == "length" for sample in samples) / 12,
        "tokens.generated": tokens,
        "tokens_per_s": tokens / 2.0,
        "tokens.suffix": 2 * tokens,
        "tokens.prefix": 2 * sum(prompt.prefix_length for prompt in PROMPTS),
        "clip_fraction": 0.0,
        "ratio/min": 1.0,
        "ratio/max": 1.0,
        "time/step": 2.0,
        "updates/skipped": 0.0,
        "policy_version": 1.0,
        "learning_rate": 1e-3,
        "grad_norm": step.updates[0].grad_norm,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-6), name
    assert {f"phase/{name}" for name in trace.seconds} <= metrics.keys()
    assert metrics["memory/peak_bytes"] > 0


def test_kl_loss_and_logprob_differences_come_from_the_tokens() -> None:
    step, _, metrics = run({"kl_coefficient": 0.1})
    kl, loss, differences = [], [], []
    for group in step.groups:
        assert group.trained_T is not None and group.reference_T is not None and group.credit is not None
        log_r = (group.reference_T - group.trained_T).double().numpy()
        token_kl = np.exp(log_r) - 1 - log_r
        kl.extend(token_kl)
        loss.extend(0.1 * token_kl - group.credit.advantages_T.double().numpy())
        sampler = np.concatenate([sample.tempered_logprobs for sample in group.responses])
        differences.extend(np.abs(group.trained_T.numpy() - sampler))
    assert metrics["kl"] == pytest.approx(np.mean(kl), rel=1e-4)
    assert metrics["loss"] == pytest.approx(np.mean(loss), rel=1e-3, abs=1e-5)
    assert metrics["logprob_difference/max"] == pytest.approx(max(differences))
    assert metrics["logprob_difference/mean"] == pytest.approx(np.mean(differences), rel=1e-4)
    assert 0.0 < metrics["entropy"] <= math.log(tiny_config().text_config.vocab_size)  # type: ignore[union-attr]
    assert metrics["logprob_difference/max"] < 1e-4


def test_a_difference_of_one_token_shows() -> None:
    step, _, _ = run({})
    sample = step.groups[1].responses[2]
    sample.tempered_logprobs[0] += 0.5
    differences_T = logprob_differences(step.groups)
    assert len(differences_T) == sum(sample.length for sample in all_samples(step.groups))
    assert float(differences_T.max()) == pytest.approx(0.5, abs=1e-4)
    assert int((differences_T > 0.1).sum()) == 1


def test_several_updates_are_averaged_and_compared_at_the_weights_that_sampled() -> None:
    step, _, metrics = run({"epochs": 2, "num_minibatches": 3}, learning_rate=1e-2)
    assert len(step.updates) == 6 and metrics["policy_version"] == 6
    assert metrics["grad_norm"] == pytest.approx(np.mean([update.grad_norm for update in step.updates]))
    assert metrics["ratio/min"] < 1.0 < metrics["ratio/max"]
    assert 0.0 < metrics["clip_fraction"] < 1.0
    assert metrics["logprob_difference/max"] < 1e-4, "not the log-probs after the updates"


def test_the_loss_is_an_average_over_epochs_too() -> None:
    still = {"epochs": 1, "scale_advantages": False, "kl_coefficient": 0.1}
    _, _, one = run(still, learning_rate=1e-12)
    _, _, three = run({**still, "epochs": 3}, learning_rate=1e-12)
    assert three["loss"] == pytest.approx(one["loss"], rel=1e-4) and three["kl"] == pytest.approx(one["kl"], rel=1e-4)


def test_parts_failures_and_groups_without_signal() -> None:
    step, _, metrics = run({}, rewards=PartlyFailing())
    assert metrics["reward/failures"] == 3.0
    assert metrics["reward/b"] == 0.5, "only of the samples that it applies to"
    assert metrics["reward/a"] == metrics["reward/mean"]
    assert metrics["groups_without_signal"] == 0.0
    group = step.groups[0]
    group.scores = dict.fromkeys(group.scores, Score(2.0, {"a": 2.0, "b": None}))
    alone = reward_metrics([group])
    assert alone["groups_without_signal"] == 1.0 and alone["reward/std"] == 0.0
    assert "reward/b" not in alone
    assert reward_metrics(step.groups)["groups_without_signal"] == pytest.approx(1 / 3)


def test_a_wholly_masked_batch_has_metrics_too() -> None:
    values = {**TINY_RECIPE, "algo": {"mask_truncated": True}, "run": {"device": "cpu"}}
    values["rollout"] = {**TINY_RECIPE["rollout"], "max_new_tokens": 1}
    config = parse_config(values)
    workers = tiny_workers(config, tiny_config(), torch.device("cpu"))
    workers.engine.stop_ids = np.zeros(0, dtype=np.int64)
    step = Runtime(config, workers).train(PROMPTS, 0, Trace())
    metrics = training_metrics(step, Trace(), 1.0)
    assert metrics["updates/skipped"] == 1.0 and metrics["policy_version"] == 0.0
    assert (metrics["loss"], metrics["kl"], metrics["clip_fraction"], metrics["grad_norm"]) == (0.0, 0.0, 0.0, 0.0)


def test_sample_rows_hold_what_a_reader_wants_as_json() -> None:
    step, _, _ = run({}, rewards=PartlyFailing())
    rows = list(sample_rows(step.groups, "train"))
    assert rows == json.loads(json.dumps(rows))
    assert [(row["uid"], row["sample"]) for row in rows] == [(uid, sample) for uid in range(3) for sample in range(4)]
    sample, row = step.groups[1].responses[2], rows[6]
    assert row["completion"] == sample.text and row["tokens"] == sample.length and row["kind"] == "train"
    assert row["source"] == "canned, row 1" and row["prompt"] == "prompt 1"
    assert row["reward"] == step.groups[1].rewards[2] and row["failures"] == ["b failed"]
    assert row["logprob_mean"] == pytest.approx(float(np.mean(sample.raw_logprobs)))
    assert row["logprob_min"] == pytest.approx(float(np.min(sample.raw_logprobs)))
    assert (row["finish_reason"], row["policy_version"]) == (sample.finish_reason, 0)
