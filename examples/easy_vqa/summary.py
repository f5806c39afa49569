"""The demo's last page: held-out accuracy before and after GRPO, how the reward rose, and where the files are.

    python examples/easy_vqa/summary.py runs/demo-0
        reads data/train.jsonl, data/test.jsonl and what the run logged: grpo/metrics.jsonl, grpo/samples.jsonl

The questions are those that the run itself evaluated, before its first and after its last step. The column "words
alone" is what the commonest training answer to the same words would get: what can be had without looking at an image.
"""

import argparse
import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 50
KINDS = ("color", "shape", "yes/no")

Row = dict[str, Any]


@dataclass(frozen=True)
class Answered:
    """One held-out question, and whether it was answered right: by its words alone, before, and after training."""

    kind: str
    words_alone: float
    before: float
    after: float


def read_lines(path: Path) -> list[Row]:
    """The objects of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def answered_questions(train: Sequence[Row], test: Sequence[Row], samples: Sequence[Row]) -> list[Answered]:
    """The evaluated questions, from the run's samples."""
    answers = defaultdict[str, Counter[str]](Counter)
    for row in train:
        answers[row["prompt"]][row["answer"]] += 1
    evaluated = [sample for sample in samples if sample["kind"] == "eval"]
    first, last = min(sample["step"] for sample in evaluated), max(sample["step"] for sample in evaluated)
    before, after = (_rewards_by_row(evaluated, step) for step in (first, last))
    return [
        Answered(
            row["kind"], float(answers[row["prompt"]].most_common(1)[0][0] == row["answer"]), reward, after[number]
        )
        for number, reward in before.items()
        for row in [test[number - 1]]
    ]


def _rewards_by_row(evaluated: Sequence[Row], step: int) -> dict[int, float]:
    """Rewards of one evaluation, by the row number that ends a sample's source."""
    return {
        int(sample["source"].rpartition(" ")[2]): sample["reward"] for sample in evaluated if sample["step"] == step
    }


def accuracy_table(questions: Sequence[Answered]) -> Table:
    """Accuracy in percent over all questions and by kind."""
    table = Table(title=f"Answers to {len(questions)} held-out questions, right in percent")
    for name in ("questions about", "number", "words alone", "before GRPO", "after GRPO", "gain in points"):
        table.add_column(name, justify="left" if name == "questions about" else "right")
    for kind in (*KINDS, "all"):
        chosen = [question for question in questions if kind in ("all", question.kind)]
        if chosen:
            words = 100 * statistics.fmean(question.words_alone for question in chosen)
            before = 100 * statistics.fmean(question.before for question in chosen)
            after = 100 * statistics.fmean(question.after for question in chosen)
            table.add_row(
                kind, str(len(chosen)), f"{words:.1f}", f"{before:.1f}", f"{after:.1f}", f"{after - before:+.1f}",
                style="bold" if kind == "all" else None,
            )  # fmt: skip
    return table


def curve(label: str, values: Sequence[float]) -> str:
    """One line: the first and last tenth's mean around bars for the whole."""
    part = max(1, len(values) // 10)
    first, last = statistics.fmean(values[:part]), statistics.fmean(values[-part:])
    return f"{label:<10} {first:.3f} {sparkline(values)} {last:.3f}"


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Values as bars between their least and their greatest; neighbours are averaged to fit into `width`."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(BARS) - 1) / (most - least) if most > least else 0.0
    return "".join(BARS[round((mean - least) * scale)] for mean in means)


def main() -> None:
    """Print the summary of DIRECTORY."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="the demo's output")
    directory: Path = parser.parse_args().directory
    train, test = (read_lines(directory / "data" / f"{split}.jsonl") for split in ("train", "test"))
    questions = answered_questions(train, test, read_lines(directory / "grpo" / "samples.jsonl"))
    steps = [row for row in read_lines(directory / "grpo" / "metrics.jsonl") if row["kind"] == "train"]
    console = Console(highlight=False)
    console.print()
    console.print(accuracy_table(questions))
    seconds = sum(row["time/step"] for row in steps)
    console.print(f"\nGRPO: {len(steps)} steps in {seconds:.0f} s; means of the first and last tenth around the curve")
    console.print(curve("  reward", [row["reward/mean"] for row in steps]))
    console.print(curve("  KL", [row["kl"] for row in steps]))
    console.print(curve("  entropy", [row["entropy"] for row in steps]))
    console.print(f"\nFiles in {directory}")
    for name, meaning in (
        ("grpo/metrics.jsonl", "every step in numbers"),
        ("grpo/samples.jsonl", "every answer and its reward"),
        ("grpo/tensorboard", "the same numbers for TensorBoard"),
        ("grpo/checkpoints", "the trained model, in Hugging Face format"),
        ("warm", "the model before GRPO, and its reference"),
        ("data", "training and test questions"),
    ):
        console.print(f"  {name:<20} {meaning}")


if __name__ == "__main__":
    main()
