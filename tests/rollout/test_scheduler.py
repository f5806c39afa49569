"""Whatever the budgets and lengths: every sample runs to its end, budgets hold, blocks are conserved, order is kept.

`simulate` runs a rollout against a store that remembers which token each slot was written for, so that a block given
out twice, or K/V not recomputed after a preemption, is seen as what it would be: another token's K/V.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from rollplex.errors import CapacityError
from rollplex.rollout.blocks import BlockPool, blocks_for
from rollplex.rollout.scheduler import SampleKey, Scheduler, Step


@dataclass(frozen=True)
class Case:
    """One rollout: its budgets, and the length at which each sample ends (groups in turn)."""

    group_size: int
    lengths: tuple[int, ...]
    max_batch_samples: int
    max_batch_tokens: int
    block_size: int
    num_blocks: int
    max_new_tokens: int

    @property
    def keys(self) -> list[SampleKey]:
        return [SampleKey(*divmod(index, self.group_size)) for index in range(len(self.lengths))]

    def scheduler(self, pool: BlockPool | None = None) -> Scheduler:
        pool = pool or BlockPool(self.num_blocks, self.block_size)
        return Scheduler(
            len(self.lengths) // self.group_size, self.group_size, self.max_batch_samples, self.max_batch_tokens, pool,
            self.max_new_tokens,
        )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    group_size, num_groups = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    max_new_tokens, block_size = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    count = group_size * num_groups
    return Case(
        group_size=group_size,
        lengths=tuple(draw(st.lists(st.integers(1, max_new_tokens), min_size=count, max_size=count))),
        max_batch_samples=draw(st.integers(1, 12)),
        max_batch_tokens=draw(st.integers(1, 40)),
        block_size=block_size,
        num_blocks=blocks_for(max_new_tokens, block_size) + draw(st.integers(0, 12)),
        max_new_tokens=max_new_tokens,
    )


class Rollout:
    """Runs a case, keeping queue, batch and store by itself, and checks every step against them."""

    def __init__(self, case: Case) -> None:
        self.case, self.scheduler = case, case.scheduler()
        self.length_of = dict(zip(case.keys, case.lengths, strict=True))
        self.generated = dict.fromkeys(case.keys, 0)
        self.queue, self.running = list(case.keys), list[SampleKey]()  # the batch by admission, oldest first
        self.store: dict[int, tuple[SampleKey, int]] = {}
        self.recomputed: set[SampleKey] = set()  # in the step before

    def run(self) -> list[Step]:
        steps = []
        while not self.scheduler.done:
            step = self.scheduler.schedule()
            self.follow(step)
            self.check_budgets(step)
            self.check_blocks()
            self.compute(step)
            finished = [key for key in step.decode if self.generated[key] == self.length_of[key]]
            self.running = [key for key in self.running if key not in finished]
            self.scheduler.commit(finished)
            assert (self.scheduler.num_running, self.scheduler.num_waiting) == (len(self.running), len(self.queue))
            steps.append(step)
            assert len(steps) <= sum(self.case.lengths), "a step without a token"
        return steps

    def follow(self, step: Step) -> None:
        """Preemption takes the youngest, puts them first in the queue; admission takes the queue's first, in order."""
        assert self.recomputed.isdisjoint(step.preempted), "recomputed for a single token"
        for key in step.preempted:
            assert key == self.running.pop()
            self.queue.insert(0, key)
            assert self.scheduler.table(key).blocks == ()
        assert not (step.preempted and step.admitted)
        for admission in step.admitted:
            assert admission.key == self.queue.pop(0)
            assert admission.num_recomputed == self.generated[admission.key]
            self.running.append(admission.key)
        self.recomputed = {admission.key for admission in step.admitted if admission.num_recomputed}
        new = [admission.key for admission in step.admitted]
        assert list(step.decode) in (sorted(self.running), sorted(new))
        assert step.groups == tuple(sorted({key.group for key in new}))
        assert step.num_recomputed == sum(self.generated[key] for key in new)
        assert step.num_tokens == len(step.decode) + step.num_recomputed

    def check_budgets(self, step: Step) -> None:
        case, scheduler = self.case, self.scheduler
        alone = len(step.decode) == 1 and step.num_recomputed > 0
        assert 0 < len(step.decode) <= case.max_batch_samples
        assert step.num_tokens <= case.max_batch_tokens or alone
        fresh_waits = bool(self.queue) and self.generated[self.queue[0]] == 0
        if fresh_waits and not step.preempted:  # then something stands in its way
            num_free = case.num_blocks - sum(scheduler.table(key).num_blocks for key in self.running)
            limit = min(case.max_batch_samples, case.max_batch_tokens)
            assert len(self.running) >= limit or step.num_tokens >= case.max_batch_tokens or num_free == 0

    def check_blocks(self) -> None:
        blocks = [block for key in self.running for block in self.scheduler.table(key).blocks]
        assert len(blocks) == len(set(blocks)) <= self.case.num_blocks
        for key in self.running:
            assert self.scheduler.num_generated(key) == self.generated[key]
            assert self.scheduler.table(key).num_blocks == blocks_for(self.generated[key] + 1, self.case.block_size)

    def compute(self, step: Step) -> None:
        """Recompute, then decode one token each: it must read its own K/V, whole."""
        for admission in step.admitted:
            slots = self.scheduler.table(admission.key).slots(0, admission.num_recomputed)
            self.store.update({slot: (admission.key, position) for position, slot in enumerate(slots)})
        for key in step.decode:
            slots = self.scheduler.table(key).slots(0, self.generated[key] + 1)
            self.store[slots[-1]] = (key, self.generated[key])
        for key in step.decode:
            slots = self.scheduler.table(key).slots(0, self.generated[key] + 1)
            assert [self.store[slot] for slot in slots] == [(key, position) for position in range(len(slots))]
            self.generated[key] += 1


