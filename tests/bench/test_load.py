"""The loading bench at a tiny size: it measures what it says, and sees a wrong weight."""

from pathlib import Path

import pytest
import torch

from rollplex.bench import load
from rollplex.errors import ConfigError
from rollplex.models.load import load_staged
from rollplex.models.shards import weight_files
from rollplex.testing import tiny_checkpoint


def test_load(tmp_path: Path) -> None:
    result = load.run("tiny", "cpu", "float32", shard_gb=1e-4, directory=str(tmp_path))
    assert result["equal"] is True
    assert isinstance(result["files"], int) and result["files"] > 3
    assert isinstance(result["parameters"], int) and result["gb"] == result["parameters"] * 4 / 1e9
    for speed in ("load_gb_per_s", "read_gb_per_s", "plain_gb_per_s"):
        value = result[speed]
        assert isinstance(value, float) and value > 0
    assert not list(tmp_path.iterdir()), "removed"


def test_it_sees_one_wrong_weight(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    tensors = [tensor for held in weight_files(tmp_path).values() for tensor in held]
    model = load_staged(str(tmp_path), torch.float32, "cpu")
    assert load._equal(model, tensors)
    weight = model.decoder.layer(1).down_t.detach()
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(torch.inf))
    assert not load._equal(model, tensors)


def test_an_unknown_model() -> None:
    with pytest.raises(ConfigError, match="'4b' is no preset"):
        load.run("4b", "cpu")
