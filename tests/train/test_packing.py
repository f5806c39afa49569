"""Packing keeps every group and sample, order and limit; suffix arrays line up inputs, targets and positions."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollplex.train.packing import Part, closed_packs, microbatches, pack, pack_finished, suffix_arrays
from rollplex.types import Prompt, Sample

LENGTHS = st.lists(st.integers(1, 50), max_size=20)


@given(LENGTHS, st.integers(1, 80))
def test_pack_keeps_order_and_limit(lengths: list[int], max_tokens: int) -> None:
    microbatches = pack(lengths, max_tokens)
    assert [index for microbatch in microbatches for index in microbatch] == list(range(len(lengths)))
    for microbatch in microbatches:
        assert microbatch
        assert len(microbatch) == 1 or sum(lengths[index] for index in microbatch) <= max_tokens


@given(LENGTHS, st.integers(1, 80))
def test_pack_is_greedy(lengths: list[int], max_tokens: int) -> None:
    microbatches = pack(lengths, max_tokens)
    for current, following in pairwise(microbatches):
        assert sum(lengths[index] for index in current) + lengths[following[0]] > max_tokens


def test_pack_examples() -> None:
    assert pack([3, 3, 4, 9, 1], 8) == ((0, 1), (2,), (3,), (4,))
    assert pack([4, 4], 8) == ((0, 1),)
    assert pack([], 8) == ()


# Packs of groups


@given(LENGTHS, st.integers(1, 80))
def test_packs_do_not_depend_on_when_one_asks(lengths: list[int], max_tokens: int) -> None:
    """However many groups have finished, what is closed stays as it is: the first packs of all groups."""
    whole = pack(lengths, max_tokens)
    assert closed_packs(lengths, max_tokens, complete=True) == whole
    for known in range(len(lengths) + 1):
        closed = closed_packs(lengths[:known], max_tokens, complete=False)
        assert closed == whole[: len(closed)]


@given(LENGTHS, st.integers(1, 80), st.integers(1, 50))
def test_a_pack_is_closed_as_soon_as_nothing_can_join_it(lengths: list[int], max_tokens: int, following: int) -> None:
    closed = closed_packs(lengths, max_tokens, complete=False)
    open_groups = lengths[sum(map(len, closed)) :]
    assert not open_groups or sum(open_groups) < max_tokens, "a group of one token would fit"
    later = pack([*lengths, following], max_tokens)
    assert later[: len(closed)] == closed
    if closed and not open_groups:
        assert later[len(closed)] == (len(lengths),)


def test_closed_packs_examples() -> None:
    assert closed_packs([8], 8, complete=False) == ((0,),)  # exactly full
    assert closed_packs([7], 8, complete=False) == ()
    assert closed_packs([7], 8, complete=True) == ((0,),)
    assert closed_packs([20], 8, complete=False) == ((0,),)  # larger than the budget
    assert closed_packs([3, 20], 8, complete=False) == ((0,), (1,))
    assert closed_packs([3, 5, 3], 8, complete=False) == ((0, 1),)
    assert closed_packs([1, 2], 1, complete=False) == ((0,), (1,))  # a budget of one token
    assert closed_packs([], 8, complete=False) == closed_packs([], 8, complete=True) == ()


@given(st.permutations(range(6)), st.lists(st.integers(1, 20), min_size=6, max_size=6), st.integers(1, 40))
def test_packs_are_of_one_minibatch_in_finishing_order(order: list[int], tokens: list[int], max_tokens: int) -> None:
    minibatches = [range(2), range(2, 6)]
    whole = pack_finished(order, tokens, max_tokens, minibatches)
    assert [group for pack in whole for group in pack] == [g for part in minibatches for g in order if g in part]
    assert all(any(set(pack) <= set(part) for part in minibatches) for pack in whole)
    for known in range(len(order)):
        for part in minibatches:
            closed = [pack for pack in pack_finished(order[:known], tokens, max_tokens, minibatches) if pack[0] in part]
            assert closed == [pack for pack in whole if pack[0] in part][: len(closed)]


# Microbatches of a pack


@given(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 60))
def test_microbatches_cover_all_samples_in_order(lengths: list[list[int]], max_tokens: int) -> None:
    found = microbatches(lengths, max_tokens)
    samples = [
        (part.group, i) for parts in found for part in parts for i in range(part.samples.start, part.samples.stop)
    ]
    assert samples == [(group, i) for group, of_group in enumerate(lengths) for i in range(len(of_group))]
    for parts in found:
        assert len({part.group for part in parts}) == len(parts)
        tokens = [part.tokens.stop - part.tokens.start for part in parts]
        assert tokens == [sum(lengths[part.group][part.samples]) for part in parts]
        assert sum(tokens) <= max_tokens or (len(parts) == 1 and parts[0].samples.stop - parts[0].samples.start == 1)
    for group, of_group in enumerate(lengths):
        tokens_of_group = [part.tokens for parts in found for part in parts if part.group == group]
        assert [tokens.start for tokens in tokens_of_group] == [0, *(tokens.stop for tokens in tokens_of_group[:-1])]
        assert tokens_of_group[-1].stop == sum(of_group)


def test_groups_that_fit_are_one_microbatch_and_a_larger_one_is_divided_as_alone() -> None:
    assert microbatches([[2, 3], [3]], 8) == (
        (Part(0, slice(0, 2), slice(0, 5)), Part(1, slice(0, 1), slice(0, 3))),
    )  # fmt: skip
    assert microbatches([[4, 4, 4]], 8) == ((Part(0, slice(0, 2), slice(0, 8)),), (Part(0, slice(2, 3), slice(8, 12)),))


def sample(ids: list[int]) -> Sample:
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Sample(0, 0, np.array(ids, dtype=np.int64), zeros, zeros, zeros, "stop", "", 0, 0)


def prompt(last_id: int, last_position: int) -> Prompt:
    ids, positions = np.array([3, last_id]), np.array([[0, last_position]] * 3)
    return Prompt(0, ids, positions, (), "", {}, "")


RESPONSES = st.lists(
    st.tuples(st.integers(0, 900), st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=12)),
    min_size=1,
    max_size=6,
)


@given(RESPONSES)
def test_suffix_arrays(responses: list[tuple[int, int, list[int]]]) -> None:
    batch = suffix_arrays([(prompt(last_id, position), sample(ids)) for last_id, position, ids in responses])
    assert batch.lengths == tuple(len(ids) for _, _, ids in responses)
    assert batch.ids_T.dtype == batch.targets_T.dtype == batch.positions_3T.dtype == np.int64
    assert batch.positions_3T.shape == (3, sum(batch.lengths))
    start = 0
    for last_id, last_position, ids in responses:
        part = slice(start, start + len(ids))
        assert batch.ids_T[part].tolist() == [last_id, *ids][:-1]
        assert batch.targets_T[part].tolist() == ids
        expected = [last_position + offset for offset in range(len(ids))]
        assert batch.positions_3T[:, part].tolist() == [expected] * 3
        start = part.stop
    assert start == len(batch.ids_T) == len(batch.targets_T)


def test_packing_needs_no_torch() -> None:
    code = "import sys, rollplex.train.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
