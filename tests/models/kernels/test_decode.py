"""Grouped decode attention against attention written out in float32: ragged batches, pages, plans, repeatability."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollplex.models.attention import PagedKV
from rollplex.models.decoder import DecoderConfig
from rollplex.models.kernels.decode import DecodeTables, GroupedDecodeAttention
from rollplex.models.kernels.decode_plan import PREFIX_UNIT, DecodeTuning, max_items, plan_items

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # the interpreter's, of infinities

FLOAT32_ERROR = 1e-5
BFLOAT16_ERROR = 1e-2
"""Relative to the largest of the output: weights and result are rounded to 8 bits."""
LAYERS = 2
SMALL = DecodeTuning(
    block_n=16, num_warps=4, num_stages=2, block_m=32, target_programs=8, max_prefix_splits=3, suffix_split=16,
    max_suffix_splits=3,
)  # fmt: skip
"""Small enough that every branch is met: several parts, several tiles, suffixes with longer parts than one."""


@dataclass(frozen=True)
class Case:
    """A batch: (prefix length, each row's suffix length) of every group; idle rows at the end."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    num_idle: int = 0


CASES = {
    "ragged": Case(((140, (1, 16, 17)), (0, (5,)), (17, (70,))), num_idle=1),
    "two tiles": Case(((130, (3, 9, 17)),), num_heads=16, num_kv_heads=1),
    "one head each, odd blocks": Case(((20, (7, 1)), (0, (9, 4))), num_heads=2, block_size=3),
    "seven queries, 80 wide": Case(((40, (5, 18)), (16, (1,))), num_heads=7, num_kv_heads=1, head_dim=80),
    "128 wide": Case(((33, (6, 2, 2)),), num_heads=14, num_kv_heads=2, head_dim=128),
}


@dataclass(frozen=True, eq=False)
class Batch:
    q_TND: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    pages: PagedKV
    prefixes: list[tuple[Tensor, Tensor]]
    """[L, P, K, D] views of larger tensors: layers are apart."""
    tables: DecodeTables
    attention: GroupedDecodeAttention
    slots_T: list[list[int]]
    """Where each row's tokens lie, in order."""


def normal(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def batch(case: Case, device: torch.device, dtype: torch.dtype, tuning: DecodeTuning, spare_items: int = 3) -> Batch:
    """Random contents; what must never be read is NaN."""
    heads = case.num_kv_heads, case.head_dim
    lengths = [length for _, suffixes in case.groups for length in suffixes] + [0] * case.num_idle
    num_rows, size = len(lengths), case.block_size
    num_blocks = max(-(-length // size) for length in lengths) + 1
    order = np.random.default_rng(0).permutation(num_rows * num_blocks).reshape(num_rows, num_blocks)
    slots_T = [[int(order[t, p // size]) * size + p % size for p in range(n)] for t, n in enumerate(lengths)]
    k_LSKD, v_LSKD = (
        torch.full((LAYERS, order.size * size, *heads), torch.nan, dtype=dtype, device=device) for _ in range(2)
    )
    written = [slot for slots in slots_T for slot in slots[:-1]]
    for seed, x_LSKD in enumerate((k_LSKD, v_LSKD)):
        x_LSKD[:, written] = normal(LAYERS, len(written), *heads, seed=seed, device=device, dtype=dtype)
    pages = PagedKV(k_LSKD, v_LSKD)
    config = DecoderConfig(
        num_layers=LAYERS, hidden=8, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim, intermediate=8, vocab_size=8, norm_eps=1e-6, rope_theta=1e4, mrope_section=(1, 1, 1),
        tied_embeddings=True,
    )  # fmt: skip
    attention = GroupedDecodeAttention.allocate(config, pages, num_rows, num_blocks, size, tuning)
    attention.o_TNSD.fill_(torch.nan)
    attention.lse_TNS.fill_(torch.nan)
    prefixes, groups, first = [], [], 0
    for seed, (length, suffixes) in enumerate(case.groups):
        k, v = (
            normal(LAYERS, length + 2, *heads, seed=10 + 2 * seed + i, device=device, dtype=dtype) for i in range(2)
        )
        k[:, length:], v[:, length:] = torch.nan, torch.nan
        prefixes.append((k[:, :length], v[:, :length]))
        groups.append((first, len(suffixes), length, k.data_ptr(), v.data_ptr(), k.stride(0)))
        first += len(suffixes)
    groups.append((0, 0, 0, 0, 0, 0))
    items, splits = attention.plan([n for n, _ in case.groups], [len(rows) for _, rows in case.groups])
    items = np.concatenate((items, np.full((spare_items, 4), -1, dtype=np.int32)))
    splits = np.concatenate((splits, np.full(case.num_idle, 2, dtype=np.int32)))  # of idle rows: anything
    blocks, lengths_T, items_IF, splits_T = (
        torch.from_numpy(np.asarray(x, dtype=np.int32)).to(device) for x in (order, lengths, items, splits)
    )
    groups_GF = torch.tensor(groups, dtype=torch.int64, device=device)
    tables = DecodeTables(blocks, lengths_T, groups_GF, items_IF, splits_T)
    q, k, v = (
        normal(num_rows, n, case.head_dim, seed=3 + i, device=device, dtype=dtype)
        for i, n in enumerate((case.num_heads, case.num_kv_heads, case.num_kv_heads))
    )
    return Batch(q, k, v, pages, prefixes, tables, attention, slots_T)


def expected(case: Case, on: Batch, layer: int) -> Tensor:
    """softmax(q k' / sqrt(D)) v of each row over its group's prefix, its own past and its new token, in float32."""
    outputs, row = [], 0
    for (_, suffixes), (prefix_k, prefix_v) in zip(case.groups, on.prefixes, strict=True):
        for _ in suffixes:
            past = on.slots_T[row][:-1]
            k = torch.cat((prefix_k[layer], on.pages.k_LSKD[layer, past], on.k_TKD[row : row + 1])).float()
            v = torch.cat((prefix_v[layer], on.pages.v_LSKD[layer, past], on.v_TKD[row : row + 1])).float()
            q = on.q_TND[row].float().view(case.num_kv_heads, -1, case.head_dim)
            weights = (torch.einsum("kgd,skd->kgs", q, k) * case.head_dim**-0.5).softmax(-1)
            outputs.append(torch.einsum("kgs,skd->kgd", weights, v).reshape(case.num_heads, case.head_dim))
            row += 1
    return torch.stack(outputs)


def check(found: Tensor, wanted: Tensor) -> None:
    tolerance = FLOAT32_ERROR if found.dtype == torch.float32 else BFLOAT16_ERROR
    assert torch.isfinite(found).all()
    error = (found.float() - wanted).abs().max() / wanted.abs().max()
    assert error < tolerance, float(error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_is_attention_over_prefix_and_own_tokens(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = CASES[name]
    on = batch(case, device, dtype, SMALL)
    attend = on.attention.on(on.tables)
    live = len(on.q_TND) - case.num_idle
    for layer in range(LAYERS):
        wanted = expected(case, on, layer)
        found = attend(layer, on.q_TND, on.k_TKD, on.v_TKD)
        check(found[:live], wanted)
        assert not found[live:].any()


def test_new_token_goes_to_its_page_and_nothing_else_changes(device: torch.device) -> None:
    case = CASES["ragged"]
    on = batch(case, device, torch.bfloat16, SMALL)
    wanted_k, wanted_v = on.pages.k_LSKD.clone(), on.pages.v_LSKD.clone()
    live = len(on.q_TND) - case.num_idle
    new = [slots[-1] for slots in on.slots_T[:live]]
    wanted_k[1, new], wanted_v[1, new] = on.k_TKD[:live], on.v_TKD[:live]
    on.attention.on(on.tables)(1, on.q_TND, on.k_TKD, on.v_TKD)
    torch.testing.assert_close(on.pages.k_LSKD, wanted_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(on.pages.v_LSKD, wanted_v, rtol=0, atol=0, equal_nan=True)


def test_bits_repeat_and_depend_on_no_idle_row_nor_on_strides(device: torch.device) -> None:
    case = Case(((130, (18, 2)), (0, (5,))))
    on, wider = (batch(replace(case, num_idle=n), device, torch.bfloat16, SMALL, 3 + n) for n in (0, 2))
    found = on.attention.on(on.tables)(0, on.q_TND, on.k_TKD, on.v_TKD)
    assert torch.equal(found, on.attention.on(on.tables)(0, on.q_TND, on.k_TKD, on.v_TKD))
    # The same rows and pages as views of one packed projection, as a decoder may hand them over, before idle rows.
    heads = torch.cat((on.q_TND, on.k_TKD, on.v_TKD), dim=1)
    rows_TND = torch.cat((heads, torch.full_like(heads[:2], torch.nan)))
    tables = replace(wider.tables, groups_GF=on.tables.groups_GF)
    tables.blocks_TM[:3] = on.tables.blocks_TM
    attention = replace(wider.attention, pages=on.pages)
    assert torch.equal(found, attention.on(tables)(0, *rows_TND.split((4, 2, 2), dim=1))[:3])


def test_rows_as_groups_of_their_own_share_one_prefix(device: torch.device) -> None:
    shared, apart = Case(((40, (5, 1, 18)),)), Case(((40, (5,)), (40, (1,)), (40, (18,))))
    together, alone = (batch(case, device, torch.float32, SMALL) for case in (shared, apart))
    groups = alone.tables.groups_GF
    groups[:3, 3:6] = together.tables.groups_GF[0, 3:6]
    found = alone.attention.on(alone.tables)(1, alone.q_TND, alone.k_TKD, alone.v_TKD)
    check(found, expected(shared, together, 1))


def test_tables_change_under_the_same_tensors(device: torch.device) -> None:
    """A graph's replay sees only new contents: nothing of a step may be fixed when it is first called."""
    case = CASES["one head each, odd blocks"]
    on = batch(case, device, torch.float32, SMALL)
    attend = on.attention.on(on.tables)
    live = len(on.q_TND) - case.num_idle
    on.tables.lengths_T.zero_()
    on.tables.items_IF[:, 0] = -1
    before = on.pages.k_LSKD.clone()
    assert not attend(0, on.q_TND, on.k_TKD, on.v_TKD).any()
    torch.testing.assert_close(on.pages.k_LSKD, before, rtol=0, atol=0, equal_nan=True)
    again = batch(case, device, torch.float32, SMALL)
    on.tables.lengths_T.copy_(again.tables.lengths_T)
    on.tables.items_IF.copy_(again.tables.items_IF)
    check(attend(0, on.q_TND, on.k_TKD, on.v_TKD)[:live], expected(case, on, 0))


SHAPES = st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 40)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 16), st.integers(1, 8), st.sampled_from([16, 64]), st.sampled_from([8, 264]))
def test_plan_covers_every_token_of_every_tile_once(
    shapes: list[tuple[int, int]], queries: int, num_kv_heads: int, block_m: int, target: int
) -> None:
    lengths, rows = [n for n, _ in shapes], [r for _, r in shapes]
    tuning = DecodeTuning(block_m=block_m, target_programs=target)
    items, splits = plan_items(lengths, rows, queries, num_kv_heads, block_m, target, tuning.max_prefix_splits)
    assert len(items) <= max_items(sum(rows), queries, num_kv_heads, tuning)
    assert len(splits) == sum(rows) and splits.max() <= tuning.max_prefix_splits
    first = np.cumsum([0, *rows])
    for group, (length, num_rows) in enumerate(shapes):
        of_group = items[items[:, 0] == group]
        assert set(of_group[:, 1]) == (set(range(-(-num_rows * queries // block_m))) if length else set())
        assert (splits[first[group] : first[group + 1]] == splits[first[group]]).all()
        for tile in set(of_group[:, 1]):
            ranges = of_group[of_group[:, 1] == tile][:, 2:]
            assert len(ranges) == splits[first[group]]
            assert ranges[0, 0] == 0 and ranges[-1, 1] == length
            assert (ranges[1:, 0] == ranges[:-1, 1]).all() and (ranges[:, 1] > ranges[:, 0]).all()
            # Equal parts but for the last, whose number the kernel then knows from the ranges alone.
            assert len({int(end - start) for start, end in ranges[:-1]}) <= 1
            assert not (ranges[:, 0] % PREFIX_UNIT).any()


def test_plan_fills_the_chip_with_few_rows_and_cuts_little_with_many() -> None:
    few_items, few_splits = plan_items([8192], [8], 7, 4, 64)
    assert len(few_items) == 32 and (few_splits == 32).all()
    many_items, many_splits = plan_items([8192] * 16, [8] * 16, 7, 4, 64)
    assert len(many_items) == 64 and (many_splits == 4).all()
