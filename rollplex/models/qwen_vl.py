"""The Qwen2.5-VL family: its config, its vision tower, and the names of its weights in a checkpoint.

    visual.*, model.visual.*                        -> vision.*; in its layers, packed:
        gate_proj, up_proj      -> gate_up            gate rows, up rows, each with the rows of zeros that pad them
        down_proj               -> down               with as many columns of zeros
    model.layers.N.*, model.language_model.layers.N -> decoder.layers.N.*, packed:
        q_proj, k_proj, v_proj  -> qkv, qkv_bias      per K/V head: rows of its query heads, its key, its value
        gate_proj, up_proj      -> gate_up            per slot: gate rows, up rows
        o_proj, down_proj       -> out_t, down_t      transposed

It knows no file and no device: `Part` says where a checkpoint's tensor lies inside one of our parameters, and
models/load.py moves the numbers. Prompts, positions and end-of-sequence ids are not its business either.

Legend: S slots, R rows of one tensor within a slot, H hidden (absent for biases), F features of one image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig

from rollplex.errors import CheckpointError
from rollplex.models.decoder import DecoderConfig
from rollplex.models.vision import Grid, VisionConfig, VisionTower

SUPPORTED_MODEL_TYPES = ("qwen2_5_vl",)
DEFAULT_MROPE_SECTION = (16, 24, 24)
VISION_ROPE_THETA = 10000.0
"""What transformers takes when a config names none."""


@dataclass(frozen=True)
class Part:
    """The place of one checkpoint tensor in a packed parameter: rows start..stop of each of num_slots equal slots.

    num_columns: how many of each row are the tensor's; None: all of them.
    """

    hf_name: str
    start: int
    stop: int
    num_slots: int = 1
    transposed: bool = False
    num_columns: int | None = None

    def of(self, packed: Tensor) -> Tensor:
        """This part of a packed parameter, or of its gradient, in the checkpoint's shape: a view where one exists."""
        rows_SRH = self._rows(packed)
        rows = rows_SRH.reshape(-1, *rows_SRH.shape[2:])
        return rows.t() if self.transposed else rows

    def write(self, packed: Tensor, tensor: Tensor) -> None:
        """Put a checkpoint's tensor, shaped as `of` returns it, into its place; converts dtype and device."""
        rows_SRH = self._rows(packed)
        rows_SRH.copy_((tensor.t() if self.transposed else tensor).reshape(rows_SRH.shape))

    def _rows(self, packed: Tensor) -> Tensor:
        rows_SRH = packed.view(self.num_slots, -1, *packed.shape[1:])[:, self.start : self.stop]
        return rows_SRH if self.num_columns is None else rows_SRH[..., : self.num_columns]


class QwenVL:
    """The `Family` of Qwen2.5-VL.

    Raises:
        CheckpointError: the config asks for something that the decoder does not compute.
    """

    def __init__(self, hf_config: Any) -> None:
        model_type = getattr(hf_config, "model_type", None)
        if model_type not in SUPPORTED_MODEL_TYPES:
            supported = ", ".join(SUPPORTED_MODEL_TYPES)
            raise CheckpointError(f"model_type = {model_type!r}: not supported; use a checkpoint of type {supported}")
        assert isinstance(hf_config, Qwen2_5_VLConfig)
        self.hf_config: Any = hf_config  # its sections are typed as dict or config: beyond a type checker
        self._decoder_config = _decoder_config(hf_config)
        self.vision_config = _vision_config(hf_config.vision_config)

    @property
    def decoder_config(self) -> DecoderConfig:
        return self._decoder_config

    @property
    def image_token_id(self) -> int:
        return int(self.hf_config.image_token_id)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """Image, video, and what encloses or pads them; those that the config names."""
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id", "vision_token_id")
        ids = (getattr(self.hf_config, name, None) for name in names)
        return tuple(sorted({int(token) for token in ids if token is not None}))

    def build_vision(self) -> nn.Module:
        """The tower, in the default dtype, on the default device."""
        return VisionTower(self.vision_config)

    def run_vision(self, tower: nn.Module, patches_TC: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, ...]:
        """Features [F, H] of each image, computed in one pass."""
        assert isinstance(tower, VisionTower)
        features_FH: Tensor = tower(patches_TC, grids)
        features: tuple[Tensor, ...] = features_FH.split([tower.num_features(grid) for grid in grids])
        return features

    def published_name(self, hf_name: str) -> str:
        """The published spelling of a checkpoint's tensor name; transformers' newer layout is accepted beside it."""
        for newer, published in (("model.visual.", "visual."), ("model.language_model.", "model.")):
            if hf_name.startswith(newer):
                return published + hf_name.removeprefix(newer)
        return hf_name

    def module_name(self, published: str) -> str:
        """The name of the same tensor in transformers' own module."""
        if published.startswith("visual."):
            return f"model.{published}"
        return published.replace("model.", "model.language_model.", 1) if published.startswith("model.") else published

    def parts(self, parameter: str) -> tuple[Part, ...]:
        """The checkpoint's tensors that make up one parameter of VisionLanguageModel, under their published names."""
        if parameter.startswith("vision."):
            return _vision_parts(self.vision_config, parameter.removeprefix("vision."))
        name = parameter.removeprefix("decoder.")
        if name in _OUTER_NAMES:
            return (_whole(_OUTER_NAMES[name]),)
        _, index, inner = name.split(".", 2)
        return _layer_parts(self._decoder_config, f"model.layers.{index}.", inner)

    def unpack(self, parameter: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """A parameter, or its gradient, as (published name, tensor) of the checkpoint's layout."""
        return [(part.hf_name, part.of(tensor)) for part in self.parts(parameter)]


_OUTER_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "untied_head": "lm_head.weight",
}

