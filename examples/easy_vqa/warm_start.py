"""The supervised warm start: labelled questions until the model answers two of five, with plain transformers.

    python examples/easy_vqa/warm_start.py runs/easy_vqa
        base/, data/train.jsonl  ->  warm/       a checkpoint for `model.path`, and GRPO's frozen reference

Every batch is new, so the share of right answers on it, before it is learned from, says how good the model is on
questions that it has not seen; training ends when that share, over the last batches, reaches the target. This file does
not know Rollplex.
"""

import argparse
import itertools
import json
import random
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE_MARK = "<image>"
BATCH_SIZE = 64
LEARNING_RATE = 1e-3
LEARNING_RATE_WARMUP_STEPS = 10
WINDOW = 8  # batches whose answers are counted together: 512 questions, so chance moves the share by 2 points

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """Questions with their answers, padded on the right: B rows of L tokens.

    labels: the answer and the end token where they stand, -100 elsewhere.
    """

    ids: Tensor
    labels: Tensor
    patches: Tensor
    grids: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same on a device."""
        return Batch(*(getattr(self, name).to(device) for name in ("ids", "labels", "patches", "grids")))


class Encoder:
    """Makes batches as the checkpoint's tokenizer, chat template and image processor say."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
        self._images = Qwen2VLImageProcessorPil.from_pretrained(checkpoint)
        self.image_id: int = AutoConfig.from_pretrained(checkpoint).image_token_id

    def question(self, prompt: str, num_image_tokens: int) -> list[int]:
        """Token ids of a prompt that begins with its one image."""
        items = [{"type": "image"}, {"type": "text", "text": prompt.removeprefix(IMAGE_MARK)}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": items}], tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        where = ids.index(self.image_id)
        return [*ids[:where], *[self.image_id] * num_image_tokens, *ids[where + 1 :]]

    def answer(self, answer: str) -> list[int]:
        """Token ids of an answer, the end token included."""
        return [*self._tokenizer(answer, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Encode rows with one image each."""
        pictures = [PIL.Image.open(row["images"][0]).convert("RGB") for row in rows]
        processed = self._images(images=pictures, return_tensors="pt")
        counts = processed["image_grid_thw"].prod(dim=1) // self._images.merge_size**2
        questions = [self.question(row["prompt"], int(count)) for row, count in zip(rows, counts, strict=True)]
        answers = [self.answer(row["answer"]) for row in rows]
        length = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
        ids = np.full((len(rows), length), self._tokenizer.pad_token_id)
        labels = np.full((len(rows), length), -100)
        for index, (q, a) in enumerate(zip(questions, answers, strict=True)):
            ids[index, : len(q) + len(a)] = q + a
            labels[index, len(q) : len(q) + len(a)] = a
        patches, grids = processed["pixel_values"], processed["image_grid_thw"]
        return Batch(torch.from_numpy(ids), torch.from_numpy(labels), patches, grids)


def learn(model: Qwen2_5_VLForConditionalGeneration, image_id: int, batch: Batch) -> tuple[Tensor, float]:
    """The loss on the answers, and the share of them that greedy decoding gets right, end token included."""
    batch = batch.to(model.device)
    # Padding is on the right and attention is causal, so nothing needs masking but the loss.
    output = model(
        input_ids=batch.ids,
        mm_token_type_ids=(batch.ids == image_id).int(),
        pixel_values=batch.patches,
        image_grid_thw=batch.grids,
        labels=batch.labels,
        use_cache=False,
    )
    predicted, wanted = output.logits[:, :-1].argmax(dim=-1), batch.labels[:, 1:]
    right = ((predicted == wanted) | (wanted == -100)).all(dim=1)
    return output.loss, float(right.float().mean())


def train(
    model: Qwen2_5_VLForConditionalGeneration, encoder: Encoder, batches: Iterator[Sequence[Row]], target: float,
    max_steps: int, report: Callable[[int, float, float], None], learning_rate: float = LEARNING_RATE,
) -> float:  # fmt: skip
    """Train until `target` of the answers are right, at most `max_steps`; returns the share reached.

    report(step, share, loss) is called after every step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=LEARNING_RATE_WARMUP_STEPS)
    window, share = deque[float](maxlen=WINDOW), 0.0
    for step, rows in enumerate(itertools.islice(batches, max_steps), start=1):
        loss, right = learn(model, encoder.image_id, encoder.batch(rows))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        window.append(right)
        share = sum(window) / len(window)
        report(step, share, loss.item())
        if len(window) == WINDOW and share >= target:
            break
    return share


def shuffled_batches(rows: Sequence[Row], seed: int) -> Iterator[Sequence[Row]]:
    """Batches in random order; every row once."""
    order = random.Random(seed).sample(range(len(rows)), len(rows))
    for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        yield [rows[index] for index in order[start : start + BATCH_SIZE]]


def progress_reporter(target: float) -> Callable[[int, float, float], None]:
    """One line that is rewritten on a terminal, a line every ten steps elsewhere."""
    start = time.perf_counter()

    def report(step: int, share: float, loss: float) -> None:
        seconds = time.perf_counter() - start
        line = f"warm start: step {step}, {share:.0%} right of {target:.0%}, loss {loss:.2f}, {seconds:.0f} s"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        elif step % 10 == 0:
            print(line, flush=True)

    return report


def main() -> None:
    """Warm-start the checkpoint in DIRECTORY/base; DIRECTORY/warm appears when it is whole."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path, help="what prepare.py wrote")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.4, help="share of right answers at which to stop")
    parser.add_argument("--max-steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    arguments = parser.parse_args()
    base, finished, unfinished = (arguments.directory / name for name in ("base", "warm", ".warm-unfinished"))
    torch.manual_seed(arguments.seed)
    if arguments.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32: a warm start needs no more
    encoder = Encoder(base)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(base, dtype=torch.float32).train().to(arguments.device)
    with (arguments.directory / "data" / "train.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    batches = shuffled_batches(rows, arguments.seed)
    report = progress_reporter(arguments.target)
    share = train(model, encoder, batches, arguments.target, arguments.max_steps, report, arguments.learning_rate)
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(base, unfinished)  # tokenizer, chat template and image processor stay as they are
    model.save_pretrained(unfinished)
    shutil.rmtree(finished, ignore_errors=True)
    unfinished.rename(finished)
    print(f"\nwarm start: {share:.0%} of the last {WINDOW * BATCH_SIZE} answers were right; saved in {finished}")


if __name__ == "__main__":
    main()
