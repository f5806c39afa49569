"""The rollout engine: from prefixes to finished samples, one token per sample and decode step.

    schedule -> (prefixes ready?) -> recompute what was preempted -> launch a decode step
                                                   tokens of the step `lag` before -> stop? -> commit

`decode` is a generator, so that others may work between two decode steps. What is decoded together follows from token
counts (scheduler.py), what is drawn from counter-based noise (noise.py): neither depends on time. On a GPU, tokens are
read while the next step is already running: a stop is seen `lag` steps late, always equally late, and tokens past it
are dropped. This file does not know who computes prefixes, why samples are wanted, or what they are worth.

Legend: B rows of one decode step, T suffix tokens of one sample, S samples, M blocks of one sample.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollplex.config import RolloutConfig
from rollplex.errors import CapacityError, NumericsError
from rollplex.models.attention import PagedKV, PrefixKV, SuffixAttention
from rollplex.models.kernels.flash import Segments
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.blocks import BlockPool, blocks_for
from rollplex.rollout.eager import EagerTokens
from rollplex.rollout.noise import pack_keys
from rollplex.rollout.rows import PendingTokens, Rows, Tokens, TokenSource
from rollplex.rollout.sampler import SamplingParams
from rollplex.rollout.scheduler import SampleKey, Scheduler, Step
from rollplex.types import FinishReason, Prompt, Sample

PrefixOf = Callable[[int], PrefixState | None]
"""A group's prefix, or None while it is not computed."""
NOT_READ = np.int64(-1)
"""In the place of a token that the host has not read yet."""


@dataclass(frozen=True)
class Vocabulary:
    """What the engine must know of the tokenizer.

    stop_ids: a response ends with any of them. num_ids: ids from here on have no token and are never sampled.
    decode: ids -> text, special tokens left out.
    """

    stop_ids: frozenset[int]
    num_ids: int
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class NeedPrefix:
    """Decoding cannot go on before this group's prefix is there."""

    group: int


@dataclass(frozen=True)
class DecodeStep:
    """One decode step more: what is known to have finished, tokens kept, suffix tokens recomputed after preemption."""

    finished: tuple[Sample, ...]
    num_decoded: int
    num_recomputed: int


class Engine:
    """Samples responses from a model whose prefixes somebody else computes."""

    def __init__(self, model: VisionLanguageModel, vocabulary: Vocabulary, config: RolloutConfig, seed: int) -> None:
        self.model, self.vocabulary, self.config, self.seed = model, vocabulary, config, seed
        self.num_blocks = num_blocks(model, config)
        c = model.decoder.config
        shape = (c.num_layers, self.num_blocks * config.block_size, c.num_kv_heads, c.head_dim)
        self.pages = PagedKV(*(torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)))
        self.stop_ids = np.array(sorted(vocabulary.stop_ids | set(config.stop_token_ids)), dtype=np.int64)
        self._stop_tail = max((len(text.encode()) for text in config.stop_strings), default=0) + 16
        self.tokens = self._token_source()

    def decode(
        self, prompts: Sequence[Prompt], prefix_of: PrefixOf, *, step: int, group_size: int, params: SamplingParams,
        limits: Sequence[int] | None = None,
    ) -> Generator[DecodeStep | NeedPrefix, None, None]:  # fmt: skip
        """Sample group_size responses to each prompt; `step` and the prompts' uids key the noise.

        limits: for each sample, in order, a length at which it ends before max_new_tokens; for measurements.

        Raises:
            CapacityError: one response cannot fit into the K/V blocks.
            StaleStateError: a prefix was computed with other weights.
            NumericsError: the model's logits are not finite.
        """
        pool = BlockPool(self.num_blocks, self.config.block_size)
        scheduler = Scheduler(
            len(prompts), group_size, self.config.max_batch_samples, self.config.max_batch_tokens, pool,
            self.config.max_new_tokens,
        )  # fmt: skip
        rollout = _Rollout(self, prompts, group_size, prefix_of, scheduler, step, params, limits)
        while not scheduler.done:
            plan = scheduler.schedule()
            for group in plan.groups:
                while prefix_of(group) is None:
                    yield NeedPrefix(group)
            rollout.launch(plan)
            landed = rollout.land(self.tokens.lag)
            scheduler.commit([SampleKey(sample.group, sample.sample) for sample in landed.finished])
            yield DecodeStep(landed.finished, landed.num_decoded, plan.num_recomputed)
        while rollout.in_flight:
            yield rollout.land(0)

    @property
    def prefill_tokens(self) -> int:
        """Prefix tokens worth computing in one pass; 0: on a CPU, one prompt at a time is as fast."""
        return self.config.prefill_tokens if self.model.device.type == "cuda" else 0

    def stops_by_text(self, ids: Sequence[int]) -> bool:
        """Whether a response of these ids ends here because of a stop string."""
        if not self.config.stop_strings:
            return False
        tail = self.vocabulary.decode(ids[-self._stop_tail :])
        return any(text in tail for text in self.config.stop_strings)

    def _token_source(self) -> TokenSource:
        model = self.model
        banned_V = torch.zeros(model.decoder.config.vocab_size, dtype=torch.bool, device=model.device)
        banned_V[self.vocabulary.num_ids :] = True
        banned_V[list(model.family.placeholder_ids)] = True
        if model.device.type == "cuda":
            from rollplex.rollout.graphs import GraphTokens, kernels_fit  # they need Triton

            if kernels_fit(model.decoder.config):
                return GraphTokens(model, self.pages, self.config, banned_V)
        return EagerTokens(model, self.pages, self.config.block_size, banned_V)


