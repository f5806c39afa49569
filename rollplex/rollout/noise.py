"""Counter-based Gumbel noise: a token's noise is a pure function of which token it is.

Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", 2011) maps a 64-bit key and a
128-bit counter to four 32-bit words. Key and counter hold, without any hashing, so that no two draws share a word:

    key      0   seed                    < 2^31
             1   step                    < 2^32
    counter  0   vocabulary id // 4      the id's word is output id % 4
             1   position                < 2^20   of the token to draw in the response, 0 for the first
             2   uid, low 32 bits        < 2^40   of the prompt
             3   uid, high 8 bits << 16 | sample  < 2^16

Everything but the vocabulary id is fixed per row: five words, packed on the host. A word x becomes the uniform
w = min((x + 0.5) / 2^32, 1 - 2^-24), never 0 or 1, and the noise -log(-log(1 - w)), between -2.81 and 22.88. Floats are
densest near w = 0, where the noise is largest: from a uniform of 23 bits it would end at 16.6, and ids less likely than
about 1e-7, which together may well hold a thousandth of the probability, would hardly ever be drawn.

This file knows no batch and no generator state: a row's noise does not depend on the rows beside it. Words are int64
tensors that hold 32-bit values (torch has no unsigned multiplication); a kernel does the same in uint32.
On one CPU core, 64 rows take about 0.9 ms for 300 ids, and 0.2 s for 151,936.
"""

# B rows of the batch, N = ceil(V / 4) counters of a row, V vocabulary ids, W = 5 words of a row's key.

from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57  # the paper's constants for 4x32
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # golden ratio and sqrt(3) - 1
NUM_ROUNDS = 10
NUM_COUNTERS_AT_ONCE = 1 << 15  # on a CPU, so that the words stay in its cache: the fastest of 2^13 to 2^18
LARGEST_UNIFORM = 1.0 - 2.0**-24  # the last float32 before 1, to which the largest words would round

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def pack_keys(
    seed: int,
    step: int,
    uids: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
) -> Tensor:
    """Pack what identifies each row's token: int64 [B, 5] on the CPU, seed, step, position, uid low, uid high | sample.

    The position is a column of its own (index 2): a later token of the same rows needs only that column changed.
    """
    assert 0 <= seed < 2**31 and 0 <= step < 2**32, (seed, step)
    assert all(0 <= uid < 2**40 for uid in uids), "a prompt's uid must be below 2^40"
    assert all(0 <= sample < 2**16 for sample in samples), "a sample's index must be below 2^16"
    assert all(0 <= position < 2**20 for position in positions), "a response is shorter than 2^20 tokens"
    rows = [
        (seed, step, position, uid & MASK, uid >> 32 << 16 | sample)
        for uid, sample, position in zip(uids, samples, positions, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), 5)


def gumbel(keys_BW: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [B, V], on the keys' device."""
    assert keys_BW.dtype == torch.int64 and keys_BW.shape[1:] == (5,), (keys_BW.dtype, keys_BW.shape)
    num_rows, num_counters = keys_BW.shape[0], -(-vocab_size // 4)
    noise_BN4 = torch.empty(num_rows, num_counters, 4, dtype=torch.float32, device=keys_BW.device)
    on_cpu = keys_BW.device.type == "cpu"
    width = max(1, NUM_COUNTERS_AT_ONCE // max(1, num_rows)) if on_cpu else max(1, num_counters)
    seed_B1, step_B1, position_B1, low_B1, high_B1 = (word_B1.contiguous() for word_B1 in keys_BW.split(1, dim=1))
    for start in range(0, num_counters, width):
        stop = min(start + width, num_counters)
        index_1N = torch.arange(start, stop, device=keys_BW.device).unsqueeze(0)
        words = philox((index_1N, position_B1, low_B1, high_B1), (seed_B1, step_B1))
        for index, word_BN in enumerate(words):
            noise_BN4[:, start:stop, index] = _to_uniform(word_BN)
    return noise_BN4.neg_().log1p_().neg_().log_().neg_().view(num_rows, 4 * num_counters)[:, :vocab_size]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox 4x32-10 on int64 tensors of 32-bit values that broadcast together."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(NUM_ROUNDS):
        # A product may wrap into the sign bit; its 64 bits are right all the same; the mask drops the sign's copies.
        product_0, product_1 = word_0 * MULTIPLIER_0, word_2 * MULTIPLIER_1
        word_0 = (product_1 >> 32).bitwise_and_(MASK) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).bitwise_and_(MASK) ^ word_3 ^ key_1
        word_1 = product_1.bitwise_and_(MASK)
        word_3 = product_0.bitwise_and_(MASK)
        key_0, key_1 = (key_0 + WEYL_0) & MASK, (key_1 + WEYL_1) & MASK
    return word_0, word_1, word_2, word_3


def _to_uniform(word: Tensor) -> Tensor:
    return word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
