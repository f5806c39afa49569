"""The processor against transformers' own: same ids, pixel values, grids and positions, whatever the picture."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer, Qwen2_5_VLModel, Qwen2_5_VLProcessor
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rollplex.errors import CheckpointError, ConfigError, DataError
from rollplex.models.processor import Processor, ProcessorSpec, load_processor, upright_rgb
from tests.models.processor_checkpoint import CHAT_TEMPLATE, write_processor_checkpoint

ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""


class _ImagesOnly(Qwen2_5_VLProcessor):
    """transformers' processor without a video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return type(argument)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_processor_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def processor(checkpoint: Path) -> Processor:
    return load_processor(ProcessorSpec(str(checkpoint)))


@pytest.fixture(scope="module")
def peer(checkpoint: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
    make: Any = _ImagesOnly
    return make(image_processor, tokenizer, None, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def peer_model(checkpoint: Path) -> Qwen2_5_VLModel:
    with torch.device("meta"):
        return Qwen2_5_VLModel(AutoConfig.from_pretrained(checkpoint))


def noise(width: int, height: int, mode: str = "RGB") -> PIL.Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def sixteen_bit() -> PIL.Image.Image:
    return PIL.Image.fromarray(np.arange(60 * 40, dtype=np.uint16).reshape(40, 60))


PICTURES = {
    "landscape": ("png", noise(130, 60)),
    "portrait": ("png", noise(60, 130)),
    "tiny": ("png", noise(1, 1)),
    "large": ("png", noise(700, 500)),
    "grayscale": ("png", noise(70, 60, "L")),
    "transparent": ("png", noise(70, 60, "RGBA")),
    "palette": ("png", noise(70, 60).convert("P")),
    "bilevel": ("png", noise(70, 60, "1")),
    "cmyk": ("jpg", noise(70, 60, "CMYK")),
    "sixteen-bit": ("png", sixteen_bit()),
}


def stored(folder: Path, name: str) -> str:
    """Write a picture to a file, so that both sides decode it."""
    if name == "rotated":
        exif = PIL.Image.Exif()
        exif[ORIENTATION] = 6
        noise(130, 60).save(folder / "rotated.jpg", exif=exif)
        return str(folder / "rotated.jpg")
    if name == "animated":
        noise(60, 50).save(folder / "animated.gif", save_all=True, append_images=[noise(60, 50, "L")])
        return str(folder / "animated.gif")
    suffix, picture = PICTURES[name]
    picture.save(folder / f"{name}.{suffix}")
    return str(folder / f"{name}.{suffix}")


def messages_with(num_images: int) -> list[dict[str, Any]]:
    items = [
        item
        for index in range(num_images)
        for item in ({"type": "text", "text": f"Picture {index}: "}, {"type": "image"})
    ]
    question = {"type": "text", "text": " Was ist größer? 数"}
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [*items, question]}]


def assert_equals_peer(
    processor: Processor, peer: Any, model: Qwen2_5_VLModel, messages: list[dict[str, Any]], paths: Sequence[str]
) -> None:
    text = peer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [load_image(path) for path in paths]
    expected = peer(text=[text], images=images or None, return_tensors="pt")
    pictures = [PIL.Image.open(path) for path in paths]
    prompt = processor.prompt(messages, pictures, uid=7)
    np.testing.assert_array_equal(prompt.ids, expected["input_ids"][0].numpy())
    assert processor.token_count(messages, [picture.size for picture in pictures]) == len(prompt.ids)
    assert prompt.ids.dtype == prompt.positions.dtype == np.int64
    if not paths:
        assert prompt.images == ()
        np.testing.assert_array_equal(prompt.positions, np.tile(np.arange(len(prompt.ids)), (3, 1)))
        return
    patches = np.concatenate([image.patches for image in prompt.images])
    np.testing.assert_array_equal(patches, expected["pixel_values"].numpy())
    assert [list(image.grid) for image in prompt.images] == expected["image_grid_thw"].tolist()
    positions, _ = model.get_rope_index(
        expected["input_ids"],
        mm_token_type_ids=expected["mm_token_type_ids"],
        image_grid_thw=expected["image_grid_thw"],
    )
    np.testing.assert_array_equal(prompt.positions, positions[:, 0].numpy())


