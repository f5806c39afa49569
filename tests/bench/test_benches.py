"""Every bench at a small size, held to the thresholds that it claims; and the command line that runs them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rollplex.bench import cli, exactness, forwards, gradients, parity, resume
from rollplex.bench.tiny import tiny_workers
from rollplex.errors import ConfigError
from rollplex.models.presets import preset_config
from rollplex.testing import tiny_config


def test_parity() -> None:
    result = parity.run(new_tokens=12)
    assert result["tokens_equal"] is True
    assert isinstance(result["logit_error"], float) and 0 < result["logit_error"] <= 1e-4


def test_exactness() -> None:
    result = exactness.run(steps=2)
    assert result["serial_overlapped_equal"] is True
    assert isinstance(result["gradient_error"], float) and 0 < result["gradient_error"] <= 1e-5
    assert isinstance(result["logprob_difference"], float) and result["logprob_difference"] <= 1e-4
    assert (result["groups"], result["group_size"], result["samples"]) == (5, 4, 40)
    lengths = result["response_lengths"]
    assert isinstance(lengths, list) and len(lengths) > 5, "ragged"
    assert json.loads(json.dumps(result)) == result


def test_exactness_compares_every_bit() -> None:
    config = exactness.recipe("serial", "cpu", "float32", kl_coefficient=0.0)
    (record,), (twin,) = exactness.run_steps(config, 1), exactness.run_steps(config, 1)
    assert exactness.records_equal(record, twin)
    for broken in (twin.gradients["vision.layers.0.down_bias"], twin.after["decoder.layers.1.qkv_bias"],
                   twin.groups[4].trained_T, torch.from_numpy(twin.groups[2].responses[3].raw_logprobs)):  # fmt: skip
        assert broken is not None
        kept = broken[0].clone()
        broken[0] = torch.nextafter(kept, torch.tensor(torch.inf))
        assert not exactness.records_equal(record, twin)
        broken[0] = kept
        assert exactness.records_equal(record, twin)


def test_exactness_sees_a_wrong_gradient() -> None:
    config = exactness.recipe("serial", "cpu", "float32")
    (record,) = exactness.run_steps(config, 1)
    together, worst = exactness.gradient_errors(record, config.algo)
    assert max(together, worst) <= 1e-5
    bias = record.gradients["vision.layers.0.down_bias"]
    bias *= 1.001
    assert exactness.gradient_errors(record, config.algo)[1] > 5e-4


@pytest.mark.parametrize("group", [2, 8])
def test_forwards(group: int) -> None:
    result = forwards.run(group)
    assert result["prefix_forwards_per_group"] == 2
    # Of the last layer only K and V are recomputed, but that is counted as a pass.
    assert result["prefix_recomputations_per_group"] == 1
    assert result["prefix_backwards_per_group"] == 1
    assert result["naive_prefix_backwards_per_group"] == group
    assert result["naive_prefix_forwards_per_group"] == 1 + 3 * group


@pytest.mark.slow
def test_resume_after_a_kill() -> None:
    result = resume.run(kills=1, steps=2, seed=4)
    assert result["equal"] is True, result


def test_resume_sees_a_single_bit(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "other")]
    for run in runs:
        model = run / "checkpoints" / "step-000001"
        model.mkdir(parents=True)
        save_file({"weight": torch.arange(4.0)}, model / "model.safetensors")
        (model / "state.json").write_text('{"step": 1}')
        for name in ("metrics.jsonl", "samples.jsonl"):
            row = {"step": 1, "time/step": np.random.default_rng().random(), "loss": 0.5}
            (run / name).write_text(json.dumps(row) + "\n")
    assert list(resume.compare_runs(*runs)) == []
    model = runs[1] / "checkpoints" / "step-000001"
    (model / "state.json").write_text('{"step": 2}')
    weight = load_file(model / "model.safetensors")["weight"].clone()
    weight[2] = torch.nextafter(weight[2], torch.tensor(9.0))
    save_file({"weight": weight}, model / "model.safetensors")
    (runs[1] / "samples.jsonl").write_text('{"step": 1, "time/step": 0.1, "loss": 0.25}\n')
    (runs[1] / "metrics.jsonl").write_text("")
    differences = list(resume.compare_runs(*runs))
    assert len(differences) == 4 and {"metrics.jsonl", "samples.jsonl"} <= set(differences)
    (runs[1] / "checkpoints" / "step-000002").mkdir()
    assert "step-000002" in next(resume.compare_runs(*runs))


def test_tiny_workers_have_different_seeded_weights() -> None:
    config = exactness.recipe("serial", "cpu", "float32")
    one, other = (tiny_workers(config, tiny_config(), torch.device("cpu")) for _ in range(2))
    assert one.reference is not None and other.reference is not None
    for mine, again, reference in zip(one.policy.model.parameters(), other.policy.model.parameters(),
                                      one.reference.model.parameters(), strict=True):  # fmt: skip
        assert torch.equal(mine, again) and not torch.equal(mine, reference)


def test_the_command_line_ends_with_one_json_object() -> None:
    command = [sys.executable, "-m", "rollplex.cli", "bench", "forwards", "--group", "2"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    result = json.loads(output.splitlines()[-1])
    assert result["bench"] == "forwards" and result["group"] == 2


def test_gradients_in_bfloat16_are_no_further_off_than_the_plain_ones() -> None:
    found: dict[str, Any] = gradients.run("tiny", 3, 2, 2, 56, 4, 12, "cpu")
    assert found["response_tokens"] > 0
    for part in ("all", "decoder", "vision"):
        assert 1e-3 < found[part]["shared"] < 0.1 and found[part]["ratio"] < 1.25
    assert found["gradient_error"] == found["all"]["shared"] and found["ratio"] == found["all"]["ratio"]


def test_a_cut_config_keeps_its_shapes() -> None:
    whole, cut = preset_config("3b"), gradients.cut_config("3b", 4)
    assert cut.text_config.num_hidden_layers == 4 and cut.vision_config.fullatt_block_indexes == [3]
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size"):
        assert getattr(cut.text_config, name) == getattr(whole.text_config, name)


def test_every_listed_bench_is_one() -> None:
    names = {command.callback.__name__ for command in cli.bench.registered_commands if command.callback}
    lines = (Path(__file__).parents[2] / "benchmarks" / "h200.txt").read_text().splitlines()
    listed = [line.split() for line in lines if not line.startswith("#")]
    assert len(listed) > 10
    for name, *options in listed:
        assert name in names and options[-2:] == ["--device", "cuda"]
        result = CliRunner().invoke(cli.bench, [name, *options[:-1], "nonsense"])
        assert isinstance(result.exception, ConfigError), result.output
