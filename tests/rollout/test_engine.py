"""The engine by kinds of faults: batching that leaks, wrong K/V, stops, banned ids, stale or broken numbers, blocks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollplex.errors import CapacityError, NumericsError, StaleStateError
from rollplex.models.load import to_transformers
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout import engine as engine_module
from rollplex.rollout.blocks import BlockPool
from rollplex.rollout.eager import EagerTokens
from rollplex.rollout.engine import DecodeStep, NeedPrefix
from rollplex.rollout.rows import Rows
from rollplex.rollout.sampler import SamplingParams
from rollplex.testing import (
    VOCAB_SIZE,
    canned_prompts,
    hf_inputs,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from rollplex.types import Prompt, Sample
from tests.rollout.engine_runs import (
    NUM_IDS,
    PEER_TOLERANCE,
    PLACEHOLDERS,
    RAW,
    Sampled,
    assert_same,
    engine_of,
    prefix_of,
    run,
)


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    return tiny_model(tiny_config(), seed=1)


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return canned_prompts(tiny_config(), (0, 1, 2), seed=3)


# What else is in the batch


@pytest.fixture(scope="module")
def alone(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> Sampled:
    """Every sample as it comes out with its group by itself and one sample decoded at a time."""
    engine = engine_of(model, max_batch_samples=1)
    found: Sampled = {}
    for prompt in prompts:
        found |= run(engine, [prompt])[0]
    lengths = {sample.length for sample in found.values()}
    assert len(lengths) > 3 and max(lengths) == 12, "ragged, and some truncated"
    return found


@pytest.mark.parametrize(
    ("limits", "preempts"),
    [
        ({}, False),
        ({"max_batch_samples": 5}, False),
        ({"max_batch_tokens": 3, "block_size": 5}, False),
        ({"block_size": 1, "num_blocks": 14}, True),
        ({"block_size": 2, "num_blocks": 13, "max_batch_samples": 7}, True),
        ({"block_size": 3, "num_blocks": 7, "max_batch_tokens": 6}, True),
        ({"block_size": 16, "num_blocks": 1}, False),
    ],
)
def test_tokens_do_not_depend_on_budgets(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled, limits: dict[str, Any], preempts: bool
) -> None:
    found, steps = run(engine_of(model, **limits), prompts)
    assert (sum(event.num_recomputed for event in steps) > 0) == preempts
    most = min(limits.get("max_batch_samples", 99), limits.get("max_batch_tokens", 99))
    assert max(event.num_decoded for event in steps) <= most
    assert sum(event.num_decoded for event in steps) == sum(sample.length for sample in found.values())
    assert_same(found, alone)


def test_tokens_do_not_depend_on_order_or_company(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled
) -> None:
    engine = engine_of(model, max_batch_samples=7)
    assert_same(run(engine, prompts[::-1])[0], alone)
    assert_same(run(engine, (prompts[2], prompts[0]))[0], alone)


def test_a_larger_group_begins_with_the_smaller_one(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled
) -> None:
    eight, _ = run(engine_of(model), prompts, group_size=8)
    assert_same({key: sample for key, sample in eight.items() if key[1] < 4}, alone)
    one, _ = run(engine_of(model), prompts, group_size=1)
    assert_same(one, alone)
    assert len({tuple(sample.ids) for sample in eight.values()}) > 12, "siblings differ"


class LateTokens(EagerTokens):
    """Tokens that the host may read only `lag` steps later; until then they go from step to step by row."""

    def __init__(self, lag: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lag = lag
        self._last_B = np.zeros(0, dtype=np.int64)

    def launch(self, rows: Rows, params: SamplingParams) -> Any:
        known_B = rows.ids_B >= 0
        assert (rows.sources_B[~known_B] >= 0).all()
        ids_B = np.where(known_B, rows.ids_B, np.append(self._last_B, 0)[rows.sources_B])
        pending = super().launch(replace(rows, ids_B=ids_B), params)
        self._last_B = pending.read().ids_B
        return pending


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("limits", [{}, {"max_batch_tokens": 3, "block_size": 5}, {"block_size": 1, "num_blocks": 14},
                                    {"block_size": 3, "num_blocks": 7, "max_batch_tokens": 6}])  # fmt: skip
def test_tokens_read_late_are_the_same_tokens(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled, limits: dict[str, Any], lag: int
) -> None:
    engine = engine_of(model, **limits)
    source = engine.tokens
    assert isinstance(source, EagerTokens)
    engine.tokens = LateTokens(lag, model, engine.pages, engine.config.block_size, source.banned_V)
    found, steps = run(engine, prompts)
    assert_same(found, alone)
    assert sum(event.num_decoded for event in steps) == sum(sample.length for sample in found.values())


def test_a_limit_ends_a_sample_before_the_longest_response(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled
) -> None:
    engine, limits = engine_of(model), [1 + index % 11 for index in range(12)]
    prefixes = [prefix_of(model, prompt) for prompt in prompts]
    events = engine.decode(prompts, prefixes.__getitem__, step=0, group_size=4, params=RAW, limits=limits)
    for event in events:
        assert isinstance(event, DecodeStep)
        for sample in event.finished:
            whole = alone[prompts[sample.group].uid, sample.sample]
            assert sample.length == min(limits[sample.group * 4 + sample.sample], whole.length)
            assert sample.ids.tolist() == whole.ids.tolist()[: sample.length]


@pytest.mark.parametrize(("gib", "expected"), [(1.0, 12), (9 * 3 * 4 * 2 * 2 * 16 * 4 / 2**30, 9), (None, 12)])
def test_blocks_fit_into_the_memory_given_to_them(model: VisionLanguageModel, gib: float | None, expected: int) -> None:
    engine = engine_of(model, block_size=4, max_batch_samples=4, kv_memory_gib=gib)
    assert engine.num_blocks == expected
    if gib is not None:
        assert 2 * engine.pages.k_LSKD.nbytes <= gib * 2**30
    with pytest.raises(CapacityError, match=r"rollout.kv_memory_gib = 1e-07.*needs 3; set it to"):
        engine_of(model, block_size=4, kv_memory_gib=1e-7)


def test_seed_step_and_uid_choose_the_tokens(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> None:
    def ids(seed: int = 0, step: int = 0, uid: int = 0) -> list[list[int]]:
        found, _ = run(engine_of(model, seed), [replace(prompts[1], uid=uid)], step=step)
        return [sample.ids.tolist() for _, sample in sorted(found.items())]

    assert ids() == ids()
    others = [ids(seed=1), ids(step=1), ids(uid=1), ids()]
    assert all(one != other for index, one in enumerate(others) for other in others[:index])


# Numbers of a sample


@torch.no_grad()
def peer_logits(model: VisionLanguageModel, prompt: Prompt, sample: Sample) -> Tensor:
    """transformers' logits [n, V] for each response token, from the whole sequence without a cache."""
    twin = to_transformers(model)
    logits: Tensor = twin(**hf_inputs(prompt, sample.ids), use_cache=False).logits[0, len(prompt.ids) - 1 : -1]
    return logits.float()


