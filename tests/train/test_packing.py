"""Packing keeps every sample, its order and the limit; suffix arrays line up inputs, targets and positions."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollplex.train.packing import pack, suffix_arrays
from rollplex.types import Sample

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


def sample(ids: list[int]) -> Sample:
    zeros = np.zeros(len(ids), dtype=np.float32)
    return Sample(0, 0, np.array(ids, dtype=np.int64), zeros, zeros, zeros, "stop", "", 0, 0)


@given(st.lists(st.lists(st.integers(0, 1000), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(0, 10**6))
def test_suffix_arrays(responses: list[list[int]], last_position: int) -> None:
    batch = suffix_arrays(7, last_position, [sample(ids) for ids in responses])
    assert batch.lengths == tuple(map(len, responses))
    assert batch.ids_T.dtype == batch.targets_T.dtype == batch.positions_3T.dtype == np.int64
    assert batch.positions_3T.shape == (3, sum(batch.lengths))
    start = 0
    for ids in responses:
        part = slice(start, start + len(ids))
        assert batch.ids_T[part].tolist() == [7, *ids][:-1]
        assert batch.targets_T[part].tolist() == ids
        expected = [last_position + offset for offset in range(len(ids))]
        assert batch.positions_3T[:, part].tolist() == [expected] * 3
        start = part.stop
    assert start == len(batch.ids_T) == len(batch.targets_T)


def test_packing_needs_no_torch() -> None:
    code = "import sys, rollplex.train.packing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
