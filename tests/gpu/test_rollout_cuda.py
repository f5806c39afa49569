"""The engine on a CUDA device: graphs against single launches bit for bit, and both against the engine on the CPU."""

from typing import Any

import numpy as np
import pytest
import torch

from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.graphs import widths
from rollplex.rollout.sampler import SamplingParams
from rollplex.testing import canned_prompts, tiny_config, tiny_model
from tests.rollout.engine_runs import RAW, Sampled, assert_same, engine_of, run

pytestmark = pytest.mark.gpu
PROMPTS = canned_prompts(tiny_config(), (0, 1, 2, 1), seed=3)
LIMITS: list[dict[str, Any]] = [
    {},
    {"max_batch_samples": 5},
    {"block_size": 1, "num_blocks": 14},
    {"block_size": 2, "num_blocks": 13, "max_batch_samples": 7},
    {"block_size": 3, "num_blocks": 7, "max_batch_tokens": 6},
]
FILTERS = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.3, top_p=0.9, top_k=40, min_p=0.05)]


def model_on(device: str, dtype: torch.dtype) -> VisionLanguageModel:
    return tiny_model(tiny_config(), seed=1, dtype=dtype).to(device)  # a GPU would draw other weights


def assert_same_bits(found: Sampled, expected: Sampled) -> None:
    assert found.keys() == expected.keys()
    for key, sample in found.items():
        for name in ("ids", "raw_logprobs", "tempered_logprobs", "sampling_logprobs"):
            np.testing.assert_array_equal(getattr(sample, name), getattr(expected[key], name))
        assert sample.decode_step == expected[key].decode_step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limits", LIMITS)
def test_graphs_give_the_bits_of_single_launches(limits: dict[str, Any], dtype: torch.dtype) -> None:
    model = model_on("cuda", dtype)
    graphs, launches = (engine_of(model, cuda_graphs=on, **limits) for on in (True, False))
    for step in range(2):  # the second replays what the first has captured
        expected, _ = run(launches, PROMPTS, step=step)
        assert_same_bits(run(graphs, PROMPTS, step=step)[0], expected)
        assert_same_bits(run(graphs, PROMPTS, step=step)[0], expected)


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_are_captured_too(params: SamplingParams) -> None:
    model = model_on("cuda", torch.bfloat16)
    expected, _ = run(engine_of(model, cuda_graphs=False), PROMPTS, params=params)
    assert_same_bits(run(engine_of(model), PROMPTS, params=params)[0], expected)


@pytest.mark.parametrize("params", [RAW, SamplingParams(temperature=0.6), *FILTERS], ids=str)
@pytest.mark.parametrize("limits", LIMITS)
def test_the_gpu_samples_what_the_cpu_samples(limits: dict[str, Any], params: SamplingParams) -> None:
    expected, _ = run(engine_of(model_on("cpu", torch.float32), **limits), PROMPTS, params=params)
    found, steps = run(engine_of(model_on("cuda", torch.float32), **limits), PROMPTS, params=params)
    assert_same(found, expected)
    assert sum(event.num_decoded for event in steps) == sum(sample.length for sample in found.values())


def test_weights_changed_in_place_reach_a_captured_graph() -> None:
    model = model_on("cuda", torch.float32)
    engine = engine_of(model)
    before, _ = run(engine, PROMPTS)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.mul_(1.25)
    after, _ = run(engine, PROMPTS)
    expected, _ = run(engine_of(model), PROMPTS)
    assert_same_bits(after, expected)
    assert any(after[key].ids.tolist() != before[key].ids.tolist() for key in after)


def test_broken_weights_are_noticed() -> None:
    from rollplex.errors import NumericsError

    model = model_on("cuda", torch.bfloat16)
    with torch.no_grad():
        model.decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(NumericsError, match="not finite"):
        run(engine_of(model), PROMPTS[:1])


@pytest.mark.parametrize("most", [1, 3, 8, 64, 100, 256, 300])
def test_some_width_fits_every_batch(most: int) -> None:
    found = widths(most)
    assert found[-1] == most and found == sorted(set(found))