def independent_logprobs(logits: np.ndarray, token: int, params: SamplingParams) -> tuple[float, float, float]:
    """Raw, tempered and sampling log-prob of one token, by sorting and counting in float64."""

    def softmax(values: np.ndarray) -> np.ndarray:
        weights = np.exp(values - values.max())
        return np.asarray(weights / weights.sum())

    raw, tempered = softmax(logits), softmax(logits / params.temperature)
    banned = PLACEHOLDERS | set(range(NUM_IDS, VOCAB_SIZE))
    left = sorted((token for token in range(VOCAB_SIZE) if token not in banned), key=lambda token: -tempered[token])
    if params.top_k:
        left = left[: params.top_k]
    mass = tempered[left].sum()
    if params.top_p < 1.0:
        count, covered = 0, 0.0
        while covered < params.top_p:
            covered += tempered[left[count]] / mass
            count += 1
        left = left[:count]
    if params.min_p:
        left = [token for token in left if tempered[token] >= params.min_p * tempered[left[0]]]
    assert token in left, "a filtered or banned token was sampled"
    sampling = tempered[token] / tempered[left].sum()
    return float(np.log(raw[token])), float(np.log(tempered[token])), float(np.log(sampling))


@pytest.mark.parametrize(
    "params",
    [
        RAW,
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=0.8, top_k=9),
        SamplingParams(temperature=1.1, top_p=0.7),
        SamplingParams(temperature=0.9, min_p=0.2),
        SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.05),
    ],
    ids=str,
)
def test_logprobs_are_those_of_the_full_sequence(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], params: SamplingParams
) -> None:
    # Blocks so few that most samples are recomputed at some time: wrong K/V anywhere shows.
    engine = engine_of(model, block_size=3, num_blocks=7)
    found, steps = run(engine, prompts, params=params, group_size=3)
    assert sum(event.num_recomputed for event in steps)
    for (uid, _), sample in found.items():
        logits = peer_logits(model, prompts[uid], sample).double().numpy()
        expected = [
            independent_logprobs(row, int(token), params) for row, token in zip(logits, sample.ids, strict=True)
        ]
        got = np.stack([sample.raw_logprobs, sample.tempered_logprobs, sample.sampling_logprobs], axis=1)
        np.testing.assert_allclose(got, np.array(expected), atol=PEER_TOLERANCE, rtol=0)


