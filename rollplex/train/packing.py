"""From samples to packed suffix arrays: which samples go together, and what the decoder is fed.

    prompt   ... p_{P-1} | p_P                       p_P, the last prompt token, begins every suffix
    ids               p_P  r_1  r_2  ...  r_{n-1}
    targets           r_1  r_2  r_3  ...  r_n        so a response of n tokens is a suffix of n tokens
    positions         s    s+1  s+2  ...  s+n-1      s: the rotary position of p_P

Arrays are numpy. This file knows no torch, no attention and no loss.

Shapes: T suffix tokens of a microbatch, one sample after the other; 3 rotary axes (temporal, height, width).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollplex.types import Sample


@dataclass(frozen=True, eq=False)
class SuffixBatch:
    """Suffixes of one group, packed: ids_T, targets_T int64 [T]; positions_3T int64 [3, T]; lengths sums to T."""

    ids_T: npt.NDArray[np.int64]
    targets_T: npt.NDArray[np.int64]
    positions_3T: npt.NDArray[np.int64]
    lengths: tuple[int, ...]


def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Divide one group's samples, in their order, into microbatches of at most max_tokens suffix tokens.

    Each microbatch takes as many of the next samples as fit; a sample longer than max_tokens is alone. Order is kept
    because it is the order in which gradients are added.
    """
    assert all(length >= 1 for length in lengths), f"a response has at least one token: {tuple(lengths)}"
    microbatches: list[tuple[int, ...]] = []
    current: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if current and tokens + length > max_tokens:
            microbatches.append(tuple(current))
            current, tokens = [], 0
        current.append(index)
        tokens += length
    if current:
        microbatches.append(tuple(current))
    return tuple(microbatches)


def suffix_arrays(prompt_last_id: int, last_position: int, samples: Sequence[Sample]) -> SuffixBatch:
    """Inputs, targets and positions of the samples' suffixes, one after the other.

    last_position: rotary position of the last prompt token, which is text and so has the same one on all axes; the
    response goes on from there, one position a token.
    """
    assert samples, "a microbatch has at least one sample"
    begin = np.array([prompt_last_id], dtype=np.int64)
    lengths = tuple(sample.length for sample in samples)
    positions_T = np.concatenate([last_position + np.arange(length, dtype=np.int64) for length in lengths])
    return SuffixBatch(
        ids_T=np.concatenate([part for sample in samples for part in (begin, sample.ids[:-1])]),
        targets_T=np.concatenate([sample.ids for sample in samples]),
        positions_3T=np.tile(positions_T, (3, 1)),
        lengths=lengths,
    )
