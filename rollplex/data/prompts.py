"""One row, in a worker process: to a conversation with its images, to what ingestion wants to know, to a `Prompt`.

    RawRow --parse--> ParsedRow --examine--> Finding      at ingestion: token counts from image sizes
                                --make_prompt--> Prompt   when needed: pixels, once per prompt

These functions are pure: they run anywhere, and results do not depend on which process ran them. This file knows no
batch and no order of rows.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from rollplex.config import Config
from rollplex.data.images import Stored, decode_image, find_image, image_size, list_images
from rollplex.data.rows import RawRow
from rollplex.errors import DataError
from rollplex.models.processor import IMAGE_MARK, ProcessorSpec, count_marks, load_processor
from rollplex.types import Message, Prompt

_IMAGE_COLUMNS = ("images", "image")
_VIDEO_COLUMNS = ("videos", "video")
_MISSING = object()


@dataclass(frozen=True)
class PromptSpec:
    """How rows become prompts; sent to worker processes. The fields are those of `DataConfig`."""

    processor: ProcessorSpec
    prompt_column: str = "prompt"
    images_column: str | None = None
    answer_column: str | None = None
    image_marks: Literal["strict", "prepend"] = "strict"
    max_prompt_tokens: int = 16384
    check_images: Literal["decode", "header"] = "decode"

    @classmethod
    def from_config(cls, config: Config) -> "PromptSpec":
        data = config.data
        return cls(
            processor=ProcessorSpec.from_config(config),
            prompt_column=data.prompt_column,
            images_column=data.images_column,
            answer_column=data.answer_column,
            image_marks=data.image_marks,
            max_prompt_tokens=data.max_prompt_tokens,
            check_images=data.check_images,
        )


@dataclass(frozen=True)
class ParsedRow:
    """A row taken apart: `content` holds marks and bare image items only, `images` are in their order."""

    content: str | list[Message]
    images: tuple[Stored, ...]
    columns: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What ingestion learns of one row.

    reason: why the row is bad, or "".
    tokens: of the prompt, without the images in `files`.
    files: paths of its images that are still to be measured, with repetitions, in their order.
    """

    reason: str
    tokens: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileFinding:
    """What ingestion learns of one image file: why it is bad, or its tokens."""

    reason: str
    tokens: int = 0


def examine(spec: PromptSpec, rows: Sequence[RawRow]) -> list[Finding]:
    """Check rows, all but their image files."""
    findings = []
    for row in rows:
        try:
            findings.append(_examine(spec, row))
        except DataError as error:
            findings.append(Finding(str(error)))
    return findings


def measure_files(spec: PromptSpec, paths: Sequence[str]) -> list[FileFinding]:
    """Check image files, each by itself."""
    findings = []
    for path in paths:
        try:
            findings.append(FileFinding("", _image_tokens(spec, path)))
        except DataError as error:
            findings.append(FileFinding(str(error)))
    return findings


def make_prompt(spec: PromptSpec, row: RawRow, uid: int) -> Prompt:
    """Decode and process one row. Raises DataError naming the row."""
    try:
        parsed = parse(spec, row)
        pictures = [_numbered(number, decode_image, image) for number, image in enumerate(parsed.images, start=1)]
        processor = load_processor(spec.processor)
        return processor.prompt(parsed.content, pictures, uid=uid, columns=parsed.columns, source=row.source)
    except DataError as error:
        raise DataError(f"{row.source}: {error}") from error


def parse(spec: PromptSpec, row: RawRow) -> ParsedRow:
    """Take a row apart and check that its image marks and its images agree.

    Raises:
        DataError: reason only; the caller names the row.
    """
    values = _mapping(row)
    _refuse_videos(values, spec)
    given = _require(values, spec.prompt_column, "data.prompt_column")
    content, inline = _content(given)
    images_column = _images_column(values, spec)
    column_images = list_images(None if images_column is None else _lookup(values, images_column))
    if column_images and spec.image_marks == "prepend" and _num_marks(content) == 0:
        content = _prepend(content, len(column_images))
    images = _in_order(inline, column_images, _num_marks(content))
    found = tuple(_numbered(number, find_image, value, row.folder) for number, value in enumerate(images, start=1))
    return ParsedRow(content, found, _columns(values, spec, images_column))