def simulate(case: Case) -> list[Step]:
    rollout = Rollout(case)
    steps = rollout.run()
    assert rollout.generated == rollout.length_of
    assert not rollout.queue
    assert not rollout.running
    return steps


# Sixteen run; the youngest is preempted with eight tokens. When three have ended, its nine and the twelve that go on
# exceed the budget, so these pause; beside it there is budget for seven new samples, but then twenty would run where
# sixteen may.
LATER_OVERFLOW = Case(26, (*[9] * 3, *[20] * 23), 32, 16, 1, 143, 20)


@settings(max_examples=400)
@example(LATER_OVERFLOW)
@given(cases())
def test_every_sample_runs_to_its_end(case: Case) -> None:
    steps = simulate(case)
    if any(step.preempted for step in steps):
        event("preempted")
    if any(step.num_tokens > case.max_batch_tokens for step in steps):
        event("recomputed alone, beyond the budget")


@given(cases())
def test_every_block_is_free_at_the_end(case: Case) -> None:
    pool = BlockPool(case.num_blocks, case.block_size)
    scheduler = case.scheduler(pool)
    length_of = dict(zip(case.keys, case.lengths, strict=True))
    while not scheduler.done:
        step = scheduler.schedule()
        assert 0 <= pool.num_free < case.num_blocks
        scheduler.commit([key for key in step.decode if scheduler.num_generated(key) + 1 == length_of[key]])
    assert pool.num_free == case.num_blocks
    assert scheduler.num_running == scheduler.num_waiting == 0


@given(cases())
def test_same_lengths_give_the_same_steps(case: Case) -> None:
    assert simulate(case) == simulate(case)


@given(cases())
def test_samples_start_in_order(case: Case) -> None:
    seen: list[SampleKey] = []
    for step in simulate(case):
        seen.extend(item.key for item in step.admitted if item.key not in seen)
    assert seen == case.keys


def test_long_rollouts_with_few_blocks() -> None:
    draw = random.Random(0)
    for _ in range(5):
        lengths = tuple(draw.randint(1, 200) for _ in range(32))
        steps = simulate(Case(8, lengths, 16, draw.choice([24, 300]), 16, 40, 200))
        assert any(step.preempted for step in steps)


@given(cases())
def test_without_shortage_nothing_is_preempted(case: Case) -> None:
    plenty = replace(case, num_blocks=blocks_for(case.max_new_tokens, case.block_size) * case.max_batch_samples)
    assert not any(step.preempted for step in simulate(plenty))