def num_blocks(model: VisionLanguageModel, config: RolloutConfig) -> int:
    """K/V blocks: as configured, or what max_batch_samples of full length need, within the memory given to them.

    Raises:
        CapacityError: the memory does not hold one response.
    """
    blocks_each = blocks_for(config.max_new_tokens, config.block_size)
    wanted = config.num_blocks or config.max_batch_samples * blocks_each
    if config.kv_memory_gib is None:
        return wanted
    c = model.decoder.config
    block_bytes = 2 * c.num_layers * config.block_size * c.num_kv_heads * c.head_dim * model.dtype.itemsize
    affordable = int(config.kv_memory_gib * 2**30) // block_bytes
    if affordable < blocks_each:
        raise CapacityError(
            f"rollout.kv_memory_gib = {config.kv_memory_gib}: holds {affordable} K/V blocks of {block_bytes} bytes, "
            f"and one response of rollout.max_new_tokens = {config.max_new_tokens} needs {blocks_each}; "
            f"set it to {blocks_each * block_bytes / 2**30:.3g} or more"
        )
    return min(wanted, affordable)


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A launched step: its rows' samples (by index), which of their tokens it draws, and its number."""

    samples_B: npt.NDArray[np.int64]
    tokens_B: npt.NDArray[np.int64]
    number: int
    pending: PendingTokens


@dataclass(eq=False)
class _Batch:
    """What stays the same while the same samples are decoded."""

    keys: tuple[SampleKey, ...]
    samples_B: npt.NDArray[np.int64]
    first_positions_B: npt.NDArray[np.int64]
    keys_BW: npt.NDArray[np.int64]


