"""Claim: in bfloat16, computing prompts once costs no accuracy: the gradient is no further off than the plain one.

One real step - rollout, reference, gradients of all weights - on a model cut to a few layers. Its gradient, and that of
transformers in bfloat16 on every full sequence by itself, are compared with transformers in float32, all from the same
weights, responses, advantages and reference log-probs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollplex.bench.exactness import plain_gradients, published, relative_errors
from rollplex.bench.tiny import RecordingPolicy, tiny_workers
from rollplex.bench.work import image_prompts
from rollplex.build import Runtime
from rollplex.config import Config, parse_config
from rollplex.gpu.device import describe, select_device
from rollplex.models.presets import preset_config
from rollplex.models.vlm import VisionLanguageModel
from rollplex.step import Step
from rollplex.testing import tiny_config, tiny_model
from rollplex.trace import Trace

VISION_LAYERS = 4
"""Of the cut tower; the last one attends to whole images, as in the published towers every eighth does."""


def run(
    model: str, layers: int, prompts: int, images: int, pixels: int, group: int, new_tokens: int, device: str
) -> dict[str, object]:
    """Relative errors of both bfloat16 gradients, and their ratio."""
    on = select_device(device)
    hf_config, config = cut_config(model, layers), recipe(prompts, group, new_tokens, on)
    workers = tiny_workers(config, hf_config, on)
    policy, runtime = workers.policy, Runtime(config, workers)
    assert isinstance(policy, RecordingPolicy)
    step = runtime.train(image_prompts(policy.model, prompts, images, pixels), 0, Trace())
    shared, weights = policy.gradients_seen[0], policy.weights_seen[0]
    with _any_algorithm():
        exact = _plain(hf_config, weights, torch.float32, step, config)
        plain = _plain(hf_config, weights, torch.bfloat16, step, config)
    ours = published(policy.model, shared)
    result: dict[str, Any] = {
        "bench": "gradients",
        "model": model,
        "layers": layers,
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "device": describe(on),
        "prompt_tokens": len(step.groups[0].prompt.ids),
        "prompts": prompts,
        "group": group,
        "response_tokens": sum(sample.length for each in step.groups for sample in each.responses),
    }
    for part, prefix in (("all", ""), ("decoder", "model."), ("vision", "visual.")):
        names = [name for name in ours if name.startswith(prefix)]
        result[part] = _compared(*({name: found[name] for name in names} for found in (ours, plain, exact)))
    return result | {"gradient_error": result["all"]["shared"], "ratio": result["all"]["ratio"]}


def cut_config(model: str, layers: int) -> Any:
    """A preset's config with few layers; "tiny" has few already."""
    if model == "tiny":
        return tiny_config()
    config: Any = preset_config(model)
    text, vision = config.text_config, config.vision_config
    text.num_hidden_layers, text.layer_types = layers, text.layer_types[:layers]
    vision.depth, vision.fullatt_block_indexes = VISION_LAYERS, [VISION_LAYERS - 1]
    return config


def recipe(prompts: int, group: int, new_tokens: int, device: torch.device) -> Config:
    """One update of everything, in bfloat16, with a KL term."""
    return parse_config(
        {
            "model": {"path": "random", "dtype": "bfloat16", "train_vision": True},
            "data": {"train": "random"},
            "rollout": {"group_size": group, "max_new_tokens": new_tokens},
            "algo": {"kl_coefficient": 0.04},
            "train": {"prompts_per_step": prompts},
            "run": {"device": device.type},
        }
    )


def _plain(
    hf_config: Any, weights: Mapping[str, Tensor], dtype: torch.dtype, step: Step, config: Config
) -> dict[str, Tensor]:
    device = next(iter(weights.values())).device
    model: VisionLanguageModel = tiny_model(hf_config, 0, dtype, device)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()}, assign=True)
    return plain_gradients(model, step.groups, config.algo)


def _compared(
    shared: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, float]:
    ours, others = relative_errors(shared, exact), relative_errors(plain, exact)
    return {
        "shared": ours[0], "plain": others[0], "ratio": ours[0] / others[0],
        "shared_worst_parameter": ours[1], "plain_worst_parameter": others[1],
    }  # fmt: skip


@contextmanager
def _any_algorithm() -> Iterator[None]:
    """The oracle may add in any order: not all that transformers calls has repeatable kernels."""
    repeatable = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(repeatable)
