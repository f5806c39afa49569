"""What one decode step computes, and how its tokens come back: the seam between the engine and who does the arithmetic.

    Rows         host arrays: what every row attends to, where it stands, what its token is drawn with
    TokenSource  runs a step of rows, and gives its tokens later

A row's input token may not be known on the host yet: then the row says which row of the step before has drawn it, and
the token never leaves the device on its way from one step to the next.

Legend: B rows, M K/V blocks of a row, W words of a noise key.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rollplex.models.attention import PrefixKV
from rollplex.rollout.sampler import SamplingParams

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one decode step, in order of (group, sample).

    prefixes: each group's prefix and its number of rows, in row order.
    ids_B: each row's input token; -1: the token that row sources_B of the step before has drawn.
    positions_B: rotary position of the input token (text: one number).
    lengths_B: suffix tokens of the row, this step's included.
    blocks_BM: the K/V blocks of its suffix, in order; what lies beyond the row's last block is not read.
    keys_BW: noise keys of the tokens to draw (noise.py).
    """

    prefixes: tuple[tuple[PrefixKV, int], ...]
    ids_B: Int64s
    sources_B: Int64s
    positions_B: Int64s
    lengths_B: Int32s
    blocks_BM: Int32s
    keys_BW: Int64s


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one decode step: ids int64 [B]; raw, tempered and sampling log-probs float32 [3, B]."""

    ids_B: Int64s
    logprobs_3B: npt.NDArray[np.float32]


class PendingTokens(Protocol):
    """A step that has been launched."""

    def read(self) -> Tokens:
        """Its tokens, once they are computed; the same every time."""
        ...


class TokenSource(Protocol):
    """Runs decode steps, in order.

    lag: steps that may be launched before the tokens of the first are read, less one.
    """

    @property
    def lag(self) -> int: ...

    def launch(self, rows: Rows, params: SamplingParams) -> PendingTokens: ...

    def workspace(self) -> Iterable[Tensor]:
        """Device memory that it keeps from step to step."""
        ...
