"""Where a decode step's prefixes are cut: work items of about equal size, from token counts alone.

A plan depends on the lengths of the prefixes, their numbers of rows and the tuning - never on the device - because the
bits of the result depend on it. It knows no tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

TARGET_PROGRAMS = 2 * 132
"""Prefix programs that a batch is cut into: two for each SM of an H200. A constant, so that every device cuts alike."""
PREFIX_UNIT = 128
"""Prefix ranges are multiples of this many tokens: a whole number of tiles for every `block_n`."""
NARROW = 16
"""Rows of the smallest tensor-core tile; a row's own tokens, and tiles with no more rows than this, use it."""


@dataclass(frozen=True)
class DecodeTuning:
    """What may be swept without changing the result beyond rounding."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Per thread; the compiler's choice allows two programs of 4 warps on an SM, 168 allow three."""
    block_m: int = 64
    """Rows (samples x query heads per K) of a prefix tile."""
    target_programs: int = TARGET_PROGRAMS
    max_prefix_splits: int = 32
    """Parts that one prefix may be cut into: partial results cost as many bytes as the K/V of a few tokens each."""
    suffix_split: int = 256
    """Tokens of a suffix range in a step of few rows, half of one in a step of many; more where a row would otherwise
    have more than `max_suffix_splits` of them."""
    max_suffix_splits: int = 8

    def __post_init__(self) -> None:
        assert PREFIX_UNIT % self.block_n == 0 and self.suffix_split % self.block_n == 0
        assert self.block_m >= NARROW and self.block_m & (self.block_m - 1) == 0

    def for_float32(self) -> "DecodeTuning":
        """Small tiles: exact float32 products use no tensor cores, and large tiles of them do not fit in registers."""
        return replace(self, block_n=16, block_m=NARROW, num_stages=1, max_registers=None)


def plan_items(
    prefix_lengths: Sequence[int], rows_per_group: Sequence[int], queries_per_kv_head: int, num_kv_heads: int,
    block_m: int, target_programs: int = TARGET_PROGRAMS, max_splits: int = DecodeTuning.max_prefix_splits,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:  # fmt: skip
    """Cut the prefixes into items of about equal work.

    Returns:
        items [I, 4] as in `DecodeTables`, at most `max_items` of them; splits [T], parts of each row's prefix.
    """
    lengths = np.asarray(prefix_lengths, dtype=np.int64)
    rows = np.asarray(rows_per_group, dtype=np.int64)
    tiles, units = -(-rows * queries_per_kv_head // block_m), -(-lengths // PREFIX_UNIT)
    wanted = max(1, -(-int((tiles * units).sum()) * num_kv_heads // target_programs))
    # Equal parts of each prefix: what rounding up leaves over is spread, not put into a short last part.
    splits = np.minimum(-(-units // wanted), max_splits)
    units_per_split = -(-units // np.maximum(splits, 1))
    splits = -(-units // np.maximum(units_per_split, 1))
    items = [
        (group, tile, start, min(start + int(size), int(length)))
        for group, (length, size) in enumerate(zip(lengths, units_per_split * PREFIX_UNIT, strict=True))
        for start in (range(0, int(length), int(size)) if size else ())
        for tile in range(int(tiles[group]))  # neighbours, so that the second finds the tokens in the cache
    ]
    return np.array(items, dtype=np.int32).reshape(-1, 4), np.repeat(splits, rows).astype(np.int32)


def max_items(num_rows: int, queries_per_kv_head: int, num_kv_heads: int, tuning: DecodeTuning) -> int:
    """The most items that a plan of this many rows can have: the target, and one part left over for each tile."""
    tiles = num_rows * -(-queries_per_kv_head // tuning.block_m)
    return -(-tuning.target_programs // num_kv_heads) + tiles
