"""Claim: the model is transformers' Qwen2.5-VL: the same logits, and the same greedy continuation through the engine.

Tiny random checkpoints, with untied and tied embeddings, are written to disk, loaded by both, and given prompts with 0,
1 and 3 images of different sizes.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.config import RolloutConfig
from rollplex.gpu.device import select_device
from rollplex.models.attention import SuffixAttention
from rollplex.models.head import logits
from rollplex.models.kernels.flash import Segments
from rollplex.models.load import load_model
from rollplex.models.prefix import PrefixState, prefix_forward
from rollplex.models.vlm import Encoded, VisionLanguageModel
from rollplex.phases.run import finish
from rollplex.rollout.engine import DecodeStep, Engine, Vocabulary
from rollplex.rollout.sampler import SamplingParams
from rollplex.testing import canned_prompts, hf_inputs, tiny_checkpoint, tiny_config
from rollplex.types import Prompt

IMAGES_PER_PROMPT = (0, 1, 3)
RESPONSE_TOKENS = 11
"""Random tokens after each prompt on which logits are compared."""


def run(new_tokens: int = 32, device: str = "cpu", dtype: str = "float32") -> dict[str, object]:
    """Largest difference of any logit, and whether all greedy continuations are equal."""
    errors, equal = [], []
    for tie in (False, True):
        model, peer = _load(tie, device, getattr(torch, dtype))
        prompts = canned_prompts(tiny_config(tie=tie), IMAGES_PER_PROMPT, seed=5)
        generator = np.random.default_rng(7)
        for prompt in prompts:
            response = generator.integers(0, 200, RESPONSE_TOKENS)
            errors.append(float((_logits(model, prompt, response) - _peer_logits(peer, prompt, response)).abs().max()))
        theirs = [_peer_continuation(peer, model, prompt, new_tokens) for prompt in prompts]
        equal.append(_continuations(model, prompts, new_tokens) == theirs)
    return {
        "bench": "parity",
        "device": device,
        "dtype": dtype,
        "images_per_prompt": list(IMAGES_PER_PROMPT),
        "positions_per_prompt": RESPONSE_TOKENS,
        "new_tokens": new_tokens,
        "logit_error": max(errors),
        "tokens_equal": all(equal),
    }


def _load(tie: bool, device: str, dtype: torch.dtype) -> tuple[VisionLanguageModel, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = str(tiny_checkpoint(f"{directory}/checkpoint", seed=3, tie=tie))
        model = load_model(path, dtype, select_device(device))
        peer: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=dtype)
    return model, peer.to(model.device).train(False)


@torch.no_grad()
def _logits(model: VisionLanguageModel, prompt: Prompt, response: npt.NDArray[np.int64]) -> Tensor:
    """Logits of the suffix: last prompt token and all but the last response token, over the prefix state."""
    decoder, device = model.decoder, model.device
    ids = np.concatenate([prompt.ids[-1:], response[:-1]])
    positions = prompt.positions[:, -1:] + np.arange(len(ids))
    attention = SuffixAttention([(_prefix(model, prompt).kv, len(ids))], Segments((len(ids),), device))
    x_TH = model.embed(torch.from_numpy(ids).to(device))
    hidden_TH = decoder(x_TH, decoder.rope(torch.from_numpy(positions).to(device)), attention)
    return logits(hidden_TH, decoder.head)


@torch.no_grad()
def _peer_logits(peer: Any, prompt: Prompt, response: npt.NDArray[np.int64]) -> Tensor:
    inputs = {name: tensor.to(peer.device) for name, tensor in hf_inputs(prompt, response).items()}
    output: Tensor = peer(**inputs, use_cache=False).logits[0, len(prompt.ids) - 1 : -1].float()
    return output


def _continuations(model: VisionLanguageModel, prompts: Sequence[Prompt], new_tokens: int) -> list[list[int]]:
    vocab_size = model.decoder.config.vocab_size
    engine = Engine(model, Vocabulary(frozenset(), vocab_size, str), RolloutConfig(max_new_tokens=new_tokens), seed=0)
    prefixes = [_prefix(model, prompt) for prompt in prompts]
    greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    events = engine.decode(prompts, prefixes.__getitem__, step=0, group_size=1, params=greedy)
    samples = [sample for event in events if isinstance(event, DecodeStep) for sample in event.finished]
    return [sample.ids.tolist() for sample in sorted(samples, key=lambda sample: sample.group)]


def _peer_continuation(peer: Any, model: VisionLanguageModel, prompt: Prompt, new_tokens: int) -> list[int]:
    """transformers' own generate, which computes rotary positions itself; the engine never samples placeholders."""
    inputs = {name: tensor.to(peer.device) for name, tensor in hf_inputs(prompt).items() if name != "position_ids"}
    if prompt.images:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.family.image_token_id).int()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new_tokens}
    output = peer.generate(**inputs, **settings, suppress_tokens=list(model.family.placeholder_ids))
    return [int(token) for token in output[0, len(prompt.ids) :]]


def _prefix(model: VisionLanguageModel, prompt: Prompt) -> PrefixState:
    with torch.no_grad():
        features = model.encode(prompt.images)
    return finish(prefix_forward(model, [prompt], [Encoded(prompt.images, features)], for_training=False))[0]