@pytest.mark.parametrize("name", [*PICTURES, "rotated", "animated"])
def test_one_picture_equals_transformers(
    name: str, processor: Processor, peer: Any, peer_model: Qwen2_5_VLModel, tmp_path: Path
) -> None:
    assert_equals_peer(processor, peer, peer_model, messages_with(1), [stored(tmp_path, name)])


@pytest.mark.parametrize("names", [[], ["portrait", "landscape", "rotated"], ["tiny", "tiny", "large"]])
def test_several_pictures_equal_transformers(
    names: list[str], processor: Processor, peer: Any, peer_model: Qwen2_5_VLModel, tmp_path: Path
) -> None:
    paths = [stored(tmp_path, name) for name in names]
    assert_equals_peer(processor, peer, peer_model, messages_with(len(names)), paths)


def test_exif_orientation_is_applied_once(tmp_path: Path) -> None:
    with PIL.Image.open(stored(tmp_path, "rotated")) as picture:
        upright = upright_rgb(picture)
    assert upright.size == (60, 130)
    assert upright_rgb(upright).size == (60, 130)


@pytest.mark.parametrize("template_file", ["chat_template.json", "chat_template.jinja", None])
def test_chat_template_is_found_wherever_it_is(template_file: str | None, processor: Processor, tmp_path: Path) -> None:
    other = Processor(ProcessorSpec(str(write_processor_checkpoint(tmp_path, template_file))))
    assert other.template == CHAT_TEMPLATE
    np.testing.assert_array_equal(other.layout(messages_with(2)), processor.layout(messages_with(2)))


def test_text_marks_and_items_are_the_same_prompt(processor: Processor) -> None:
    items = [{"type": "text", "text": "a "}, {"type": "image"}, {"type": "text", "text": " b"}]
    as_items = processor.layout([{"role": "user", "content": items}])
    np.testing.assert_array_equal(processor.layout("a <image> b"), as_items)
    np.testing.assert_array_equal(processor.layout([{"role": "user", "content": "a <image> b"}]), as_items)


def test_raw_text_has_no_template_but_image_frames(checkpoint: Path) -> None:
    raw = Processor(ProcessorSpec(str(checkpoint), chat_template=False))
    text = raw.tokenizer.decode(raw.layout("<image>Is it red?"))
    assert text == "<|vision_start|><|image_pad|><|vision_end|>Is it red?"


def test_system_prompt_comes_first_and_yields_to_the_rows_own(checkpoint: Path) -> None:
    processor = Processor(ProcessorSpec(str(checkpoint), system_prompt="Think."))
    decode = processor.tokenizer.decode
    assert decode(processor.layout("Hi")).startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\nHi")
    own = decode(processor.layout(messages_with(0)))
    assert own.startswith("<|im_start|>system\nBe brief.")
    assert "Think." not in own


def test_a_started_answer_goes_on(processor: Processor) -> None:
    text = processor.tokenizer.decode(
        processor.layout([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}])
    )
    assert text.endswith("<|im_start|>assistant\nIt is")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("See <|image_pad|>", "special token"),
        ("See <|video_pad|>", "special token"),
        ("See <video>", "video is not supported"),
        ("See \ud83d", "half of a character pair"),
        ([{"role": "user", "content": [{"type": "text", "text": "\ude00"}]}], "half of a character pair"),
        ([], "no messages"),
        ([{"role": "user"}], "no content"),
        ([{"content": "x"}], "no role"),
        ([{"role": "user", "content": [{"type": "audio"}]}], "'audio'"),
        ([{"role": "user", "content": ["x"]}], "'str'"),
    ],
)
def test_unusable_content_is_refused(content: Any, reason: str, processor: Processor) -> None:
    with pytest.raises(DataError, match=reason):
        processor.layout(content)


