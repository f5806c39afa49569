"""Every block is free or owned once, whatever is asked in whatever order; the same calls give the same blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollplex.rollout.blocks import BlockPool, BlockTable, blocks_for


class PoolMachine(RuleBasedStateMachine):
    """Tables that grow and are released, and loose blocks, beside a set that knows who owns what."""

    @initialize(num_blocks=st.integers(1, 24), block_size=st.integers(1, 5))
    def start(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tables = [BlockTable(self.pool) for _ in range(4)]
        self.lengths = [0] * 4
        self.loose: list[int] = []

    def free_blocks(self) -> set[int]:
        owned = {block for table in self.tables for block in table.blocks} | set(self.loose)
        return set(range(self.pool.num_blocks)) - owned

    @rule(share=st.floats(0, 1))
    def allocate(self, share: float) -> None:
        expected = sorted(self.free_blocks())[: int(share * self.pool.num_free)]
        blocks = self.pool.allocate(len(expected))
        assert list(blocks) == expected  # the lowest ones
        self.loose.extend(blocks)

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.loose) - 1))
        self.pool.free([self.loose.pop(index)])

    @rule(index=st.integers(0, 3), growth=st.integers(0, 12))
    def ensure(self, index: int, growth: int) -> None:
        table, length = self.tables[index], self.lengths[index] + growth
        before, free = table.blocks, sorted(self.free_blocks())
        missing = table.missing(length)
        if missing > self.pool.num_free:
            with pytest.raises(AssertionError, match="blocks asked for"):
                table.ensure(length)
            assert table.blocks == before
            return
        table.ensure(length)
        self.lengths[index] = length
        assert table.blocks == (*before, *free[:missing])
        assert table.missing(length) == 0

    @rule(index=st.integers(0, 3))
    def release(self, index: int) -> None:
        self.tables[index].release()
        self.lengths[index] = 0
        assert self.tables[index].blocks == ()

    @invariant()
    def owned_once_and_none_lost(self) -> None:
        owned = [block for table in self.tables for block in table.blocks] + self.loose
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(self.pool.num_blocks))
        assert self.pool.num_free + len(owned) == self.pool.num_blocks

    @invariant()
    def tables_are_as_long_as_needed(self) -> None:
        for table, length in zip(self.tables, self.lengths, strict=True):
            assert table.num_blocks == len(table.blocks) == blocks_for(length, self.pool.block_size)

    @invariant()
    def slots_follow_the_blocks(self) -> None:
        size = self.pool.block_size
        slots = [
            slot
            for table, length in zip(self.tables, self.lengths, strict=True)
            for slot in table.slots(0, length)
        ]  # fmt: skip
        assert len(slots) == len(set(slots)) == sum(self.lengths)
        for table, length in zip(self.tables, self.lengths, strict=True):
            for position, slot in enumerate(table.slots(0, length)):
                assert divmod(slot, size) == (table.blocks[position // size], position % size)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_blocks_for(length: int, block_size: int) -> None:
    count = blocks_for(length, block_size)
    assert count * block_size >= length
    assert count == 0 or (count - 1) * block_size < length


def test_slots_of_a_part() -> None:
    pool = BlockPool(6, 4)
    other, table = BlockTable(pool), BlockTable(pool)
    table.ensure(2)
    other.ensure(5)
    table.ensure(9)
    assert table.blocks == (0, 3, 4)
    assert table.slots(2, 9) == [2, 3, 12, 13, 14, 15, 16]
    assert table.slots(3, 3) == []


def test_misuse_is_caught() -> None:
    pool = BlockPool(3, 4)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(AssertionError, match="free already"):
        pool.free([block])
    with pytest.raises(AssertionError, match="not of this pool"):
        pool.free([3])
    table = BlockTable(pool)
    table.ensure(4)
    with pytest.raises(AssertionError):
        table.slots(0, 5)
