"""K/V blocks of suffixes: who owns which, exactly.

    BlockPool   num_blocks blocks of block_size tokens, lowest free block first
    BlockTable  one sample's blocks, in the order of its tokens

Only suffixes are paged; a group's prefix lives elsewhere. This file knows no tensor, no sample and no policy for what
happens when blocks run out: the scheduler asks `num_free` first, so an allocation that fails is a defect.
"""

import heapq
from collections.abc import Iterable


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


class BlockPool:
    """A fixed number of blocks; every block is free or owned once.

    The lowest free blocks are given out first, so that the same calls always give the same blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, so already a heap
        self._owned = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Take the `count` lowest free blocks, ascending."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blocks = tuple(heapq.heappop(self._free) for _ in range(count))
        for block in blocks:
            self._owned[block] = True
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; each must be owned."""
        for block in blocks:
            assert 0 <= block < self.num_blocks, f"block {block} is not of this pool"
            assert self._owned[block], f"block {block} is free already"
            self._owned[block] = False
            heapq.heappush(self._free, block)


class BlockTable:
    """The blocks of one sample: token `position` lies in block `position // block_size` of the table."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[int] = []

    @property
    def blocks(self) -> tuple[int, ...]:
        """Owned blocks, in token order."""
        return tuple(self._blocks)

    @property
    def num_blocks(self) -> int:
        """Owned blocks."""
        return len(self._blocks)

    def missing(self, length: int) -> int:
        """Blocks to add before the table holds `length` tokens."""
        return max(0, blocks_for(length, self._pool.block_size) - len(self._blocks))

    def ensure(self, length: int) -> None:
        """Own enough blocks for `length` tokens; the pool must have them."""
        self._blocks.extend(self._pool.allocate(self.missing(length)))

    def slots(self, start: int, stop: int) -> list[int]:
        """Places of tokens [start, stop) in the store, as block * block_size + offset."""
        size = self._pool.block_size
        assert 0 <= start <= stop <= size * len(self._blocks), (start, stop, self._blocks)
        return [self._blocks[position // size] * size + position % size for position in range(start, stop)]

    def release(self) -> None:
        """Give every block back."""
        self._pool.free(self._blocks)
        self._blocks.clear()