def test_pictures_must_match_marks(processor: Processor) -> None:
    with pytest.raises(DataError, match="1 image marks for 2 images"):
        processor.prompt("<image> ?", [noise(30, 30), noise(30, 30)])


def test_prompt_must_end_with_text_and_have_a_prefix(checkpoint: Path, tmp_path: Path) -> None:
    bare = write_processor_checkpoint(tmp_path, None)
    (bare / "chat_template.jinja").write_text("{{ 'x<|image_pad|>' }}", encoding="utf-8")
    with pytest.raises(DataError, match="ends with an image"):
        Processor(ProcessorSpec(str(bare))).layout("<image>")
    with pytest.raises(DataError, match="1 tokens"):
        Processor(ProcessorSpec(str(checkpoint), chat_template=False)).layout("x")


def test_a_template_that_ignores_images_is_noticed(tmp_path: Path) -> None:
    directory = write_processor_checkpoint(tmp_path, None)
    (directory / "chat_template.jinja").write_text("{{ 'plain text' }}", encoding="utf-8")
    with pytest.raises(DataError, match="0 placeholders for 1 images"):
        Processor(ProcessorSpec(str(directory))).layout("<image>?")


def test_extreme_aspect_ratio_is_refused(processor: Processor) -> None:
    with pytest.raises(DataError, match="3 x 900"):
        processor.image_tokens(3, 900)
    with pytest.raises(DataError, match="3 x 900"):
        processor.prompt("<image>?", [noise(3, 900)])


def test_pixel_limits_change_the_size_and_must_be_in_order(checkpoint: Path) -> None:
    small = Processor(ProcessorSpec(str(checkpoint), max_pixels=28 * 28 * 4))
    assert small.image_tokens(700, 500) <= 4
    assert small.image(noise(700, 500)).grid == (1, 2, 4)
    with pytest.raises(ConfigError, match=r"data\.min_pixels"):
        Processor(ProcessorSpec(str(checkpoint), min_pixels=10**6))


def test_system_prompt_needs_the_template() -> None:
    with pytest.raises(ConfigError, match=r"data\.chat_template"):
        ProcessorSpec("x", chat_template=False, system_prompt="Think.")


def test_equal_pictures_have_equal_keys(processor: Processor) -> None:
    first, again, other = (
        processor.image(noise(60, 60)),
        processor.image(noise(60, 60)),
        processor.image(noise(61, 60)),
    )
    assert first.key == again.key != other.key


def test_missing_files_and_text_models_are_checkpoint_errors(checkpoint: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", checkpoint / "config.json", "model"):
        with pytest.raises(CheckpointError, match=r"neither a directory .* nor a hub name"):
            Processor(ProcessorSpec(str(place)))
    (tmp_path / "step").mkdir()
    write_processor_checkpoint(tmp_path / "step" / "model")
    with pytest.raises(CheckpointError, match=r"no usable .* did you mean '.*step/model'\?"):
        Processor(ProcessorSpec(str(tmp_path / "step")))
    text_only = write_processor_checkpoint(tmp_path / "text")
    (text_only / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="image_token_id"):
        Processor(ProcessorSpec(str(text_only)))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = write_processor_checkpoint(tmp_path / "checkpoint")
    for path in checkpoint.glob("tok*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="its tokenizer has no token"):
        Processor(ProcessorSpec(str(checkpoint)))


def test_spec_travels() -> None:
    spec = ProcessorSpec("x", 1, 2, True, "s")
    assert pickle.loads(pickle.dumps(spec)) == spec


@settings(max_examples=40)
@given(width=st.integers(1, 400), height=st.integers(1, 400))
def test_tokens_do_not_depend_on_orientation(width: int, height: int, processor: Processor) -> None:
    if max(width, height) <= 200 * min(width, height):
        assert processor.image_tokens(width, height) == processor.image_tokens(height, width)
