"""Rollouts of the tiny model without a step around them, for the tests of the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollplex.config import RolloutConfig
from rollplex.models.prefix import PrefixState, prefix_forward
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.phases.run import finish
from rollplex.rollout.engine import DecodeStep, Engine, Vocabulary
from rollplex.rollout.sampler import SamplingParams
from rollplex.testing import (
    FIRST_SPECIAL_ID,
    SPECIAL_IDS,
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


def engine_of(model: VisionLanguageModel, seed: int = 0, stop_ids: frozenset[int] = STOP_IDS, **rollout: Any) -> Engine:
    tokenizer: Any = tiny_tokenizer()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    config = RolloutConfig(**{"max_new_tokens": 12, **rollout})
    return Engine(model, Vocabulary(stop_ids, NUM_IDS, decode), config, seed)


def prefix_of(model: VisionLanguageModel, prompt: Prompt) -> PrefixState:
    with torch.no_grad():
        features = model.encode(prompt.images)
    return finish(prefix_forward(model, [prompt], [Encoded(prompt.images, features)], for_training=False))[0]


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
