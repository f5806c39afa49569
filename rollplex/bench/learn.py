"""Claim: rewards alone teach a vision-language model to read pictures, through the step that large runs use.

    examples/easy_vqa/prepare.py      questions, and a model with random weights
    examples/easy_vqa/warm_start.py   labelled questions, until about half of the answers are right
    rollplex train RECIPE             GRPO with an exact-match reward; held-out questions before, during and after
    metrics.jsonl                     -> the curve

It needs a checkout and the package easy-vqa, and no network. Held-out questions are about images that occur in no
training question; their answers are greedy.
"""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import safe_open

from rollplex import __version__, loop
from rollplex.config import Config, load_config
from rollplex.errors import ConfigError
from rollplex.gpu.device import describe, select_device

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "easy_vqa"
STDERR = 2
"""Where other programs' progress goes: standard output ends with the result."""


@dataclass(frozen=True)
class Setting:
    """How a size is trained. warm_*: rate of the warm start, share of right answers that ends it, most steps."""

    recipe: str
    warm_learning_rate: float
    warm_target: float
    warm_steps: int
    overrides: tuple[str, ...] = ()


SETTINGS = {
    "1m": Setting("easy_vqa.toml", 1e-3, 0.4, 150),
    "6m": Setting("easy_vqa.toml", 5e-4, 0.5, 200, ("train.learning_rate=2.5e-4",)),
    "90m": Setting("easy_vqa_90m.toml", 2e-4, 0.5, 230),
}

Row = dict[str, Any]


def run(
    size: str = "90m", device: str = "auto", seed: int = 0, directory: str | None = None,
    questions: int | None = None, warm_steps: int | None = None, overrides: Sequence[str] = (),
) -> dict[str, object]:  # fmt: skip
    """Train a model of this size from nothing. overrides: of its recipe, as for `rollplex train`.

    directory: where all files go; by default they are removed again. questions: only the first so many of each split.

    Raises:
        ConfigError: the size is unknown, or this is no checkout.
    """
    if size not in SETTINGS:
        raise ConfigError(f"--size {size}: use {', '.join(SETTINGS)}")
    if not EXAMPLE.is_dir():
        raise ConfigError(f"bench learn: there is no {EXAMPLE}; run it in a checkout of the repository")
    setting = SETTINGS[size]
    with TemporaryDirectory() as folder:
        root = Path(directory or folder)
        config = recipe(setting, root, device, seed, overrides)
        where = select_device(config.run.device)
        seconds = {"prepare": _timed(_prepare, root, size, seed, questions)}
        steps = setting.warm_steps if warm_steps is None else warm_steps
        seconds["warm_start"] = _timed(_warm_start, root, setting, steps, str(where), seed)
        seconds["grpo"] = _timed(_train, config)
        return {
            "bench": "learn",
            "size": size,
            "parameters": num_parameters(root / "warm"),
            "dtype": config.model.dtype,
            "device": describe(where),
            "seed": seed,
            **learned(root, config),
            "seconds": {**seconds, "all": sum(seconds.values())},
            "versions": {
                "rollplex": __version__, "torch": torch.__version__, "transformers": transformers.__version__
            },
        }  # fmt: skip


def recipe(setting: Setting, root: Path, device: str, seed: int, overrides: Sequence[str]) -> Config:
    """The setting's recipe on the files below root."""
    places = {
        "model.path": root / "warm",
        "data.train": root / "data" / "train.jsonl",
        "data.eval": root / "data" / "test.jsonl",
        "run.directory": root / "grpo",
    }
    own = [f"{field}={json.dumps(str(place))}" for field, place in places.items()]
    own += [f"run.device={device}", f"run.seed={seed}", "run.resume=false", *setting.overrides]
    return load_config(ROOT / "recipes" / setting.recipe, [*own, *overrides])


def learned(root: Path, config: Config) -> dict[str, object]:
    """What the run's files say.

    curve: [step, mean reward of its samples, held-out accuracy after it or None, seconds of all steps until then];
    step 0 is before training, and has no reward.
    """
    rows = _read_lines(root / "grpo" / "metrics.jsonl")
    steps = [row for row in rows if row["kind"] == "train"]
    held_out = {row["step"]: row["eval/reward/mean"] for row in rows if row["kind"] == "eval"}
    elapsed = accumulate(row["time/step"] + row["time/data_wait"] for row in steps)
    curve: list[list[float | None]] = [[0, None, held_out[0], 0.0]]
    curve += [
        [row["step"], row["reward/mean"], held_out.get(row["step"]), seconds]
        for row, seconds in zip(steps, elapsed, strict=True)
    ]
    first, last = held_out[min(held_out)], held_out[max(held_out)]
    return {
        "held_out_questions": int(next(row["eval/prompts"] for row in rows if row["kind"] == "eval")),
        "accuracy_before": first,
        "accuracy_after": last,
        "accuracy_by_words_alone": _by_words_alone(root, config.eval.max_prompts),
        "gain_points": 100 * (last - first),
        "steps": len(steps),
        "samples_per_step": config.train.prompts_per_step * config.rollout.group_size,
        "step_s_median": median(row["time/step"] for row in steps),
        "phase_s_median": _phase_medians(steps),
        "logprob_difference_max": max(row["logprob_difference/max"] for row in steps),
        "kl_last": steps[-1]["kl"],
        "updates_skipped": int(steps[-1]["updates/skipped_total"]),
        "columns": ["step", "reward", "held_out_accuracy", "seconds"],
        "curve": [[_rounded(value) for value in point] for point in curve],
    }


def num_parameters(checkpoint: Path) -> int:
    """Numbers in a checkpoint's weights."""
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        return sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 - not a dict


def _by_words_alone(root: Path, max_questions: int | None) -> float:
    """Accuracy of the commonest training answer to the same words: what needs no image."""
    answers = defaultdict[str, Counter[str]](Counter)
    for row in _read_lines(root / "data" / "train.jsonl"):
        answers[row["prompt"]][row["answer"]] += 1
    commonest = {prompt: counts.most_common(1)[0][0] for prompt, counts in answers.items()}
    asked = _read_lines(root / "data" / "test.jsonl")[:max_questions]
    return fmean(commonest.get(row["prompt"]) == row["answer"] for row in asked)


def _phase_medians(steps: Sequence[Row]) -> dict[str, float]:
    names = [name for name in steps[-1] if name.startswith("phase/")]
    return {name.removeprefix("phase/"): median(row.get(name, 0.0) for row in steps) for name in names}


def _prepare(root: Path, size: str, seed: int, questions: int | None) -> None:
    limit = [] if questions is None else ["--questions", str(questions)]
    _example("prepare.py", "--output", str(root), "--size", size, "--seed", str(seed), *limit)


def _warm_start(root: Path, setting: Setting, steps: int, device: str, seed: int) -> None:
    _example(
        "warm_start.py", str(root), "--device", device, "--seed", str(seed), "--max-steps", str(steps),
        "--target", str(setting.warm_target), "--learning-rate", str(setting.warm_learning_rate),
    )  # fmt: skip


def _train(config: Config) -> None:
    with redirect_stdout(sys.stderr):
        loop.train(config)


def _example(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(EXAMPLE / name), *arguments], stdout=STDERR, check=True)


def _timed(work: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def _read_lines(path: Path) -> list[Row]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
