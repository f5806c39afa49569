"""The layers of a decode step against the decoder's own, with few rows and with many."""

import numpy as np
import pytest
import torch

from rollplex.models.attention import PagedKV
from rollplex.models.decoder import Decoder, DecoderConfig
from rollplex.models.kernels import decode_layers
from rollplex.models.kernels.decode import DecodeStep, DecodeTables, GroupedDecodeAttention
from rollplex.models.kernels.decode_layers import DecodeLayers
from rollplex.models.kernels.decode_plan import DecodeTuning

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
TOLERANCE = 2e-5
CONFIG = DecoderConfig(
    num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=128, vocab_size=32, norm_eps=1e-6,
    rope_theta=1e4, mrope_section=(2, 3, 3), tied_embeddings=True,
)  # fmt: skip


def step_on(pages: PagedKV, num_rows: int) -> DecodeStep:
    """Rows without a prefix, each at the second token of its own block."""
    device = pages.k_LSKD.device
    attention = GroupedDecodeAttention.allocate(
        CONFIG, pages, num_rows, 1, 16, DecodeTuning(block_n=16, suffix_split=16)
    )

    def tensor(values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=dtype, device=device)

    rows = np.arange(num_rows)
    tables = DecodeTables(
        tensor(rows[:, None], torch.int32), tensor(np.full(num_rows, 2), torch.int32),
        tensor(np.zeros((num_rows, 6)), torch.int64), tensor([[-1, 0, 0, 0]], torch.int32),
        tensor(np.zeros(num_rows), torch.int32),
    )  # fmt: skip
    return attention.on(tables)


@pytest.mark.parametrize(("few_rows", "some_rows"), [(1, 1), (1, 64), (32, 64)])
@pytest.mark.parametrize("min_weight_bytes", [0, 2**30])
@torch.no_grad()
def test_layers_are_the_decoders(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, few_rows: int, some_rows: int, min_weight_bytes: int
) -> None:
    monkeypatch.setattr(decode_layers, "FEW_ROWS", few_rows)
    monkeypatch.setattr(decode_layers, "SOME_ROWS", some_rows)
    monkeypatch.setattr(decode_layers, "MIN_WEIGHT_BYTES", min_weight_bytes)
    decoder = Decoder(CONFIG)
    decoder.initialize(torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    for parameter in decoder.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    decoder = decoder.to(device)
    num_rows = 3
    x_TH = torch.randn(num_rows, CONFIG.hidden, generator=generator).to(device)
    rope = decoder.rope(torch.arange(num_rows, device=device).expand(3, -1) + 5)
    found = []
    for forward in (decoder, DecodeLayers(decoder, num_rows)):
        pages = PagedKV(*(torch.zeros(2, num_rows * 16, 2, 16, device=device) for _ in range(2)))
        for page in (pages.k_LSKD, pages.v_LSKD):
            page[:, ::16] = torch.randn(2, num_rows, 2, 16, generator=torch.Generator().manual_seed(3)).to(device)
        found.append((forward(x_TH.clone(), rope, step_on(pages, num_rows)), pages.k_LSKD, pages.v_LSKD))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE * float(theirs.abs().max()))
