"""The whole step against transformers and autograd, and one runner against the other, for a grid of recipes."""

import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollplex.algo.reward import Score
from rollplex.bench.tiny import CannedRewards, RecordingPolicy, tiny_workers
from rollplex.build import Runtime
from rollplex.errors import NumericsError
from rollplex.models.prefix import PrefixState, prefix_backward, prefix_forward
from rollplex.testing import SPECIAL_IDS, canned_prompts, tiny_config
from rollplex.trace import Trace
from rollplex.train import policy as policy_module
from rollplex.train.optim import UpdateReport
from rollplex.train.policy import Scorer
from rollplex.types import Image, Prompt, Sample
from tests.step_oracle import (
    CPU,
    Run,
    all_logprobs,
    expected_update,
    recipe,
    relative_errors,
    responses,
    run_step,
)

GRADIENT_TOLERANCE = 1e-5
"""Relative, float32: over all parameters together, and for the worst one."""
BFLOAT16_TOLERANCE = 0.05
"""Relative, over all parameters together, against float32 from the same weights."""
LOGPROB_TOLERANCE = 1e-4
IMAGES = (0, 2, 1, 1)
PROMPTS = canned_prompts(tiny_config(), IMAGES, seed=4)


@dataclass(frozen=True)
class Case:
    """A recipe; `sections` overrides the base one. minibatches: the groups of each update of an epoch."""

    name: str
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tie: bool = False
    share_vision: bool = False
    minibatches: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)
    clips: bool = False


FAST = {"learning_rate": 1e-2, "betas": (0.0, 0.9)}
"""Weights that move far in one update, so that ratios leave the clip range."""
TIGHT = {"clip_low": 0.05, "clip_high": 0.1}
HALVES = ((0, 1), (2, 3))
CASES = (
    Case("plain"),
    Case("k3 in the loss, tied", {"algo": {"kl_coefficient": 0.3}}, tie=True),
    Case("k1 in the loss, frozen vision, nothing recomputed",
         {"algo": {"kl_coefficient": 0.3, "kl_estimator": "k1"}, "train": {"recompute": "none"},
          "model": {"train_vision": False}}),
    Case("k2 in the loss, masked, constant-length, one response a microbatch",
         {"algo": {"kl_coefficient": 0.3, "kl_estimator": "k2", "mask_truncated": True,
                   "aggregation": "constant-length"},
          "train": {"microbatch_tokens": 1}}),
    Case("k3 in the reward, one frozen tower for both",
         {"algo": {"kl_coefficient": 0.3, "kl_in": "reward"}, "model": {"train_vision": False}}, share_vision=True),
    Case("k1 in the reward, unscaled, masked, sequence-mean",
         {"algo": {"kl_coefficient": 0.3, "kl_in": "reward", "kl_estimator": "k1", "scale_advantages": False,
                   "mask_truncated": True, "aggregation": "sequence-mean"}}),
    Case("entropy bonus, cold, larger groups",
         {"algo": {"entropy_coefficient": 0.2}, "rollout": {"temperature": 0.7, "group_size": 5}}),
    Case("entropy penalty, hot and filtered, pairs rewarded by group",
         {"algo": {"entropy_coefficient": -0.2}, "reward": {"per": "group"},
          "rollout": {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "group_size": 2, "num_blocks": 8}}),
    Case("two epochs, sequence-mean",
         {"algo": {"epochs": 2, "aggregation": "sequence-mean", **TIGHT}, "train": FAST}, clips=True),
    Case("two minibatches, constant-length",
         {"algo": {"num_minibatches": 2, "aggregation": "constant-length", **TIGHT}, "train": FAST},
         minibatches=HALVES, clips=True),
    Case("two epochs of two minibatches, KL, entropy, masked",
         {"algo": {"epochs": 2, "num_minibatches": 2, "kl_coefficient": 0.1, "entropy_coefficient": 0.05,
                   "mask_truncated": True, **TIGHT}, "train": FAST, "rollout": {"temperature": 0.9}},
         minibatches=HALVES, clips=True),
)  # fmt: skip


