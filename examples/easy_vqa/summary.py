"""The demo's last page: held-out accuracy before and after GRPO, how the reward rose, and where the files are.

    python examples/easy_vqa/summary.py runs/demo-0     reads grpo/metrics.jsonl, grpo/samples.jsonl, data/train.jsonl

The questions are those that the run itself evaluated, before its first and after its last step. "words alone" is what
the commonest training answer to the same words would get: what can be had without looking at an image.
"""

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

IMAGE_MARK = "<image>"
BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 50

Row = dict[str, Any]


def read_lines(path: Path) -> list[Row]:
    """The objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Values as bars between their least and their greatest, neighbours averaged so that `width` bars are enough."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in zip(edges, edges[1:], strict=False)]
    least, most = min(means), max(means)
    scale = (len(BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(BARS[round((mean - least) * scale)] for mean in means)


def accuracies(samples: Sequence[Row]) -> dict[str, float]:
    """Share of rewarded answers, over all questions and by kind."""
    rewards = defaultdict[str, list[float]](list)
    for sample in samples:
        rewards["all"].append(sample["reward"])
        rewards[question_kind(sample["prompt"])].append(sample["reward"])
    return {kind: statistics.fmean(values) for kind, values in rewards.items()}


def question_kind(prompt: str) -> str:
    """What a question is about: "color", "shape" or "yes/no"."""
    if not prompt.removeprefix(IMAGE_MARK).startswith("what"):
        return "yes/no"
    return "color" if "color" in prompt else "shape"


def words_alone(train: Sequence[Row], test: Sequence[Row]) -> dict[str, float]:
    """Accuracy, as `accuracies`, of the commonest training answer to the same words."""
    answers = defaultdict[str, Counter[str]](Counter)
    for row in train:
        answers[row["prompt"]][row["answer"]] += 1
    guessed = [
        {"prompt": row["prompt"], "reward": float(answers[row["prompt"]].most_common(1)[0][0] == row["answer"])}
        for row in test
    ]
    return accuracies(guessed)