_WHOLE = 2**62
"""A stop beyond any row, so that a part without slots is the whole parameter."""


def _whole(hf_name: str, transposed: bool = False) -> Part:
    return Part(hf_name, 0, _WHOLE, transposed=transposed)


_VISION_OUTER_NAMES: Mapping[str, str] = {
    "patch_embed": "patch_embed.proj.weight",
    "merger.norm": "merger.ln_q.weight",
    "merger.up": "merger.mlp.0.weight",
    "merger.up_bias": "merger.mlp.0.bias",
    "merger.down": "merger.mlp.2.weight",
    "merger.down_bias": "merger.mlp.2.bias",
}
_VISION_LAYER_NAMES: Mapping[str, str] = {
    "attention_norm": "norm1.weight",
    "mlp_norm": "norm2.weight",
    "qkv": "attn.qkv.weight",
    "qkv_bias": "attn.qkv.bias",
    "out": "attn.proj.weight",
    "out_bias": "attn.proj.bias",
    "down_bias": "mlp.down_proj.bias",
}


def _vision_parts(config: VisionConfig, name: str) -> tuple[Part, ...]:
    """Parts of one parameter of the tower; what no part covers is padding."""
    if name in _VISION_OUTER_NAMES:
        return (_whole("visual." + _VISION_OUTER_NAMES[name]),)
    _, index, inner = name.split(".", 2)
    prefix, rows, padded = f"visual.blocks.{index}.", config.intermediate, config.padded_intermediate
    if inner in _VISION_LAYER_NAMES:
        return (_whole(prefix + _VISION_LAYER_NAMES[inner]),)
    match inner:
        case "gate_up" | "gate_up_bias":
            kind = "weight" if inner == "gate_up" else "bias"
            return (
                Part(f"{prefix}mlp.gate_proj.{kind}", 0, rows),
                Part(f"{prefix}mlp.up_proj.{kind}", padded, padded + rows),
            )
        case "down":
            return (Part(f"{prefix}mlp.down_proj.weight", 0, config.hidden, num_columns=rows),)
    raise AssertionError(f"no checkpoint name for {inner}")