@cache
def plain_run() -> Run:
    """The base recipe under the overlapped runner; to be read only."""
    return run_step(recipe({}), PROMPTS)


def assert_gradients(
    run: Run, case: Case, tolerance: float = GRADIENT_TOLERANCE, worst_tolerance: float = GRADIENT_TOLERANCE
) -> None:
    """Every update's gradient, its number of clipped tokens, and every log-prob that a sample or a group carries."""
    algo = run.config.algo
    old = all_logprobs(run.policy.weights_seen[0], run, case.tie)
    reference = all_logprobs(run.reference_weights, run, case.tie) if run.reference_weights else {}
    trained = [
        name for name in run.policy.weights_seen[0] if name.startswith("decoder.") or run.config.model.train_vision
    ]
    updates = [groups for _ in range(algo.epochs) for groups in case.minibatches]
    assert len(updates) == len(run.policy.gradients_seen) == algo.num_updates
    num_clipped = 0
    for update, groups in enumerate(updates):
        gradients = run.policy.gradients_seen[update]
        assert sorted(gradients) == sorted(trained)
        expected, clipped = expected_update(run, update, groups, old, reference, case.tie)
        together, worst = relative_errors(run, gradients, expected)
        assert together <= tolerance and worst <= worst_tolerance, (update, together, worst)
        num_clipped += clipped
    if tolerance == GRADIENT_TOLERANCE:
        stats = [stats for group in run.groups for stats in group.stats]
        assert sum(float(item.clipped) for item in stats) == num_clipped
        assert (num_clipped > 0) == case.clips
        for index, group in enumerate(run.groups):
            whole = torch.cat([old[index, sample.sample] for sample in group.responses])
            sampler = torch.cat([torch.from_numpy(sample.tempered_logprobs) for sample in group.responses])
            torch.testing.assert_close(sampler, whole, atol=LOGPROB_TOLERANCE, rtol=0)
            if group.old_T is not None:
                torch.testing.assert_close(group.old_T, whole, atol=LOGPROB_TOLERANCE, rtol=0)


# The grid


def assert_equal_runs(one: Run, other: Run) -> None:
    """Every bit of every token, log-prob, gradient and weight."""
    for a, b in zip(responses(one), responses(other), strict=True):
        for name in ("ids", "raw_logprobs", "tempered_logprobs", "sampling_logprobs"):
            assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), (a.group, a.sample, name)
        assert (a.finish_reason, a.decode_step, a.version) == (b.finish_reason, b.decode_step, b.version)
    for mine, theirs in zip(one.groups, other.groups, strict=True):
        assert mine.rewards == theirs.rewards
        for name in ("trained_T", "reference_T", "old_T"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b), name
    for kind in ("gradients_seen", "weights_seen"):
        for a, b in zip(getattr(one.policy, kind), getattr(other.policy, kind), strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a), kind


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_the_plain_computation_under_both_runners(case: Case) -> None:
    serial, overlapped = (
        run_step(recipe(case.sections, runner), PROMPTS, tie=case.tie, share_vision=case.share_vision)
        for runner in ("serial", "overlapped")
    )
    assert_equal_runs(serial, overlapped)
    assert_gradients(serial, case)
    reasons = {sample.finish_reason for sample in responses(serial)}
    assert reasons == {"stop", "length"} and len({sample.length for sample in responses(serial)}) > 3
    assert any(len(set(group.rewards)) > 1 for group in serial.groups)
    changed = [name for name, weight in serial.policy.weights_seen[0].items()
               if not torch.equal(weight, serial.policy.weights_seen[-1][name])]  # fmt: skip
    assert any(name.startswith("decoder.") for name in changed)
    assert any(name.startswith("vision.") for name in changed) == serial.config.model.train_vision
    assert serial.policy.version == serial.config.algo.num_updates


