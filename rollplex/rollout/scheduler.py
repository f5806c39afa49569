"""Continuous batching: which samples decode in the next step, from token counts alone.

    waiting --admit--> running --finish--> gone
       ^                  |
       +---- preempt -----+      no block left: the youngest running sample gives its blocks back, keeps its tokens,
                                 and has its suffix K/V recomputed when it is admitted again

A sample with n generated tokens has K/V for n suffix tokens; its next decode step writes K/V at suffix position n, so
it needs blocks for n + 1. A stop may be reported steps after the token that it came with: until then the sample goes
on, and whoever reports it drops what came after. This file knows no time, no model and no tensor: two runs whose
samples end at the same lengths, reported equally late, get the same steps.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rollplex.errors import CapacityError
from rollplex.rollout.blocks import BlockPool, BlockTable, blocks_for


class SampleKey(NamedTuple):
    """Which sample: its prompt group in the batch, and its index in the group."""

    group: int
    sample: int


@dataclass(frozen=True)
class Admission:
    """A sample that joins the batch; the K/V of its first `num_recomputed` suffix tokens must be computed first."""

    key: SampleKey
    num_recomputed: int


@dataclass(frozen=True)
class Step:
    """One decode step.

    decode: the samples that decode one token, by (group, sample); every admitted sample is among them.
    preempted: samples that lost their blocks before this step, in that order.
    admitted: samples that joined, in order of admission.
    """

    decode: tuple[SampleKey, ...]
    preempted: tuple[SampleKey, ...]
    admitted: tuple[Admission, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Groups of the admitted samples, ascending: their prefixes must be ready before the step."""
        return tuple(sorted({admission.key.group for admission in self.admitted}))

    @property
    def num_recomputed(self) -> int:
        """Suffix tokens whose K/V is recomputed before the step."""
        return sum(admission.num_recomputed for admission in self.admitted)

    @property
    def num_tokens(self) -> int:
        """Tokens the step costs: what the budget is compared with."""
        return len(self.decode) + self.num_recomputed


@dataclass
class _Progress:
    """One sample that has not finished: its tokens so far, and its blocks."""

    key: SampleKey
    table: BlockTable
    num_generated: int = 0