def test_greedy_takes_the_likeliest_allowed_id(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> None:
    found, _ = run(engine_of(model), prompts, params=SamplingParams(temperature=0.0), group_size=2)
    for (uid, index), sample in found.items():
        logits = peer_logits(model, prompts[uid], sample)
        logits[:, [*PLACEHOLDERS, *range(NUM_IDS, VOCAB_SIZE)]] = -torch.inf
        assert logits.argmax(-1).tolist() == sample.ids.tolist()
        assert sample.ids.tolist() == found[uid, 1 - index].ids.tolist()
        np.testing.assert_array_equal(sample.sampling_logprobs, 0.0)
        np.testing.assert_array_equal(sample.tempered_logprobs, sample.raw_logprobs)


@pytest.mark.parametrize(("text_tokens", "images"), [((1,), 0), ((2,), 0), ((1,), 1), ((4, 6), 3)])
def test_shortest_and_richest_prompts(text_tokens: tuple[int, ...], images: int) -> None:
    model = tiny_model(tiny_config(), seed=2)
    (prompt,) = canned_prompts(tiny_config(), (images,), seed=8, text_tokens=text_tokens)
    assert images or prompt.prefix_length == text_tokens[0] - 1
    found, _ = run(engine_of(model), [prompt], group_size=2)
    for sample in found.values():
        logprobs = peer_logits(model, prompt, sample).log_softmax(-1)
        expected = logprobs.gather(1, torch.from_numpy(sample.ids)[:, None])[:, 0]
        np.testing.assert_allclose(sample.raw_logprobs, expected.numpy(), atol=PEER_TOLERANCE)


def test_bfloat16_agrees_with_float32_to_its_rounding(prompts: tuple[Prompt, ...]) -> None:
    model = tiny_model(tiny_config(), seed=1, dtype=torch.bfloat16)
    found, _ = run(engine_of(model, block_size=3, num_blocks=7), prompts, group_size=2)
    for (uid, _), sample in found.items():
        logprobs = peer_logits(model.float(), prompts[uid], sample).log_softmax(-1)
        expected = logprobs.gather(1, torch.from_numpy(sample.ids)[:, None])[:, 0]
        assert np.abs(sample.raw_logprobs - expected.numpy()).mean() < 0.05


def test_a_sample_carries_version_step_and_text(prompts: tuple[Prompt, ...]) -> None:
    model = tiny_model(tiny_config(), seed=1)
    model.version = 7
    found, steps = run(engine_of(model), prompts)
    assert {sample.version for sample in found.values()} == {7}
    for number, event in enumerate(steps, 1):
        assert all(sample.decode_step == number for sample in event.finished)
    for sample in found.values():
        assert sample.text == tiny_tokenizer().decode(sample.ids.tolist(), skip_special_tokens=True)
        assert (str(sample.ids.dtype), str(sample.raw_logprobs.dtype)) == ("int64", "float32")
        assert (
            len(sample.raw_logprobs) == len(sample.tempered_logprobs) == len(sample.sampling_logprobs) == sample.length
        )


# What must never be sampled


def biased_to(ids: Sequence[int]) -> VisionLanguageModel:
    """A model that, wherever it is, gives these ids by far the largest logits."""
    model = tiny_model(tiny_config(), seed=1)
    with torch.no_grad():
        model.decoder.embedding[:, 0] = 100.0  # stays the largest entry of every hidden state
        model.decoder.norm.weight[0] = 1.0
        assert model.decoder.untied_head is not None
        model.decoder.untied_head[:, 0] = 0.0
        model.decoder.untied_head[list(ids), 0] = 20.0
    return model


@pytest.mark.parametrize(
    "params",
    [
        RAW,
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=5.0, top_p=0.01),
        SamplingParams(temperature=1.0, min_p=1.0),
    ],
    ids=str,
)
def test_banned_ids_are_never_sampled_however_likely(prompts: tuple[Prompt, ...], params: SamplingParams) -> None:
    banned = [*PLACEHOLDERS, *range(NUM_IDS, VOCAB_SIZE)]
    found, _ = run(engine_of(biased_to(banned), stop_ids=frozenset()), prompts, params=params)
    sampled = {int(token) for sample in found.values() for token in sample.ids}
    assert not sampled & set(banned)
    assert all((sample.raw_logprobs < -50).all() for sample in found.values()), "the bias works"
    control, _ = run(engine_of(biased_to([65]), stop_ids=frozenset()), prompts[:1], params=params)
    assert {int(token) for sample in control.values() for token in sample.ids} == {65}