def test_bfloat16_runners_agree_and_the_gradient_is_right_to_rounding() -> None:
    case = Case("bfloat16", {"model": {"dtype": "bfloat16"}, "algo": {"kl_coefficient": 0.1}})
    serial, overlapped = (run_step(recipe(case.sections, runner), PROMPTS) for runner in ("serial", "overlapped"))
    assert_equal_runs(serial, overlapped)
    assert_gradients(serial, case, BFLOAT16_TOLERANCE, worst_tolerance=0.3)


def test_recomputing_layers_changes_no_bit() -> None:
    assert plain_run().config.train.recompute == "layer"
    assert_equal_runs(plain_run(), run_step(recipe({"train": {"recompute": "none"}}), PROMPTS))


def test_a_first_update_has_ratio_one_by_construction_and_by_measurement() -> None:
    single = plain_run()
    assert all(group.old_T is None for group in single.groups)
    double = run_step(recipe({"algo": {"epochs": 2}}), PROMPTS)
    first = double.policy.gradients_seen[0]
    assert all(torch.equal(gradient, first[name]) for name, gradient in single.policy.gradients_seen[0].items())


# Prompts and images that occur twice


def test_a_prompt_twice_and_an_image_in_several_groups_count_each_time() -> None:
    prompts = canned_prompts(tiny_config(), (1, 2, 0), seed=4)
    shared = prompts[0].images[0]
    ids = prompts[0].ids.copy()
    ids[0] = SPECIAL_IDS["<|endoftext|>"]  # an id that transformers does not train as input: its padding
    other = replace(prompts[0], uid=7, ids=ids)  # the same image between other words
    batch = (prompts[0], prompts[1], prompts[0], other)
    case = Case("twice", tie=True)
    serial, overlapped = (run_step(recipe({}, runner), batch, tie=True) for runner in ("serial", "overlapped"))
    assert_equal_runs(serial, overlapped)
    assert_gradients(serial, case)
    assert [s.ids.tolist() for s in serial.groups[0].responses] == [s.ids.tolist() for s in serial.groups[2].responses]
    distinct = {image.key: len(image.patches) for prompt in batch for image in prompt.images}
    assert shared.key in distinct and serial.trace.counts["tokens.vision"] == sum(distinct.values())


# Host results that come late


class LateRewards(CannedRewards):
    """Nothing is scored before every response is there; then the last one submitted is scored first."""

    def __init__(self, total: int) -> None:
        self.total, self.pending = total, list[_LateScores]()

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Any:
        scores = _LateScores(self, super().submit(prompt, samples).result())
        self.pending.append(scores)
        return scores


@dataclass(eq=False)
class _LateScores:
    rewards: LateRewards
    scores: tuple[Score, ...]
    asked: int = 0
    taken: bool = False

    def done(self) -> bool:
        self.asked += 1
        if len(self.rewards.pending) < self.rewards.total:
            return False
        still = [scores for scores in self.rewards.pending if not scores.taken]
        return bool(still) and still[-1] is self

    def result(self) -> tuple[Score, ...]:
        self.taken = True
        return self.scores


@pytest.mark.parametrize(("per", "total"), [("sample", 12), ("group", 4)])
@pytest.mark.parametrize("runner", ["serial", "overlapped"])
def test_rewards_that_come_late_and_in_reverse_change_no_bit(runner: str, per: str, total: int) -> None:
    sections: dict[str, dict[str, Any]] = {"reward": {"per": per}, "algo": {"kl_coefficient": 0.1}}
    late = LateRewards(total)
    slow = run_step(recipe(sections, runner), PROMPTS, rewards=late)
    assert len(late.pending) == total and max(scores.asked for scores in late.pending) >= total
    assert_equal_runs(slow, run_step(recipe(sections), PROMPTS))


def test_a_score_belongs_to_its_sample() -> None:
    run = plain_run()
    for group in run.groups:
        assert group.rewards == [float(int(sample.ids.sum()) % 7) for sample in group.responses]
        assert [sample.sample for sample in group.responses] == [0, 1, 2]


# The order of work