class Scheduler:
    """Decides the steps of one rollout: `schedule`, run the step, `commit`, until `done`.

    max_batch_samples: samples decoded together, at most.
    max_batch_tokens: decoded samples plus recomputed tokens of a step, at most. Only one longer recomputation may
        exceed it, and then that sample decodes alone.

    Raises:
        CapacityError: one response of max_new_tokens does not fit into the whole pool.
    """

    def __init__(
        self,
        num_groups: int,
        group_size: int,
        max_batch_samples: int,
        max_batch_tokens: int,
        blocks: BlockPool,
        max_new_tokens: int,
    ) -> None:
        assert min(num_groups, group_size, max_batch_samples, max_batch_tokens, max_new_tokens) > 0
        self._max_blocks = blocks_for(max_new_tokens, blocks.block_size)
        if self._max_blocks > blocks.num_blocks:
            raise CapacityError(
                f"rollout.num_blocks = {blocks.num_blocks}: one response of max_new_tokens = {max_new_tokens} needs "
                f"{self._max_blocks} blocks of {blocks.block_size} tokens; set rollout.num_blocks to "
                f"{self._max_blocks} or more"
            )
        # A pause lets samples in beside those that run; all of them must fit into a later step.
        self._max_batch_samples = min(max_batch_samples, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._max_new_tokens = max_new_tokens
        self._pool = blocks
        keys = [SampleKey(group, sample) for group in range(num_groups) for sample in range(group_size)]
        self._unfinished = {key: _Progress(key, BlockTable(blocks)) for key in keys}
        self._waiting = deque(self._unfinished.values())
        self._running: list[_Progress] = []  # in order of admission: the youngest is last
        self._step: Step | None = None

    @property
    def done(self) -> bool:
        """Every sample has finished."""
        return not self._unfinished

    @property
    def num_running(self) -> int:
        """Samples that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Samples not yet admitted, or preempted."""
        return len(self._waiting)

    def num_generated(self, key: SampleKey) -> int:
        """Tokens that an unfinished sample has, n: also the suffix position its next decode step writes."""
        return self._unfinished[key].num_generated

    def table(self, key: SampleKey) -> BlockTable:
        """The blocks of an unfinished sample; to be read only."""
        return self._unfinished[key].table

    def schedule(self) -> Step:
        """Decide the next step; every sample in it owns the blocks it needs."""
        assert self._step is None, "the last step was not committed"
        assert not self.done, "every sample has finished"
        preempted = self._make_room()
        admitted, pause = self._admit()
        decoding = [admission.key for admission in admitted] if pause else [progress.key for progress in self._running]
        assert decoding, "nobody can run"
        self._step = Step(tuple(sorted(decoding)), preempted, tuple(admitted))
        return self._step

    def commit(self, finished: Collection[SampleKey]) -> None:
        """Close the scheduled step: its samples have one more token; those that end give their blocks back.

        finished: samples that were found to have ended, with a token of this step or of an earlier one. Those that have
        max_new_tokens now end by themselves, and may be reported later, or never.
        """
        assert self._step is not None, "no step was scheduled"
        ended = {key for key in finished if key in self._unfinished}
        assert all(key in self._unfinished for key in self._step.decode)
        for key in self._step.decode:
            progress = self._unfinished[key]
            progress.num_generated += 1
            if progress.num_generated == self._max_new_tokens:
                ended.add(key)
        for key in ended:
            self._unfinished.pop(key).table.release()
        self._running = [progress for progress in self._running if progress.key in self._unfinished]
        self._waiting = deque(progress for progress in self._waiting if progress.key in self._unfinished)
        self._step = None

    def _make_room(self) -> tuple[SampleKey, ...]:
        """Give every running sample, oldest first, the block of its next token, from the youngest if there is no other.

        What a preempted sample has given up is then used, at least in part: it cannot come back in the same step.
        """
        preempted: list[SampleKey] = []
        index = 0
        while index < len(self._running):
            progress = self._running[index]
            if progress.table.missing(progress.num_generated + 1) <= self._pool.num_free:
                progress.table.ensure(progress.num_generated + 1)
                index += 1
                continue
            assert len(self._running) > 1, "a sample alone always fits"
            victim = self._running.pop()
            victim.table.release()
            self._waiting.appendleft(victim)
            preempted.append(victim.key)
        return tuple(preempted)

    def _admit(self) -> tuple[list[Admission], bool]:
        """Admit waiting samples in order while they fit; second: whether those that ran before pause for this step.

        They pause when the first sample in the queue has too much to recompute beside them: one step without them is
        cheaper than a queue that stands still until enough of them have finished.
        """
        admitted: list[Admission] = []
        budget = self._max_batch_tokens - len(self._running)
        pause = False
        while self._waiting and len(self._running) < self._max_batch_samples:
            head = self._waiting[0]
            cost = head.num_generated + 1
            if not self._has_blocks_for(head):
                break
            if cost > budget:
                if admitted or head.num_generated == 0:
                    break
                pause = True
                budget = self._max_batch_tokens
            self._waiting.popleft()
            head.table.ensure(cost)
            self._running.append(head)
            admitted.append(Admission(head.key, head.num_generated))
            budget -= cost
        return admitted, pause

    def _has_blocks_for(self, head: _Progress) -> bool:
        """Whether `head` can be admitted now.

        A sample with tokens to recompute also waits until it has room for one token more, and every running sample that
        can still grow for one more block: otherwise it could be preempted again at once, and its recomputation lost.
        """
        length, reserve = head.num_generated + 1, 0
        if head.num_generated:
            length = min(length + 1, self._max_new_tokens)
            reserve = sum(progress.table.num_blocks < self._max_blocks for progress in self._running)
        return head.table.missing(length) + reserve <= self._pool.num_free