def decoded(steps: Sequence[Step]) -> list[list[int]]:
    return [[key.sample for key in step.decode] for step in steps]


def test_a_sample_joins_as_soon_as_one_ends() -> None:
    steps = simulate(Case(3, (1, 3, 2), 2, 100, 4, 10, 3))
    assert decoded(steps) == [[0, 1], [1, 2], [1, 2]]


def test_the_youngest_is_preempted_and_recomputed() -> None:
    # Blocks of one token, four of them: after two tokens each, sample 0's third needs what sample 1 owns.
    steps = simulate(Case(2, (4, 3), 2, 100, 1, 4, 4))
    assert decoded(steps) == [[0, 1], [0, 1], [0], [0], [1]]
    assert [list(step.preempted) for step in steps] == [[], [], [SampleKey(0, 1)], [], []]
    assert [step.num_recomputed for step in steps] == [0, 0, 0, 0, 2]


@pytest.mark.parametrize("max_batch_tokens", [4, 3])  # enough for the recomputation of 3 and one token; or too few
def test_a_pause_admits_what_is_too_long_for_the_rest_of_the_budget(max_batch_tokens: int) -> None:
    steps = simulate(Case(3, (4, 6, 5), 3, max_batch_tokens, 1, 11, 6))
    assert decoded(steps)[:5] == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1], [2]]
    assert steps[3].preempted == (SampleKey(0, 2),)
    assert steps[4].num_tokens == 4
    assert decoded(steps)[5:] == [[1, 2], [1]]


def test_a_pause_leaves_room_in_later_steps() -> None:
    steps = simulate(LATER_OVERFLOW)
    (index,) = (index for index, step in enumerate(steps) if step.num_recomputed == 8)
    assert steps[index].decode == tuple(SampleKey(0, sample) for sample in (15, 16, 17, 18))
    assert len(steps[index + 1].decode) == 16


@pytest.mark.parametrize(("max_new_tokens", "block_size", "least"), [(512, 16, 32), (513, 16, 33), (1, 16, 1)])
def test_a_pool_too_small_is_refused_with_the_least_that_works(
    max_new_tokens: int, block_size: int, least: int
) -> None:
    case = Case(1, (max_new_tokens,), 4, 8, block_size, least, max_new_tokens)
    assert len(simulate(case)) == max_new_tokens
    if least == 1:
        return  # there is no pool of no blocks
    with pytest.raises(CapacityError) as caught:
        replace(case, num_blocks=least - 1).scheduler()
    assert f"rollout.num_blocks = {least - 1}" in str(caught.value)
    assert f"set rollout.num_blocks to {least} or more" in str(caught.value)


def test_misuse_is_caught() -> None:
    scheduler = Case(2, (2, 2), 1, 8, 4, 4, 2).scheduler()
    with pytest.raises(AssertionError, match="no step"):
        scheduler.commit([])
    scheduler.schedule()
    with pytest.raises(AssertionError, match="not committed"):
        scheduler.schedule()


@given(cases(), st.integers(0, 3))
def test_a_stop_may_be_reported_late(case: Case, lag: int) -> None:
    """Each sample is decoded until its end is reported, and no longer; then its blocks are free."""
    pool = BlockPool(case.num_blocks, case.block_size)
    scheduler = case.scheduler(pool)
    length_of = dict(zip(case.keys, case.lengths, strict=True))
    decoded, ends = dict.fromkeys(case.keys, 0), list[list[SampleKey]]()
    reported: set[SampleKey] = set()
    while not scheduler.done:
        step = scheduler.schedule()
        assert reported.isdisjoint(step.decode)
        for key in step.decode:
            decoded[key] += 1
        ends.append([key for key in step.decode if decoded[key] == length_of[key]])
        late = ends[-1 - lag] if len(ends) > lag else []
        reported |= set(late)
        scheduler.commit(late)
    assert all(length_of[key] <= count <= length_of[key] + lag for key, count in decoded.items())
    assert max(decoded.values()) <= case.max_new_tokens
    assert pool.num_free == case.num_blocks
    assert scheduler.num_running == scheduler.num_waiting == 0
