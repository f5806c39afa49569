"""The learning run at its smallest, its result and its picture; and the model that it is meant for, without storage."""

import dataclasses
import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import PIL.Image
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex.bench import learn
from rollplex.config import load_config
from rollplex.errors import ConfigError
from rollplex.models.qwen_vl import QwenVL
from rollplex.rollout.graphs import kernels_fit

pytest.importorskip("easy_vqa", reason="the demo extra is not installed")

ROOT = Path(__file__).parents[2]
STEPS, PROMPTS, GROUP, HELD_OUT, QUESTIONS = 2, 3, 4, 10, 640


def script(path: str) -> ModuleType:
    """One file outside the package, as a module."""
    spec = importlib.util.spec_from_file_location(f"learn_{Path(path).stem}", ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


prepare, learning_curve = script("examples/easy_vqa/prepare.py"), script("scripts/learning_curve.py")
Row = dict[str, Any]


def read_lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run: its result, and where its files are."""

    result: Row
    directory: Path

    def rows(self, split: str) -> list[Row]:
        return read_lines(self.directory / "data" / f"{split}.jsonl")

    def samples(self, kind: str) -> Iterator[tuple[Row, Row]]:
        """Each sample, with the row that it answers."""
        split = {"train": "train", "eval": "test"}[kind]
        rows = self.rows(split)
        for sample in read_lines(self.directory / "grpo" / "samples.jsonl"):
            if sample["kind"] == kind:
                file, _, number = sample["source"].rpartition(", row ")
                assert file.endswith(f"{split}.jsonl")
                yield sample, rows[int(number) - 1]


def run_here(name: str, *arguments: str) -> None:
    """A program of the example without an interpreter of its own, which takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(learn.EXAMPLE / name), run_name="__main__")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same path as a large run's, in seconds: a warm start of ten batches, two steps."""
    directory = tmp_path_factory.mktemp("learn")
    overrides = [
        f"train.steps={STEPS}", f"train.prompts_per_step={PROMPTS}", f"rollout.group_size={GROUP}",
        f"eval.max_prompts={HELD_OUT}", "eval.every_steps=1", "run.tensorboard=false",
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "_example", run_here)
        result = learn.run("1m", "cpu", 1, str(directory), QUESTIONS, 10, overrides)
    return Run(json.loads(json.dumps(result)), directory)


def test_the_result_says_what_was_trained_and_how_it_went(tiny: Run) -> None:
    result = tiny.result
    assert (result["bench"], result["size"], result["dtype"], result["seed"]) == ("learn", "1m", "float32", 1)
    assert 1e6 < result["parameters"] < 3e6
    assert result["seconds"].keys() == {"prepare", "warm_start", "grpo", "all"}
    assert result["seconds"]["all"] == pytest.approx(sum(result["seconds"].values()) / 2)
    assert result["versions"]["torch"] == torch.__version__
    assert (result["steps"], result["samples_per_step"]) == (STEPS, PROMPTS * GROUP)
    assert result["phase_s_median"].keys() >= {"rollout.decode", "policy.prefix_backward", "policy.update"}
    assert result["logprob_difference_max"] < 1e-4
    assert result["updates_skipped"] == 0


def test_the_curve_has_every_step_with_its_samples_real_rewards(tiny: Run) -> None:
    curve = tiny.result["curve"]
    assert [point[0] for point in curve] == list(range(STEPS + 1))
    assert curve[0][1] is None
    rewards: dict[int, list[bool]] = {step: [] for step in range(1, STEPS + 1)}
    for sample, row in tiny.samples("train"):
        rewards[sample["step"]].append(sample["completion"].strip() == row["answer"])
        assert sample["reward"] == rewards[sample["step"]][-1]
    for step, right in rewards.items():
        assert len(right) == PROMPTS * GROUP
        assert curve[step][1] == pytest.approx(sum(right) / len(right), abs=1e-4)
    assert {right for step in rewards.values() for right in step} == {False, True}, "else a constant would pass, too"
    seconds = [point[3] for point in curve]
    assert seconds == sorted(seconds)
    assert 0.0 == seconds[0] < seconds[-1] <= tiny.result["seconds"]["grpo"]


def test_accuracy_is_that_of_greedy_answers_about_images_that_were_never_trained_on(tiny: Run) -> None:
    right: dict[int, list[bool]] = {step: [] for step in range(STEPS + 1)}
    held_out_images = set[str]()
    for sample, row in tiny.samples("eval"):
        right[sample["step"]].append(sample["completion"].strip() == row["answer"])
        held_out_images.update(row["images"])
    for step, answers in right.items():
        assert len(answers) == HELD_OUT
        assert tiny.result["curve"][step][2] == pytest.approx(sum(answers) / HELD_OUT)
    assert tiny.result["accuracy_before"] == tiny.result["curve"][0][2]
    assert tiny.result["accuracy_after"] == tiny.result["curve"][-1][2]
    assert tiny.result["held_out_questions"] == HELD_OUT
    training_images = {image for row in tiny.rows("train") for image in row["images"]}
    pixels = [
        {PIL.Image.open(path).convert("RGB").tobytes() for path in paths}
        for paths in (held_out_images, training_images)
    ]
    assert len(tiny.rows("train")) == QUESTIONS
    assert pixels[0] and not pixels[0] & pixels[1]


