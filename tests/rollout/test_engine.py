"""The engine by kinds of faults: batching that leaks, wrong K/V, stops, banned ids, stale or broken numbers, blocks lost."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollplex.config import RolloutConfig
from rollplex.errors import CapacityError, NumericsError, StaleStateError
from rollplex.models.load import to_transformers
from rollplex.models.prefix import PrefixState, prefix_forward
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.phases.run import finish
from rollplex.rollout import engine as engine_module
from rollplex.rollout.blocks import BlockPool
from rollplex.rollout.engine import DecodeStep, Engine, NeedPrefix, Vocabulary
from rollplex.rollout.sampler import Draw, SamplingParams
from rollplex.testing import (
    FIRST_SPECIAL_ID,
    SPECIAL_IDS,
    VOCAB_SIZE,
    canned_prompts,
    hf_inputs,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from rollplex.types import Prompt, Sample

LOGPROB_TOLERANCE = 1e-5
"""float32: what a batch of other rows may change in a matrix product."""
PEER_TOLERANCE = 1e-4
"""Against transformers, whose attention adds in another order."""
NUM_IDS = FIRST_SPECIAL_ID + len(SPECIAL_IDS)
STOP_IDS = frozenset(range(0, FIRST_SPECIAL_ID, 12))
RAW = SamplingParams()
PLACEHOLDERS = {SPECIAL_IDS[name] for name in
                ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")}  # fmt: skip

Sampled = dict[tuple[int, int], Sample]
"""By prompt uid and sample index."""


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    return tiny_model(tiny_config(), seed=1)


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return canned_prompts(tiny_config(), (0, 1, 2), seed=3)


def engine_of(model: VisionLanguageModel, seed: int = 0, stop_ids: frozenset[int] = STOP_IDS, **rollout: Any) -> Engine:
    tokenizer: Any = tiny_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    config = RolloutConfig(**{"max_new_tokens": 12, **rollout})
    return Engine(model, Vocabulary(stop_ids, NUM_IDS, decode), config, seed)


def prefix_of(model: VisionLanguageModel, prompt: Prompt) -> PrefixState:
    with torch.no_grad():
        features = tuple(model.encode(image) for image in prompt.images)
    return finish(prefix_forward(model, prompt, Encoded(prompt.images, features), for_training=False))


def run(
    engine: Engine, prompts: Sequence[Prompt], *, group_size: int = 4, step: int = 0, params: SamplingParams = RAW
) -> tuple[Sampled, list[DecodeStep]]:
    prefixes = [prefix_of(engine.model, prompt) for prompt in prompts]
    events = list(engine.decode(prompts, prefixes.__getitem__, step=step, group_size=group_size, params=params))
    steps = [event for event in events if isinstance(event, DecodeStep)]
    assert len(steps) == len(events), "no prefix was missing"
    samples = [sample for event in steps for sample in event.finished]
    found = {(prompts[sample.group].uid, sample.sample): sample for sample in samples}
    assert len(found) == len(samples) == len(prompts) * group_size
    return found, steps


def assert_same(found: Sampled, expected: Sampled) -> None:
    for key, sample in found.items():
        other = expected[key]
        assert sample.ids.tolist() == other.ids.tolist(), key
        assert (sample.finish_reason, sample.text) == (other.finish_reason, other.text)
        for name in ("raw_logprobs", "tempered_logprobs", "sampling_logprobs"):
            np.testing.assert_allclose(getattr(sample, name), getattr(other, name), atol=LOGPROB_TOLERANCE, rtol=0)


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
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], alone: Sampled, limits: dict[str, int], preempts: bool
) -> None:
    found, steps = run(engine_of(model, **limits), prompts)
    assert (sum(event.num_recomputed for event in steps) > 0) == preempts
    assert max(event.num_decoded for event in steps) <= min(limits.get("max_batch_samples", 99), limits.get("max_batch_tokens", 99))  # fmt: skip
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
        expected = [independent_logprobs(row, int(token), params) for row, token in zip(logits, sample.ids, strict=True)]
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
        assert (sample.ids.dtype, sample.raw_logprobs.dtype) == (np.int64, np.float32)
        assert len(sample.raw_logprobs) == len(sample.tempered_logprobs) == len(sample.sampling_logprobs) == sample.length


# Where a response ends


def scripted(monkeypatch: pytest.MonkeyPatch, script: Callable[[int], Sequence[int]]) -> None:
    """Draw these ids in the n-th decode step instead of sampling."""
    calls = iter(range(1000))

    def sample(logits_BV: Tensor, *_: object) -> Draw:
        ids_B = torch.tensor(script(next(calls)))
        zeros_B = torch.zeros(len(ids_B))
        assert len(ids_B) == len(logits_BV)
        return Draw(ids_B, zeros_B, zeros_B, zeros_B)

    monkeypatch.setattr(engine_module, "sample", sample)


def scripted_response(
    monkeypatch: pytest.MonkeyPatch, model: VisionLanguageModel, prompt: Prompt, ids: Sequence[int], **rollout: Any
) -> Sample:
    """The one response of a rollout that draws these ids, one after the other, and then would go on."""
    scripted(monkeypatch, lambda step: [[*ids, *[65] * 100][step]])
    engine = engine_of(model, stop_ids=frozenset({SPECIAL_IDS["<|im_end|>"]}), **rollout)
    return run(engine, [prompt], group_size=1)[0][prompt.uid, 0]


def tokens_of(text: str) -> list[int]:
    tokenizer: Any = tiny_tokenizer()
    return [int(token) for token in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one then </answer> and on", "</answer>", "one then </answer>"),
        ("one then </answer> and on", "e t", "one the"),  # inside the token " the": the whole token stays
        ("end", "e", "e"),
        ("a thing in the ring", " in", "a thing in"),
        ("ça fini 終わり。後", "終わり。", "ça fini 終わり。"),
        ("🙂🙃🙂", "🙃", "🙂🙃"),
        ("x\n\n\ny", "\n\n", "x\n\n"),
    ],
)
def test_a_stop_string_ends_with_the_token_that_completes_it(
    monkeypatch: pytest.MonkeyPatch, model: VisionLanguageModel, prompts: tuple[Prompt, ...], text: str, stop: str, kept: str
) -> None:
    ids = tokens_of(text)
    sample = scripted_response(monkeypatch, model, prompts[0], ids, stop_strings=["never", stop], max_new_tokens=100)
    first = next(n for n in range(1, len(ids) + 1) if stop in tiny_tokenizer().decode(ids[:n]))
    assert sample.ids.tolist() == ids[:first]
    assert (sample.finish_reason, sample.text) == ("stop", kept)


@pytest.mark.parametrize("limit", [1, 4, 5])
def test_limits_and_stops_at_the_first_and_the_last_token(
    monkeypatch: pytest.MonkeyPatch, model: VisionLanguageModel, prompts: tuple[Prompt, ...], limit: int
) -> None:
    end, letters = SPECIAL_IDS["<|im_end|>"], tokens_of("ab!d")

    def response(ids: list[int], **rollout: Any) -> Sample:
        return scripted_response(monkeypatch, model, prompts[0], ids, max_new_tokens=limit, **rollout)

    assert response(letters * 3).finish_reason == "length" and response(letters * 3).length == limit
    stopped = response([*letters[: limit - 1], end])
    assert (stopped.finish_reason, stopped.length, stopped.ids[-1]) == ("stop", limit, end)
    assert stopped.text == "ab!d"[: limit - 1], "special tokens are not in the text"
    for extra in ({"stop_token_ids": [letters[0]]}, {"stop_strings": ["a"]}):
        first = response(letters * 3, **extra)
        assert (first.finish_reason, first.ids.tolist()) == ("stop", letters[:1])


def test_a_long_response_still_finds_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, model: VisionLanguageModel, prompts: tuple[Prompt, ...]
) -> None:
    ids = tokens_of("z" * 80 + "stop here")
    sample = scripted_response(monkeypatch, model, prompts[0], ids, stop_strings=["stop"], max_new_tokens=99)
    assert sample.text == "z" * 80 + "stop"


def test_nothing_after_a_stop_is_kept(model: VisionLanguageModel, prompts: tuple[Prompt, ...]) -> None:
    found, _ = run(engine_of(model), prompts, group_size=8)
    free, _ = run(engine_of(model, stop_ids=frozenset()), prompts, group_size=8)
    reasons = set()
    for key, sample in found.items():
        stops = [n for n, token in enumerate(free[key].ids.tolist(), 1) if token in STOP_IDS]
        assert sample.length == (stops[0] if stops else 12)
        assert sample.ids.tolist() == free[key].ids[: sample.length].tolist()
        assert sample.finish_reason == ("stop" if stops else "length")
        reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


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
    events = engine_of(model, stop_ids=frozenset()).decode([prompts[0]], lambda _: prefix, step=0, group_size=1, params=RAW)
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
    model: VisionLanguageModel, prompts: tuple[Prompt, ...], pools: list[BlockPool], limits: Mapping[str, int]
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
