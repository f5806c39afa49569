"""The noise is Philox 4x32-10, word by word; it is Gumbel distributed; and only what a token is decides its value."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollplex.rollout import noise
from rollplex.rollout.noise import Words, gumbel, pack_keys, philox

EULER_GAMMA = 0.5772156649
FLOAT32_ERROR = 2e-6  # relative; of two logarithms, one of which may be near 0

WORD = st.integers(0, 2**32 - 1)
WORDS = st.tuples(WORD, WORD, WORD, WORD)
KEY = st.tuples(
    st.integers(0, 2**31 - 1),  # seed
    st.integers(0, 2**32 - 1),  # step
    st.integers(0, 2**40 - 1),  # uid
    st.integers(0, 2**16 - 1),  # sample
    st.integers(0, 2**20 - 1),  # position
)


def scalar_philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """The paper's figure, one number at a time."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        high_a, low_a = divmod(0xD2511F53 * a, 2**32)
        high_c, low_c = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = high_c ^ b ^ k, low_c, high_a ^ d ^ m, low_a
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def tensors(values: Sequence[int]) -> list[Tensor]:
    return [torch.tensor([value]) for value in values]


def run(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    c0, c1, c2, c3 = tensors(counter)
    k0, k1 = tensors(key)
    return tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1)))


def scalar_gumbel(word: int) -> float:
    uniform = min(float(np.float32(word) + np.float32(0.5)) / 2**32, 1 - 2**-24)
    return float(-np.log(-np.log1p(-uniform)))


# Random123's known answers (kat_vectors, philox4x32 10).
PI_COUNTER, PI_KEY = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI_COUNTER, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert run(counter, key) == expected
    assert scalar_philox(counter, key) == expected


@given(WORDS, st.tuples(WORD, WORD))
def test_philox_against_scalars(counter: tuple[int, ...], key: tuple[int, ...]) -> None:
    assert run(counter, key) == scalar_philox(counter, key)