def test_the_overlapped_runner_really_computes_while_it_decodes() -> None:
    during = {}
    # a pack is full with a group
    sections: dict[str, dict[str, Any]] = {"algo": {"kl_coefficient": 0.1}, "train": {"microbatch_tokens": 20}}
    for runner in ("serial", "overlapped"):
        run = run_step(recipe(sections, runner), PROMPTS)
        names = [str(event["name"]) for event in run.trace.events]
        last = len(names) - 1 - names[::-1].index("rollout.decode")
        during[runner] = set(names[names.index("rollout.decode") : last])
    assert during["serial"] == {"rollout.decode"}
    shared = {"reference.prefix", "reward", "reference.suffix", "policy.suffix", "policy.prefix_backward"}
    assert shared <= during["overlapped"]


def test_tokens_are_counted_by_kind_and_alike_under_both_runners() -> None:
    sections = {"algo": {"kl_coefficient": 0.1, "epochs": 2}}
    serial, overlapped = (run_step(recipe(sections, runner), PROMPTS) for runner in ("serial", "overlapped"))
    assert serial.trace.counts == overlapped.trace.counts
    prefix = sum(prompt.prefix_length for prompt in PROMPTS)
    generated = sum(sample.length for sample in responses(serial))
    patches = sum(len(image.patches) for prompt in PROMPTS for image in prompt.images)
    counts = dict(serial.trace.counts)
    assert counts.pop("tokens.recomputed") > 0, "blocks are few enough for preemption"
    assert counts == {
        "tokens.vision": 3 * patches,  # policy, reference, and the policy again with new weights
        "tokens.prefix": 3 * prefix,
        "tokens.prefix_backward": 2 * prefix,
        "tokens.generated": generated,
        "tokens.suffix": 4 * generated,  # old log-probs, reference, two updates
    }


# Updates that do not happen


def test_a_batch_of_truncated_responses_changes_nothing() -> None:
    sections = {"rollout": {"max_new_tokens": 1, "num_blocks": 16}, "algo": {"mask_truncated": True, "epochs": 2}}
    config = recipe(sections)
    workers = tiny_workers(config, tiny_config(), CPU)
    workers.engine.stop_ids = np.zeros(0, dtype=np.int64)
    before = {name: weight.clone() for name, weight in workers.policy.optimizer.state().items()}
    step = Runtime(config, workers).train(PROMPTS, 0, Trace())
    assert all(sample.finish_reason == "length" for group in step.groups for sample in group.responses)
    assert [(update.skipped, update.grad_norm) for update in step.updates] == [(True, 0.0)] * 2
    assert workers.policy.version == 0
    assert isinstance(workers.policy, RecordingPolicy)
    first, *_, last = workers.policy.weights_seen
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(torch.equal(before[name], weight) for name, weight in workers.policy.optimizer.state().items())
    assert not any(buffer.any() for buffer in workers.policy.gradients.buffers.values())


def test_groups_without_signal_give_no_gradient() -> None:
    class Equal(CannedRewards):
        def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Any:
            pending = super().submit(prompt, samples)
            pending.scores = tuple(Score(3.0, {}, ()) for _ in samples)
            return pending

    run = run_step(recipe({}), PROMPTS, rewards=Equal())
    assert not any(gradient.any() for gradient in run.policy.gradients_seen[0].values())
    assert [update.skipped for update in run.step.updates] == [False]


def test_an_error_in_a_phase_ends_the_step_and_leaves_the_weights_alone() -> None:
    class Broken(CannedRewards):
        def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> Any:
            if prompt.uid == 2:
                raise NumericsError("broken on purpose")
            return super().submit(prompt, samples)

    for runner in ("serial", "overlapped"):
        config = recipe({}, runner)
        made = tiny_workers(config, tiny_config(), CPU)
        workers = replace(made, rewards=Broken())
        before = {name: weight.detach().clone() for name, weight in workers.policy.model.named_parameters()}
        with pytest.raises(NumericsError, match="on purpose"):
            Runtime(config, workers).train(PROMPTS, 0, Trace())
        assert all(torch.equal(before[name], weight) for name, weight in workers.policy.model.named_parameters())


