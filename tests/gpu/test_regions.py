"""Bytes by region: every storage once, whoever names it, and views count as what they keep alive."""

import pytest
import torch

from rollplex.gpu.regions import Region, regions, unaccounted_fraction


def test_a_storage_belongs_to_the_first_that_names_it() -> None:
    a, b = torch.zeros(10), torch.zeros(4, dtype=torch.float64)
    found = regions({"first": [a, a[:3]], "second": [a.view(2, 5), b], "none": []})
    assert found == (Region("first", 40), Region("second", 32), Region("none", 0))


def test_a_view_counts_with_all_that_it_keeps() -> None:
    whole = torch.zeros(100)
    assert regions({"view": [whole[:1]]}) == (Region("view", 400),)


@pytest.mark.gpu
def test_what_is_named_is_what_is_allocated() -> None:
    device = torch.device("cuda")
    before = torch.cuda.memory_allocated(device)
    tensors = [torch.zeros(2**20 * n, device=device) for n in (8, 16)]
    found = [*regions({"before": ()}), *regions({"mine": tensors}), Region("before", before)]
    assert abs(unaccounted_fraction(found, device)) < 0.01
