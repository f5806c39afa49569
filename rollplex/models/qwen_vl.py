"""The Qwen2.5-VL family: its config, its vision tower, and the names of its weights in a checkpoint.

    visual.*, model.visual.*                        -> vision.*
    model.layers.N.*, model.language_model.layers.N -> decoder.layers.N.*, packed:
        q_proj, k_proj, v_proj  -> qkv, qkv_bias      per K/V head: rows of its query heads, its key, its value
        gate_proj, up_proj      -> gate_up            per slot: gate rows, up rows
        o_proj, down_proj       -> out_t, down_t      transposed

It knows no file and no device: `Part` says where a checkpoint's tensor lies inside one of our parameters, and
models/load.py moves the numbers. Prompts, positions and end-of-sequence ids are not its business either.

Legend: S slots, R rows of one tensor within a slot, H hidden (absent for biases), F features of one image.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from rollplex.errors import CheckpointError
from rollplex.models.decoder import DecoderConfig

SUPPORTED_MODEL_TYPES = ("qwen2_5_vl",)
DEFAULT_MROPE_SECTION = (16, 24, 24)
"""What transformers takes when a config names none."""


@dataclass(frozen=True)
class Part:
    """The place of one checkpoint tensor in a packed parameter: rows start..stop of each of num_slots equal slots."""

    hf_name: str
    start: int
    stop: int
    num_slots: int = 1
    transposed: bool = False

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
        return packed.view(self.num_slots, -1, *packed.shape[1:])[:, self.start : self.stop]


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
        """The tower of transformers, with scaled-dot-product attention, in the default dtype."""
        config = copy.deepcopy(self.hf_config.vision_config)  # transformers notes dtype and attention in it
        tower: Any = Qwen2_5_VisionTransformerPretrainedModel._from_config(
            config, dtype=torch.get_default_dtype(), attn_implementation="sdpa"
        )
        # Rotary frequencies are computed, never loaded: they must be real even where parameters are on the meta device.
        device = torch.get_default_device()
        with torch.device("cpu" if device.type == "meta" else device):
            tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config)
        return cast(nn.Module, tower)

    def run_vision(self, tower: nn.Module, patches: Tensor, grid_13: Tensor) -> Tensor:
        """Features [F, H] of one image. grid_13 stays on the CPU: the tower reads lengths from it without a sync."""
        config = self.hf_config.vision_config
        position_ids = get_vision_position_ids(grid_13, config.spatial_merge_size)
        window_index, window_offsets = get_vision_window_index(
            grid_13, config.spatial_merge_size, config.window_size, config.patch_size
        )
        output = tower(
            patches,
            grid_thw=grid_13,
            position_ids=position_ids.to(patches.device),
            window_index=window_index.to(patches.device),
            cu_window_seqlens=window_offsets,
        )
        features_FH: Tensor = output.pooler_output
        return features_FH

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
            return (_whole("visual." + parameter.removeprefix("vision.")),)
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


def _refuse_unsupported(hf_config: Any, text: Any) -> None:
    def refuse(field: str, value: object, why: str) -> None:
        raise CheckpointError(f"config.json: {field} = {value!r}: {why}")

    rope = text.rope_parameters
    rope_type = rope.get("rope_type", "default")
    section = tuple(rope.get("mrope_section", DEFAULT_MROPE_SECTION))
    heads, kv_heads, hidden = text.num_attention_heads, text.num_key_value_heads, text.hidden_size
    features = hf_config.vision_config.out_hidden_size
    if rope_type not in ("default", "mrope"):
        refuse("rope_type", rope_type, "only default and mrope are supported; remove the rope scaling")
    if hidden % heads or heads % kv_heads:
        refuse(
            "num_attention_heads", heads, f"must divide hidden_size = {hidden} and be divisible by {kv_heads} K/V heads"
        )
    if getattr(text, "head_dim", None) not in (None, hidden // heads):
        refuse("head_dim", text.head_dim, f"only hidden_size / num_attention_heads = {hidden // heads} is supported")
    if len(section) != 3 or 2 * sum(section) != hidden // heads:
        refuse(
            "mrope_section", list(section), f"must be three numbers that add up to half the head dim {hidden // heads}"
        )
    if any(kind != "full_attention" for kind in text.layer_types):
        refuse("use_sliding_window", True, "sliding-window attention is not supported; set it to false")
    if text.hidden_act != "silu":
        refuse("hidden_act", text.hidden_act, "only silu is supported")
    if text.attention_dropout:
        refuse("attention_dropout", text.attention_dropout, "must be 0: sampling and training have to agree")
    if features != hidden:
        refuse("vision_config.out_hidden_size", features, f"must equal the text model's hidden_size = {hidden}")
    if getattr(hf_config, "quantization_config", None):
        refuse("quantization_config", "...", "quantized weights cannot be trained; use the unquantized checkpoint")
