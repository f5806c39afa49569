"""Whole runs of a tiny model: what is left behind, resuming, stopping, and bad input that costs nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from rollplex import loop
from rollplex.bench.resume import compare_runs, write_recipe
from rollplex.config import Config, load_config
from rollplex.errors import CapacityError, CheckpointError, ConfigError, DataError, RewardError, RollplexError
from rollplex.models.load import load_model, named_hf_tensors
from rollplex.testing import VOCAB_SIZE, tiny_checkpoint, tiny_config


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, steps=2)


def configured(recipe: Path, directory: str, *overrides: str) -> Config:
    return load_config(recipe, [f'run.directory="{recipe.parent / directory}"', *overrides])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_leaves_recipe_metrics_samples_events_and_a_checkpoint(recipe: Path) -> None:
    held_out = f'data.eval="{recipe.parent / "train.jsonl"}"'
    config = configured(recipe, "run", "run.tensorboard=true", held_out, "eval.max_prompts=7", "eval.every_steps=1")
    summary = loop.train(config)
    run = summary.directory
    assert (summary.step, summary.complete) == (2, True)
    assert load_config(run / "config.toml") == config
    metrics = rows(run / "metrics.jsonl")
    order = [(0, "eval"), (1, "train"), (1, "eval"), (2, "train"), (2, "eval")]
    assert [(row["step"], row["kind"]) for row in metrics] == order
    trained = [row for row in metrics if row["kind"] == "train"]
    wanted = (
        "reward/mean reward/std kl entropy clip_fraction grad_norm learning_rate groups_without_signal time/step "
        "logprob_difference/max logprob_difference/mean memory/peak_bytes tokens.prefix tokens.suffix tokens.generated "
        "phase/rollout.decode phase/policy.prefix_backward"
    )
    assert all(set(wanted.split()) <= row.keys() for row in trained)
    assert all(row["logprob_difference/max"] <= 1e-4 for row in trained)
    assert all(row["eval/prompts"] == 7 for row in metrics if row["kind"] == "eval")
    samples = rows(run / "samples.jsonl")
    assert len([row for row in samples if row["kind"] == "train"]) == 2 * 5 * 4
    assert {"prompt", "completion", "reward", "logprob_mean", "finish_reason"} <= samples[0].keys()
    assert list((run / "tensorboard").iterdir())


def test_a_checkpoint_loads_into_transformers_with_the_trained_weights(recipe: Path) -> None:
    run = loop.train(configured(recipe, "run")).directory
    saved = sorted((run / "checkpoints").iterdir())[-1] / "model"
    peer = Qwen2_5_VLForConditionalGeneration.from_pretrained(saved).state_dict()
    family = load_model(str(saved), torch.float32, "cpu")
    for name, tensor in named_hf_tensors(family):
        assert torch.equal(peer[family.family.module_name(name)], tensor), name  # type: ignore[attr-defined]
    before = dict(named_hf_tensors(load_model(str(recipe.parent / "model"), torch.float32, "cpu")))
    changed = [name for name, tensor in named_hf_tensors(family) if not torch.equal(tensor, before[name])]
    assert any(name.startswith("visual.") for name in changed)
    assert "model.layers.0.self_attn.q_proj.weight" in changed


@pytest.mark.parametrize("runner", ["serial", "overlapped"])
def test_resumed_equals_undisturbed_and_serial_equals_overlapped(recipe: Path, runner: str) -> None:
    whole = loop.train(configured(recipe, "whole", "train.schedule=constant", "run.runner=serial")).directory
    options = ("train.schedule=constant", f"run.runner={runner}")
    loop.train(configured(recipe, "parts", "train.steps=1", *options))
    parts = loop.train(configured(recipe, "parts", *options)).directory
    assert list(compare_runs(whole, parts)) == []


def test_several_updates_per_batch(recipe: Path) -> None:
    run = loop.train(configured(recipe, "run", "algo.epochs=2", "algo.num_minibatches=2", "train.steps=1")).directory
    row = rows(run / "metrics.jsonl")[-1]
    assert row["policy_version"] == 4
    assert row["ratio/max"] > 1.0 > row["ratio/min"]


@pytest.mark.parametrize(
    ("override", "error", "words"),
    [
        ("model.path=nowhere/at/all", RollplexError, ["nowhere/at/all"]),
        ("reward.functions=['no_such_reward']", ConfigError, ["no_such_reward"]),
        ("data.answer_column=missing", DataError, ["train.jsonl", "missing"]),
        ("data.max_prompt_tokens=3", DataError, ["train.jsonl", "3"]),
        ("train.prompts_per_step=1000", ConfigError, ["train.prompts_per_step", "1000"]),
        ("rollout.num_blocks=0", ConfigError, ["rollout.num_blocks"]),
    ],
)
def test_bad_input_is_refused_by_name_before_weights_are_loaded(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, override: str, error: type[Exception], words: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loop, "build_workers", refuse)
    with pytest.raises(error) as caught:
        loop.train(configured(recipe, "run", override))
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_reference_of_another_vocabulary_is_refused(recipe: Path) -> None:
    other = tiny_checkpoint(recipe.parent / "other", config=tiny_config(vocab_size=VOCAB_SIZE + 8))
    with pytest.raises(CheckpointError, match="another vocabulary"):
        loop.train(configured(recipe, "run", f'model.reference="{other}"'))


def test_a_failed_step_loses_no_step_before_it(recipe: Path) -> None:
    """With the default, which is no checkpoint before the end."""
    reward = recipe.parent / "failing.py"
    reward.write_text(_FAILING.format(count=recipe.parent / "count"), encoding="utf-8")
    options = (f"reward.functions={reward}:failing", "run.checkpoint_every_steps=0", "train.steps=3")
    with pytest.raises(RewardError, match=r"'failing'.*no more"):
        loop.train(configured(recipe, "run", *options))
    run = recipe.parent / "run"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    (recipe.parent / "count").unlink()
    summary = loop.train(configured(recipe, "run", *options))
    assert (summary.step, summary.complete) == (3, True)
    assert [row["step"] for row in rows(run / "metrics.jsonl")] == [1, 2, 3]


def test_a_failed_first_step_leaves_no_checkpoint(recipe: Path) -> None:
    reward = recipe.parent / "failing.py"
    reward.write_text("def failing(completions, **columns):\n    raise KeyError('never')\n", encoding="utf-8")
    with pytest.raises(RewardError, match="never"):
        loop.train(configured(recipe, "run", f"reward.functions={reward}:failing"))
    assert not (recipe.parent / "run" / "checkpoints").exists()


def test_held_out_metrics_name_every_function_and_the_longest_response(recipe: Path) -> None:
    reward = recipe.parent / "some.py"
    reward.write_text(_SOME, encoding="utf-8")
    held_out = f'data.eval="{recipe.parent / "train.jsonl"}"'
    options = ("rollout.max_new_tokens=40", "eval.max_prompts=9", "eval.temperature=2.0", "train.steps=1")
    run = loop.train(configured(recipe, "run", f"reward.functions={reward}:some", held_out, *options)).directory
    samples = [row for row in rows(run / "samples.jsonl") if row["kind"] == "eval" and row["step"] == 0]
    first = rows(run / "metrics.jsonl")[0]
    assert samples[0]["rewards"] == {"some": None} and len({row["tokens"] for row in samples}) > 1
    assert first["eval/reward/some"] == 1.0
    assert first["eval/response/length_max"] == max(row["tokens"] for row in samples)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("rollout.num_blocks=100000000000", CapacityError, "out of memory.*lower rollout.num_blocks"),
        ("rollout.stop_token_ids=[100000]", ConfigError, "no id 100000"),
        ("rollout.stop_strings=['</a>', '<|im_end|>']", ConfigError, r"'<\|im_end\|>'.*rollout.stop_token_ids, here"),
    ],
)
def test_what_a_run_cannot_have_is_refused(
    recipe: Path, override: str, error: type[RollplexError], message: str
) -> None:
    with pytest.raises(error, match=message):
        loop.train(configured(recipe, "run", override))


def test_a_disk_without_room_for_a_checkpoint_is_refused_at_once(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollplex.train.checkpoint.checkpoint_bytes", lambda policy: 2**60)
    with pytest.raises(ConfigError, match=r"run.directory.*a checkpoint takes 1152921504.61 GB.*make room"):
        loop.train(configured(recipe, "run"))


def test_signals_that_ask_to_stop_are_noted_and_nohup_is_respected() -> None:
    with loop._interruption() as received:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
            assert received.pop() == number
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with loop._interruption() as received:
            signal.raise_signal(signal.SIGHUP)
            assert not received
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_ctrl_c_ends_with_a_checkpoint_and_the_run_goes_on_from_there(recipe: Path) -> None:
    directory = recipe.parent / "run"
    command = [sys.executable, "-m", "rollplex.cli", "train", str(recipe), f'run.directory="{directory}"']
    command += ["train.steps=500", "run.checkpoint_every_steps=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 60
        while not (directory / "metrics.jsonl").exists() or not rows_so_far(directory):
            assert time.monotonic() < deadline, "no step in 60 s"
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    done = max(row["step"] for row in rows(directory / "metrics.jsonl"))
    assert (directory / "checkpoints" / f"step-{done:06d}" / "model" / "config.json").exists()
    assert "goes on from there" in output
    resumed = loop.train(load_config(recipe, [f'run.directory="{directory}"', f"train.steps={done + 1}"]))
    assert resumed.step == done + 1


_FAILING = '''"""Fails in the third step of 5 x 4 samples."""
import os


def failing(completions, **columns):
    with open("{count}", "a") as file:
        file.write("x")
    if os.path.getsize("{count}") > 45:
        raise ValueError("no more")
    return [float(len(text)) for text in completions]
'''

_SOME = """def some(completions, prompts, **columns):
    return [None if "number 0?" in str(prompt) else 1.0 for prompt in prompts]
"""


def test_a_run_needs_no_standard_streams(recipe: Path) -> None:
    command = f"{sys.executable} -m rollplex.cli train {recipe} train.steps=1 run.directory={recipe.parent / 'run'}"
    assert subprocess.run(f"exec {command} <&- >&- 2>&-", shell=True, timeout=60, check=False).returncode == 0
    assert rows_so_far(recipe.parent / "run") == 1


def rows_so_far(directory: Path) -> int:
    return (directory / "metrics.jsonl").read_text().count("\n")