class _Rollout:
    """The drafts of one call of `decode`: arrays over all its samples, indexed group * group_size + sample."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], group_size: int, prefix_of: PrefixOf, scheduler: Scheduler,
        step: int, params: SamplingParams, limits: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self._engine, self._model, self._prompts, self._group_size = engine, engine.model, prompts, group_size
        self._prefix_of, self._scheduler, self._step, self._params = prefix_of, scheduler, step, params
        count, longest = len(prompts) * group_size, engine.config.max_new_tokens
        self._limits_S = np.minimum(longest, np.full(count, longest) if limits is None else np.array(limits))
        self._ids_ST = np.zeros((count, longest), dtype=np.int64)
        self._logprobs_3ST = np.empty((3, count, longest), dtype=np.float32)
        self._num_launched_S = np.zeros(count, dtype=np.int64)
        self._num_landed_S = np.zeros(count, dtype=np.int64)
        self._ended_S = np.zeros(count, dtype=bool)
        self._blocks_SM = np.zeros((count, blocks_for(longest, engine.config.block_size)), dtype=np.int32)
        self._rows_S = np.full(count, NOT_READ)  # each sample's row in the last step
        self._batch: _Batch | None = None
        self._num_steps = 0
        self.in_flight: deque[_InFlight] = deque()
        self._finished: list[Sample] = []
        self._num_kept = 0

    def launch(self, plan: Step) -> None:
        """Start a decode step, after recomputing what it needs."""
        for admission in plan.admitted:
            if admission.num_recomputed:
                self._recompute(admission.key)
        batch = self._batch_of(plan.decode)
        samples_B, engine = batch.samples_B, self._engine
        tokens_B = self._num_launched_S[samples_B]
        self._refresh_blocks(plan, batch, tokens_B)
        batch.keys_BW[:, 2] = tokens_B
        rows = Rows(
            self._prefixes(plan.decode), self._inputs(batch, tokens_B), self._rows_S[samples_B],
            batch.first_positions_B + tokens_B, (tokens_B + 1).astype(np.int32), self._blocks_SM[samples_B],
            batch.keys_BW,
        )  # fmt: skip
        self._num_steps += 1
        pending = engine.tokens.launch(rows, self._params)
        self.in_flight.append(_InFlight(samples_B, tokens_B, self._num_steps, pending))
        self._num_launched_S[samples_B] += 1
        self._rows_S[:] = NOT_READ
        self._rows_S[samples_B] = np.arange(len(samples_B))

    def land(self, lag: int) -> DecodeStep:
        """Read what was launched, all but the last `lag` steps; returns what has finished since the last call."""
        while len(self.in_flight) > lag:
            self._read(self.in_flight.popleft())
        landed = DecodeStep(tuple(self._finished), self._num_kept, 0)
        self._finished, self._num_kept = [], 0
        return landed

    def _read(self, step: _InFlight) -> None:
        """Append a step's tokens to the drafts, except those of samples that have ended."""
        tokens = step.pending.read()
        kept_B = ~self._ended_S[step.samples_B]
        self._require_finite(step.samples_B, tokens, kept_B)
        samples_B, at_B, ids_B = step.samples_B[kept_B], step.tokens_B[kept_B], tokens.ids_B[kept_B]
        self._ids_ST[samples_B, at_B] = ids_B
        self._logprobs_3ST[:, samples_B, at_B] = tokens.logprobs_3B[:, kept_B]
        self._num_landed_S[samples_B] = at_B + 1
        self._num_kept += len(samples_B)
        stopped_B = np.isin(ids_B, self._engine.stop_ids)
        if self._engine.config.stop_strings:
            drafts = (self._ids_ST[sample, : at + 1].tolist() for sample, at in zip(samples_B, at_B, strict=True))
            stopped_B |= np.array([self._engine.stops_by_text(ids) for ids in drafts], dtype=bool)
        for row in np.flatnonzero(stopped_B | (at_B + 1 >= self._limits_S[samples_B])):
            self._ended_S[samples_B[row]] = True
            self._finished.append(
                self._sample(int(samples_B[row]), "stop" if stopped_B[row] else "length", step.number)
            )

    @torch.no_grad()
    def _recompute(self, key: SampleKey) -> None:
        """Put a preempted sample's suffix K/V back into its blocks."""
        length, decoder = self._scheduler.num_generated(key), self._model.decoder
        if self._num_landed_S[self._index(key)] < length:
            self._read_all()
        ids = [int(self._prompts[key.group].ids[-1]), *self._ids_ST[self._index(key), : length - 1].tolist()]
        slots_T = self._tensor(self._scheduler.table(key).slots(0, length))
        segments = Segments((length,), self._model.device)
        pages = self._engine.pages

        def write(layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
            pages.write(layer, slots_T, k_TKD, v_TKD)

        attention = SuffixAttention([(self._prefix(key.group), length)], segments, write)
        positions_T = self._tensor(range(self._first_position(key), self._first_position(key) + length))
        decoder(self._model.embed(self._tensor(ids)), decoder.rope(positions_T.expand(3, -1)), attention)

    def _batch_of(self, keys: tuple[SampleKey, ...]) -> _Batch:
        if self._batch is None or self._batch.keys != keys:
            uids = [self._prompts[key.group].uid for key in keys]
            self._batch = _Batch(
                keys,
                np.array([self._index(key) for key in keys]),
                np.array([self._first_position(key) for key in keys]),
                pack_keys(self._engine.seed, self._step, uids, [key.sample for key in keys], [0] * len(keys)).numpy(),
            )
        return self._batch

    def _refresh_blocks(self, plan: Step, batch: _Batch, tokens_B: npt.NDArray[np.int64]) -> None:
        """Blocks change when a sample is admitted, and when it begins another block."""
        begins = [batch.keys[row] for row in np.flatnonzero(tokens_B % self._engine.config.block_size == 0)]
        for key in (*begins, *(admission.key for admission in plan.admitted)):
            blocks = self._scheduler.table(key).blocks
            self._blocks_SM[self._index(key), : len(blocks)] = blocks

    def _inputs(self, batch: _Batch, tokens_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Each row's input token, where the host knows it or nobody else does."""
        samples_B = batch.samples_B
        unread_B = self._num_landed_S[samples_B] < tokens_B
        if (unread_B & (self._rows_S[samples_B] == NOT_READ)).any():
            self._read_all()
            unread_B = np.zeros_like(unread_B)
        ids_B = self._ids_ST[samples_B, tokens_B - 1]
        for row in np.flatnonzero(tokens_B == 0):
            ids_B[row] = self._prompts[batch.keys[row].group].ids[-1]
        ids_B[unread_B] = NOT_READ
        return ids_B

    def _read_all(self) -> None:
        """Wait until every token is known. When that happens depends on counts alone, as everything here."""
        while self.in_flight:
            self._read(self.in_flight.popleft())

    def _require_finite(self, samples_B: npt.NDArray[np.int64], tokens: Tokens, kept_B: npt.NDArray[np.bool_]) -> None:
        broken = np.flatnonzero(kept_B & ~np.isfinite(tokens.logprobs_3B).all(axis=0))
        if len(broken):
            source = self._prompts[int(samples_B[broken[0]]) // self._group_size].source
            raise NumericsError(
                f"{source}: log-probs of a sampled token are {tokens.logprobs_3B[:, broken[0]].tolist()}: the model's "
                "logits are not finite; lower train.learning_rate, or use model.dtype = 'float32' to find out where"
            )

    def _sample(self, index: int, reason: FinishReason, number: int) -> Sample:
        group, sample = divmod(index, self._group_size)
        length = int(self._num_landed_S[index])
        ids = self._ids_ST[index, :length].copy()
        raw, tempered, sampling = self._logprobs_3ST[:, index, :length].copy()
        return Sample(
            group=group,
            sample=sample,
            ids=ids,
            raw_logprobs=raw,
            tempered_logprobs=tempered,
            sampling_logprobs=sampling,
            finish_reason=reason,
            text=self._engine.vocabulary.decode(ids.tolist()),
            version=self._model.version,
            decode_step=number,
        )

    def _prefixes(self, keys: Sequence[SampleKey]) -> tuple[tuple[PrefixKV, int], ...]:
        return tuple((self._prefix(group), len(list(rows))) for group, rows in groupby(keys, lambda key: key.group))

    def _prefix(self, group: int) -> PrefixKV:
        prefix = self._prefix_of(group)
        assert prefix is not None, "a group's prefix must outlive its last decode step"
        return prefix.require(self._model.version)

    def _index(self, key: SampleKey) -> int:
        return key.group * self._group_size + key.sample

    def _first_position(self, key: SampleKey) -> int:
        return int(self._prompts[key.group].positions[0, -1])

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)
