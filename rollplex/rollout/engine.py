"""The rollout engine: from prefixes to finished samples, one token per sample and decode step.

    schedule -> (prefixes ready?) -> recompute what was preempted -> one decode step -> draw -> stop? -> commit

`decode` is a generator, so that others may work between two decode steps. What is decoded together follows from token
counts (scheduler.py), what is drawn from counter-based noise (noise.py): neither depends on time. It does not know who
computes prefixes, why samples are wanted, or what they are worth.

Legend: B samples of one decode step, V vocabulary, S history slots, T suffix tokens of one sample.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from rollplex.config import RolloutConfig
from rollplex.errors import NumericsError
from rollplex.models.attention import DecodeAttention, PagedKV, PrefixKV, SuffixAttention
from rollplex.models.head import logits
from rollplex.models.kernels.flash import Segments
from rollplex.models.prefix import PrefixState
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.blocks import BlockPool, blocks_for
from rollplex.rollout.noise import gumbel, pack_keys
from rollplex.rollout.sampler import Draw, SamplingParams, sample
from rollplex.rollout.scheduler import SampleKey, Scheduler
from rollplex.types import FinishReason, Prompt, Sample

PrefixOf = Callable[[int], PrefixState | None]
"""A group's prefix, or None while it is not computed."""


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
    """One decode step is done: what finished in it, tokens drawn, suffix tokens recomputed after preemption."""

    finished: tuple[Sample, ...]
    num_decoded: int
    num_recomputed: int


@dataclass(eq=False)
class _Draft:
    """A response so far."""

    ids: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)
    tempered: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)