# What a step keeps


@pytest.fixture
def prefixes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list["weakref.ref[PrefixState]"]]:
    """References to every prefix state that is made."""
    made: list[weakref.ref[PrefixState]] = []

    def recording(*arguments: Any, **options: Any) -> Generator[None, None, tuple[PrefixState, ...]]:
        states = yield from prefix_forward(*arguments, **options)
        made.extend(weakref.ref(state) for state in states)
        return states

    monkeypatch.setattr(policy_module, "prefix_forward", recording)
    yield made
    assert made


@pytest.mark.parametrize("runner", ["serial", "overlapped"])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algo": {"kl_coefficient": 0.1}},
        {"algo": {"kl_coefficient": 0.1, "epochs": 2, "num_minibatches": 2}},
    ],
    ids=str,
)
def test_prefixes_and_features_are_dropped_with_their_last_use(
    prefixes: list["weakref.ref[PrefixState]"], runner: str, sections: dict[str, dict[str, Any]]
) -> None:
    run = run_step(recipe(sections, runner), PROMPTS)
    per_group = (
        1 + bool(run.workers.reference) + (run.config.algo.num_updates > 1) * (run.config.algo.epochs * 4 - 2) / 4
    )
    assert len(prefixes) == 4 * per_group
    assert not any(prefix() for prefix in prefixes), "alive although the step is over, without a garbage collection"
    for group in run.groups:
        assert group.prefix is None and group.reference_prefix is None


def test_a_prefix_is_dropped_before_the_next_group_goes_backward(
    prefixes: list["weakref.ref[PrefixState]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    backward = prefix_backward

    def recording(*arguments: Any, **options: Any) -> Iterator[None]:
        alive.append(sum(prefix() is not None for prefix in prefixes))
        yield from backward(*arguments, **options)

    monkeypatch.setattr(policy_module, "prefix_backward", recording)
    run_step(recipe({"algo": {"kl_coefficient": 0.1}}, "serial"), PROMPTS)
    assert alive == [4, 3, 2, 1]


def test_prefixes_that_are_trained_on_later_are_dropped_before_the_first_update(
    prefixes: list["weakref.ref[PrefixState]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    update = RecordingPolicy.update

    def recording(policy: RecordingPolicy, denominator: float, learning_rate: float) -> UpdateReport:
        alive.append(sum(prefix() is not None for prefix in prefixes))
        return update(policy, denominator, learning_rate)

    monkeypatch.setattr(RecordingPolicy, "update", recording)
    run_step(recipe({"algo": {"num_minibatches": 2}}), PROMPTS)
    assert alive == [0, 0]


def test_features_are_dropped_with_the_last_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    features: list[weakref.ref[Tensor]] = []
    encode = Scorer.encode

    def recording(self: Scorer, images: Sequence[Image]) -> tuple[Tensor, ...]:
        found = encode(self, images)
        features.extend(weakref.ref(feature) for feature in found)
        return found

    monkeypatch.setattr(Scorer, "encode", recording)
    run = run_step(recipe({"algo": {"kl_coefficient": 0.1}}), PROMPTS)
    assert len(features) == 2 * sum(IMAGES)
    assert run.step.groups and not any(feature() is not None for feature in features)


def test_an_evaluation_keeps_no_prefix_and_trains_nothing(prefixes: list["weakref.ref[PrefixState]"]) -> None:
    config = recipe({"eval": {"temperature": 0.0}})
    workers = tiny_workers(config, tiny_config(), CPU)
    first, again = (Runtime(config, workers).evaluate(PROMPTS, number, Trace()) for number in (0, 1))
    assert not any(prefix() for prefix in prefixes)
    for one, other in zip(first.groups, again.groups, strict=True):
        assert len(one.responses) == 1 and one.responses[0].ids.tolist() == other.responses[0].ids.tolist()
    assert workers.policy.version == 0 and not first.updates
