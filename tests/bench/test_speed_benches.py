"""The speed benches run whole on the tiny model, on a CPU, without what only a GPU can tell."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rollplex.bench import decode, generate, prefill, step
from rollplex.bench.roofline import decode_bytes
from rollplex.bench.work import image_prompts, model_of
from rollplex.cli import app
from rollplex.errors import ConfigError


def bench(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["bench", *arguments, "--model", "tiny", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_decode() -> None:
    found = bench("decode", "--batch", "4", "--batch", "2", "--group", "2", "--prefix", "20", "--suffix", "16",
                  "--steps", "2")  # fmt: skip
    assert [cell["batch"] for cell in found["cells"]] == [4, 2]
    for cell in found["cells"]:
        assert cell["step_ms"] > 0 and cell["tokens_per_s"] == pytest.approx(cell["batch"] / cell["step_ms"] * 1e3)
        assert cell["prefix_per_sample"]["bytes"] > cell["bytes"]
        assert "fraction_of_bound" not in cell and "kernels" not in cell


def test_prefill() -> None:
    found = bench("prefill", "--tokens", "40", "--images", "2", "--pixels", "56")
    for part in ("prefill", "vision"):
        assert found[part]["tflops"] == pytest.approx(found[part]["flops"] / found[part]["ms"] / 1e9)
    assert found["product_tflops"] is None


@pytest.mark.parametrize("lengths", ["fixed", "lognormal"])
def test_generate(lengths: str) -> None:
    found = bench("generate", "--prompts", "2", "--images", "2", "--pixels", "56", "--group", "2", "--new-tokens", "5",
                  "--lengths", lengths, "--longest", "12")  # fmt: skip
    expected = 20 if lengths == "fixed" else sum(generate._lognormal(4, 12))
    assert found["tokens"] == expected and found["longest"] == (5 if lengths == "fixed" else 12)
    assert set(found["phase_seconds"]) == {"vision", "prefill", "decode"}
    assert found["media_processing"]["patches"] == 4 * 16


def test_a_name_that_is_no_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model 8b: use 3b, 7b, 32b, 72b, tiny"):
        decode.run("8b", [1], 1, 1, 1, 1, "cpu")
    with pytest.raises(ConfigError):
        prefill.run("3", 1, 1, 56, "cpu")
    assert model_of("tiny", torch.device("cpu"), torch.float32).dtype == torch.float32


def test_arguments_that_fit_no_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--batch 6: groups of 4 do not fill it"):
        decode.run("tiny", [4, 6], 4, 8, 8, 1, "cpu")
    with pytest.raises(ConfigError, match=r"--lengths log-normal: use fixed or lognormal"):
        generate.run("tiny", 1, 1, 56, 1, 1, "log-normal", 1, "cpu")


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_train(recompute: str) -> None:
    options = ("--prefix", "40", "--groups", "2", "--group", "4", "--suffix", "12", "--recompute", recompute)
    found = bench("train", *options)
    for part in ("prefix_forward", "suffix", "prefix_backward"):
        assert found[part]["tflops"] == pytest.approx(found[part]["flops"] / found[part]["ms"] / 1e9)
    assert found["prefix_backward"]["flops"] == 3 * found["prefix_forward"]["flops"]
    assert found["shared_ms"] == pytest.approx(found["suffix"]["ms"] / 2 + found["prefix_backward"]["ms"])
    assert found["sharing_gain"] == pytest.approx(found["unshared"]["ms"] / found["shared_ms"])


STEP = ("--prompts", "2", "--images", "2", "--pixels", "56", "--group", "2", "--new-tokens", "5", "--steps", "1")


def test_step() -> None:
    found = bench("step", *STEP, "--unshared")
    assert list(found["phases"]) == [
        "vision.encode", "rollout.prefill", "rollout.decode", "reference.prefix", "reference.suffix", "policy.suffix",
        "policy.prefix_backward", "policy.update",
    ]  # fmt: skip
    assert all(phase["seconds"] > 0 and phase["flops"] + phase["bytes"] > 0 for phase in found["phases"].values())
    assert found["flops"] == sum(phase["flops"] for phase in found["phases"].values())
    scoring = sum(found["phases"][name]["seconds"] for name in step.SCORING)
    unshared = found["unshared"]
    assert unshared["shared_scoring_and_update_seconds"] == pytest.approx(scoring)
    assert unshared["sharing_gain"] == pytest.approx(unshared["scoring_and_update_seconds"] / scoring)
    assert found["grad_norm"] > 0 and found["optimizer_bytes"]["host"] == 0


def test_step_without_reference_with_vision_and_overrides() -> None:
    found = bench("step", "train.optimizer_gpu_gib=0", *STEP, "--no-reference", "--train-vision")
    phases = found["phases"]
    assert not any(name.startswith("reference") for name in phases)
    plain = phases["rollout.prefill"]["flops"] + phases["vision.encode"]["flops"]
    assert phases["policy.prefix_backward"]["flops"] == 3 * plain
    assert found["optimizer_bytes"]["device"] == 0
    assert phases["policy.update"]["host_bytes"] == found["optimizer_bytes"]["host"] > 0


def test_bytes_of_all_decode_steps_are_those_of_each() -> None:
    shape = step.Shape(prompts=3, images=1, pixels=56, group=4, new_tokens=7)
    cpu = torch.device("cpu")
    workers = step.make_workers("tiny", step.recipe("tiny", shape, False, False, cpu, []), cpu)
    prompts = image_prompts(workers.policy.model, 3, 1, 56)
    c, length = workers.policy.model.decoder.config, prompts[0].prefix_length
    each = [decode_bytes(c, 12, 4, length, 1 + token, element_bytes=4).total for token in range(7)]
    assert step.phase_work(workers, prompts, shape, False)["rollout.decode"].num_bytes == sum(each)