def _examine(spec: PromptSpec, row: RawRow) -> Finding:
    parsed = parse(spec, row)
    layout = load_processor(spec.processor).layout(parsed.content)
    tokens, files = len(layout) - len(parsed.images), []
    for number, image in enumerate(parsed.images, start=1):
        if isinstance(image, str):
            files.append(image)
        else:
            tokens += _numbered(number, lambda stored: _image_tokens(spec, stored), image)
    return Finding("", tokens, tuple(files))


def _image_tokens(spec: PromptSpec, stored: Stored) -> int:
    # Turning an image upright swaps its sides, which changes no count: header sizes are enough.
    width, height = image_size(stored, decode=spec.check_images == "decode")
    return load_processor(spec.processor).image_tokens(width, height)


def _numbered(number: int, function: Any, *args: Any) -> Any:
    """Call a function on the image with this number; its reason then names the image."""
    try:
        return function(*args)
    except DataError as error:
        raise DataError(f"image {number}: {error}") from error


def _mapping(row: RawRow) -> Mapping[str, Any]:
    if row.problem:
        raise DataError(row.problem)
    value = row.value
    if isinstance(value, bytes):
        try:
            value = json.loads(value.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"not UTF-8: {error.reason} at byte {error.start}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise DataError(f"the row is a {type(value).__name__}, not an object with named columns")
    return value


# ---- columns


def _lookup(values: Mapping[str, Any], name: str) -> Any:
    """A column by name, or a field of a nested column by dotted name; _MISSING where there is none."""
    if name in values:
        return values[name]
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _MISSING
        found = found[part]
    return found


def _require(values: Mapping[str, Any], name: str, field: str) -> Any:
    found = _lookup(values, name)
    if found is _MISSING:
        present = ", ".join(str(column) for column in values) or "none"
        raise DataError(f"there is no column {name!r} (columns: {present}); set {field}")
    if found is None:
        raise DataError(f"column {name!r} is null")
    return found


def _images_column(values: Mapping[str, Any], spec: PromptSpec) -> str | None:
    if spec.images_column is not None:
        if _lookup(values, spec.images_column) is _MISSING:
            present = ", ".join(str(column) for column in values)
            raise DataError(f"there is no column {spec.images_column!r} (columns: {present}); set data.images_column")
        return spec.images_column
    held = [name for name in _IMAGE_COLUMNS if name in values and name != spec.prompt_column]
    filled = [name for name in held if values[name] is not None]
    return next(iter(filled or held), None)


def _refuse_videos(values: Mapping[str, Any], spec: PromptSpec) -> None:
    for name in _VIDEO_COLUMNS:
        if name not in (spec.prompt_column, spec.answer_column) and list_images(values.get(name)):
            raise DataError(f"column {name!r} holds videos, which are not supported yet; remove or rename the column")


def _columns(values: Mapping[str, Any], spec: PromptSpec, images_column: str | None) -> dict[str, Any]:
    """What reward functions get: every column but prompt and media, as plain Python, and `answer`."""
    left: Mapping[str, Any] = {name: value for name, value in values.items() if name not in _VIDEO_COLUMNS}
    for name in (spec.prompt_column, images_column):
        left = left if name is None else _without(left, name)
    columns = {}
    for name, value in left.items():
        plain = _plain(value)
        if plain is not _MISSING:
            columns[str(name)] = plain
    if spec.answer_column is not None:
        columns["answer"] = _plain(_require(values, spec.answer_column, "data.answer_column"))
        if columns["answer"] is _MISSING:
            raise DataError(f"column {spec.answer_column!r} holds no plain value")
    return columns


def _without(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name in values:
        return {key: value for key, value in values.items() if key != name}
    first, _, rest = name.partition(".")
    if not rest or not isinstance(values.get(first), Mapping):
        return values
    return {**values, first: _without(values[first], rest)}


def _plain(value: Any) -> Any:
    """Numbers, text, lists and dicts as plain Python; _MISSING for media and whatever else has no such form."""
    if isinstance(value, (np.generic, np.ndarray)):
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, Mapping):
        plain = {str(key): _plain(item) for key, item in value.items()}
        return _MISSING if _MISSING in plain.values() else plain
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return _MISSING if any(item is _MISSING for item in items) else items
    return _MISSING


# ---- the conversation


def _content(given: Any) -> tuple[str | list[Message], list[Any]]:
    """The prompt without media, and for each of its marks, in order, the inline image or _MISSING."""
    if isinstance(given, np.ndarray):
        given = given.tolist()
    if isinstance(given, str):
        if not given.strip():
            raise DataError("the prompt is empty")
        return given, [_MISSING] * given.count(IMAGE_MARK)
    if not isinstance(given, (list, tuple)):
        raise DataError(f"the prompt is of type {type(given).__name__}; it must be text or a list of chat messages")
    messages: list[Message] = []
    inline: list[Any] = []
    for number, message in enumerate(given, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"message {number} of the prompt is a {type(message).__name__}, not an object")
        messages.append(_message(message, inline))
    return messages, inline


def _message(message: Mapping[str, Any], inline: list[Any]) -> Message:
    """One message without media; appends to `inline`. Nulls go: parquet writes every key into every struct."""
    content = message.get("content")
    content = content.tolist() if isinstance(content, np.ndarray) else content
    if isinstance(content, (list, tuple)):
        items = [_item(item, inline) for item in content]
        cleaned: Any = items
    else:
        cleaned = content
        inline.extend([_MISSING] * (content.count(IMAGE_MARK) if isinstance(content, str) else 0))
    others = {str(key): _plain(value) for key, value in message.items() if key != "content" and value is not None}
    kept = {key: value for key, value in others.items() if value is not _MISSING}
    return kept if cleaned is None else {**kept, "content": cleaned}


def _item(item: Any, inline: list[Any]) -> Any:
    if not isinstance(item, Mapping):
        return item  # refused by the processor, which knows what a template takes
    if item.get("type") == "image":
        image = item.get("image")
        inline.append(_MISSING if image is None else image)
        return {"type": "image"}
    text = item.get("text")
    if isinstance(text, str):
        inline.extend([_MISSING] * text.count(IMAGE_MARK))
        return {"type": str(item.get("type") or "text"), "text": text}
    return {"type": str(item.get("type"))}


def _num_marks(content: str | list[Message]) -> int:
    return content.count(IMAGE_MARK) if isinstance(content, str) else sum(count_marks(message) for message in content)


def _prepend(content: str | list[Message], num_images: int) -> str | list[Message]:
    """Put image marks at the beginning of the first user turn."""
    if isinstance(content, str):
        return IMAGE_MARK * num_images + content
    messages = list(content)
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            old = message.get("content") or ""
            new = IMAGE_MARK * num_images + old if isinstance(old, str) else [{"type": "image"}] * num_images + old
            messages[index] = {**message, "content": new}
            return messages
    raise DataError("the prompt has no user turn to put its images into")


def _in_order(inline: list[Any], column: list[Any], num_marks: int) -> list[Any]:
    """Images in the order of their marks: an inline image where there is one, else the column's next."""
    slots = inline or [_MISSING] * num_marks
    num_open = sum(slot is _MISSING for slot in slots)
    if num_open != len(column):
        remedy = '; data.image_marks = "prepend" puts images first' if num_marks == 0 else ""
        kind = f"{IMAGE_MARK} marks" if num_open == num_marks else f"{IMAGE_MARK} marks without an inline image"
        raise DataError(f"the prompt has {num_open} {kind}, and the row has {len(column)} images{remedy}")
    rest = iter(column)
    return [next(rest) if slot is _MISSING else slot for slot in slots]
