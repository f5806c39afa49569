"""The easy-VQA example: honest rows, a usable checkpoint, a warm start that learns, and a summary that adds up."""

import dataclasses
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from rollplex.config import load_config
from rollplex.models.load import load_model, named_hf_tensors
from rollplex.models.processor import Processor, ProcessorSpec

pytest.importorskip("easy_vqa", reason="the demo extra is not installed")

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "easy_vqa"
RECIPE = ROOT / "recipes" / "easy_vqa.toml"


def example(name: str) -> ModuleType:
    """One file of the example, as a module."""
    full_name = f"easy_vqa_example_{name}"
    spec = importlib.util.spec_from_file_location(full_name, EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[full_name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


prepare, warm_start, summary = example("prepare"), example("warm_start"), example("summary")
Row = dict[str, Any]


@pytest.fixture(scope="module")
def everything() -> dict[str, list[Row]]:
    """All rows of both splits."""
    return {split: prepare.read_rows(split) for split in ("train", "test")}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, everything: dict[str, list[Row]]) -> Path:
    """What prepare.py writes, with the first 640 training questions."""
    directory = tmp_path_factory.mktemp("easy_vqa")
    texts = [row[column] for row in everything["train"] for column in ("prompt", "answer")]
    prepare.write_rows(directory / "data" / "train.jsonl", everything["train"][:640])
    prepare.write_rows(directory / "data" / "test.jsonl", everything["test"])
    prepare.write_checkpoint(directory / "base", texts, seed=0)
    return directory


@pytest.fixture(scope="module")
def rows(prepared: Path) -> dict[str, list[Row]]:
    return {split: summary.read_lines(prepared / "data" / f"{split}.jsonl") for split in ("train", "test")}


# ---- rows


def test_no_test_image_is_among_the_training_images(everything: dict[str, list[Row]]) -> None:
    def pixels(split: str) -> set[bytes]:
        paths = {row["images"][0] for row in everything[split]}
        return {PIL.Image.open(path).convert("RGB").tobytes() for path in paths}

    assert not pixels("train") & pixels("test")


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_third_of_the_rows_wants_yes_or_no_wherever_one_looks(split: str, everything: dict[str, list[Row]]) -> None:
    for part in (everything[split], everything[split][:600]):
        kinds = Counter(row["kind"] for row in part)
        assert set(kinds) == {"color", "shape", "yes/no"}
        assert kinds["yes/no"] == pytest.approx(len(part) / 3, abs=2)
    assert everything[split] == prepare.read_rows(split), "the order is the same in every run"


def test_rows_are_the_packages_questions_and_answers(everything: dict[str, list[Row]]) -> None:
    import easy_vqa

    asked = Counter(zip(*easy_vqa.get_test_questions(), strict=True))
    for row in everything["test"]:
        image_id = int(Path(row["images"][0]).stem)
        assert "/test/" in row["images"][0]
        key = (row["prompt"].removeprefix("<image>"), row["answer"], image_id)
        asked[key] -= 1
        assert asked[key] >= 0, f"{key} is not among the package's questions, or there too often"


# ---- the checkpoint


def test_every_word_has_one_token_and_nothing_is_unknown(prepared: Path, everything: dict[str, list[Row]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared / "base")
    assert len(tokenizer) == len(set(tokenizer.get_vocab().values())) < 64
    asked = {(row["prompt"].removeprefix("<image>"), row["answer"]) for rows in everything.values() for row in rows}
    for question, answer in asked:
        ids = tokenizer(question)["input_ids"]
        assert len(ids) == len(question.split()) + 1, "the question mark is a token of its own"
        assert tokenizer.unk_token_id not in ids
        (answer_id,) = tokenizer(answer)["input_ids"]
        assert tokenizer.decode([answer_id, tokenizer.eos_token_id], skip_special_tokens=True) == answer


def test_the_warm_start_reads_a_prompt_as_rollplex_does(prepared: Path, rows: dict[str, list[Row]]) -> None:
    encoder, processor = warm_start.Encoder(prepared / "base"), Processor(ProcessorSpec(str(prepared / "base")))
    chosen = rows["train"][:6]
    batch = encoder.batch(chosen)
    for index, row in enumerate(chosen):
        prompt = processor.prompt(row["prompt"], [PIL.Image.open(row["images"][0])])
        length = len(prompt.ids)
        assert batch.ids[index, :length].tolist() == prompt.ids.tolist()
        answer_ids = [processor.tokenizer.convert_tokens_to_ids(name) for name in (row["answer"], "<|im_end|>")]
        labels = batch.labels[index]
        assert labels[length : length + 2].tolist() == batch.ids[index, length : length + 2].tolist() == answer_ids
        assert (labels[:length] == -100).all()
        assert (labels[length + 2 :] == -100).all()
        patches = batch.patches.view(len(chosen), *prompt.images[0].patches.shape)[index]
        np.testing.assert_array_equal(patches.numpy(), prompt.images[0].patches)


def test_positions_of_padded_batches_are_rollplexes(prepared: Path, rows: dict[str, list[Row]]) -> None:
    """The warm start gives the model no attention mask: padding must not move a question's positions."""
    encoder, processor = warm_start.Encoder(prepared / "base"), Processor(ProcessorSpec(str(prepared / "base")))
    chosen = rows["train"][:6]
    batch = encoder.batch(chosen)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(prepared / "base")
    types = (batch.ids == encoder.image_id).int()
    positions, _ = model.model.get_rope_index(batch.ids, mm_token_type_ids=types, image_grid_thw=batch.grids)
    for index, row in enumerate(chosen):
        prompt = processor.prompt(row["prompt"], [PIL.Image.open(row["images"][0])])
        assert positions[:, index, : len(prompt.ids)].tolist() == prompt.positions.tolist()


# ---- the warm start


def test_what_the_warm_start_saves_loads_everywhere(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["warm_start.py", str(prepared), "--max-steps", "2"])
    warm_start.main()
    warm = prepared / "warm"
    assert not (prepared / ".warm-unfinished").exists()
    state, base = (load_file(folder / "model.safetensors") for folder in (warm, prepared / "base"))
    assert state.keys() == base.keys()
    assert not torch.equal(state["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(state["visual.patch_embed.proj.weight"], base["visual.patch_embed.proj.weight"])
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "generation_config.json"):
        assert (warm / name).read_bytes() == (prepared / "base" / name).read_bytes(), name
    loaded = dict(named_hf_tensors(load_model(str(warm), torch.float32, torch.device("cpu"))))
    assert loaded.keys() == state.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, state[name]), name


def test_the_warm_start_learns(prepared: Path, rows: dict[str, list[Row]]) -> None:
    torch.manual_seed(0)
    encoder = warm_start.Encoder(prepared / "base")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(prepared / "base", dtype=torch.float32)
    losses: list[float] = []
    warm_start.train(model, encoder, iter([rows["train"][:16]] * 12), 1.1, 12, lambda *values: losses.append(values[2]))
    assert losses[-1] < losses[0] / 2


def test_training_stops_at_the_target_and_counts_new_questions_only(
    prepared: Path, rows: dict[str, list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shares = iter([0.1] * 8 + [0.9] * 20)
    weight = torch.nn.Parameter(torch.zeros(1))
    monkeypatch.setattr(warm_start, "learn", lambda *_: (weight.sum(), next(shares)))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    steps: list[int] = []
    batches = warm_start.shuffled_batches(list(range(64 * 30)), seed=1)
    seen: list[int] = []

    def watched() -> Iterator[list[int]]:
        for batch in batches:
            seen.extend(batch)
            yield batch

    encoder = type("Fake", (), {"image_id": 0, "batch": lambda self, rows: rows})()
    share = warm_start.train(model, encoder, watched(), 0.5, 100, lambda step, *_: steps.append(step))
    assert steps == list(range(1, 13)), "the mean over eight batches reaches 0.5 with the fourth good one"
    assert share == pytest.approx(0.5)
    assert len(seen) == len(set(seen)) == 12 * 64


# ---- recipe and summary


def test_the_recipe_and_the_demos_overrides_are_right() -> None:
    config = load_config(RECIPE)
    assert config.data.eval is not None and config.data.eval != config.data.train
    assert (config.eval.max_prompts or 500) >= 500
    assert config.algo.kl_coefficient > 0
    demo = (ROOT / "scripts" / "demo").read_text(encoding="utf-8")
    for line in ('data.train="$out/data/train.jsonl"', 'data.eval="$out/data/test.jsonl"', 'model.path="$out/warm"'):
        assert line in demo


def fake_run(directory: Path) -> None:
    """A run that answered every second of six questions right before, and all but one after."""
    (directory / "grpo").mkdir(parents=True)
    metrics = [{"step": 0, "kind": "eval", "eval/reward/mean": 0.5}]
    metrics += [
        {"step": step, "kind": "train", "reward/mean": step / 20, "kl": 0.1, "entropy": 1.0, "time/step": 2.0}
        for step in range(1, 21)
    ]
    samples = [{"step": 1, "kind": "train", "source": "data/train.jsonl, row 1", "reward": 1.0}]
    for step, rewards in ((0, (1, 0, 1, 0, 1, 0)), (20, (1, 1, 1, 1, 1, 0))):
        samples += [
            {"step": step, "kind": "eval", "source": f"x/test.jsonl, row {index + 1}", "reward": float(reward)}
            for index, reward in enumerate(rewards)
        ]
    for name, lines in (("metrics", metrics), ("samples", samples)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / "grpo" / f"{name}.jsonl").write_text(text, encoding="utf-8")


def test_the_summary_adds_up(tmp_path: Path, everything: dict[str, list[Row]]) -> None:
    test = everything["test"]
    fake_run(tmp_path)
    samples = summary.read_lines(tmp_path / "grpo" / "samples.jsonl")
    questions = summary.answered_questions(everything["train"], test, samples)
    assert [(question.before, question.after) for question in questions] == [
        (1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 0)
    ]  # fmt: skip
    assert [question.kind for question in questions] == [row["kind"] for row in test[:6]]
    console = Console(width=120, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(summary.accuracy_table(questions))
    last_row = next(line for line in console.export_text().splitlines() if " all " in line)
    assert ("50.0" in last_row, "83.3" in last_row, "+33.3" in last_row) == (True, True, True)


def test_words_alone_is_the_commonest_answer_to_the_same_words() -> None:
    train = [{"prompt": "a", "answer": answer} for answer in ("x", "y", "y")]
    test = [{"prompt": "a", "answer": answer, "kind": "shape"} for answer in ("x", "y")]
    samples = [
        {"step": step, "kind": "eval", "source": f"t, row {row}", "reward": 0.0} for step in (0, 3) for row in (1, 2)
    ]
    questions = summary.answered_questions(train, test, samples)
    assert [dataclasses.astuple(question)[:2] for question in questions] == [("shape", 0.0), ("shape", 1.0)]


def test_a_sparkline_rises_with_its_values_and_keeps_its_width() -> None:
    line = summary.sparkline([float(value) for value in range(1000)], width=8)
    assert line == "▁▂▃▄▅▆▇█"
    assert summary.sparkline([0.5, 0.5, 0.5]) == "▁▁▁"
    assert len(summary.sparkline([0.0, 1.0])) == 2
