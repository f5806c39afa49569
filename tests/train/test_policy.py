"""The policy by itself: microbatches, gradients gathered in a prefix, versions, and what is frozen."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollplex.config import TrainConfig
from rollplex.errors import StaleStateError
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import Encoded
from rollplex.phases.run import finish
from rollplex.testing import canned_prompts, tiny_config, tiny_model
from rollplex.train.policy import GroupLoss, Learner, Policy, Responses, Scored, Scorer
from rollplex.types import Prompt, Sample

ROUNDING = 1e-5
"""Relative, float32: another order of addition."""
LENGTHS = (5, 1, 7, 7, 3)


def policy_of(
    *, train_vision: bool = True, entropy: bool = False, dtype: torch.dtype = torch.float32, **train: Any
) -> Policy:
    model = tiny_model(tiny_config(), seed=1, dtype=dtype)
    return Policy(model, TrainConfig(**train), 0.8, train_vision=train_vision, entropy_gradient=entropy)


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return canned_prompts(tiny_config(), (2,), seed=3)[0]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(5)
    zeros = {name: np.zeros(0, np.float32) for name in ("raw_logprobs", "tempered_logprobs", "sampling_logprobs")}
    return [
        Sample(0, index, rng.integers(0, 250, length), **zeros, finish_reason="stop", text="", version=0, decode_step=1)
        for index, length in enumerate(LENGTHS)
    ]


def prefix_of(scorer: Scorer, prompt: Prompt) -> PrefixState:
    encoded = Encoded(prompt.images, scorer.encode(prompt.images))
    return finish(scorer.prefixes([prompt], [encoded], for_training=True))[0]


def weighted(tokens: slice, scored: Scored) -> Tensor:
    """A loss in which every token of the group has a weight of its own."""
    weights_T = torch.linspace(-1.0, 2.0, sum(LENGTHS))[tokens]
    return (weights_T * scored.logprobs_T).sum()


def suffixes(
    learner: Learner, prompt: Prompt, prefix: PrefixState, samples: Sequence[Sample], loss: GroupLoss
) -> Tensor:
    """Forward and backward over one group's responses; returns the log-probs."""
    (logprobs_T,) = finish(learner.backward([Responses(prompt, prefix, samples)], [loss]))
    return logprobs_T


def score(scorer: Scorer, prompt: Prompt, prefix: PrefixState, samples: Sequence[Sample]) -> Tensor:
    (logprobs_T,) = finish(scorer.score([Responses(prompt, prefix, samples)]))
    return logprobs_T


