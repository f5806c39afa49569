"""Ingestion finds every bad row; batches are a function of their number, not of time or of who asks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.config import Config
from rollplex.data import BadRow, Dataset, PromptLoader, eval_prompts, load_dataset
from rollplex.data.loader import epoch_order
from rollplex.data.prompts import make_prompt, measure_files
from rollplex.errors import CheckpointError, ConfigError, DataError, WorkerError
from rollplex.pool import WorkerPool
from tests.data.pools import InlinePool

Recipe = Callable[..., Config]
Encode = Callable[..., bytes]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def seven(tmp_path: Path, recipe: Recipe, pool: InlinePool) -> Dataset:
    rows = [{"prompt": f"Question {index}", "n": index} for index in range(7)]
    return load_dataset(recipe(write_jsonl(tmp_path / "d.jsonl", rows)), pool)


def numbers(batches: Any) -> list[list[int]]:
    return [[prompt.columns["n"] for prompt in batch] for batch in batches]


# ---- ingestion


def test_skip_counts_and_lists_bad_rows(tmp_path: Path, recipe: Recipe, pool: InlinePool, encoded: Encode) -> None:
    (tmp_path / "ok.png").write_bytes(encoded())
    (tmp_path / "cut.png").write_bytes(encoded(300, 300)[:-2000])
    path = write_jsonl(
        tmp_path / "d.jsonl",
        [
            {"prompt": "<image>?", "image": "ok.png"},
            "{broken",
            {"prompt": "<image>?", "image": "cut.png"},
            {"prompt": "word " * 400},
            {"prompt": "<image><image>?", "images": ["ok.png", "ok.png"]},
        ],
    )
    dataset = load_dataset(recipe(path, on_bad_row="skip", max_prompt_tokens=1000), pool)
    assert len(dataset) == 2
    assert [row.source for row in dataset.bad_rows] == [f"{path}, row {number}" for number in (2, 3, 4)]
    first, second, third = (row.reason for row in dataset.bad_rows)
    assert "not valid JSON" in first
    assert "cut.png" in second
    assert "cannot be decoded" in second
    assert "more than data.max_prompt_tokens = 1000" in third
    assert isinstance(dataset.bad_rows[0], BadRow)
    for index in range(2):
        prompt = make_prompt(dataset.spec, dataset.row(index), 0)
        assert len(prompt.ids) == dataset.token_counts[index]
    measured = [path for function, _, paths in pool.submitted if function is measure_files for path in paths]
    assert sorted(Path(path).name for path in measured) == ["cut.png", "ok.png"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (["{}", "{broken"], "row 1: there is no column 'prompt'"),
        ([{"prompt": "a"}, "{broken"], "row 2: not valid JSON"),
        ([{"prompt": "a"}, {"prompt": "<image>", "image": "bad.png"}], "row 2: image '.*bad.png': cannot be read"),
        ([{"prompt": "a " * 400}], "row 1: the prompt has .* tokens"),
    ],
)
def test_a_bad_row_is_an_error(rows: list[Any], reason: str, tmp_path: Path, recipe: Recipe, pool: InlinePool) -> None:
    (tmp_path / "bad.png").write_bytes(b"no image")
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    with pytest.raises(DataError, match=reason) as caught:
        load_dataset(recipe(path, max_prompt_tokens=500), pool)
    assert 'data.on_bad_row = "skip"' in str(caught.value)


def test_the_length_limit_counts_expanded_images(
    tmp_path: Path, recipe: Recipe, pool: InlinePool, encoded: Encode
) -> None:
    (tmp_path / "a.png").write_bytes(encoded(224, 224))
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "<image>?", "image": "a.png"}])
    length = int(load_dataset(recipe(path), pool).token_counts[0])
    assert length > 64
    assert len(load_dataset(recipe(path, max_prompt_tokens=length), pool)) == 1
    with pytest.raises(DataError, match=f"has {length} tokens"):
        load_dataset(recipe(path, max_prompt_tokens=length - 1), pool)


def test_no_good_row_and_no_row(tmp_path: Path, recipe: Recipe, pool: InlinePool) -> None:
    with pytest.raises(DataError, match=r"no good row is left of 2.*row 1: not valid JSON"):
        load_dataset(recipe(write_jsonl(tmp_path / "d.jsonl", ["{", "{"]), on_bad_row="skip"), pool)
    (tmp_path / "e.jsonl").write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match="no rows"):
        load_dataset(recipe(tmp_path / "e.jsonl"), pool)
    with pytest.raises(ConfigError, match=r"data\.eval"):
        load_dataset(recipe(tmp_path / "e.jsonl"), pool, "eval")


def test_progress_ends_at_the_total(tmp_path: Path, recipe: Recipe, pool: InlinePool, encoded: Encode) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    rows = [{"prompt": "<image>?", "image": "a.png"} for _ in range(40)]
    calls: list[tuple[int, int]] = []
    load_dataset(recipe(write_jsonl(tmp_path / "d.jsonl", rows)), pool, progress=lambda *call: calls.append(call))
    assert [done for done, _ in calls] == list(range(1, 42))
    assert calls[-1] == (41, 41)


def test_a_row_that_kills_its_worker_is_named(tmp_path: Path, recipe: Recipe) -> None:
    rows = [{"prompt": f"Question {index}"} for index in range(40)]
    path = write_jsonl(tmp_path / "d.jsonl", rows)
    dataset = load_dataset(recipe(path, on_bad_row="skip"), InlinePool(deadly=b"Question 35"))
    assert dataset.bad_rows == (BadRow(f"{path}, row 36", "the worker process died"),)
    assert len(dataset) == 39


def test_a_row_that_cannot_be_sent_is_named(tmp_path: Path, recipe: Recipe, pool: InlinePool) -> None:
    code = "def rows(): return [{'prompt': 'a'}, {'prompt': 'b', 'key': lambda: 0}]"
    (tmp_path / "f.py").write_text(code, encoding="utf-8")
    with pytest.raises(DataError, match=r"f\.py:rows, row 2: cannot be sent"):
        load_dataset(recipe(f"{tmp_path}/f.py:rows"), pool)


def test_an_unusable_checkpoint_is_not_blamed_on_rows(tmp_path: Path, recipe: Recipe, pool: InlinePool) -> None:
    config = recipe(write_jsonl(tmp_path / "d.jsonl", [{"prompt": "a"}]), on_bad_row="skip")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "none")})})
    with pytest.raises(CheckpointError):
        load_dataset(config, pool)


# ---- batches


def test_epochs_follow_each_other_without_a_gap(seven: Dataset, pool: InlinePool) -> None:
    loader = PromptLoader(seven, 3, seed=1, shuffle=True, pool=pool)
    prompts = [prompt for _ in range(7) for prompt in next(loader)]
    for epoch in range(3):
        part = prompts[7 * epoch : 7 * epoch + 7]
        assert sorted(prompt.columns["n"] for prompt in part) == list(range(7))
        assert all(prompt.uid == 7 * epoch + prompt.columns["n"] for prompt in part)
    orders = [tuple(prompt.columns["n"] for prompt in prompts[start : start + 7]) for start in (0, 7, 14)]
    assert len(set(orders)) == 3


@pytest.mark.parametrize("start", [0, 1, 2, 5])
def test_a_loader_resumes_exactly(start: int, seven: Dataset, pool: InlinePool) -> None:
    whole = PromptLoader(seven, 4, seed=3, shuffle=True, pool=pool, prefetch_steps=1)
    expected = [next(whole) for _ in range(8)]
    assert whole.position == 8
    rest = PromptLoader(seven, 4, seed=3, shuffle=True, pool=pool, prefetch_steps=3, start_batch=start)
    for batch in expected[start:]:
        again = next(rest)
        assert [prompt.uid for prompt in again] == [prompt.uid for prompt in batch]
        assert all(np.array_equal(one.ids, other.ids) for one, other in zip(again, batch, strict=True))
    assert rest.position == 8


def test_without_shuffle_in_file_order(seven: Dataset, pool: InlinePool) -> None:
    loader = PromptLoader(seven, 4, seed=3, shuffle=False, pool=pool)
    assert numbers(next(loader) for _ in range(2)) == [[0, 1, 2, 3], [4, 5, 6, 0]]


def test_batches_are_prepared_ahead(seven: Dataset, pool: InlinePool) -> None:
    pool.submitted.clear()
    loader = PromptLoader(seven, 2, seed=0, shuffle=True, pool=pool, prefetch_steps=3)
    assert pool.submitted == []
    for num_batches in (1, 2):
        next(loader)
        assert len(pool.submitted) == 2 * (num_batches + 3)


def test_a_data_set_smaller_than_a_batch_is_refused(seven: Dataset, pool: InlinePool) -> None:
    with pytest.raises(ConfigError, match=r"train\.prompts_per_step = 8: the data set has only 7"):
        PromptLoader(seven, 8, seed=0, shuffle=True, pool=pool)


def test_eval_prompts_in_file_order(seven: Dataset, pool: InlinePool) -> None:
    assert numbers(eval_prompts(seven, pool, 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert numbers(eval_prompts(seven, pool, 3, max_prompts=4)) == [[0, 1, 2], [3]]
    assert numbers(eval_prompts(seven, pool, 3, max_prompts=100))[-1] == [6]


def test_a_file_that_vanishes_is_an_error_even_with_skip(
    tmp_path: Path, recipe: Recipe, pool: InlinePool, encoded: Encode
) -> None:
    (tmp_path / "a.png").write_bytes(encoded())
    path = write_jsonl(tmp_path / "d.jsonl", [{"prompt": "<image>?", "image": "a.png"}])
    dataset = load_dataset(recipe(path, on_bad_row="skip"), pool)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"d\.jsonl, row 1: image 1: 'a\.png': there is no such file"):
        next(PromptLoader(dataset, 1, seed=0, shuffle=True, pool=pool))


def test_a_worker_that_dies_names_the_row(seven: Dataset) -> None:
    loader = PromptLoader(seven, 7, seed=0, shuffle=False, pool=InlinePool(deadly=b"Question 4"))
    with pytest.raises(WorkerError, match=r"row 5: the worker process died"):
        next(loader)


@given(num_rows=st.integers(1, 300), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 50))
def test_an_epoch_visits_every_row_once(num_rows: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_rows, seed, epoch, shuffle=True)
    assert sorted(order.tolist()) == list(range(num_rows))
    np.testing.assert_array_equal(order, epoch_order(num_rows, seed, epoch, shuffle=True))


def test_the_order_never_changes() -> None:
    assert epoch_order(8, 0, 0, shuffle=True).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]


def test_worker_processes_give_the_same_prompts(
    tmp_path: Path, recipe: Recipe, pool: InlinePool, encoded: Encode
) -> None:
    for index in range(4):
        (tmp_path / f"{index}.png").write_bytes(encoded(40 + 30 * index, 50, index))
    rows = [{"prompt": "<image>?", "image": f"{index}.png"} for index in range(4)]
    config = recipe(write_jsonl(tmp_path / "d.jsonl", rows))
    here = next(PromptLoader(load_dataset(config, pool), 4, 0, True, pool))
    with WorkerPool(2) as workers:
        there = next(PromptLoader(load_dataset(config, workers), 4, 0, True, workers))
    for one, other in zip(here, there, strict=True):
        assert (one.uid, one.source) == (other.uid, other.source)
        assert [image.key for image in one.images] == [image.key for image in other.images]
        np.testing.assert_array_equal(one.images[0].patches, other.images[0].patches)
        np.testing.assert_array_equal(one.positions, other.positions)
