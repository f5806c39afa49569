"""Rows of the styles people have become prompts; rows that cannot have one reason."""

import datetime
import decimal
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from rollplex.config import Config
from rollplex.data import load_dataset
from rollplex.data.prompts import PromptSpec, examine, make_prompt
from rollplex.data.rows import RawRow
from rollplex.errors import DataError
from rollplex.models.processor import ProcessorSpec, load_processor
from rollplex.types import Prompt
from tests.data.pools import InlinePool

Recipe = Callable[..., Config]
Encode = Callable[..., bytes]


@pytest.fixture
def spec(checkpoint: Path) -> PromptSpec:
    return PromptSpec(ProcessorSpec(str(checkpoint)))


def raw(value: Any, folder: str = ".") -> RawRow:
    return RawRow(value, "d.jsonl, row 4", folder)


def reason_for(spec: PromptSpec, value: Any) -> str:
    (finding,) = examine(spec, [raw(value)])
    return finding.reason


def first_prompt(config: Config) -> Prompt:
    pool = InlinePool()
    dataset = load_dataset(config, pool)
    prompt = make_prompt(dataset.spec, dataset.row(0), uid=0)
    assert len(prompt.ids) == dataset.token_counts[0]
    return prompt


def text_of(config: Config, prompt: Prompt) -> str:
    processor = load_processor(ProcessorSpec.from_config(config))
    text = str(processor.tokenizer.decode(prompt.ids))
    for image in prompt.images:
        count = int(np.prod(image.grid)) // 4
        text = text.replace("<|image_pad|>" * count, "[IMAGE]", 1)
    return text.partition("<|im_start|>user\n")[2]


# ---- files as other trainers' users have them


def test_trl_style_conversation_with_an_image_column(tmp_path: Path, recipe: Recipe, encoded: Encode) -> None:
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Reason first."},
                {"role": "user", "content": "How many cubes are there?"},
            ],
            "image": {"bytes": encoded(), "path": None},
            "solution": "<answer> 3 </answer>",
        }
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    config = recipe(tmp_path / "d.parquet", image_marks="prepend")
    prompt = first_prompt(config)
    assert text_of(config, prompt).startswith(
        "<|vision_start|>[IMAGE]<|vision_end|>How many cubes are there?<|im_end|>"
    )
    assert prompt.columns == {"solution": "<answer> 3 </answer>"}
    with pytest.raises(DataError, match=r"0 <image> marks, and the row has 1 images.*prepend"):
        first_prompt(recipe(tmp_path / "d.parquet"))


