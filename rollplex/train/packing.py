"""From samples to packed suffix arrays: which groups and samples go together, and what the decoder is fed.

    groups, as they finish    g3 | g1 g4 | g2 ...        packs: whole groups, as many as fit into a budget of tokens
    a pack's samples          s0 s1 s2 | s0 s1 ...       microbatches; several only if one group exceeds the budget

    prompt   ... p_{P-1} | p_P                       p_P, the last prompt token, begins every suffix
    ids               p_P  r_1  r_2  ...  r_{n-1}
    targets           r_1  r_2  r_3  ...  r_n        so a response of n tokens is a suffix of n tokens
    positions         s    s+1  s+2  ...  s+n-1      s: the rotary position of p_P

What goes together is decided by numbers of tokens and by order, never by time. Arrays are numpy. This file knows no
torch, no attention and no loss.

Shapes: T suffix tokens of a microbatch, one sample after the other; 3 rotary axes (temporal, height, width).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from rollplex.types import Prompt, Sample


@dataclass(frozen=True, eq=False)
class SuffixBatch:
    """Suffixes of a microbatch, packed: ids_T, targets_T int64 [T]; positions_3T int64 [3, T]; lengths sums to T."""

    ids_T: npt.NDArray[np.int64]
    targets_T: npt.NDArray[np.int64]
    positions_3T: npt.NDArray[np.int64]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What a microbatch takes of one group: neighbouring samples, and which of the group's packed tokens they are.

    group: the place of the group in its pack.
    """

    group: int
    samples: slice
    tokens: slice


def pack(lengths: Sequence[int], max_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Divide items, in their order, into packs of at most max_tokens suffix tokens.

    Each pack takes as many of the next items as fit; one longer than max_tokens is alone. Order is kept because it is
    the order in which gradients are added.
    """
    assert all(length >= 1 for length in lengths), f"a response has at least one token: {tuple(lengths)}"
    packs: list[tuple[int, ...]] = []
    current: list[int] = []
    tokens = 0
    for index, length in enumerate(lengths):
        if current and tokens + length > max_tokens:
            packs.append(tuple(current))
            current, tokens = [], 0
        current.append(index)
        tokens += length
    if current:
        packs.append(tuple(current))
    return tuple(packs)


def closed_packs(lengths: Sequence[int], max_tokens: int, *, complete: bool) -> tuple[tuple[int, ...], ...]:
    """Those packs of the groups finished so far that no later group can join; all of them once it is `complete`.

    However many groups are known, they are the first packs of `pack` over all groups: who asks when changes nothing.
    """
    packs = pack(lengths, max_tokens)
    if complete or not packs or sum(lengths[index] for index in packs[-1]) >= max_tokens:
        return packs
    return packs[:-1]


def pack_finished(
    finished: Sequence[int], tokens: Sequence[int], max_tokens: int, minibatches: Sequence[Collection[int]]
) -> list[list[int]]:
    """The closed packs of each minibatch, in the order in which groups have `finished`. tokens: of every group."""
    packs = []
    for minibatch in minibatches:
        order = [group for group in finished if group in minibatch]
        lengths, complete = [tokens[group] for group in order], len(order) == len(minibatch)
        packs += [[order[i] for i in chosen] for chosen in closed_packs(lengths, max_tokens, complete=complete)]
    return packs


def microbatches(lengths: Sequence[Sequence[int]], max_tokens: int) -> tuple[tuple[Part, ...], ...]:
    """Divide the samples of a pack's groups, in their order, into passes of at most max_tokens suffix tokens.

    lengths: of each group's samples.
    """
    samples = [(group, sample) for group, of_group in enumerate(lengths) for sample in range(len(of_group))]
    result = []
    for chosen in pack([lengths[group][sample] for group, sample in samples], max_tokens):
        parts = []
        for group, run in groupby(chosen, key=lambda index: samples[index][0]):
            of_group = [samples[index][1] for index in run]
            first, stop = of_group[0], of_group[-1] + 1
            start = sum(lengths[group][:first])
            parts.append(Part(group, slice(first, stop), slice(start, start + sum(lengths[group][first:stop]))))
        result.append(tuple(parts))
    return tuple(result)


def suffix_arrays(suffixes: Sequence[tuple[Prompt, Sample]]) -> SuffixBatch:
    """Inputs, targets and positions of suffixes, one after the other.

    The last prompt token is text, and so has the same rotary position on all axes; the response goes on from there, one
    position a token.
    """
    assert suffixes, "a microbatch has at least one sample"
    positions_T = np.concatenate(
        [prompt.positions[0, -1] + np.arange(sample.length, dtype=np.int64) for prompt, sample in suffixes]
    )
    return SuffixBatch(
        ids_T=np.concatenate([ids for prompt, sample in suffixes for ids in (prompt.ids[-1:], sample.ids[:-1])]),
        targets_T=np.concatenate([sample.ids for _, sample in suffixes]),
        positions_3T=np.tile(positions_T, (3, 1)),
        lengths=tuple(sample.length for _, sample in suffixes),
    )
