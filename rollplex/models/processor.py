"""From a conversation and its pictures to a `Prompt`: tokens, patches and rotary positions, as transformers makes them.

    messages --chat template--> text --tokenizer--> one placeholder per image --expand--> ids
    pictures --upright, RGB--> image processor --> patches, grid (t, h, w) --> t*h*w / merge_size^2 placeholders each
    ids, grids --the model's own get_rope_index, on CPU--> positions

Everything that a checkpoint decides comes from its files: template, special ids, resizing, position rule. This module
knows no data file, no column and no path of an image: those are `rollplex.data`'s.
"""

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, GenerationConfig

# By its own module: asking AutoImageProcessor for it needs torchvision in some of the versions that we support.
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.hub import cached_file

from rollplex.config import Config
from rollplex.errors import CheckpointError, ConfigError, DataError
from rollplex.types import Image, Message, Prompt

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
MIN_PROMPT_TOKENS = 2
"""One for the prefix and one that begins the suffix."""
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ProcessorSpec:
    """What a `Processor` is made from; small, hashable, and sent to worker processes.

    checkpoint: a local directory in Hugging Face format, or a hub name.
    min_pixels, max_pixels: image size after resizing; None keeps the checkpoint's limits.
    chat_template: wrap a text prompt as one user message. Messages always use the template.
    system_prompt: begins every conversation that has no system message of its own.
    """

    checkpoint: str
    min_pixels: int | None = None
    max_pixels: int | None = None
    chat_template: bool = True
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.system_prompt is not None and not self.chat_template:
            raise ConfigError(
                f"data.system_prompt = {self.system_prompt!r}: a text prompt without chat template has no system turn; "
                "set data.chat_template = true, or write the system prompt into the prompts"
            )

    @classmethod
    def from_config(cls, config: Config) -> "ProcessorSpec":
        data = config.data
        return cls(config.model.path, data.min_pixels, data.max_pixels, data.chat_template, data.system_prompt)


@lru_cache(maxsize=2)
def load_processor(spec: ProcessorSpec) -> "Processor":
    """The processor of `spec`, loaded at first use in each process.

    Raises:
        CheckpointError: the checkpoint's configuration, tokenizer or image processor cannot be read.
    """
    return Processor(spec)


