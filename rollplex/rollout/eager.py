"""A decode step written out in torch operators: the one that runs on CPUs, and the oracle of graphs.py.

Legend: B rows, S slots of the longest row, V vocabulary, H hidden.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollplex.models.attention import DecodeAttention, PagedKV
from rollplex.models.head import logits
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.noise import gumbel
from rollplex.rollout.rows import Int64s, Rows, Tokens
from rollplex.rollout.sampler import Draw, SamplingParams, sample


@dataclass(frozen=True, eq=False)
class _Pending:
    draw: Draw

    def read(self) -> Tokens:
        draw = self.draw
        columns = (draw.raw_logprobs_B, draw.tempered_logprobs_B, draw.sampling_logprobs_B)
        return Tokens(draw.ids_B.cpu().numpy(), torch.stack(columns).float().cpu().numpy())


class EagerTokens:
    """A `TokenSource` without lag."""

    lag: int = 0

    def __init__(self, model: VisionLanguageModel, pages: PagedKV, block_size: int, banned_V: Tensor) -> None:
        self._model, self._pages, self._block_size, self.banned_V = model, pages, block_size, banned_V

    @torch.no_grad()
    def launch(self, rows: Rows, params: SamplingParams) -> _Pending:
        """One decode step. Its rows' input tokens must be known."""
        assert (rows.ids_B >= 0).all()
        model, device = self._model, self._model.device
        slots_BS = torch.from_numpy(history_slots(rows, self._block_size)).to(device)
        lengths_B = torch.from_numpy(rows.lengths_B).to(device)
        attention = DecodeAttention(self._pages, slots_BS[:, -1].contiguous(), slots_BS, lengths_B, rows.prefixes)
        x_BH = model.embed(torch.from_numpy(rows.ids_B).to(device))
        rope = model.decoder.rope(torch.from_numpy(rows.positions_B).to(device).expand(3, -1))
        logits_BV = logits(model.decoder(x_BH, rope, attention), model.decoder.head)
        noise_BV = None
        if params.temperature > 0.0:
            noise_BV = gumbel(torch.from_numpy(rows.keys_BW).to(device), logits_BV.shape[1])
        return _Pending(sample(logits_BV, noise_BV, params, self.banned_V))

    def workspace(self) -> tuple[Tensor, ...]:
        return ()


def history_slots(rows: Rows, block_size: int) -> Int64s:
    """Slots of each row's suffix, in order, int64 [B, S]; filled up to the longest with the row's last."""
    last_B1 = rows.lengths_B[:, None].astype(np.int64) - 1
    token_BS = np.minimum(np.arange(rows.lengths_B.max()), last_B1)
    blocks_BS = np.take_along_axis(rows.blocks_BM.astype(np.int64), token_BS // block_size, axis=1)
    slots_BS: Int64s = blocks_BS * block_size + token_BS % block_size
    return slots_BS