def _layer_parts(config: DecoderConfig, prefix: str, inner: str) -> tuple[Part, ...]:
    """Parts of one decoder layer's parameter."""
    queries = config.num_heads // config.num_kv_heads * config.head_dim
    keys, values = queries + config.head_dim, queries + 2 * config.head_dim
    gates = config.intermediate // config.num_gate_up_slots
    match inner:
        case "qkv" | "qkv_bias":
            kind = "weight" if inner == "qkv" else "bias"
            bounds = (("q_proj", 0, queries), ("k_proj", queries, keys), ("v_proj", keys, values))
            return tuple(
                Part(f"{prefix}self_attn.{name}.{kind}", start, stop, config.num_kv_heads)
                for name, start, stop in bounds
            )
        case "gate_up":
            return (
                Part(f"{prefix}mlp.gate_proj.weight", 0, gates, config.num_gate_up_slots),
                Part(f"{prefix}mlp.up_proj.weight", gates, 2 * gates, config.num_gate_up_slots),
            )
        case "out_t":
            return (_whole(f"{prefix}self_attn.o_proj.weight", transposed=True),)
        case "down_t":
            return (_whole(f"{prefix}mlp.down_proj.weight", transposed=True),)
        case "attention_norm.weight":
            return (_whole(f"{prefix}input_layernorm.weight"),)
        case "mlp_norm.weight":
            return (_whole(f"{prefix}post_attention_layernorm.weight"),)
    raise AssertionError(f"no checkpoint name for {inner}")


def _decoder_config(hf_config: Any) -> DecoderConfig:
    text: Any = hf_config.text_config
    _refuse_unsupported(hf_config, text)
    rope = text.rope_parameters
    return DecoderConfig(
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=text.hidden_size // text.num_attention_heads,
        intermediate=text.intermediate_size,
        vocab_size=text.vocab_size,
        norm_eps=text.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        mrope_section=tuple(rope.get("mrope_section", DEFAULT_MROPE_SECTION)),
        padding_id=text.pad_token_id,
        tied_embeddings=bool(hf_config.tie_word_embeddings),
        initializer_range=text.initializer_range,
    )


def _vision_config(vision: Any) -> VisionConfig:
    if vision.hidden_act != "silu":
        _refuse("vision_config.hidden_act", vision.hidden_act, "only silu is supported")
    rope = getattr(vision, "rope_parameters", None) or {}
    return VisionConfig(
        num_layers=vision.depth,
        hidden=vision.hidden_size,
        num_heads=vision.num_heads,
        intermediate=vision.intermediate_size,
        feature_size=vision.out_hidden_size,
        patch_shape=(vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size),
        merge=vision.spatial_merge_size,
        window=vision.window_size // vision.spatial_merge_size // vision.patch_size,
        full_layers=frozenset(vision.fullatt_block_indexes),
        rope_theta=float(rope.get("rope_theta", VISION_ROPE_THETA)),
    )


def _refuse(field: str, value: object, why: str) -> None:
    raise CheckpointError(f"config.json: {field} = {value!r}: {why}")


def _refuse_unsupported(hf_config: Any, text: Any) -> None:
    rope = text.rope_parameters
    rope_type = rope.get("rope_type", "default")
    section = tuple(rope.get("mrope_section", DEFAULT_MROPE_SECTION))
    heads, kv_heads, hidden = text.num_attention_heads, text.num_key_value_heads, text.hidden_size
    features = hf_config.vision_config.out_hidden_size
    if rope_type not in ("default", "mrope"):
        _refuse("rope_type", rope_type, "only default and mrope are supported; remove the rope scaling")
    if hidden % heads or heads % kv_heads:
        _refuse(
            "num_attention_heads", heads, f"must divide hidden_size = {hidden} and be divisible by {kv_heads} K/V heads"
        )
    if getattr(text, "head_dim", None) not in (None, hidden // heads):
        _refuse("head_dim", text.head_dim, f"only hidden_size / num_attention_heads = {hidden // heads} is supported")
    if len(section) != 3 or 2 * sum(section) != hidden // heads:
        _refuse(
            "mrope_section", list(section), f"must be three numbers that add up to half the head dim {hidden // heads}"
        )
    if any(kind != "full_attention" for kind in text.layer_types):
        _refuse("use_sliding_window", True, "sliding-window attention is not supported; set it to false")
    if text.hidden_act != "silu":
        _refuse("hidden_act", text.hidden_act, "only silu is supported")
    if text.attention_dropout:
        _refuse("attention_dropout", text.attention_dropout, "must be 0: sampling and training have to agree")
    if features != hidden:
        _refuse("vision_config.out_hidden_size", features, f"must equal the text model's hidden_size = {hidden}")
    if getattr(hf_config, "quantization_config", None):
        _refuse("quantization_config", "...", "quantized weights cannot be trained; use the unquantized checkpoint")
