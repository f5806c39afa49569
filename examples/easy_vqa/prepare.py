"""easy-VQA as a Rollplex run needs it: rows as JSONL, and a small Qwen2.5-VL checkpoint with random weights.

    python examples/easy_vqa/prepare.py --output runs/easy_vqa [--size 90m]
        data/train.jsonl, data/test.jsonl    rows: prompt, images, answer, kind; images stay in the easy-vqa package
        base/                                config, weights, tokenizer, image processor, in Hugging Face format

easy-VQA asks thirteen-answer questions about one coloured shape on a 64x64 image. Its training and its test questions
are about different images. Three quarters of its questions want yes or no, and most of those can be guessed from their
words alone; so that the images count, only every third row here is such a question. This file trains nothing, and it
does not know Rollplex.
"""

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import easy_vqa
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

IMAGE_MARK = "<image>"
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
UNKNOWN = "<|unknown|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}
{%- for item in message['content'] %}
{%- if item['type'] == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- item['text'] }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

IMAGE_SIDE = 84  # three merged patches of 28 pixels: 9 image tokens, enough to tell a circle from a rectangle


@dataclass(frozen=True)
class Size:
    """Shape of a model. init: standard deviation of its random weights; of a matrix n wide, about 1 / sqrt(n).

    vocabulary_multiple: the embedding has rows beyond the last token up to a multiple of it, for GPU kernels.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vision_hidden: int
    vision_intermediate: int
    vision_layers: int
    vision_heads: int
    init: float
    vision_init: float
    vocabulary_multiple: int = 64

    @property
    def mrope_section(self) -> list[int]:
        """Rotary frequencies of time, row and column, in the published models' proportion."""
        half = self.hidden // self.heads // 2
        return [half // 4, half * 3 // 8, half * 3 // 8]


SIZES = {
    # At this width the usual init of 0.02 begins with a plateau of thousands of questions.
    "1m": Size(128, 256, 4, 4, 2, 128, 256, 3, 4, 0.1, 0.1, 1),
    "6m": Size(256, 512, 4, 4, 2, 256, 512, 3, 4, 0.06, 0.06),
    # As shallow as the small one, and ten times as wide: prompts are 30 tokens, so a step's time goes by layers, not by
    # products, and what is known of the small one's learning carries over. Heads of 128 and 64, as published.
    "90m": Size(1280, 3456, 4, 10, 2, 640, 1728, 3, 10, 0.03, 0.045),
}
ROW_ORDER_SEED = 0  # the order of rows, the same for every run, so that every seed is evaluated on the same questions

Row = dict[str, Any]


def read_rows(split: str) -> list[Row]:
    """The rows of "train" or "test", in an order that mixes images and kinds of questions."""
    train = split == "train"
    questions, answers, image_ids = easy_vqa.get_train_questions() if train else easy_vqa.get_test_questions()
    paths = easy_vqa.get_train_image_paths() if train else easy_vqa.get_test_image_paths()
    rows = [
        {
            "prompt": f"{IMAGE_MARK}{question}",
            "images": [str(Path(paths[image_id]).resolve())],
            "answer": answer,
            "kind": question_kind(question),
        }
        for question, answer, image_id in zip(questions, answers, image_ids, strict=True)
    ]
    order = random.Random(ROW_ORDER_SEED)
    order.shuffle(rows)
    return _thin_out(rows)


def question_kind(question: str) -> str:
    """What a question is about: "color", "shape" or "yes/no"."""
    if not question.startswith("what"):
        return "yes/no"
    return "color" if "color" in question else "shape"


def _thin_out(rows: list[Row]) -> list[Row]:
    """Keep every question about a colour or a shape, and after every two of them one yes/no question."""
    kept, allowed = list[Row](), 0
    for row in rows:
        if row["kind"] != "yes/no":
            allowed += 1
            kept.append(row)
        elif allowed >= 2:
            allowed -= 2
            kept.append(row)
    return kept


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSONL, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token per word or punctuation mark of `texts`; white space separates, and is no token."""
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[\w/]+|[^\w\s]"), "isolated")]
    )
    words = {word for text in texts for word, _ in split.pre_tokenize_str(text.removeprefix(IMAGE_MARK))}
    entries = [*SPECIAL_TOKENS, UNKNOWN, *ROLES, *sorted(words)]
    tokenizer = Tokenizer(models.WordLevel({entry: index for index, entry in enumerate(entries)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = split
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "<|endoftext|>")],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast, size: Size) -> Qwen2_5_VLConfig:
    """A Qwen2.5-VL of this size."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    return Qwen2_5_VLConfig(
        text_config={
            "initializer_range": size.init,
            "vocab_size": -(-len(tokenizer) // size.vocabulary_multiple) * size.vocabulary_multiple,
            "hidden_size": size.hidden,
            "intermediate_size": size.intermediate,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.kv_heads,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": size.mrope_section},
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "initializer_range": size.vision_init,
            "depth": size.vision_layers,
            "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_intermediate,
            "num_heads": size.vision_heads,
            "out_hidden_size": size.hidden,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": list(range(size.vision_layers)),  # an image of 36 patches needs no windows
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def image_settings() -> dict[str, Any]:
    """preprocessor_config.json: every image becomes IMAGE_SIDE pixels square, in patches of 14 merged 2 by 2."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": IMAGE_SIDE**2,
        "max_pixels": IMAGE_SIDE**2,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def write_checkpoint(directory: Path, texts: Iterable[str], seed: int, size: str = "1m") -> None:
    """Write a model with random weights, its tokenizer for `texts`, and its image processor."""
    tokenizer = build_tokenizer(texts)
    config = model_config(tokenizer, SIZES[size])
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    eos = [config.text_config.eos_token_id, config.text_config.bos_token_id]
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=config.text_config.pad_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    write_image_settings(directory)


def write_image_settings(directory: Path) -> None:
    """Write preprocessor_config.json."""
    text = json.dumps(image_settings(), indent=2) + "\n"
    (directory / "preprocessor_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    """Write rows and checkpoint, and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/easy_vqa"))
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--size", choices=SIZES, default="1m", help="of the model, in parameters")
    parser.add_argument("--questions", type=int, help="write only so many of each split; by default all")
    arguments = parser.parse_args()
    train, test = read_rows("train"), read_rows("test")
    texts = [row[column] for row in train for column in ("prompt", "answer")]
    train, test = train[: arguments.questions], test[: arguments.questions]
    write_rows(arguments.output / "data" / "train.jsonl", train)
    write_rows(arguments.output / "data" / "test.jsonl", test)
    write_checkpoint(arguments.output / "base", texts, arguments.seed, arguments.size)
    print(f"prepared {len(train)} training and {len(test)} test questions, and a model with random weights, "
          f"in {arguments.output}")  # fmt: skip


if __name__ == "__main__":
    main()
