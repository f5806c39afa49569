"""Preset configurations against the published numbers; the family accepts each."""

from typing import Any

import pytest
import torch

from rollplex.errors import ConfigError
from rollplex.models.load import named_hf_tensors
from rollplex.models.presets import PRESETS, preset_config
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vlm import VisionLanguageModel

# name: layers, hidden, heads, K/V heads, intermediate, vocabulary, tied, the tower's intermediate, parameters
PUBLISHED = {
    "3b": (36, 2048, 16, 2, 11008, 151936, True, 3420, 3_754_622_976),
    "7b": (28, 3584, 28, 4, 18944, 152064, False, 3420, 8_292_166_656),
    "32b": (64, 5120, 40, 8, 27648, 152064, False, 3456, 33_452_718_336),
    "72b": (80, 8192, 64, 8, 29568, 152064, False, 3456, 73_410_777_344),
}


def test_there_are_presets_of_the_published_sizes() -> None:
    assert list(PRESETS) == list(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_model(name: str) -> None:
    config: Any = preset_config(name)
    with torch.device("meta"):
        model = VisionLanguageModel(QwenVL(config))
    shape, vision = model.decoder.config, config.vision_config
    numbers = (shape.num_layers, shape.hidden, shape.num_heads, shape.num_kv_heads, shape.intermediate,
               shape.vocab_size, shape.tied_embeddings, vision.intermediate_size)  # fmt: skip
    num_parameters = sum(tensor.numel() for _, tensor in named_hf_tensors(model))  # without padding
    assert (*numbers, num_parameters) == PUBLISHED[name]
    assert (shape.head_dim, shape.rope_theta, shape.mrope_section) == (128, 1e6, (16, 24, 24))
    assert (shape.norm_eps, shape.padding_id, shape.initializer_range) == (1e-6, None, 0.02)
    tower = (vision.hidden_size, vision.depth, vision.num_heads, vision.patch_size, vision.window_size,
             vision.spatial_merge_size, vision.temporal_patch_size, vision.in_channels)  # fmt: skip
    assert tower == (1280, 32, 16, 14, 112, 2, 2, 3)
    assert (vision.fullatt_block_indexes, vision.out_hidden_size) == ([7, 15, 23, 31], shape.hidden)
    assert vision.tokens_per_second == 2
    assert model.family.image_token_id == 151655
    assert model.family.placeholder_ids == (151652, 151653, 151654, 151655, 151656)
    assert (config.text_config.bos_token_id, config.text_config.eos_token_id) == (151643, 151645)


def test_each_call_gives_a_config_of_its_own() -> None:
    first: Any = preset_config("3b")
    first.text_config.num_hidden_layers = 1
    second: Any = preset_config("3b")
    assert second.text_config.num_hidden_layers == 36


def test_an_unknown_preset_lists_those_that_exist() -> None:
    with pytest.raises(ConfigError, match="'8b' is no preset; presets: 3b, 7b, 32b, 72b"):
        preset_config("8b")
