"""From a recipe to workers, and from workers to steps. The only place that turns options into structure.

    config -> reward workers (checked) -> processor -> policy, reference, engine -> Workers -> Step with its stages

It decides which stages a step has; step.py says what they do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rollplex.algo.reward import RewardWorkers
from rollplex.config import Config
from rollplex.data import BadRow, Dataset, PromptLoader, eval_prompts, load_dataset
from rollplex.errors import CapacityError, CheckpointError, ConfigError
from rollplex.models.load import checkpoint_directory, load_model, random_model, read_config
from rollplex.models.processor import Processor
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vlm import VisionLanguageModel
from rollplex.phases.run import RUNNERS
from rollplex.pool import WorkerPool
from rollplex.rollout.engine import Engine, Vocabulary
from rollplex.rollout.sampler import SamplingParams
from rollplex.step import (
    Stage,
    Step,
    Workers,
    old_logprobs_stage,
    reference_stage,
    release_stage,
    rollout_stage,
    update_stage,
)
from rollplex.trace import Trace
from rollplex.train.checkpoint import MODEL, TrainingState, restore_training
from rollplex.train.policy import Policy, Scorer
from rollplex.types import Prompt

SPLITS: tuple[Literal["train"], Literal["eval"]] = ("train", "eval")
_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of torch's RuntimeError when a CPU has no memory left; there is no class of its own for it."""
_REMEDY = (
    "lower rollout.num_blocks or rollout.max_batch_samples (K/V of responses), train.microbatch_tokens, "
    "train.logprob_chunk_tokens, train.prompts_per_step (kept prefixes) or data.max_pixels"
)
EVALUATION_NOISE = 2**31
"""Added to the step number that keys the noise, so that evaluation draws none of training's."""


@dataclass(frozen=True, eq=False)
class Runtime:
    """A recipe's workers, and the steps that they make."""

    config: Config
    workers: Workers

    def train(self, prompts: Sequence[Prompt], number: int, trace: Trace) -> Step:
        """Run training step `number` on a batch."""
        rollout = self.config.rollout
        params = SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
        return self._run(training_stages(self.config), prompts, number, trace, rollout.group_size, params)

    def evaluate(self, prompts: Sequence[Prompt], number: int, trace: Trace) -> Step:
        """One response to each prompt, and its rewards."""
        params = SamplingParams(self.config.eval.temperature, 1.0, 0, 0.0)
        return self._run((rollout_stage, release_stage), prompts, EVALUATION_NOISE + number, trace, 1, params)

    def _run(
        self, stages: Sequence[Stage], prompts: Sequence[Prompt], number: int, trace: Trace, group_size: int,
        params: SamplingParams,
    ) -> Step:  # fmt: skip
        step = Step(prompts, self.workers, self.config, trace, number=number, group_size=group_size, params=params)
        for stage in stages:
            stage(step)
        RUNNERS[self.config.run.runner](step.graph, trace)
        step.release_features()
        return step


@dataclass(frozen=True, eq=False)
class Data:
    """A recipe's data, checked: endless training batches, evaluation rows (None without data.eval), rows left out.

    columns: those that both have, as reward functions get them.
    """

    config: Config
    pool: WorkerPool
    batches: PromptLoader
    eval: Dataset | None
    columns: tuple[str, ...]
    bad_rows: Mapping[str, Sequence[BadRow]]

    def held_out(self) -> Iterable[tuple[Prompt, ...]]:
        """Evaluation batches."""
        if self.eval is None:
            return ()
        return eval_prompts(self.eval, self.pool, self.config.train.prompts_per_step, self.config.eval.max_prompts)

    @property
    def num_held_out(self) -> int:
        """Prompts in `held_out`."""
        return 0 if self.eval is None else min(len(self.eval), self.config.eval.max_prompts or len(self.eval))


def read_data(config: Config, pool: WorkerPool, start: int, progress: Callable[[str, int, int], None]) -> Data:
    """Check every row, and have training batches ready from step `start` on. progress: called with (task, done, total).

    Raises:
        ConfigError, DataError: what is wrong, and where.
    """
    datasets: dict[str, Dataset] = {}
    for split in SPLITS if config.data.eval else SPLITS[:1]:
        datasets[split] = load_dataset(config, pool, split, partial(progress, f"checking {split} data"))
    batches = PromptLoader(
        datasets["train"],
        config.train.prompts_per_step,
        config.run.seed,
        config.data.shuffle,
        pool,
        config.data.prefetch_steps,
        start,
    )
    bad_rows = {split: dataset.bad_rows for split, dataset in datasets.items() if dataset.bad_rows}
    columns = [name for name in datasets["train"].columns if all(name in other.columns for other in datasets.values())]
    return Data(config, pool, batches, datasets.get("eval"), tuple(columns), bad_rows)