def test_trl_style_content_items_with_an_images_column(tmp_path: Path, recipe: Recipe, encoded: Encode) -> None:
    items = [{"type": "image", "text": None}, {"type": "text", "text": "Which is larger?"}, {"type": "image"}]
    rows = [{"prompt": [{"role": "user", "content": items}], "images": [encoded(seed=1), encoded(90, 30)], "answer": 1}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    config = recipe(tmp_path / "d.parquet", answer_column="answer")
    prompt = first_prompt(config)
    assert [image.grid for image in prompt.images] == [(1, 4, 4), (1, 4, 8)]
    frame = "<|vision_start|>[IMAGE]<|vision_end|>"
    assert text_of(config, prompt).startswith(f"{frame}Which is larger?{frame}<|im_end|>")
    assert prompt.columns == {"answer": 1}
    assert not isinstance(prompt.content, str)
    assert prompt.content[0]["content"][0] == {"type": "image"}


def test_easyr1_style_problem_with_marks(tmp_path: Path, recipe: Recipe, encoded: Encode) -> None:
    table = pyarrow.Table.from_pylist(
        [
            {
                "images": [{"bytes": encoded(), "path": "images/0.png"}],
                "problem": "<image>Find x.",
                "answer": "$2\\sqrt{3}$",
            }
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    config = recipe(tmp_path / "*.parquet", prompt_column="problem", answer_column="answer")
    prompt = first_prompt(config)
    assert text_of(config, prompt).startswith("<|vision_start|>[IMAGE]<|vision_end|>Find x.<|im_end|>")
    assert prompt.content == "<image>Find x."
    assert prompt.columns == {"answer": "$2\\sqrt{3}$"}


def test_verl_style_nested_ground_truth(tmp_path: Path, recipe: Recipe, encoded: Encode) -> None:
    row = {
        "data_source": "geometry",
        "prompt": [{"role": "user", "content": "<image>Find x. <image>"}],
        "images": [{"bytes": encoded()}, {"bytes": encoded(90, 30)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": {"split": "train", "index": 0, "question": "Find x."},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "d.parquet")
    config = recipe(tmp_path / "d.parquet", answer_column="reward_model.ground_truth")
    prompt = first_prompt(config)
    assert len(prompt.images) == 2
    assert prompt.columns["answer"] == "42"
    assert prompt.columns["reward_model"] == {"style": "rule", "ground_truth": "42"}
    assert prompt.columns["extra_info"]["index"] == 0
    assert set(prompt.columns) == {"data_source", "ability", "reward_model", "extra_info", "answer"}


def test_jsonl_with_paths_beside_it(tmp_path: Path, recipe: Recipe, encoded: Encode) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "0.png").write_bytes(encoded())
    row = {"prompt": "<image>\nWas ist das? 数", "image": "images/0.png", "answer": "Käse"}
    (tmp_path / "d.jsonl").write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    config = recipe(tmp_path / "d.jsonl")
    prompt = first_prompt(config)
    assert text_of(config, prompt).startswith("<|vision_start|>[IMAGE]<|vision_end|>\nWas ist das? 数")
    assert prompt.columns == {"answer": "Käse"}
    assert prompt.source == f"{tmp_path / 'd.jsonl'}, row 1"


# ---- rows from memory


def test_inline_images_and_column_images_take_their_own_places(spec: PromptSpec, picture: Any) -> None:
    content = [{"type": "image"}, {"type": "image", "image": picture(90, 30)}, {"type": "text", "text": "<image> ?"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": [picture(), picture(30, 90)]}
    prompt = make_prompt(spec, raw(row), uid=5)
    assert [image.grid for image in prompt.images] == [(1, 4, 4), (1, 4, 8), (1, 8, 4)]
    assert prompt.uid == 5
    assert prompt.content == [
        {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "<image> ?"}]}
    ]


def test_columns_are_plain_python_without_media(spec: PromptSpec, picture: Any) -> None:
    row = {
        "prompt": "Hi",
        "images": None,
        "thumbnail": picture(),
        "raw": b"\x00",
        "number": np.int64(3),
        "box": np.array([1.5, 2.0]),
        "day": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.5"),
        "nested": {"a": (1, None)},
    }
    columns = make_prompt(spec, raw(row), 0).columns
    assert json.loads(json.dumps(columns)) == columns
    assert columns == {"number": 3, "box": [1.5, 2.0], "day": "2026-01-02", "price": 1.5, "nested": {"a": [1, None]}}


def test_dotted_names_for_prompt_and_images(checkpoint: Path, picture: Any) -> None:
    spec = PromptSpec(ProcessorSpec(str(checkpoint)), prompt_column="input.text", images_column="input.pictures")
    row = {"input": {"text": "<image>?", "pictures": picture(), "id": 9}, "a.b": 1}
    prompt = make_prompt(spec, raw(row), 0)
    assert prompt.columns == {"input": {"id": 9}, "a.b": 1}
    assert len(prompt.images) == 1


def test_images_column_falls_back_to_image_when_null(spec: PromptSpec, picture: Any) -> None:
    assert len(make_prompt(spec, raw({"prompt": "<image>?", "images": None, "image": picture()}), 0).images) == 1


def test_prepend_leaves_prompts_with_marks_and_without_images_alone(checkpoint: Path, picture: Any) -> None:
    spec = PromptSpec(ProcessorSpec(str(checkpoint)), image_marks="prepend")
    assert make_prompt(spec, raw({"prompt": "a <image>", "image": picture()}), 0).content == "a <image>"
    assert make_prompt(spec, raw({"prompt": "a", "images": []}), 0).content == "a"
    assert make_prompt(spec, raw({"prompt": "a", "images": [picture()] * 2}), 0).content == "<image><image>a"
    no_user = {"prompt": [{"role": "system", "content": "a"}], "image": picture()}
    assert "no user turn" in reason_for(spec, no_user)


def test_numpy_messages_as_pandas_writes_them(spec: PromptSpec) -> None:
    messages = np.empty(1, dtype=object)
    messages[0] = {"role": "user", "content": "Hi", "name": None}
    assert make_prompt(spec, raw({"prompt": messages}), 0).content == [{"role": "user", "content": "Hi"}]


BAD_ROWS: list[tuple[Any, str]] = [
    (b"{broken", "not valid JSON"),
    (b'{"prompt": "\xff"}', "not UTF-8"),
    (b"[1, 2]", "the row is a list"),
    (b'"text"', "the row is a str"),
    ({"question": "?", "answer": 1}, r"no column 'prompt' \(columns: question, answer\)"),
    ({}, r"\(columns: none\)"),
    ({"prompt": None}, "column 'prompt' is null"),
    ({"prompt": "  \n"}, "the prompt is empty"),
    ({"prompt": []}, "no messages"),
    ({"prompt": 3}, "the prompt is of type int"),
    ({"prompt": ["Hi"]}, "message 1 of the prompt is a str"),
    ({"prompt": [{"role": "user", "content": None}]}, "message 1 has no content"),
    ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
    ({"prompt": "<image>?"}, "1 <image> marks, and the row has 0 images"),
    ({"prompt": "<image>?", "images": ["gone.png"]}, "image 1: 'gone.png': there is no such file"),
    ({"prompt": "<image>?", "images": [b"garbage"]}, "image 1: cannot be read as an image"),
    ({"prompt": "<image>?", "images": [np.zeros((900, 3, 3), np.uint8)]}, "image 1: an image of 3 x 900"),
    ({"prompt": "<image>?", "images": [None]}, "1 <image> marks, and the row has 0 images"),
    ({"prompt": "<video>?"}, "video is not supported"),
    ({"prompt": "?", "videos": ["a.mp4"]}, "column 'videos'"),
    ({"prompt": "Say <|image_pad|>"}, "special token"),
]


@pytest.mark.parametrize(("value", "reason"), BAD_ROWS)
def test_bad_rows_have_a_reason(value: Any, reason: str, spec: PromptSpec) -> None:
    with pytest.raises(DataError, match=reason):
        raise DataError(reason_for(spec, value))
    with pytest.raises(DataError, match=r"^d\.jsonl, row 4: "):
        make_prompt(spec, raw(value), 0)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "?"}, "no column 'reward_model.ground_truth'.*set data.answer_column"),
        ({"prompt": "?", "reward_model": {"ground_truth": None}}, "is null"),
        ({"prompt": "?", "reward_model": "x"}, "no column"),
        ({"prompt": "?", "reward_model": {"ground_truth": b"x"}}, "no plain value"),
    ],
)
def test_the_answer_must_be_there(row: dict[str, Any], reason: str, checkpoint: Path) -> None:
    spec = PromptSpec(ProcessorSpec(str(checkpoint)), answer_column="reward_model.ground_truth")
    with pytest.raises(DataError, match=reason):
        raise DataError(reason_for(spec, row))


def test_a_named_images_column_must_be_there(checkpoint: Path) -> None:
    spec = PromptSpec(ProcessorSpec(str(checkpoint)), images_column="pics")
    assert "there is no column 'pics'" in reason_for(spec, {"prompt": "?"})
    assert reason_for(spec, {"prompt": "?", "pics": None}) == ""


def test_header_checks_do_not_decode(checkpoint: Path, encoded: Encode) -> None:
    cut = encoded(300, 300)[:-2000]
    row = {"prompt": "<image>?", "image": cut}
    processor = ProcessorSpec(str(checkpoint))
    assert "cannot be decoded" in reason_for(PromptSpec(processor), row)
    assert reason_for(PromptSpec(processor, check_images="header"), row) == ""
