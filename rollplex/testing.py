"""Public fakes: a tiny Qwen2.5-VL, a whole checkpoint directory of it, and prompts that need no data set.

    tiny_config      a Qwen2_5_VLConfig of about 0.2 million parameters
    tiny_model       its weights, every vector random too, so that a misplaced bias or norm shows
    tiny_checkpoint  a Hugging Face directory: weights, byte-level tokenizer with Qwen's special tokens, processor files
    canned_prompts   processed prompts with given numbers of images of different sizes
    hf_inputs        a prompt and a response as keyword arguments of transformers' model

Everything is seeded. Nothing here knows a run, a reward or a file of data.
"""

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig

from rollplex.models.load import random_model, save_model
from rollplex.models.vlm import VisionLanguageModel
from rollplex.types import Image, Prompt

MERGES = ("t h", "i n", "a n", "e r", "o n", "Ġ th", "Ġth e", "in g", "Ġ a", "Ġ w", "h a", "i s", "Ġ is", "Ġ in")
"""A few byte pairs, so that tokens differ in length and strings have several spellings."""
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
FIRST_SPECIAL_ID = 256 + len(MERGES)
SPECIAL_IDS = {token: FIRST_SPECIAL_ID + index for index, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 304
"""More rows than the tokenizer has ids, as in published checkpoints."""
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for item in message.content -%}
{%- if item.type == 'image' or 'image' in item %}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' or 'video' in item %}<|vision_start|><|video_pad|><|vision_end|>
{%- else %}{{ item.text }}{% endif -%}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""
GRIDS = ((1, 4, 4), (1, 6, 10), (1, 2, 8), (1, 10, 4))
"""Image sizes in patches: one window, several windows with ragged edges, one row of merged patches."""


def tiny_config(
    *, tie: bool = False, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, **text: Any
) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL of 3 layers and a vision tower of 2, one with window and one with full attention.

    Its ids agree with `tiny_checkpoint`'s tokenizer. `text` overrides fields of the text config.
    """
    eighth = head_dim // 8
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_heads * head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.1,  # large enough for attention to matter at this size
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head_dim // 2 - 2 * (eighth + eighth // 2), *[eighth + eighth // 2] * 2],
        },
        "bos_token_id": SPECIAL_IDS["<|endoftext|>"],
        "eos_token_id": SPECIAL_IDS["<|im_end|>"],
        "pad_token_id": SPECIAL_IDS["<|endoftext|>"],
        "tie_word_embeddings": tie,
        **text,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": values["hidden_size"],
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    ids: dict[str, Any] = {
        "image_token_id": SPECIAL_IDS["<|image_pad|>"],
        "video_token_id": SPECIAL_IDS["<|video_pad|>"],
        "vision_start_token_id": SPECIAL_IDS["<|vision_start|>"],
        "vision_end_token_id": SPECIAL_IDS["<|vision_end|>"],
        "vision_token_id": SPECIAL_IDS["<|vision_pad|>"],
    }
    return Qwen2_5_VLConfig(text_config=values, vision_config=vision, tie_word_embeddings=tie, **ids)


def tiny_model(
    config: Qwen2_5_VLConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> VisionLanguageModel:
    """A random model whose norms and biases are random too."""
    model = random_model(tiny_config() if config is None else config, seed, dtype, device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype, device=device), alpha=0.1)
    return model


def tiny_checkpoint(
    directory: str | Path,
    seed: int = 0,
    tie: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
    config: Qwen2_5_VLConfig | None = None,
    max_shard_bytes: int = 2**30,
) -> Path:
    """Write a whole checkpoint directory with random weights; returns its path. `config` takes the place of `tie`."""
    path = Path(directory)
    hf_config: Any = tiny_config(tie=tie) if config is None else config
    model = tiny_model(hf_config, seed, dtype)
    save_model(model, path, None, max_shard_bytes)
    tiny_tokenizer().save_pretrained(str(path))
    ends = [SPECIAL_IDS["<|im_end|>"], SPECIAL_IDS["<|endoftext|>"]]
    padding = SPECIAL_IDS["<|endoftext|>"]
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": padding, "eos_token_id": ends, "pad_token_id": padding, "do_sample": False},
    )
    _write_json(path / "preprocessor_config.json", _image_processor_values(hf_config.vision_config))
    return path


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: 256 bytes, a few merges, Qwen's special tokens and a chat template like Qwen's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(pair.split(" ")[0], pair.split(" ")[1]) for pair in MERGES]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    assert all(tokenizer.token_to_id(token) == index for token, index in SPECIAL_IDS.items())
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if "vision" in token or "_pad" in token],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def canned_prompts(
    config: Qwen2_5_VLConfig,
    num_images: Sequence[int] = (0, 1, 2),
    seed: int = 0,
    text_tokens: Sequence[int] = (5, 9, 3, 14),
    grids: Sequence[tuple[int, int, int]] = GRIDS,
    images: Sequence[Image] = (),
) -> tuple[Prompt, ...]:
    """One prompt per entry of num_images, with that many images of different sizes between random text.

    Args:
        text_tokens: tokens of the text before, between and after images, taken in turn. A prompt without images has one
            text; an entry of 1 makes it a one-token prompt, whose prefix is empty.
        grids: sizes of the images, taken in turn.
        images: taken in turn instead of random ones.
    """
    rng = np.random.default_rng(seed)
    lengths = cycle(text_tokens)
    taken = cycle(images) if images else (_random_image(config.vision_config, grid, rng) for grid in cycle(grids))
    return tuple(_canned_prompt(config, uid, count, rng, lengths, taken) for uid, count in enumerate(num_images))


def hf_inputs(prompt: Prompt, response: Sequence[int] | npt.NDArray[np.int64] = ()) -> dict[str, torch.Tensor]:
    """`model(**hf_inputs(prompt, response))` runs transformers' Qwen2.5-VL on one whole sequence, without a cache."""
    extra = np.asarray(response, dtype=np.int64)
    ids = np.concatenate([prompt.ids, extra])
    following = prompt.positions.max() + 1 + np.arange(len(extra))
    positions = np.concatenate([prompt.positions, np.broadcast_to(following, (3, len(extra)))], axis=1)
    inputs = {"input_ids": torch.from_numpy(ids)[None], "position_ids": torch.from_numpy(positions)[:, None]}
    if prompt.images:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([image.patches for image in prompt.images]))
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in prompt.images])
    return inputs