def test_words_alone_are_answered_as_most_training_questions_of_these_words(tmp_path: Path) -> None:
    train = [{"prompt": "a", "answer": answer} for answer in ("x", "y", "y")]
    test = [{"prompt": "a", "answer": "y"}, {"prompt": "a", "answer": "x"}, {"prompt": "b", "answer": "x"}]
    prepare.write_rows(tmp_path / "data" / "train.jsonl", train)
    prepare.write_rows(tmp_path / "data" / "test.jsonl", test)
    assert learn._by_words_alone(tmp_path, 2) == 1 / 2
    assert learn._by_words_alone(tmp_path, None) == 1 / 3


def test_the_gpus_model_has_50_to_150_million_parameters_and_shapes_that_kernels_fit() -> None:
    assert prepare.SIZES.keys() == learn.SETTINGS.keys()
    tokenizer = prepare.build_tokenizer(["what shape is it?"])
    config = prepare.model_config(tokenizer, prepare.SIZES["90m"])
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    assert 50e6 < sum(parameter.numel() for parameter in model.parameters()) < 150e6
    family = QwenVL(config)
    assert family.decoder_config.head_dim == 128
    assert family.vision_config.head_dim == 64
    assert kernels_fit(family.decoder_config)


@pytest.mark.parametrize("size", learn.SETTINGS)
def test_every_size_has_a_recipe_with_a_step_and_an_evaluation(size: str, tmp_path: Path) -> None:
    config = learn.recipe(learn.SETTINGS[size], tmp_path, "cpu", 3, ["train.steps=7"])
    assert config.model.path == str(tmp_path / "warm")
    assert (config.run.seed, config.run.device, config.train.steps) == (3, "cpu", 7)
    assert config.model.train_vision
    assert config.data.eval == str(tmp_path / "data" / "test.jsonl")
    assert [function.name for function in config.reward.functions] == ["exact_match"]


def test_the_gpu_recipe_trains_in_bfloat16() -> None:
    assert load_config(ROOT / "recipes" / "easy_vqa_90m.toml").model.dtype == "bfloat16"


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="--size 7b: use 1m, 6m, 90m"):
        learn.run("7b", "cpu")


def test_the_examples_programs_are_run_and_their_failure_ends_the_bench(capfd: pytest.CaptureFixture[str]) -> None:
    learn._example("summary.py", "--help")
    captured = capfd.readouterr()
    assert captured.out == "", "standard output is the result's"
    assert "usage: summary.py" in captured.err
    with pytest.raises(subprocess.CalledProcessError):
        learn._example("summary.py", "--unknown")


# ---- the picture


@pytest.fixture
def record() -> Row:
    curve = [
        [0, None, 0.5, 0.0],
        *([step, step / 20, 0.9 if step == 20 else None, 2.0 * step] for step in range(1, 21)),
    ]
    result = {
        "parameters": 90_500_000, "dtype": "bfloat16", "steps": 20, "curve": curve, "held_out_questions": 500,
        "accuracy_by_words_alone": 0.47, "seconds": {"all": 246.0},
    }  # fmt: skip
    return {"result": result, "device": "A & B"}


def test_the_picture_shows_the_numbers(record: Row) -> None:
    picture = learning_curve.draw(record)
    root = ElementTree.fromstring(picture)
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"50.0 %", "90.0 %", "without the image: 47.0 % at best", "steps of GRPO (40 s in all)"} <= set(texts)
    assert any(text and "90.5 million" in text and "A & B; 4.1 min" in text for text in texts)
    circles = list(root.iter("{http://www.w3.org/2000/svg}circle"))
    assert [float(circle.attrib["cx"]) for circle in circles] == [learning_curve.LEFT, learning_curve.RIGHT]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert heights[0] - heights[1] == pytest.approx(0.4 * (learning_curve.BOTTOM - learning_curve.TOP), abs=0.1)
    assert root[2].tag.endswith("style") and root[3].attrib["fill"] == "#ffffff", "readable on a dark page, too"


def test_the_picture_follows_from_the_result_alone(record: Row, tmp_path: Path) -> None:
    stored, picture = tmp_path / "learn.json", tmp_path / "learn.svg"
    stored.write_text(json.dumps(record), encoding="utf-8")
    learning_curve.main(str(stored), str(picture))
    assert picture.read_text(encoding="utf-8") == learning_curve.draw(record) == learning_curve.draw(record)
    record["result"]["curve"][7][1] += 0.1
    assert picture.read_text(encoding="utf-8") != learning_curve.draw(record)


def test_smoothing_is_a_mean_of_neighbours() -> None:
    values = [0.0] * 20
    values[10] = 9.0
    assert learning_curve.smoothed(values)[5:16] == pytest.approx([0.0] + [1.0] * 9 + [0.0])
    assert learning_curve.smoothed([1.0, 2.0]) == [1.5, 1.5]


@pytest.mark.parametrize(("steps", "ticks"), [(2, [0, 1, 2]), (100, [*range(0, 101, 10)]), (110, [*range(0, 111, 20)])])
def test_ticks_are_round(steps: int, ticks: list[int]) -> None:
    assert list(learning_curve._ticks(steps)) == ticks
