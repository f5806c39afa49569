"""A run without weights: `--random-weights` needs config and tokenizer only, and means what the recipe's field does."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from rollplex import loop
from rollplex.bench.resume import write_recipe
from rollplex.cli import app
from rollplex.config import Config, load_config
from rollplex.models.load import load_model, random_model, read_config


def test_the_flag_sets_the_field_after_all_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, configs = write_recipe(tmp_path, steps=1), list[Config]()

    def note(config: Config) -> loop.Summary:
        configs.append(config)
        return loop.Summary(1, True, tmp_path)

    monkeypatch.setattr(loop, "train", note)
    for arguments in (["--random-weights"], ["model.random_weights=false", "--random-weights"], []):
        result = CliRunner().invoke(app, ["train", str(recipe), *arguments])
        assert result.exit_code == 0, result.output
    assert [config.model.random_weights for config in configs] == [True, True, False]


def test_a_run_starts_from_seeded_weights_and_so_does_its_reference(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, steps=1)
    source = Path(load_config(recipe).model.path)
    for path in source.glob("*.safetensors*"):
        path.unlink()
    run = f'run.directory="{tmp_path / "run"}"'
    fields = ["model.random_weights=true", "run.seed=11", "train.learning_rate=1e-30", "algo.kl_coefficient=0.1"]
    summary = loop.train(load_config(recipe, [run, *fields]))
    (saved,) = summary.directory.glob("checkpoints/*1/model")
    trained = load_model(str(saved), torch.float32, "cpu")
    expected = random_model(read_config(source), 11, torch.float32, "cpu")
    for (name, one), other in zip(trained.named_parameters(), expected.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) < 1e-20, name  # the rate is too small for an update to be seen
    rows = [json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["kl"] for row in rows if row["kind"] == "train"] == [0.0]
