"""The Qwen2.5-VL family: what it reads from a config, what it refuses, and where it finds each weight."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Config

from rollplex.errors import CheckpointError
from rollplex.models.decoder import Decoder
from rollplex.models.load import to_transformers
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import SPECIAL_IDS, canned_prompts, hf_inputs, tiny_config, tiny_model

PUBLISHED_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "hidden_size": 1280, "out_hidden_size": 2048, "model_type": "qwen2_5_vl"},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}
"""A published config in its flat spelling."""


def test_a_flat_published_config_is_understood() -> None:
    values = copy.deepcopy(PUBLISHED_3B)
    family = QwenVL(AutoConfig.for_model(values.pop("model_type"), **values))
    config = family.decoder_config
    assert (config.num_layers, config.hidden, config.num_heads, config.num_kv_heads) == (36, 2048, 16, 2)
    assert (config.head_dim, config.intermediate, config.vocab_size) == (128, 11008, 151936)
    assert (config.norm_eps, config.rope_theta, config.mrope_section) == (1e-6, 1e6, (16, 24, 24))
    assert config.tied_embeddings
    assert family.image_token_id == 151655
    assert family.placeholder_ids == (151652, 151653, 151654, 151655, 151656)


def test_the_placeholders_are_those_that_the_config_names() -> None:
    config = tiny_config()
    config.vision_token_id = None
    expected = {SPECIAL_IDS[f"<|{name}|>"] for name in ("vision_start", "vision_end", "image_pad", "video_pad")}
    assert set(QwenVL(config).placeholder_ids) == expected


def set_text(**values: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in values.items():
            setattr(config.text_config, name, value)

    return change


def set_rope(**values: Any) -> Callable[[Any], None]:
    return lambda config: config.text_config.rope_parameters.update(values)


def set_features(config: Any) -> None:
    config.vision_config.out_hidden_size = 48


def set_activation(config: Any) -> None:
    config.vision_config.hidden_act = "gelu"


def set_quantization(config: Any) -> None:
    config.quantization_config = {"quant_method": "awq"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_rope(rope_type="yarn"), "rope_type = 'yarn'"),
        (set_rope(mrope_section=[2, 2, 2]), "mrope_section"),
        (set_text(layer_types=["full_attention", "sliding_attention"]), "use_sliding_window"),
        (set_text(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (set_text(attention_dropout=0.1), "attention_dropout = 0.1"),
        (set_text(num_key_value_heads=3), "num_attention_heads = 4"),
        (set_text(head_dim=32), "head_dim = 32"),
        (set_features, "out_hidden_size = 48"),
        (set_activation, "vision_config.hidden_act = 'gelu'"),
        (set_quantization, "quantization_config"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused(change: Callable[[Any], None], message: str) -> None:
    config = tiny_config()
    change(config)
    with pytest.raises(CheckpointError, match=message):
        QwenVL(config)


def test_another_model_type_is_refused_and_the_supported_ones_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"model_type = 'qwen2'.*qwen2_5_vl"):
        QwenVL(Qwen2Config())


def packed_by_hand(config: Qwen2_5_VLConfig, module: Any) -> dict[str, torch.Tensor]:
    """The packing rule written out with loops over heads and slots."""
    text: Any = config.text_config
    heads, kv_heads, dim = (
        text.num_attention_heads,
        text.num_key_value_heads,
        text.hidden_size // text.num_attention_heads,
    )
    attention, mlp = module.self_attn, module.mlp
    per_kv = heads // kv_heads

    def qkv(kind: str) -> torch.Tensor:
        q, k, v = (getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv")
        rows = []
        for kv in range(kv_heads):
            rows += [q[head * dim : (head + 1) * dim] for head in range(kv * per_kv, (kv + 1) * per_kv)]
            rows += [k[kv * dim : (kv + 1) * dim], v[kv * dim : (kv + 1) * dim]]
        return torch.cat(rows)

    gate_up, size = [], text.intermediate_size // 8
    for slot in range(8):
        rows = slice(slot * size, (slot + 1) * size)
        gate_up += [mlp.gate_proj.weight[rows], mlp.up_proj.weight[rows]]
    return {
        "qkv": qkv("weight"),
        "qkv_bias": qkv("bias"),
        "gate_up": torch.cat(gate_up),
        "out_t": attention.o_proj.weight.t(),
        "down_t": mlp.down_proj.weight.t(),
        "attention_norm.weight": module.input_layernorm.weight,
        "mlp_norm.weight": module.post_attention_layernorm.weight,
    }


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_packing_is_the_rule_written_out(num_kv_heads: int) -> None:
    config = tiny_config(num_kv_heads=num_kv_heads)
    family = QwenVL(config)
    hf: Any = Qwen2_5_VLForConditionalGeneration(config)
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter)
    tensors = {family.published_name(name): tensor for name, tensor in hf.state_dict().items()}
    decoder = Decoder(family.decoder_config)
    for index in range(3):
        by_hand = packed_by_hand(config, hf.model.language_model.layers[index])
        ours = dict(decoder.layer(index).named_parameters())
        assert ours.keys() == by_hand.keys()
        for name, expected in by_hand.items():
            packed = torch.full_like(ours[name], float("nan"))
            for part in family.parts(f"decoder.layers.{index}.{name}"):
                part.write(packed, tensors[part.hf_name])
            assert torch.equal(packed, expected), name


@given(
    queries_per_kv=st.integers(1, 7),
    kv_heads=st.integers(1, 4),
    intermediate=st.integers(1, 64),
    seed=st.integers(0, 2**31),
)
def test_unpacking_and_packing_are_inverse(queries_per_kv: int, kv_heads: int, intermediate: int, seed: int) -> None:
    config = tiny_config(num_heads=queries_per_kv * kv_heads, num_kv_heads=kv_heads, intermediate_size=intermediate)
    family = QwenVL(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = [(name, parameter.shape) for name, parameter in Decoder(family.decoder_config).named_parameters()]
    for name, shape in shapes:
        packed = torch.randn(shape, generator=generator)
        again = torch.full_like(packed, float("nan"))
        parts = family.parts(f"decoder.{name}")
        unpacked = family.unpack(f"decoder.{name}", packed)
        assert sum(tensor.numel() for _, tensor in unpacked) == packed.numel()
        for part, (hf_name, tensor) in zip(parts, unpacked, strict=True):
            assert part.hf_name == hf_name
            part.write(again, tensor)
        assert torch.equal(again, packed), name


def test_every_weight_of_transformers_has_exactly_one_place() -> None:
    config = tiny_config()
    with torch.device("meta"):
        hf = Qwen2_5_VLForConditionalGeneration(config)
        model = VisionLanguageModel(QwenVL(config))
    family = model.family
    assert isinstance(family, QwenVL)
    ours = [(hf_name, t.shape) for name, p in model.named_parameters() for hf_name, t in family.unpack(name, p)]
    theirs = [(family.published_name(name), tensor.shape) for name, tensor in hf.state_dict().items()]
    assert sorted(ours) == sorted(theirs)
    for name in hf.state_dict():
        assert family.module_name(family.published_name(name)) == name


@given(intermediate=st.integers(1, 100), layer=st.integers(0, 1))
def test_packing_of_the_tower_is_the_rule_written_out(intermediate: int, layer: int) -> None:
    config: Any = tiny_config()
    config.vision_config.intermediate_size = intermediate
    family = QwenVL(config)
    with torch.device("meta"):
        hf: Any = Qwen2_5_VLForConditionalGeneration(config)
        ours = dict(family.build_vision().layers[layer].named_parameters())  # type: ignore[index, union-attr]
    mlp = hf.model.visual.blocks[layer].mlp
    tensors = {f"mlp.{name}": torch.randn(weight.shape) for name, weight in mlp.named_parameters()}
    rows = intermediate if intermediate % 16 == 0 else (intermediate // 64 + 1) * 64

    def padded(name: str) -> torch.Tensor:
        weight = tensors[f"mlp.{name}"]
        return torch.cat([weight, torch.zeros(rows - len(weight), *weight.shape[1:])])

    by_hand = {
        "gate_up": torch.cat([padded("gate_proj.weight"), padded("up_proj.weight")]),
        "gate_up_bias": torch.cat([padded("gate_proj.bias"), padded("up_proj.bias")]),
        "down": torch.cat([tensors["mlp.down_proj.weight"], torch.zeros(32, rows - intermediate)], dim=1),
    }
    prefix = f"visual.blocks.{layer}."
    for name, expected in by_hand.items():
        packed = torch.zeros(ours[name].shape)
        for part in family.parts(f"vision.layers.{layer}.{name}"):
            part.write(packed, tensors[part.hf_name.removeprefix(prefix)])
            assert torch.equal(part.of(packed), tensors[part.hf_name.removeprefix(prefix)])
        assert torch.equal(packed, expected), name


def test_the_tower_built_without_storage_knows_its_rotary_frequencies() -> None:
    family = QwenVL(tiny_config())
    with torch.device("meta"):
        tower = family.build_vision()
    weights = family.build_vision()
    assert all(parameter.is_meta for parameter in tower.parameters())
    for parameter in weights.parameters():
        torch.nn.init.normal_(parameter)
    tower.load_state_dict(weights.state_dict(), assign=True)
    patches_TC, grids = torch.randn(24, 3 * 2 * 14 * 14), [(1, 4, 6)]
    for one, other in zip(family.run_vision(tower, patches_TC, grids), family.run_vision(weights, patches_TC, grids),
                          strict=True):  # fmt: skip
        assert torch.equal(one, other)


@pytest.mark.parametrize("theta", [10000.0, 500.0])
def test_features_equal_those_of_transformers_in_one_call(theta: float) -> None:
    config: Any = tiny_config()
    if getattr(config.vision_config, "rope_parameters", None):
        config.vision_config.rope_parameters["rope_theta"] = theta
    hf = to_transformers(tiny_model(config))
    prompt = canned_prompts(config, (3,))[0]
    inputs = hf_inputs(prompt)
    with torch.no_grad():
        expected = hf.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
        actual = tiny_model(config).encode(prompt.images)
    assert len(actual) == 3
    for features, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(features, theirs, atol=1e-5, rtol=0)


def test_canned_positions_are_those_of_transformers() -> None:
    config = tiny_config()
    with torch.device("meta"):
        hf: Any = Qwen2_5_VLForConditionalGeneration(config)
    for prompt in canned_prompts(config, (1, 2, 3, 0), seed=4):
        inputs = hf_inputs(prompt, [1, 2, 3])
        if not prompt.images:
            assert torch.equal(inputs["position_ids"][:, 0], torch.arange(len(prompt.ids) + 3).expand(3, -1))
            continue
        types = (inputs["input_ids"] == config.image_token_id).int()
        positions, _ = hf.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=types, image_grid_thw=inputs["image_grid_thw"]
        )
        assert torch.equal(inputs["position_ids"], positions)
