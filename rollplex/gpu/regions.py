"""Memory by what it is for: bytes of named groups of tensors, against what the allocator has given out."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Bytes of one purpose; a storage that several name belongs to the first."""

    name: str
    num_bytes: int


def regions(named: Mapping[str, Iterable[Tensor]]) -> tuple[Region, ...]:
    """Bytes of the storages behind each group of tensors, each storage once."""
    seen: set[int] = set()
    found = []
    for name, tensors in named.items():
        num_bytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
        found.append(Region(name, num_bytes))
    return tuple(found)


def unaccounted_fraction(found: Iterable[Region], device: torch.device) -> float:
    """Share of the allocated memory of a CUDA device that is in no region."""
    allocated = torch.cuda.memory_allocated(device)
    return (allocated - sum(region.num_bytes for region in found)) / allocated