def _canned_prompt(
    config: Any,
    uid: int,
    num_images: int,
    rng: np.random.Generator,
    lengths: Iterator[int],
    given: Iterator[Image],
) -> Prompt:
    merge = config.vision_config.spatial_merge_size
    ids, columns, images = list[int](), list[npt.NDArray[np.int64]](), list[Image]()

    def add_text(tokens: Sequence[int]) -> None:
        start = int(columns[-1].max()) + 1 if columns else 0
        ids.extend(tokens)
        columns.append(np.broadcast_to(start + np.arange(len(tokens)), (3, len(tokens))))

    for _ in range(num_images):
        add_text([*_random_ids(rng, next(lengths)), config.vision_start_token_id])
        images.append(next(given))
        grid = np.array(images[-1].grid) // (1, merge, merge)
        columns.append(np.indices(grid).reshape(3, -1) + int(columns[-1].max()) + 1)
        ids.extend([config.image_token_id] * int(grid.prod()))
        add_text([config.vision_end_token_id])
    add_text(_random_ids(rng, next(lengths)))
    return Prompt(
        uid=uid,
        ids=np.array(ids, dtype=np.int64),
        positions=np.ascontiguousarray(np.concatenate(columns, axis=1).astype(np.int64)),
        images=tuple(images),
        content=f"prompt {uid}",
        columns={"answer": str(uid)},
        source=f"canned, row {uid}",
    )


def _random_image(vision: Any, grid: tuple[int, int, int], rng: np.random.Generator) -> Image:
    patch_dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    patches = rng.standard_normal((int(np.prod(grid)), patch_dim)).astype(np.float32)
    return Image(key=sha256(patches.tobytes() + repr(grid).encode()).hexdigest(), patches=patches, grid=grid)


def _random_ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(0, FIRST_SPECIAL_ID, count)]


def _image_processor_values(vision: Any) -> dict[str, Any]:
    """Published settings, with smaller images."""
    side = vision.patch_size * vision.spatial_merge_size
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "min_pixels": side**2,
        "max_pixels": 64 * side**2,
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
