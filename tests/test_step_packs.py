"""Packs of a whole step: the groups in them, the same results under both runners, and the plain gradient."""

from collections.abc import Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.testing import canned_prompts, tiny_config
from rollplex.train.packing import pack_finished
from rollplex.train.policy import GroupLoss, Learner, Responses, Scorer
from tests.step_oracle import Run, recipe, run_step
from tests.test_step import Case, assert_equal_runs, assert_gradients

IMAGES = (0, 1, 0, 1, 0)
Passes = dict[str, list[tuple[int, ...]]]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """The prompts (by uid) of every call of `score` and `backward`."""
    found: Passes = {"score": [], "backward": []}
    score, backward = Scorer.score, Learner.backward

    def recording_score(self: Scorer, groups: Sequence[Responses]) -> Generator[None, None, list[Tensor]]:
        found["score"].append(tuple(group.prompt.uid for group in groups))
        return (yield from score(self, groups))

    def recording_backward(
        self: Learner, groups: Sequence[Responses], losses: Sequence[GroupLoss]
    ) -> Generator[None, None, list[Tensor]]:
        found["backward"].append(tuple(group.prompt.uid for group in groups))
        return (yield from backward(self, groups, losses))

    monkeypatch.setattr(Scorer, "score", recording_score)
    monkeypatch.setattr(Learner, "backward", recording_backward)
    return found


def expected_packs(run: Run, minibatches: Sequence[range]) -> list[tuple[int, ...]]:
    """From decode steps and lengths of the samples alone."""
    last = [max(sample.decode_step for sample in group.responses) for group in run.groups]
    order = sorted(range(len(run.groups)), key=lambda group: (last[group], group))
    tokens = [sum(sample.length for sample in group.responses) for group in run.groups]
    packs = pack_finished(order, tokens, run.config.train.microbatch_tokens, minibatches)
    return [tuple(run.groups[group].prompt.uid for group in pack) for pack in packs]


@pytest.mark.parametrize("seed", [4, 5, 6])
@pytest.mark.parametrize("budget", [1, 40, 60, 1000])
def test_packs_follow_from_lengths_and_finishing_order_under_both_runners(
    passes: Passes, seed: int, budget: int
) -> None:
    sections: dict[str, dict[str, Any]] = {
        "algo": {"kl_coefficient": 0.1}, "train": {"microbatch_tokens": budget},
    }  # fmt: skip
    prompts, runs = canned_prompts(tiny_config(), IMAGES, seed=seed), []
    for runner in ("serial", "overlapped"):
        runs.append(run := run_step(recipe(sections, runner), prompts))
        packs = expected_packs(run, [range(5)])
        assert passes["backward"] == packs
        assert sorted(passes["score"]) == sorted(packs), "the reference has no order to keep"
        passes["backward"].clear()
        passes["score"].clear()
    assert_equal_runs(*runs)
    sizes = {len(pack) for pack in packs}
    assert budget != 1 or sizes == {1}
    assert budget != 60 or 1 < max(sizes) < 5, "two groups of at most 30 tokens always fit"
    assert budget != 1000 or sizes == {5}


@pytest.mark.parametrize("budget", [1, 40, 60, 1000])
def test_the_gradient_is_the_plain_one_whatever_is_packed(budget: int) -> None:
    prompts = canned_prompts(tiny_config(), IMAGES, seed=5)
    case = Case("packs", {"algo": {"kl_coefficient": 0.1}, "train": {"microbatch_tokens": budget}},
                minibatches=((0, 1, 2, 3, 4),))  # fmt: skip
    assert_gradients(run_step(recipe(case.sections), prompts), case)


def test_packs_are_of_one_minibatch_so_that_a_first_update_has_ratio_one_to_the_bit(passes: Passes) -> None:
    sections: dict[str, dict[str, Any]] = {
        "algo": {"num_minibatches": 2, "epochs": 2}, "train": {"microbatch_tokens": 50},
    }  # fmt: skip
    prompts, runs = canned_prompts(tiny_config(), IMAGES, seed=5), []
    for runner in ("serial", "overlapped"):
        run = run_step(recipe(sections, runner), prompts)
        halves = [range(2), range(2, 5)]
        packs = [expected_packs(run, [half]) for half in halves]
        assert passes["backward"] == [*packs[0], *packs[1]] * 2
        assert sorted(passes["score"]) == sorted(packs[0] + packs[1])
        runs.append(run)
        passes["backward"].clear()
        passes["score"].clear()
    assert_equal_runs(*runs)
    once = run_step(recipe({**sections, "algo": {"num_minibatches": 2}}), prompts)
    for index in halves[0]:
        group = once.groups[index]
        assert group.old_T is not None and group.trained_T is not None
        assert torch.equal(group.old_T, group.trained_T)
