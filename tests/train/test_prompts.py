"""What is computed together follows from the batch alone, is computed once, and is what each prompt would get alone."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollplex.config import TrainConfig
from rollplex.models.prefix import PrefixState, prefix_backward
from rollplex.phases.run import finish
from rollplex.testing import canned_prompts, tiny_config, tiny_model
from rollplex.trace import Trace
from rollplex.train.policy import Scorer
from rollplex.train.prompts import PromptPasses, pack_neighbours
from rollplex.types import Image, Prompt

TOLERANCE = 1e-5
"""float32: rows of other prompts may change how a matrix product is cut up."""


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(0, 60))
def test_packs_cover_all_in_order_and_are_full(lengths: list[int], budget: int) -> None:
    packs = pack_neighbours(lengths, budget)
    assert [index for pack in packs for index in pack] == list(range(len(lengths)))
    totals = [sum(lengths[index] for index in pack) for pack in packs]
    assert all(total <= budget or len(pack) == 1 for total, pack in zip(totals, packs, strict=True))
    for total, following in zip(totals, packs[1:], strict=False):
        assert total + lengths[following[0]] > budget, "the next prompt would have fitted"


def scorer_and_prompts() -> tuple[Scorer, tuple[Prompt, ...]]:
    config = tiny_config()
    prompts = canned_prompts(config, (1, 0, 2, 1, 0), seed=4, text_tokens=(5, 1, 9, 3, 7))
    return Scorer(tiny_model(config, seed=1), TrainConfig(), 1.0), prompts


def state_of(passes: PromptPasses, scorer: Scorer, group: int, among: range) -> PrefixState:
    return finish(passes.prefix(scorer, group, among, for_training=True))


def test_prompts_packed_together_get_what_each_gets_alone() -> None:
    scorer, prompts = scorer_and_prompts()
    every = range(len(prompts))
    trace = Trace()
    packed, alone = PromptPasses(prompts, 60, trace), PromptPasses(prompts, 0, Trace())
    assert 1 < len(packed._packs) < len(prompts)
    for group in reversed(every):  # whoever asks first
        one, other = (state_of(passes, scorer, group, every) for passes in (packed, alone))
        assert torch.equal(one.ids_P, other.ids_P)
        torch.testing.assert_close(one.kv.k_LPKD, other.kv.k_LPKD, rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(one.kv.v_LPKD, other.kv.v_LPKD, rtol=0, atol=TOLERANCE)
        for mine, theirs in zip(one.inputs, other.inputs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)
    assert trace.counts["tokens.prefix"] == sum(prompt.prefix_length for prompt in prompts)
    assert trace.counts["tokens.vision"] == sum(len(i.patches) for prompt in prompts for i in prompt.images)


def test_gradients_of_a_packed_prefix_are_those_of_one_alone() -> None:
    scorer, prompts = scorer_and_prompts()
    model = scorer.model
    found = []
    for budget in (200, 0):
        passes = PromptPasses(prompts, budget, Trace())
        state = state_of(passes, scorer, 2, range(len(prompts)))
        generator = torch.Generator().manual_seed(3)
        for gradient in (state.kv.grad_k_LPKD, state.kv.grad_v_LPKD):
            assert gradient is not None
            gradient.normal_(generator=generator)
        model.zero_grad()
        finish(prefix_backward(model, state, train_vision=True))
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(gradient, found[1][name], rtol=1e-4, atol=1e-4 * float(gradient.abs().max()))


def test_only_prompts_wanted_alike_are_packed() -> None:
    scorer, prompts = scorer_and_prompts()
    passes = PromptPasses(prompts, 1000, Trace())
    finish(passes.prefix(scorer, 1, {1, 3}))
    assert {group for _, group in passes._states} == {3}


def test_an_image_is_encoded_with_the_first_prompt_that_has_it() -> None:
    scorer, prompts = scorer_and_prompts()
    calls: list[list[str]] = []

    class Counting(Scorer):
        def encode(self, images: Sequence[Image]) -> tuple[Tensor, ...]:
            calls.append([image.key for image in images])
            return super().encode(images)

    scorer = Counting(scorer.model, scorer.config, scorer.temperature)
    shared = (prompts[2], prompts[0], prompts[2])
    passes = PromptPasses(shared, 0, Trace())
    for group in (2, 1, 0):
        passes.encode(scorer, group)
    assert calls == [[i.key for i in prompts[2].images], [i.key for i in prompts[0].images]]
    passes.release()
    passes.encode(scorer, 0)
    assert len(calls) == 3