@given(st.lists(KEY, min_size=1, max_size=4), st.integers(1, 23))
def test_noise_against_scalars(keys: list[tuple[int, int, int, int, int]], vocab_size: int) -> None:
    seed, step = keys[0][:2]
    _, _, uids, samples, positions = zip(*keys, strict=True)
    noise_BV = gumbel(pack_keys(seed, step, uids, samples, positions), vocab_size)
    assert noise_BV.dtype == torch.float32
    assert noise_BV.shape == (len(keys), vocab_size)
    expected = [
        [
            scalar_gumbel(
                scalar_philox((i // 4, position, uid % 2**32, uid // 2**32 * 65536 + index), (seed, step))[i % 4]
            )
            for i in range(vocab_size)
        ]
        for _, _, uid, index, position in keys
    ]
    np.testing.assert_allclose(noise_BV.double().numpy(), expected, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR)


@given(KEY, KEY)
def test_different_tokens_have_different_words(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    def packed(key: tuple[int, ...]) -> list[int]:
        seed, step, uid, index, position = key
        words: list[int] = pack_keys(seed, step, [uid], [index], [position])[0].tolist()
        assert all(0 <= word < 2**32 for word in words)
        assert [words[0], words[1], words[4] // 65536 * 2**32 + words[3], words[4] % 65536, words[2]] == list(key)
        return words

    assert (packed(one) == packed(other)) == (one == other)


@pytest.mark.parametrize(
    ("seed", "step", "uid", "index", "position"),
    [
        (2**31, 0, 0, 0, 0),
        (0, 2**32, 0, 0, 0),
        (0, 0, 2**40, 0, 0),
        (0, 0, 0, 2**16, 0),
        (0, 0, 0, 0, 2**20),
        (0, 0, -1, 0, 0),
    ],
)
def test_keys_out_of_range_are_caught(seed: int, step: int, uid: int, index: int, position: int) -> None:
    with pytest.raises(AssertionError):
        pack_keys(seed, step, [uid], [index], [position])


# Sizes that are no multiple of any vector width, so that a row lies elsewhere in memory in each batch.
@pytest.mark.parametrize("vocab_size", [1, 3, 300, 1003, 4099])
def test_rows_do_not_depend_on_the_batch(vocab_size: int) -> None:
    keys_BW = pack_keys(7, 3, list(range(11)), [5] * 11, list(range(100, 111)))
    noise_BV = gumbel(keys_BW, vocab_size)
    for rows in ([0], [10], [3, 2], [9, 1, 5], [10, 9, 8, 7, 6, 5, 4]):
        assert torch.equal(gumbel(keys_BW[rows], vocab_size), noise_BV[rows])


def test_ids_do_not_depend_on_the_vocabulary() -> None:
    keys_BW = pack_keys(7, 3, [1, 2], [0, 1], [5, 6])
    noise_BV = gumbel(keys_BW, 1000)
    assert all(torch.equal(gumbel(keys_BW, size), noise_BV[:, :size]) for size in (1, 2, 5, 17, 998))


@pytest.mark.parametrize("num_counters", [1, 7, 64, 1000])
def test_chunks_change_no_bit(num_counters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys_BW = pack_keys(2**31 - 1, 2**32 - 1, [2**40 - 1, 0, 5], [2**16 - 1, 0, 1], [2**20 - 1, 0, 9])
    monkeypatch.setattr(noise, "NUM_COUNTERS_AT_ONCE", 10**9)
    whole_BV = gumbel(keys_BW, 803)
    monkeypatch.setattr(noise, "NUM_COUNTERS_AT_ONCE", num_counters)
    assert torch.equal(gumbel(keys_BW, 803), whole_BV)


def test_threads_change_no_bit() -> None:
    keys_BW = pack_keys(1, 2, list(range(8)), [0] * 8, [0] * 8)
    alone_BV = gumbel(keys_BW, 20_001)
    torch.set_num_threads(2)
    try:
        assert torch.equal(gumbel(keys_BW, 20_001), alone_BV)
    finally:
        torch.set_num_threads(1)


def test_an_empty_batch() -> None:
    assert gumbel(pack_keys(0, 0, [], [], []), 10).shape == (0, 10)


def noise_of_words(words: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    words_N4 = torch.tensor(words).view(-1, 4)

    def given_words(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
        word_0, word_1, word_2, word_3 = words_N4[counter[0].flatten()].T.unsqueeze(1)
        return word_0, word_1, word_2, word_3

    monkeypatch.setattr(noise, "philox", given_words)
    return gumbel(pack_keys(0, 0, [0], [0], [0]), len(words))[0]


def test_every_word_gives_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    powers = [2**power + offset for power in range(3, 33) for offset in (-2, -1, 0, 1) if 2**power + offset < 2**32]
    words = sorted({*range(8), *powers, 2**32 - 512, 2**32 - 385, 2**32 - 384, 2**32 - 129, 2**32 - 128})
    del words[-5 : -5 - len(words) % 4 : -1]
    noise_V = noise_of_words(words, monkeypatch)
    assert noise_V.isfinite().all()
    assert (noise_V.diff() <= 0).all()  # a larger word, less noise: no wrap, no jump
    expected = torch.tensor([scalar_gumbel(word) for word in words], dtype=torch.float64)
    torch.testing.assert_close(noise_V.double(), expected, rtol=FLOAT32_ERROR, atol=FLOAT32_ERROR)
    assert 22.87 < noise_V.max() < 22.88
    assert -2.82 < noise_V.min() < -2.81


def test_the_upper_tail_is_fine_enough_for_unlikely_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    # Noise at least as large as that of word x has probability (x + 1) / 2^32: an id of probability 1e-9 gets its due.
    words = [0, 1, 2, 3, 10, 100, 1000, 10_000]
    noise_V = noise_of_words(words, monkeypatch).double()
    exceedance_V = -torch.expm1(-torch.exp(-noise_V))
    expected_V = (torch.tensor(words) + 0.5) / 2**32
    torch.testing.assert_close(exceedance_V, expected_V.double(), rtol=1e-5, atol=0.0)


def many(num_rows: int = 500, vocab_size: int = 400) -> Tensor:
    """Noise of [position, id]."""
    return gumbel(pack_keys(11, 4, [3] * num_rows, [0] * num_rows, list(range(num_rows))), vocab_size).double()


def test_distribution_is_gumbel() -> None:
    values = many().flatten().sort().values
    count = len(values)
    assert abs(values.mean() - EULER_GAMMA) < 4 * values.std() / count**0.5
    assert abs(values.var() - torch.pi**2 / 6) < 0.03
    expected = torch.exp(-torch.exp(-values))
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((expected - steps[:-1]).abs().max(), (expected - steps[1:]).abs().max())
    assert distance * count**0.5 < 1.95  # Kolmogorov-Smirnov: exceeded once in a thousand


@pytest.mark.parametrize("word", ["seed", "step", "uid", "sample", "position", "id"])
def test_neighbours_are_independent(word: str) -> None:
    def at(offset: int) -> Tensor:
        add = {name: offset * (name == word) for name in ("seed", "step", "uid", "sample", "position", "id")}
        rows = range(100)
        keys_BW = pack_keys(
            11 + add["seed"], 4 + add["step"], [3 + add["uid"]] * 100, [8 + add["sample"]] * 100,
            [1000 * row + add["position"] for row in rows],
        )  # fmt: skip
        return gumbel(keys_BW, 402)[:, add["id"] : 400 + add["id"]].flatten()

    for offset in (1, 2):
        both = torch.stack([at(0), at(offset)])
        assert abs(torch.corrcoef(both)[0, 1]) < 4 / both.shape[1] ** 0.5


@settings(max_examples=30)
@given(KEY, st.integers(1, 2000))
def test_noise_is_always_finite(key: tuple[int, int, int, int, int], vocab_size: int) -> None:
    seed, step, uid, index, position = key
    assert gumbel(pack_keys(seed, step, [uid], [index], [position]), vocab_size).isfinite().all()