def training_stages(config: Config) -> tuple[Stage, ...]:
    """The stages of a training step under this recipe."""
    algo = config.algo
    stages: list[Stage] = [rollout_stage]
    if algo.kl_coefficient:
        stages.append(reference_stage)
    if algo.num_updates > 1 or (algo.kl_coefficient and algo.kl_in == "reward"):
        stages.append(old_logprobs_stage)
    return (*stages, update_stage)


def build_workers(
    config: Config, processor: Processor, rewards: RewardWorkers, device: torch.device, checkpoint: Path | None = None
) -> tuple[Workers, TrainingState]:
    """Load the models and make the workers; with a checkpoint, in exactly the state that it was saved in.

    Raises:
        CheckpointError: weights or training state cannot be read, or do not fit the recipe.
    """
    dtype = getattr(torch, config.model.dtype)
    temperature = config.rollout.temperature
    model = _load_policy(config, checkpoint, dtype, device)
    policy = Policy(
        model, config.train, temperature,
        train_vision=config.model.train_vision, entropy_gradient=config.algo.entropy_coefficient != 0.0,
    )  # fmt: skip
    state = restore_training(checkpoint, policy) if checkpoint else TrainingState(0, 0, 0)
    vocabulary = read_vocabulary(processor)
    engine = Engine(model, vocabulary, config.rollout, config.run.seed)
    return Workers(policy, _build_reference(config, policy, device), engine, rewards), state


def _load_policy(
    config: Config, checkpoint: Path | None, dtype: torch.dtype, device: torch.device
) -> VisionLanguageModel:
    if checkpoint is None:
        return _load(config, config.model.path, dtype, device)
    try:
        return load_model(str(checkpoint / MODEL), dtype, device)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; or remove {checkpoint} to go on from an older checkpoint") from error


def _load(config: Config, source: str, dtype: torch.dtype, device: torch.device) -> VisionLanguageModel:
    """A checkpoint's weights, or random ones: of one source, the same at every call."""
    if config.model.random_weights:
        hf_config = read_config(checkpoint_directory(source, weights=False))
        return random_model(hf_config, config.run.seed, dtype, device)
    return load_model(source, dtype, device)


@contextmanager
def memory_explained() -> Iterator[None]:
    """Name the fields that decide about memory when there is too little."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or repr(error)
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and _ALLOCATOR not in text:
            raise
        raise CapacityError(f"out of memory: {text.splitlines()[0]}; {_REMEDY}") from error


def check_model(config: Config, processor: Processor) -> None:
    """Find what is wrong with the checkpoint's configuration before every row of the data is read.

    Raises:
        CheckpointError: the model is not supported, or its tokenizer does not fit it.
        ConfigError: a stop that no response can have.
    """
    vocabulary, rollout = read_vocabulary(processor), config.rollout
    for token in rollout.stop_token_ids:
        if token >= vocabulary.num_ids:
            raise ConfigError(
                f"rollout.stop_token_ids: the tokenizer has no id {token}; its ids are 0 to {vocabulary.num_ids - 1}"
            )
    for text in rollout.stop_strings:
        ids = processor.tokenizer.encode(text, add_special_tokens=False)
        if text not in vocabulary.decode(ids):
            raise ConfigError(
                f"rollout.stop_strings: {text!r} is or holds a special token, which a response's text leaves out; "
                f"use rollout.stop_token_ids, here {ids}"
            )


def read_vocabulary(processor: Processor) -> Vocabulary:
    """Stop ids, number of ids, and decoding; refuses a tokenizer larger than the embedding table."""
    num_ids, vocab_size = len(processor.tokenizer), QwenVL(processor.config).decoder_config.vocab_size
    if num_ids > vocab_size:
        raise CheckpointError(
            f"the tokenizer has {num_ids} tokens and the embedding table {vocab_size} rows: "
            "they are not of one checkpoint"
        )
    tokenizer = processor.tokenizer

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True))

    return Vocabulary(processor.stop_ids, num_ids, decode)


def _build_reference(config: Config, policy: Policy, device: torch.device) -> Scorer | None:
    if not config.algo.kl_coefficient:
        return None
    source = config.model.reference or config.model.path
    model = _load(config, source, policy.model.dtype, device)
    if model.decoder.config.vocab_size != policy.model.decoder.config.vocab_size:
        raise CheckpointError(
            f"model.reference = {source!r} has another vocabulary than model.path; use a model of the same family"
        )
    model.requires_grad_(False)
    if source == config.model.path and not config.model.train_vision:
        model.vision = policy.model.vision  # one tower, and each image's features are computed once for both
    return Scorer(model, config.train, config.rollout.temperature)
