"""Where a response ends: stop ids, stop strings, the limit, and nothing after them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout import eager
from rollplex.rollout.sampler import Draw
from rollplex.testing import (
    SPECIAL_IDS,
    canned_prompts,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)
from rollplex.types import Prompt, Sample
from tests.rollout.engine_runs import STOP_IDS, engine_of, run


@pytest.fixture(scope="module")
def model() -> VisionLanguageModel:
    return tiny_model(tiny_config(), seed=1)


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return canned_prompts(tiny_config(), (0, 1, 2), seed=3)


def scripted(monkeypatch: pytest.MonkeyPatch, script: Callable[[int], Sequence[int]]) -> None:
    """Draw these ids in the n-th decode step instead of sampling."""
    calls = iter(range(1000))

    def sample(logits_BV: Tensor, *_: object) -> Draw:
        ids_B = torch.tensor(script(next(calls)))
        zeros_B = torch.zeros(len(ids_B))
        assert len(ids_B) == len(logits_BV)
        return Draw(ids_B, zeros_B, zeros_B, zeros_B)

    monkeypatch.setattr(eager, "sample", sample)


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
    monkeypatch: pytest.MonkeyPatch,
    model: VisionLanguageModel,
    prompts: tuple[Prompt, ...],
    text: str,
    stop: str,
    kept: str,
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
