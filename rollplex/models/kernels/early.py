"""Kernels that start while the one before them is still ending: programmatic dependent launch, from Hopper on.

In a decode step of a hundred short kernels, launching one and filling the GPU with it takes about as long as its work.
A kernel launched early is put onto the GPU as soon as every program of the one before has begun, and then waits, in
`begin`, for that one's results. Nothing may be read or written before `begin`.
"""

# Triton's decorator has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 512
"""Tokens up to which a kernel is short enough to gain from it."""


def starts_early(x_TH: Tensor) -> bool:
    """Whether a kernel over these rows is launched early: `EARLY` of the kernel, and launch_pdl of its launch."""
    return x_TH.is_cuda and x_TH.shape[0] <= MAX_ROWS and _has_dependent_launch(x_TH.device)


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr):
    """First of all in such a kernel: let the next one be put onto the GPU, and wait for what the one before has done."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