def backward(policy: Policy, prompt: Prompt, samples: Sequence[Sample], prefix: PrefixState | None = None) -> Tensor:
    """Both backward passes of a group; returns the log-probs."""
    prefix = prefix or prefix_of(policy, prompt)
    logprobs_T = suffixes(policy, prompt, prefix, samples, weighted)
    finish(policy.prefix_backward(prefix))
    return logprobs_T


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Of the worst parameter, relative."""
    return max(float((one[name] - other[name]).norm() / other[name].norm().clamp_min(1e-12)) for name in one)


@pytest.mark.parametrize("recompute", ["none", "layer"])
@pytest.mark.parametrize("microbatch_tokens", [1, 7, 13, 1000])
def test_microbatches_change_the_gradient_by_rounding_only(
    prompt: Prompt, samples: list[Sample], microbatch_tokens: int, recompute: str
) -> None:
    whole, parts = policy_of(recompute="none"), policy_of(microbatch_tokens=microbatch_tokens, recompute=recompute,
                                                          logprob_chunk_tokens=3)  # fmt: skip
    logprobs_T, in_parts_T = (backward(policy, prompt, samples) for policy in (whole, parts))
    torch.testing.assert_close(in_parts_T, logprobs_T, atol=1e-5, rtol=0)
    assert not in_parts_T.requires_grad
    assert difference(parts.gradients.buffers, whole.gradients.buffers) < ROUNDING
    assert all(buffer.any() for buffer in whole.gradients.buffers.values() if buffer.ndim > 1)


def test_a_prefix_gathers_the_gradients_of_all_microbatches(prompt: Prompt, samples: list[Sample]) -> None:
    policy = policy_of(microbatch_tokens=8)
    together = prefix_of(policy, prompt)
    suffixes(policy, prompt, together, samples, weighted)
    sums = []
    for index in range(len(samples)):
        alone = prefix_of(policy, prompt)
        start = sum(LENGTHS[:index])

        def loss(tokens: slice, scored: Scored, start: int = start) -> Tensor:
            return weighted(slice(start + tokens.start, start + tokens.stop), scored)

        suffixes(policy, prompt, alone, samples[index : index + 1], loss)
        sums.append((alone.kv.grad_k_LPKD, alone.kv.grad_v_LPKD))
    for total, parts in zip((together.kv.grad_k_LPKD, together.kv.grad_v_LPKD), zip(*sums, strict=True), strict=True):
        assert total is not None and total.dtype == torch.float32 and total.any()
        expected = torch.stack([part for part in parts if part is not None]).sum(0)
        assert float((total - expected).norm() / expected.norm()) < ROUNDING


def test_prefix_gradients_are_summed_in_float32_in_bfloat16_training(prompt: Prompt, samples: list[Sample]) -> None:
    prefix = prefix_of(policy_of(dtype=torch.bfloat16), prompt)
    assert prefix.kv.k_LPKD.dtype == torch.bfloat16
    assert prefix.kv.grad_k_LPKD is not None and prefix.kv.grad_k_LPKD.dtype == torch.float32
    policy = policy_of(dtype=torch.bfloat16)
    backward(policy, prompt, samples)
    assert all(buffer.dtype == torch.float32 for buffer in policy.gradients.buffers.values())


def test_score_and_backward_give_the_same_bits(prompt: Prompt, samples: list[Sample]) -> None:
    policy = policy_of(microbatch_tokens=8)
    prefix = prefix_of(policy, prompt)
    scored_T = score(policy, prompt, prefix, samples)
    assert not scored_T.requires_grad
    assert torch.equal(suffixes(policy, prompt, prefix, samples, weighted), scored_T)


def test_temperature_divides_the_logits(prompt: Prompt, samples: list[Sample]) -> None:
    model = tiny_model(tiny_config(), seed=1)
    by_temperature = [Scorer(model, TrainConfig(), temperature) for temperature in (1.0, 2.0)]
    with torch.no_grad():
        model.decoder.norm.weight.mul_(0.5)
        hot_T = score(by_temperature[0], prompt, prefix_of(by_temperature[0], prompt), samples)
        model.decoder.norm.weight.mul_(2.0)
    expected_T = score(by_temperature[1], prompt, prefix_of(by_temperature[1], prompt), samples)
    torch.testing.assert_close(hot_T, expected_T)


def test_entropy_has_a_gradient_only_where_it_is_wanted(prompt: Prompt, samples: list[Sample]) -> None:
    def entropy_loss(_: slice, scored: Scored) -> Tensor:
        return scored.logprobs_T.sum() * 0.0 + scored.entropy_T.sum()

    norms = []
    for wanted in (False, True):
        policy = policy_of(entropy=wanted)
        suffixes(policy, prompt, prefix_of(policy, prompt), samples, entropy_loss)
        norms.append(sum(float(buffer.norm()) for buffer in policy.gradients.buffers.values()))
    assert norms[0] == 0.0 and norms[1] > 1.0


def test_an_update_publishes_a_version_and_a_skipped_one_does_not(prompt: Prompt, samples: list[Sample]) -> None:
    policy = policy_of(learning_rate=1e-3)
    prefix = prefix_of(policy, prompt)
    backward(policy, prompt, samples, prefix)
    weights = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    assert policy.update(0.0, 1e-3).skipped and policy.version == 0
    next(iter(policy.gradients.buffers.values())).view(-1)[0] = float("nan")
    assert policy.update(1.0, 1e-3).skipped and policy.version == 0
    assert all(torch.equal(weights[name], parameter) for name, parameter in policy.model.named_parameters())
    backward(policy, prompt, samples)  # the old version's numbers are still good
    report = policy.update(20.0, 1e-3)
    assert not report.skipped and report.grad_norm > 0 and policy.version == 1
    assert not any(torch.equal(weights[name], parameter) for name, parameter in policy.model.named_parameters())
    with pytest.raises(StaleStateError):
        suffixes(policy, prompt, prefix, samples, weighted)
    with pytest.raises(StaleStateError):
        score(policy, prompt, prefix, samples)
    with pytest.raises(StaleStateError):
        finish(policy.prefix_backward(prefix))


def test_a_frozen_tower_has_no_gradient_and_never_changes(prompt: Prompt, samples: list[Sample]) -> None:
    policy = policy_of(train_vision=False, learning_rate=1e-2, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in policy.model.vision.named_parameters()}
    key = policy.vision_key
    for _ in range(2):
        backward(policy, prompt, samples)
        policy.update(20.0, 1e-2)
    assert not any(name.startswith("vision.") for name in policy.gradients.buffers)
    for name, parameter in policy.model.vision.named_parameters():
        assert parameter.grad is None and not parameter.requires_grad and torch.equal(parameter, before[name])
    assert policy.vision_key == key, "features stay good"
    trained = policy_of(train_vision=True)
    first = trained.vision_key
    backward(trained, prompt, samples)
    trained.update(20.0, 1e-2)
    assert trained.vision_key != first, "features of old weights are not taken for new ones"


def test_a_frozen_tower_leaves_the_decoder_gradient_as_it_is(prompt: Prompt, samples: list[Sample]) -> None:
    frozen, trained = policy_of(train_vision=False), policy_of(train_vision=True)
    for policy in (frozen, trained):
        backward(policy, prompt, samples)
    assert all(
        torch.equal(buffer, trained.gradients.buffers[name]) for name, buffer in frozen.gradients.buffers.items()
    )


@pytest.mark.parametrize("text_tokens", [1, 2])
def test_prompts_with_hardly_a_prefix(text_tokens: int, samples: list[Sample]) -> None:
    (short,) = canned_prompts(tiny_config(), (0,), seed=3, text_tokens=(text_tokens,))
    policy = policy_of()
    logprobs_T = backward(policy, short, samples)
    assert logprobs_T.shape == (sum(LENGTHS),) and torch.isfinite(logprobs_T).all()
    assert all(torch.isfinite(buffer).all() for buffer in policy.gradients.buffers.values())
    assert bool(policy.gradients.buffers["decoder.embedding"][int(short.ids[0])].any())


@pytest.mark.parametrize("tie", [False, True])
def test_the_heads_gradient_may_go_straight_into_its_sum(prompt: Prompt, samples: list[Sample], tie: bool) -> None:
    """As on a GPU; on a CPU it goes through autograd."""

    class Direct(Learner):
        @property
        def _head_gradient(self) -> Tensor:
            return self.gradients.buffers["decoder.embedding" if tie else "decoder.untied_head"]

    found = []
    for kind in (Learner, Direct):
        model = tiny_model(tiny_config(tie=tie), seed=1)
        learner = kind(model, TrainConfig(microbatch_tokens=13), 0.8, train_vision=True)
        prefix = prefix_of(learner, prompt)
        suffixes(learner, prompt, prefix, samples, weighted)
        finish(learner.prefix_backward(prefix))
        found.append(learner.gradients.buffers)
    assert difference(found[1], found[0]) <= ROUNDING


# Several groups in one pass


PACK_TOLERANCE = 1e-5
"""Relative, float32, of the worst parameter: products of other shapes, and another order of addition."""


def groups_of(policy: Policy, lengths: Sequence[Sequence[int]]) -> list[Responses]:
    """Groups of responses of these lengths: the first over a long prefix, one over none, one over a short one."""
    prompts = canned_prompts(tiny_config(), (1, 0, 0), seed=3, text_tokens=(9, 1, 5))
    rng = np.random.default_rng(6)
    zeros = {name: np.zeros(0, np.float32) for name in ("raw_logprobs", "tempered_logprobs", "sampling_logprobs")}
    return [
        Responses(prompt, prefix_of(policy, prompt), [
            Sample(0, i, rng.integers(0, 250, length), **zeros, finish_reason="stop", text="", version=0, decode_step=1)
            for i, length in enumerate(of_group)
        ])
        for prompt, of_group in zip(prompts, lengths, strict=False)
    ]  # fmt: skip


def losses_of(lengths: Sequence[Sequence[int]], scales: Sequence[float]) -> list[GroupLoss]:
    """Another weight for each token of each group; `scales` multiplies a group's."""

    def loss_of(group: int) -> GroupLoss:
        weights_T = torch.linspace(-1.0, 2.0 + group, sum(lengths[group])) * scales[group]
        return lambda tokens, scored: (weights_T[tokens] * scored.logprobs_T).sum()

    return [loss_of(group) for group in range(len(lengths))]