class Processor:
    """Makes prompts for one checkpoint. Stateless after construction; one instance serves a whole process."""

    def __init__(self, spec: ProcessorSpec) -> None:
        self.spec = spec
        if not Path(spec.checkpoint).is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", spec.checkpoint):
            # transformers would ask the hub for it, again and again
            raise CheckpointError(
                f"model.path = {spec.checkpoint!r} is neither a directory (looked from {Path.cwd()}) nor a hub name "
                "(owner/name)"
            )
        self.config = _load(AutoConfig, spec.checkpoint, "config.json")
        self.tokenizer = _load(AutoTokenizer, spec.checkpoint, "tokenizer")
        self.template = _chat_template(spec.checkpoint) or self.tokenizer.chat_template
        self.image_processor = _image_processor(spec)
        self.image_token_id, self.video_token_id, start_id, end_id = _vision_ids(self.config, spec.checkpoint)
        names = [self._special_token(token) for token in (self.image_token_id, self.video_token_id, start_id, end_id)]
        self._image_token, self._video_token, self._vision_start, self._vision_end = names

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a response: the generation config's, and the tokenizer's end of sequence.

        Raises:
            CheckpointError: there is neither.
        """
        try:
            ends = GenerationConfig.from_pretrained(self.spec.checkpoint).eos_token_id
        except OSError:  # the checkpoint has no generation_config.json
            ends = None
        ids = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id} - {None}
        if not ids:
            raise CheckpointError(
                f"model.path = {self.spec.checkpoint!r}: neither generation_config.json nor the tokenizer names an "
                "end-of-sequence id; set eos_token_id in generation_config.json"
            )
        return frozenset(int(token) for token in ids)

    def prompt(
        self,
        content: str | Sequence[Message],
        pictures: Sequence[PIL.Image.Image] = (),
        *,
        uid: int = 0,
        columns: Mapping[str, Any] | None = None,
        source: str = "prompt",
    ) -> Prompt:
        """Tokenize and process one prompt.

        content: text, or chat messages. An image stands where text holds `<image>` or a message has an item of type
            "image"; there must be as many as pictures.
        pictures: any mode and size; each is turned upright and made RGB (see `upright_rgb`).

        Raises:
            DataError: marks and pictures do not match, or the content cannot be tokenized (reason only, no source).
        """
        ids = self.layout(content)
        images = tuple(self.image(picture) for picture in pictures)
        counts = [self._placeholders(image.grid) for image in images]
        ids = self._expand(ids, counts)
        positions = self.positions(ids, [image.grid for image in images])
        return Prompt(uid, ids, positions, images, content, {} if columns is None else columns, source)

    def token_count(self, content: str | Sequence[Message], sizes: Sequence[tuple[int, int]]) -> int:
        """Length of the prompt's ids, from the (width, height) of its images alone.

        Raises:
            DataError: as `prompt`, and for an image whose sides are too unequal to be resized.
        """
        ids = self.layout(content)
        return len(self._expand(ids, [self.image_tokens(width, height) for width, height in sizes]))

    def layout(self, content: str | Sequence[Message]) -> Ids:
        """The prompt's ids with one placeholder for each image, whatever its size: int64 [L].

        Raises:
            DataError: no or too little text, an unusable message, a `<video>` mark, a special token written as text.
        """
        if isinstance(content, str) and not self.spec.chat_template:
            parts = self._parts(content)
            encoded = self.tokenizer.encode(_unicode("".join(self._raw(part) for part in parts)))
            num_marks = sum(part["type"] == "image" for part in parts)
        else:
            messages = self._conversation(content)
            num_marks = sum(count_marks(message) for message in messages)
            encoded = self.tokenizer.encode(_unicode(self._render(messages)), add_special_tokens=False)
        ids = np.asarray(encoded, dtype=np.int64)
        num_placeholders = int((ids == self.image_token_id).sum())
        if num_placeholders != num_marks:
            raise DataError(
                f"the chat template wrote {num_placeholders} placeholders for {num_marks} images; "
                "use a checkpoint whose template knows images"
            )
        if len(ids) < MIN_PROMPT_TOKENS:
            raise DataError(f"the prompt has {len(ids)} tokens; it needs at least {MIN_PROMPT_TOKENS}")
        if ids[-1] == self.image_token_id:
            raise DataError("the prompt ends with an image; it must end with text")
        return ids

    def image_tokens(self, width: int, height: int) -> int:
        """Placeholders of an image of this size. Raises DataError where the image processor refuses the size."""
        try:
            patches = self.image_processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise DataError(f"an image of {width} x {height} pixels cannot be resized: {error}") from error
        return int(patches) // int(self.image_processor.merge_size) ** 2

    def image(self, picture: PIL.Image.Image) -> Image:
        """Cut one picture into patches."""
        try:
            processed = self.image_processor(images=[upright_rgb(picture)], return_tensors="np")
        except ValueError as error:
            raise DataError(f"an image of {picture.width} x {picture.height} pixels: {error}") from error
        patches = np.ascontiguousarray(processed["pixel_values"], dtype=np.float32)
        t, h, w = (int(size) for size in processed["image_grid_thw"][0])
        digest = hashlib.blake2b(repr((t, h, w)).encode(), digest_size=16)
        digest.update(patches.data)
        return Image(digest.hexdigest(), patches, (t, h, w))

    def positions(self, ids: Ids, grids: Sequence[tuple[int, int, int]]) -> Ids:
        """Rotary positions (temporal, height, width) of expanded ids: int64 [3, L]."""
        if not grids:
            return np.broadcast_to(np.arange(len(ids), dtype=np.int64), (3, len(ids))).copy()
        positions, _ = self._position_rule.get_rope_index(
            torch.from_numpy(ids)[None],
            mm_token_type_ids=torch.from_numpy((ids == self.image_token_id).astype(np.int32))[None],
            image_grid_thw=torch.tensor(grids, dtype=torch.int64),
        )
        return np.ascontiguousarray(positions[:, 0].numpy(), dtype=np.int64)

    @cached_property
    def _position_rule(self) -> Any:
        """The family's model, for its position rule alone: one layer and no storage, so its size does not matter."""
        config = copy.deepcopy(self.config)
        config.text_config.num_hidden_layers = 1
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = config.text_config.layer_types[:1]
        config.vision_config.depth = 1
        with torch.device("meta"):
            return AutoModel.from_config(config)

    def _special_token(self, token: int) -> str:
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:  # transformers makes an empty tokenizer where there are no files
            raise CheckpointError(
                f"model.path = {self.spec.checkpoint!r}: its tokenizer has no token {token}, which config.json names "
                "for images or videos; copy the tokenizer files of the checkpoint that it comes from"
            )
        return str(name)

    def _conversation(self, content: str | Sequence[Message]) -> list[Message]:
        """Messages as the chat template takes them: images as items, the system prompt in front."""
        given: Sequence[Message] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if not given:
            raise DataError("the prompt has no messages")
        messages = [self._message(message, number) for number, message in enumerate(given, start=1)]
        if self.spec.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.spec.system_prompt})
        return messages

    def _message(self, message: Message, number: int) -> Message:
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            raise DataError(f"message {number} has no role")
        if isinstance(content, str):
            parts = self._parts(content)
            if any(part["type"] == "image" for part in parts):
                return {**message, "content": parts}
            return dict(message)
        if not isinstance(content, list):
            raise DataError(f"message {number} has no content; it must be text or a list of items")
        parts = []
        for item in content:
            if isinstance(item, Mapping) and item.get("type") == "image":
                parts.append({"type": "image"})
            elif isinstance(item, Mapping) and item.get("type") == "text" and isinstance(item.get("text"), str):
                parts.extend(self._parts(item["text"]))
            else:
                kind = item.get("type") if isinstance(item, Mapping) else type(item).__name__
                raise DataError(f"message {number} has an item of type {kind!r}; only image and text are supported")
        return {**message, "content": parts}

    def _parts(self, text: str) -> list[dict[str, str]]:
        """Cut text at its image marks."""
        if VIDEO_MARK in text:
            raise DataError(f"the prompt has a {VIDEO_MARK} mark; video is not supported yet")
        for token in (self._image_token, self._video_token):
            if token in text:
                raise DataError(
                    f"the prompt's text contains the special token {token}; write {IMAGE_MARK} for an image"
                )
        parts: list[dict[str, str]] = []
        for index, piece in enumerate(text.split(IMAGE_MARK)):
            if index:
                parts.append({"type": "image"})
            if piece:
                parts.append({"type": "text", "text": piece})
        return parts

    def _raw(self, part: Mapping[str, str]) -> str:
        return part["text"] if part["type"] == "text" else self._vision_start + self._image_token + self._vision_end

    def _render(self, messages: list[Message]) -> str:
        if self.template is None:
            raise CheckpointError(
                f"{self.spec.checkpoint} has no chat template; add a chat_template.jinja, or set data.chat_template = "
                "false and use text prompts"
            )
        resume = messages[-1]["role"] == "assistant"  # a started answer goes on, as in TRL
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=not resume,
                continue_final_message=resume,
            )
        except Exception as error:  # a template is a program: it raises what its author chose
            raise DataError(f"the chat template refuses the messages: {error}") from error
        return str(text)

    def _placeholders(self, grid: tuple[int, int, int]) -> int:
        return int(np.prod(grid)) // int(self.image_processor.merge_size) ** 2

    def _expand(self, ids: Ids, counts: Sequence[int]) -> Ids:
        placeholders = ids == self.image_token_id
        if int(placeholders.sum()) != len(counts):
            raise DataError(f"the prompt has {int(placeholders.sum())} image marks for {len(counts)} images")
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[placeholders] = counts
        return np.repeat(ids, repeats)