class Engine:
    """Samples responses from a model whose prefixes somebody else computes."""

    def __init__(self, model: VisionLanguageModel, vocabulary: Vocabulary, config: RolloutConfig, seed: int) -> None:
        self.model, self.vocabulary, self.config, self._seed = model, vocabulary, config, seed
        blocks_each = blocks_for(config.max_new_tokens, config.block_size)
        self.num_blocks = config.num_blocks or config.max_batch_samples * blocks_each
        c = model.decoder.config
        shape = (c.num_layers, self.num_blocks * config.block_size, c.num_kv_heads, c.head_dim)
        self.pages = PagedKV(*(torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(2)))
        self._stop_ids = vocabulary.stop_ids | set(config.stop_token_ids)
        self._stop_tail = max((len(text.encode()) for text in config.stop_strings), default=0) + 16
        self._banned_V = torch.zeros(c.vocab_size, dtype=torch.bool, device=model.device)
        self._banned_V[vocabulary.num_ids :] = True
        self._banned_V[list(model.family.placeholder_ids)] = True

    def decode(
        self, prompts: Sequence[Prompt], prefix_of: PrefixOf, *, step: int, group_size: int, params: SamplingParams
    ) -> Generator[DecodeStep | NeedPrefix, None, None]:
        """Sample group_size responses to each prompt; `step` and the prompts' uids key the noise.

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
        rollout = _Rollout(self, prompts, prefix_of, scheduler, step, params)
        while not scheduler.done:
            plan = scheduler.schedule()
            for group in plan.groups:
                while prefix_of(group) is None:
                    yield NeedPrefix(group)
            for admission in plan.admitted:
                if admission.num_recomputed:
                    rollout.recompute(admission.key)
            drawn = rollout.draw(plan.decode)
            finished = rollout.accept(plan.decode, drawn)
            scheduler.commit([SampleKey(item.group, item.sample) for item in finished])
            yield DecodeStep(finished, len(plan.decode), plan.num_recomputed)

    def stop_reason(self, ids: Sequence[int]) -> FinishReason | None:
        """Why a response of these ids ends here, or None."""
        if ids[-1] in self._stop_ids:
            return "stop"
        if self.config.stop_strings:
            tail = self.vocabulary.decode(ids[-self._stop_tail :])
            if any(text in tail for text in self.config.stop_strings):
                return "stop"
        return "length" if len(ids) >= self.config.max_new_tokens else None


class _Rollout:
    """The drafts of one call of `decode`, and the arithmetic of its steps."""

    def __init__(
        self, engine: Engine, prompts: Sequence[Prompt], prefix_of: PrefixOf, scheduler: Scheduler, step: int,
        params: SamplingParams,
    ) -> None:  # fmt: skip
        self._engine, self._model, self._prompts = engine, engine.model, prompts
        self._prefix_of, self._scheduler, self._step, self._params = prefix_of, scheduler, step, params
        self._drafts: dict[SampleKey, _Draft] = {}
        self._num_steps = 0

    @torch.no_grad()
    def recompute(self, key: SampleKey) -> None:
        """Put a preempted sample's suffix K/V back into its blocks."""
        ids = [int(self._prompts[key.group].ids[-1]), *self._drafts[key].ids[:-1]]
        slots_T = self._tensor(self._scheduler.table(key).slots(0, len(ids)))
        segments = Segments((len(ids),), self._model.device)
        attention = SuffixAttention(self._prefix(key.group), segments, lambda *kv: self._write(slots_T, *kv))
        positions_T = self._tensor([self._position(key, n) for n in range(len(ids))])
        self._hidden(self._tensor(ids), positions_T, attention)

    @torch.no_grad()
    def draw(self, keys: Sequence[SampleKey]) -> Draw:
        """One decode step: the next token of each sample. keys are in order of (group, sample)."""
        lengths = [self._scheduler.num_generated(key) for key in keys]
        tables = [self._scheduler.table(key).slots(0, n + 1) for key, n in zip(keys, lengths, strict=True)]
        longest = max(map(len, tables))
        history_BS = self._tensor([slots + [slots[-1]] * (longest - len(slots)) for slots in tables])
        prefixes = [(self._prefix(group), len(list(rows))) for group, rows in groupby(keys, lambda key: key.group)]
        attention = DecodeAttention(
            self._engine.pages, self._tensor([slots[-1] for slots in tables]), history_BS,
            self._tensor([len(slots) for slots in tables]), prefixes,
        )  # fmt: skip
        ids_B = self._tensor([self._last_id(key) for key in keys])
        positions_B = self._tensor([self._position(key, n) for key, n in zip(keys, lengths, strict=True)])
        hidden_BH = self._hidden(ids_B, positions_B, attention)
        logits_BV = logits(hidden_BH, self._model.decoder.head)
        return sample(logits_BV, self._noise(keys, lengths), self._params, self._engine._banned_V)

    def accept(self, keys: Sequence[SampleKey], drawn: Draw) -> tuple[Sample, ...]:
        """Append the drawn tokens to the drafts; returns the samples that end with them."""
        self._num_steps += 1
        finished = []
        columns = (drawn.ids_B, drawn.raw_logprobs_B, drawn.tempered_logprobs_B, drawn.sampling_logprobs_B)
        for key, token, *logprobs in zip(keys, *(column.tolist() for column in columns), strict=True):
            if not np.isfinite(logprobs).all():
                raise NumericsError(
                    f"{self._prompts[key.group].source}: log-probs of a sampled token are {logprobs}: the model's "
                    "logits are not finite; lower train.learning_rate, or use model.dtype = 'float32' to find out where"
                )
            draft = self._drafts.setdefault(key, _Draft())
            draft.ids.append(token)
            for values, value in zip((draft.raw, draft.tempered, draft.sampling), logprobs, strict=True):
                values.append(value)
            reason = self._engine.stop_reason(draft.ids)
            if reason is not None:
                finished.append(self._sample(key, self._drafts.pop(key), reason))
        return tuple(finished)

    def _sample(self, key: SampleKey, draft: _Draft, reason: FinishReason) -> Sample:
        return Sample(
            group=key.group,
            sample=key.sample,
            ids=np.array(draft.ids, dtype=np.int64),
            raw_logprobs=np.array(draft.raw, dtype=np.float32),
            tempered_logprobs=np.array(draft.tempered, dtype=np.float32),
            sampling_logprobs=np.array(draft.sampling, dtype=np.float32),
            finish_reason=reason,
            text=self._engine.vocabulary.decode(draft.ids),
            version=self._model.version,
            decode_step=self._num_steps,
        )

    def _hidden(self, ids_B: Tensor, positions_B: Tensor, attention: DecodeAttention | SuffixAttention) -> Tensor:
        decoder = self._model.decoder
        hidden_BH: Tensor = decoder(self._model.embed(ids_B), decoder.rope(positions_B.expand(3, -1)), attention)
        return hidden_BH

    def _noise(self, keys: Sequence[SampleKey], positions: Sequence[int]) -> Tensor | None:
        if self._params.temperature == 0.0:
            return None
        uids = [self._prompts[key.group].uid for key in keys]
        words = pack_keys(self._engine._seed, self._step, uids, [key.sample for key in keys], positions)
        return gumbel(words.to(self._model.device), self._model.decoder.config.vocab_size)

    def _prefix(self, group: int) -> PrefixKV:
        prefix = self._prefix_of(group)
        assert prefix is not None, "a group's prefix must outlive its last decode step"
        return prefix.require(self._model.version)

    def _last_id(self, key: SampleKey) -> int:
        draft = self._drafts.get(key)
        return draft.ids[-1] if draft else int(self._prompts[key.group].ids[-1])

    def _position(self, key: SampleKey, suffix_index: int) -> int:
        return int(self._prompts[key.group].positions[0, -1]) + suffix_index

    def _write(self, slots_T: Tensor, layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
        self._engine.pages.write(layer, slots_T, k_TKD, v_TKD)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._model.device)