def prefix_gradients(group: Responses) -> Tensor:
    assert group.prefix.kv.grad_k_LPKD is not None and group.prefix.kv.grad_v_LPKD is not None
    return torch.cat([group.prefix.kv.grad_k_LPKD.flatten(), group.prefix.kv.grad_v_LPKD.flatten()])


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=2, max_size=3),
    st.sampled_from([1, 6, 13, 1000]),
)
@settings(max_examples=12, deadline=None)
def test_groups_in_one_pass_give_what_each_gives_alone(lengths: list[list[int]], microbatch_tokens: int) -> None:
    together, alone = policy_of(microbatch_tokens=microbatch_tokens), policy_of()
    losses = losses_of(lengths, [1.0] * 3)
    packed, single = groups_of(together, lengths), groups_of(alone, lengths)
    found = finish(together.backward(packed, losses))
    for index, (one, other) in enumerate(zip(packed, single, strict=True)):
        (expected_T,) = finish(alone.backward([other], [losses[index]]))
        torch.testing.assert_close(found[index], expected_T, atol=1e-5, rtol=0)
        error = float((prefix_gradients(one) - prefix_gradients(other)).norm())
        assert error <= PACK_TOLERANCE * float(prefix_gradients(other).norm())
    assert difference(together.gradients.buffers, alone.gradients.buffers) <= PACK_TOLERANCE
    for group in packed:
        finish(together.prefix_backward(group.prefix))
    for group in single:
        finish(alone.prefix_backward(group.prefix))
    assert difference(together.gradients.buffers, alone.gradients.buffers) <= PACK_TOLERANCE


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_another_advantage_of_one_group_changes_its_own_gradients_only(changed: int) -> None:
    lengths, scales = [[5, 2], [3, 4, 1], [6]], [1.0, 1.0, 1.0]
    runs = []
    for scale in (1.0, 3.0):
        policy = policy_of(microbatch_tokens=1000)
        scales[changed] = scale
        groups = groups_of(policy, lengths)
        logprobs = finish(policy.backward(groups, losses_of(lengths, scales)))
        runs.append((logprobs, [prefix_gradients(group) for group in groups], policy.gradients.buffers))
    alone = policy_of()
    finish(alone.backward([groups_of(alone, lengths)[changed]], [losses_of(lengths, [2.0] * 3)[changed]]))
    assert all(torch.equal(*pair) for pair in zip(runs[0][0], runs[1][0], strict=True))
    for group, (before, after) in enumerate(zip(runs[0][1], runs[1][1], strict=True)):
        if group != changed:
            assert torch.equal(before, after)
        elif len(before):
            assert float((after - 3 * before).norm()) <= PACK_TOLERANCE * float(after.norm())
    grown = {name: after - runs[0][2][name] for name, after in runs[1][2].items()}
    expected = alone.gradients.buffers
    for name, gradient in grown.items():
        scale_of_sums = float(runs[1][2][name].norm())
        assert float((gradient - expected[name]).norm()) <= PACK_TOLERANCE * max(scale_of_sums, 1e-6), name
    assert any(gradient.any() for gradient in expected.values())


