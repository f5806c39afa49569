"""A recipe: what a run is, as frozen pydantic models read from TOML, with dotted overrides on top.

Unknown keys are errors. Every default is a value that works; every field says its unit. This file knows no model, no
data and no torch: what can only be checked against them is checked where they are read.
"""

import os.path
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rollplex.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A path, or what else names a place; a shell leaves the `~` of `section.field=~/path` alone."""

LEAST_TEMPERATURE = 0.01
"""Below it, logits divided by the temperature lose their differences or overflow."""


class Section(BaseModel):
    # The docstrings under the fields become their descriptions: scripts/recipe_docs.py makes docs/recipes.md of them.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take true for 1."""
        if isinstance(value, bool) and _numeric(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError("a number is needed, not true or false")
        return value


def _numeric(annotation: Any) -> bool:
    return annotation in (int, float) or any(_numeric(argument) for argument in get_args(annotation))


class ModelConfig(Section):
    """Which weights, and in which precision they compute."""

    path: Place
    """A local directory in Hugging Face format, or a hub name."""
    reference: Place | None = None
    """The frozen reference's weights; by default those at `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and computation; the optimizer works in float32 either way."""
    train_vision: bool = False
    """Train the vision tower (its merger included), or keep it frozen."""
    random_weights: bool = False
    """Start from random weights of the checkpoint's config, seeded by `run.seed`: to measure speed and memory where no
    weights are at hand. No weight file is read, of `path` and of `reference`; config and tokenizer are still needed."""


class DataConfig(Section):
    """Where prompts come from, and what its columns mean. A column name may be dotted: `reward_model.ground_truth`."""

    train: Place
    """A .jsonl or .parquet file, a glob of them, or `module:function` / `file.py:function` returning rows."""
    eval: Place | None = None
    """Held-out prompts, as `train`; without it nothing is evaluated."""
    prompt_column: str = "prompt"
    """Text, with an `<image>` mark for each image, or a list of chat messages."""
    images_column: str | None = None
    """One image or a list of them: path, bytes, {"bytes" or "path": ...}, PIL. By default `images`, else `image`."""
    answer_column: str | None = None
    """A column that every row must have; also passed to reward functions as `answer`."""
    image_marks: Literal["strict", "prepend"] = "strict"
    """strict: as many <image> marks as images. prepend: without marks, all images come first in the first user turn."""
    system_prompt: str | None = None
    """Begins every conversation that has no system message of its own."""
    chat_template: bool = True
    """Wrap a text prompt as one user message of the checkpoint's chat template; chat messages always use it."""
    max_prompt_tokens: Positive = 16384
    """Longest prompt after placeholders are expanded, tokens."""
    min_pixels: Positive | None = None
    """Smallest image size after resizing, pixels; by default the checkpoint's own limit."""
    max_pixels: Positive | None = None
    """Largest image size after resizing, pixels; by default the checkpoint's own limit."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error: the first bad row ends the run. skip: bad rows are left out, counted and listed in bad_rows.jsonl."""
    check_images: Literal["decode", "header"] = "decode"
    """At ingestion, read every image wholly, or only its header."""
    shuffle: bool = True
    """A new seeded order in each epoch, or the file's order."""
    num_workers: Positive = 2
    """Worker processes that decode and process media."""
    prefetch_steps: Positive = 2
    """Batches prepared ahead of need."""


class RolloutConfig(Section):
    """How responses are sampled, and how much is decoded together."""

    group_size: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Responses per prompt, G."""
    max_new_tokens: Annotated[int, Field(gt=0, le=2**20)] = 512
    """Longest response, tokens, its stop token included."""
    temperature: Annotated[float, Field(ge=0.0)] = 1.0
    """0 is greedy; training needs more than 0."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Keep the likeliest ids that hold this share of probability; 1 keeps every id."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps every id."""
    min_p: Fraction = 0.0
    """Keep ids at least this share as likely as the likeliest; 0 keeps every id."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """In addition to the checkpoint's end-of-sequence ids."""
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """A response ends with the token that completes one of them; the string stays in the text."""
    max_batch_samples: Positive = 256
    """Samples decoded together."""
    max_batch_tokens: Positive = 8192
    """Tokens of one decode step: one per decoded sample, and those recomputed after a preemption."""
    prefill_tokens: Positive = 8192
    """On a GPU, neighbouring prompts are prefilled together up to so many tokens; a longer prompt runs by itself."""
    block_size: Positive = 16
    """Tokens per K/V block of a suffix."""
    num_blocks: Positive | None = None
    """K/V blocks for all suffixes; by default enough for max_batch_samples of full length."""
    kv_memory_gib: Annotated[float, Field(gt=0.0)] | None = None
    """Most memory for these blocks, GiB; samples wait, or are preempted and recomputed, when they are used up."""
    cuda_graphs: bool = True
    """On a GPU, replay each decode step as one CUDA graph; false launches its kernels one by one (same results)."""


class AlgoConfig(Section):
    """GRPO and its close relatives."""

    scale_advantages: bool = True
    """Divide the group-relative advantage by the group's standard deviation (false: Dr. GRPO)."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """The upper bound by itself (DAPO: larger than the lower)."""
    aggregation: Literal["token-mean", "sequence-mean", "constant-length"] = "token-mean"
    """token-mean: over the batch's tokens. sequence-mean: over each response, then over responses.
    constant-length: sum / (responses * max_new_tokens)."""
    kl_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """0 runs no reference at all."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """With x = reference - policy log-prob: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL term to the loss token by token, or subtract a response's sum from its reward."""
    entropy_coefficient: float = 0.0
    """Adds entropy_coefficient * entropy to the objective."""
    mask_truncated: bool = False
    """Leave responses that ran into max_new_tokens out of the loss."""
    epochs: Positive = 1
    """Passes over each batch."""
    num_minibatches: Positive = 1
    """Updates per pass: the batch's groups are divided into so many parts."""

    @property
    def num_updates(self) -> int:
        """Weight updates per batch."""
        return self.epochs * self.num_minibatches


class RewardFunction(Section):
    """One reward function and its weight."""

    function: str
    """`exact_match`, `number_match`, `multiple_choice` or `format`; or `module:function`, `file.py:function`."""
    weight: float = 1.0
    """The reward is the sum of weight * score over the functions."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments passed with every call."""

    @property
    def name(self) -> str:
        return self.function.rsplit(":", 1)[-1]


class RewardConfig(Section):
    """What a response is worth: the weighted sum of functions, run in worker processes."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(function="exact_match"),)
    """One name, a list of names, or tables with `function`, `weight` and `kwargs`."""
    per: Literal["sample", "group"] = "sample"
    """One call per sample as soon as it is finished, or one per prompt group (for functions that compare siblings)."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    """Time limit of one call, seconds."""
    on_error: Literal["error", "zero"] = "error"
    """A failed call ends the run, or counts as zero and is reported."""
    num_workers: Positive = 2
    """Worker processes that run reward functions."""

    @field_validator("functions", mode="before")
    @classmethod
    def _accept_names(cls, value: Any) -> Any:
        if isinstance(value, str | dict):
            value = [value]
        if not isinstance(value, list | tuple):
            raise ValueError("expected a name, a list of names, or tables with a function each")
        return [{"function": item} if isinstance(item, str) else item for item in value]

    @field_validator("functions")
    @classmethod
    def _at_least_one(cls, value: tuple[RewardFunction, ...]) -> tuple[RewardFunction, ...]:
        if not value:
            raise ValueError("needs at least one function")
        return value


class TrainConfig(Section):
    """Batch, schedule and optimizer."""

    steps: Positive = 100
    """Training steps: a rollout and its update or updates."""
    prompts_per_step: Positive = 64
    """Prompt groups of one step; responses are group_size times as many."""
    microbatch_tokens: Positive = 16384
    """Suffix tokens of one forward and backward, of as many groups as fit; a longer response runs by itself."""
    logprob_chunk_tokens: Positive = 4096
    """Tokens whose logits exist at the same time in the head."""
    recompute: Literal["none", "layer"] = "layer"
    """Activations of a suffix pass: keep all, or keep layer inputs and recompute."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1e-6
    """The full rate, after warm-up and before decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up; step i of them has (i + 1) / warmup_steps of the rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from the end of warm-up to the last step."""
    min_learning_rate_ratio: Fraction = 0.0
    """Where the decay ends, as a share of learning_rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """On matrices; norms and biases are not decayed."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    """AdamW's epsilon."""
    optimizer_gpu_gib: Annotated[float, Field(ge=0.0)] | None = None
    """GiB of the optimizer's state (moments, float32 masters) to keep in GPU memory; the rest is in host memory and
    passes through the GPU in every update, with the same results. By default all of it stays on the GPU."""
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which a batch's gradients are summed; bfloat16 halves their memory, and rounds at each addition."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Clip by the global norm over every trained parameter."""


class EvalConfig(Section):
    """Held-out evaluation: greedy unless said otherwise, one response per prompt."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """0: never during the run. With data.eval set, it also runs before the first and after the last step."""
    max_prompts: Positive | None = None
    """The first so many rows of data.eval; by default all."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """0 is greedy."""


class RunConfig(Section):
    """Where a run lives and how it is executed."""

    directory: Place = "runs/default"
    """Where config, metrics, samples and checkpoints go."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Keys the order of data and the sampling noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a CUDA device where there is one."""
    runner: Literal["serial", "overlapped"] = "overlapped"
    """How a step is executed; both give the same bits."""
    checkpoint_every_steps: Annotated[int, Field(ge=0)] = 0
    """0: only at the end and on Ctrl-C."""
    keep_checkpoints: Positive = 2
    """Older ones are removed."""
    resume: bool = True
    """Continue from the newest whole checkpoint in `directory`; false refuses a directory that has one."""
    save_samples: bool = True
    """Write every response with its rewards to samples.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""


class Config(Section):
    """A whole recipe."""

    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    algo: AlgoConfig = AlgoConfig()
    reward: RewardConfig = RewardConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        def refuse(field: str, value: object, why: str, remedy: str) -> None:
            raise ValueError(f"{field} = {value!r}: {why}; {remedy}")

        if self.rollout.temperature == 0.0:
            refuse("rollout.temperature", 0.0, "greedy samples of a group are all equal", "use a value above 0")
        for field, value in (
            ("rollout.temperature", self.rollout.temperature),
            ("eval.temperature", self.eval.temperature),
        ):
            if 0.0 < value < LEAST_TEMPERATURE:
                refuse(field, value, "so low that logits overflow", f"use {LEAST_TEMPERATURE} or more, or 0 for greedy")
        if self.algo.num_minibatches > self.train.prompts_per_step:
            refuse("algo.num_minibatches", self.algo.num_minibatches, "more parts than prompts in a step",
                   f"use at most train.prompts_per_step = {self.train.prompts_per_step}")  # fmt: skip
        if self.eval.every_steps and self.data.eval is None:
            refuse("eval.every_steps", self.eval.every_steps, "there is nothing to evaluate on", "set data.eval")
        if self.rollout.group_size == 1:
            refuse("rollout.group_size", 1, "a group of one has no relative advantage", "use 2 or more")
        rollout = self.rollout
        if rollout.num_blocks and rollout.num_blocks * rollout.block_size < rollout.max_new_tokens:
            least = -(-rollout.max_new_tokens // rollout.block_size)
            refuse("rollout.num_blocks", rollout.num_blocks,
                   f"too few for one response of rollout.max_new_tokens = {rollout.max_new_tokens}",
                   f"use {least} or more")  # fmt: skip
        if self.data.min_pixels and self.data.max_pixels and self.data.min_pixels > self.data.max_pixels:
            refuse(
                "data.min_pixels", self.data.min_pixels, f"above data.max_pixels = {self.data.max_pixels}", "lower it"
            )
        return self


def load_config(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML recipe and apply `section.field=value` overrides, later ones last.

    A value is read as TOML (`3`, `true`, `["a"]`); what is not TOML is taken as a string.

    Raises:
        ConfigError: the file is missing or no TOML, an override is malformed, a key unknown, a value out of range.
    """
    path = Path(recipe)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"recipe {str(path)!r} cannot be read: {error.strerror}; give the path of a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {str(path)!r} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(values, override)
    return parse_config(values)


def parse_config(values: dict[str, Any]) -> Config:
    """Validate nested values; raises ConfigError with one line per wrong field."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(item) for item in error.errors())) from error


def _describe(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        how = f"or as {field}=VALUE" if "." in field else f"as a section [{field}]"
        return f"{field}: missing; set it in the recipe {how}"
    if item["type"] == "extra_forbidden":
        return f"{field} = {item['input']!r}: unknown field; check the spelling (docs/recipes.md lists every field)"
    if item["type"] == "string_type" and not isinstance(item["input"], list | dict):
        quoted = f"'{field}=\"{item['input']}\"'"
        return f"{field} = {item['input']!r}: a string is needed; quote what looks like a number or date: {quoted}"
    message = item["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
    message = re.sub(r"a valid dictionary or instance of \w+", "a table", message)
    return f"{field} = {item['input']!r}: {message}" if field else message


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set one `section.field=value` in nested values.

    Raises:
        ConfigError: it is malformed.
    """
    name, separator, text = override.partition("=")
    parts = name.strip().split(".")
    if not separator or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r}: expected section.field=value, for example train.steps=200")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if parsed.keys() == {"value"} else text.strip()
    section = values
    for part in parts[:-1]:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    section[parts[-1]] = value