# Errors


def test_a_stale_prefix_is_refused(prompts: tuple[Prompt, ...]) -> None:
    model = tiny_model(tiny_config(), seed=1)
    prefix = prefix_of(model, prompts[0])
    model.version = 1
    with pytest.raises(StaleStateError, match=r"version 0 .* version 1"):
        next(engine_of(model).decode([prompts[0]], lambda _: prefix, step=0, group_size=1, params=RAW))


def test_a_prefix_that_goes_stale_while_decoding_is_refused(prompts: tuple[Prompt, ...]) -> None:
    model = tiny_model(tiny_config(), seed=1)
    prefix = prefix_of(model, prompts[0])
    events = engine_of(model, stop_ids=frozenset()).decode(
        [prompts[0]], lambda _: prefix, step=0, group_size=1, params=RAW
    )
    next(events)
    model.version += 1
    with pytest.raises(StaleStateError):
        next(events)


@pytest.mark.parametrize("params", [RAW, SamplingParams(temperature=0.0), SamplingParams(top_k=3, top_p=0.5)], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_name_the_prompt(prompts: tuple[Prompt, ...], params: SamplingParams, value: float) -> None:
    model = tiny_model(tiny_config(), seed=1)
    with torch.no_grad():
        model.decoder.norm.weight[3] = value
    with pytest.raises(NumericsError, match="canned, row 0") as caught:
        run(engine_of(model), prompts, params=params)
    assert "not finite" in str(caught.value) and "train.learning_rate" in str(caught.value)


def test_one_broken_prompt_is_the_one_that_is_named(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> None:
    prefixes = [prefix_of(model, prompt) for prompt in prompts]
    prefixes[1].kv.v_LPKD[0, 0, 0, 0] = float("nan")
    with pytest.raises(NumericsError, match="canned, row 1"):
        list(engine_of(model).decode(prompts, prefixes.__getitem__, step=0, group_size=2, params=RAW))


def test_blocks_too_few_for_one_response_are_refused(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> None:
    with pytest.raises(CapacityError, match=r"rollout.num_blocks = 3.*12.*4 or more"):
        run(engine_of(model, block_size=3, num_blocks=3), prompts)
    run(engine_of(model, block_size=3, num_blocks=4), prompts[:1])


# Prefixes and blocks


def test_decoding_asks_for_a_prefix_until_it_is_there(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled
) -> None:
    prefixes: dict[int, PrefixState] = {}
    found: Sampled = {}
    asked = []
    engine = engine_of(model, max_batch_samples=5)
    for event in engine.decode(prompts, prefixes.get, step=0, group_size=4, params=RAW):
        if isinstance(event, NeedPrefix):
            asked.append(event.group)
            if asked.count(event.group) == 2:
                prefixes[event.group] = prefix_of(model, prompts[event.group])
            continue
        found |= {(prompts[sample.group].uid, sample.sample): sample for sample in event.finished}
        done = {uid for uid, _ in found if sum(key[0] == uid for key in found) == 4}
        for group in done:
            prefixes.pop(group, None)  # a prefix is not read after its last sample
    assert asked == [0, 0, 1, 1, 2, 2]
    assert_same(found, alone)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockPool]]:
    """Every pool that an engine makes."""
    made: list[BlockPool] = []

    class Recorded(BlockPool):
        def __init__(self, num_blocks: int, block_size: int) -> None:
            super().__init__(num_blocks, block_size)
            made.append(self)

    monkeypatch.setattr(engine_module, "BlockPool", Recorded)
    yield made
    assert made


@pytest.mark.parametrize("limits", [{}, {"block_size": 2, "num_blocks": 13}])
def test_every_block_comes_back(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], pools: list[BlockPool], limits: Mapping[str, Any]
) -> None:
    run(engine_of(model, **limits), prompts)
    assert [pool.num_free for pool in pools] == [pool.num_blocks for pool in pools]


def test_an_abandoned_rollout_leaves_nothing_behind(
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled
) -> None:
    engine = engine_of(model, block_size=2, num_blocks=13)
    prefixes = [prefix_of(model, prompt) for prompt in prompts]
    events = engine.decode(prompts, prefixes.__getitem__, step=5, group_size=4, params=RAW)
    for _ in range(6):
        next(events)
    events.close()
    with torch.no_grad():  # whatever is in the pages must not matter
        engine.pages.k_LSKD.fill_(float("nan"))
        engine.pages.v_LSKD.fill_(float("nan"))
    assert_same(run(engine, prompts)[0], alone)