@pytest.mark.parametrize("microbatch_tokens", [1, 8, 1000])
def test_score_and_backward_give_the_same_bits_for_several_groups(microbatch_tokens: int) -> None:
    policy, lengths = policy_of(microbatch_tokens=microbatch_tokens), [[5, 2], [3, 4, 1], [6]]
    groups = groups_of(policy, lengths)
    scored = finish(policy.score(groups))
    trained = finish(policy.backward(groups, losses_of(lengths, [1.0] * 3)))
    assert [len(logprobs_T) for logprobs_T in scored] == [7, 8, 6]
    assert all(torch.equal(*pair) and not pair[1].requires_grad for pair in zip(scored, trained, strict=True))


def test_a_pass_over_groups_yields_once_for_each_microbatch() -> None:
    lengths = [[5, 2], [3, 4, 1], [6]]
    for microbatch_tokens, passes in ((21, 1), (20, 2), (8, 3), (1, 6)):
        policy = policy_of(microbatch_tokens=microbatch_tokens)
        assert len(list(policy.backward(groups_of(policy, lengths), losses_of(lengths, [1.0] * 3)))) == passes


def test_a_stale_prefix_among_others_is_refused() -> None:
    policy, lengths = policy_of(), [[5, 2], [3, 4, 1]]
    groups = groups_of(policy, lengths)
    groups[1].prefix.version += 1
    with pytest.raises(StaleStateError):
        finish(policy.score(groups))