def upright_rgb(picture: PIL.Image.Image) -> PIL.Image.Image:
    """Decode a picture wholly, turn it as its EXIF orientation says, and make it RGB.

    This is what transformers' load_image does, its simplifications included: transparency is dropped, 16-bit values
    above 255 are clipped, and of an animation the first frame counts. So training sees what other tools show the model.
    """
    return PIL.ImageOps.exif_transpose(picture).convert("RGB")


def count_marks(message: Message) -> int:
    """Images that a message asks for: `<image>` marks in its text and items of type "image"."""
    content = message.get("content")
    if isinstance(content, str):
        return _marks_in(content)
    items = [item for item in content if isinstance(item, Mapping)] if isinstance(content, list) else []
    texts = [item["text"] for item in items if isinstance(item.get("text"), str)]
    return len([item for item in items if item.get("type") == "image"]) + sum(map(_marks_in, texts))


def _unicode(text: str) -> str:
    """The text, which JSON may have given half of a character pair: tokenizers take no such thing."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        lone = text[error.start]
        raise DataError(f"the text holds {lone!r}, half of a character pair; mend what wrote it, or drop it") from error
    return text


def _marks_in(text: str) -> int:
    return text.count(IMAGE_MARK)


def _load(kind: Any, checkpoint: str, what: str, **options: Any) -> Any:
    try:
        return kind.from_pretrained(checkpoint, **options)
    except (OSError, ValueError, KeyError) as error:
        inner = Path(checkpoint) / "model"
        hint = f"; did you mean {str(inner)!r}?" if (inner / "config.json").is_file() else ""
        raise CheckpointError(f"model.path = {checkpoint!r}: no usable {what}: {error}{hint}") from error


def _image_processor(spec: ProcessorSpec) -> Any:
    limits = {"min_pixels": spec.min_pixels, "max_pixels": spec.max_pixels}
    given = {name: value for name, value in limits.items() if value is not None}
    processor = _load(Qwen2VLImageProcessorPil, spec.checkpoint, "image processor", **given)
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    if least > most:
        raise ConfigError(
            f"data.min_pixels = {spec.min_pixels}, data.max_pixels = {spec.max_pixels}: with the checkpoint's limits "
            f"that makes at least {least} and at most {most} pixels; set both fields"
        )
    return processor


def _vision_ids(config: Any, checkpoint: str) -> tuple[int, int, int, int]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    missing = [name for name in names if getattr(config, name, None) is None]
    if missing:
        raise CheckpointError(
            f"model.path = {checkpoint!r}: config.json ({config.model_type}) has no {', '.join(missing)}; "
            "use a vision-language checkpoint"
        )
    image, video, start, end = (int(getattr(config, name)) for name in names)
    return image, video, start, end


def _chat_template(checkpoint: str) -> str | None:
    """The template in a file of its own, which a multimodal checkpoint prefers to its tokenizer's."""
    for name in _TEMPLATE_FILES:
        path = cached_file(
            checkpoint,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            text = Path(path).read_text(encoding="utf-8")
            return str(json.loads(text)["chat_template"]) if name.endswith(".json") else text
    return None
