"""Claim: a run that is killed and resumed ends exactly like one that was left alone.

A tiny model is trained by `rollplex train` in a process of its own. That process is killed with SIGKILL at a random
moment, started again, and so on; then every bit of the last checkpoint, and every metric and sample, is compared with
an undisturbed run's.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import PIL.Image
import tomli_w
from safetensors import safe_open

from rollplex.testing import tiny_checkpoint

TIME_METRICS = ("phase/", "time/", "memory/", "tokens_per_s")
"""Metrics that say how long something took, or how much memory the machine used."""
GIVE_UP_S = 300.0
POLL_S = 0.02
LONGEST_STEP_S = 0.5
"""A step with its checkpoint takes less: the kill falls anywhere in it, or in the start of the next process."""


def run(kills: int = 3, steps: int = 12, seed: int | None = None) -> dict[str, object]:
    """Compare an undisturbed run with one that is killed `kills` times."""
    rng = random.Random(seed)
    with TemporaryDirectory() as folder:
        root = Path(folder)
        recipe = write_recipe(root, steps)
        run_to_end(recipe, root / "undisturbed")
        killed = [kill_once(recipe, root / "killed", rng, steps) for _ in range(kills)]
        run_to_end(recipe, root / "killed")
        differences = list(compare_runs(root / "undisturbed", root / "killed"))
    return {
        "bench": "resume",
        "steps": steps,
        "steps_logged_when_killed": killed,
        "equal": not differences,
        "differences": differences[:10],
    }


def write_recipe(root: Path, steps: int) -> Path:
    """A tiny checkpoint, 24 rows with none, one or two small images, and a recipe that saves at every step."""
    tiny_checkpoint(root / "model", seed=1)
    rng = np.random.default_rng(0)
    with (root / "train.jsonl").open("w", encoding="utf-8") as file:
        for row in range(24):
            names = [f"{row}-{image}.png" for image in range(row % 3)]
            for name in names:
                height, width = rng.integers(28, 120, 2)
                PIL.Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(root / name)
            prompt = "<image>" * len(names) + f"what is number {row}?"
            file.write(json.dumps({"prompt": prompt, "images": names, "answer": chr(97 + row % 5)}) + "\n")
    (root / "reward.py").write_text(_REWARD, encoding="utf-8")
    recipe = {
        "model": {"path": str(root / "model"), "dtype": "float32", "train_vision": True},
        "data": {"train": str(root / "train.jsonl"), "answer_column": "answer", "num_workers": 1},
        "rollout": {"group_size": 4, "max_new_tokens": 12, "temperature": 1.2},
        "algo": {"kl_coefficient": 0.02},
        "reward": {"functions": [f"{root / 'reward.py'}:letters"], "num_workers": 1},
        "train": {
            "steps": steps,
            "prompts_per_step": 5,
            "learning_rate": 1e-3,
            "schedule": "cosine",
            "warmup_steps": 2,
        },
        "run": {"device": "cpu", "checkpoint_every_steps": 1, "tensorboard": False},
    }
    path = root / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe), encoding="utf-8")
    return path


def run_to_end(recipe: Path, directory: Path) -> None:
    """Train to the last step; raises if the run fails."""
    result = subprocess.run(_command(recipe, directory), capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"the run failed with exit code {result.returncode}:\n{result.stderr[-2000:]}")


def kill_once(recipe: Path, directory: Path, rng: random.Random, steps: int) -> int:
    """Start or resume the run, kill it at a random moment of a random step, and return the steps logged by then."""
    metrics = directory / "metrics.jsonl"
    target = min(_last_step(metrics) + rng.randint(1, 3), steps - 1)
    with subprocess.Popen(
        _command(recipe, directory), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + GIVE_UP_S
        while process.poll() is None and _last_step(metrics) < target:
            if time.monotonic() > deadline:
                raise RuntimeError(f"no step {target} within {GIVE_UP_S:.0f} s")
            time.sleep(POLL_S)
        time.sleep(rng.uniform(0.0, LONGEST_STEP_S))
        os.kill(process.pid, signal.SIGKILL)
    return _last_step(metrics)


def _last_step(metrics: Path) -> int:
    return max((int(str(row["step"])) for row in read_rows(metrics)), default=0)


def compare_runs(one: Path, other: Path) -> Iterator[str]:
    """What differs between two finished runs: checkpoints bit for bit, metrics (times aside) and samples exactly."""
    names = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (one, other)]
    if names[0] != names[1]:
        yield f"checkpoints: {names[0]} and {names[1]}"
        return
    for path in sorted((one / "checkpoints").rglob("*")):
        twin = other / path.relative_to(one)
        if path.suffix == ".safetensors":
            yield from _compare_tensors(path, twin)
        elif path.is_file() and path.read_bytes() != twin.read_bytes():
            yield str(path.relative_to(one))
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [[_without_times(row) for row in read_rows(run / name)] for run in (one, other)]
        if not rows[0]:
            yield f"{name} is empty"
        if rows[0] != rows[1]:
            yield name


def read_rows(path: Path) -> list[dict[str, object]]:
    """The whole lines of a JSONL file; none if it is not there."""
    if not path.exists():
        return []
    return [
        json.loads(line) for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def _without_times(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if not name.startswith(TIME_METRICS)}


def _compare_tensors(path: Path, twin: Path) -> Iterator[str]:
    with safe_open(path, "pt") as mine, safe_open(twin, "pt") as theirs:
        if sorted(mine.keys()) != sorted(theirs.keys()):
            yield f"{path.name}: other tensors"
            return
        for name in mine.keys():  # noqa: SIM118 - not a dict
            if mine.get_tensor(name).numpy().tobytes() != theirs.get_tensor(name).numpy().tobytes():
                yield f"{path.name}: {name}"


def _command(recipe: Path, directory: Path) -> list[str]:
    return [sys.executable, "-m", "rollplex.cli", "train", str(recipe), f'run.directory="{directory}"']


_REWARD = '''"""A reward with signal for a random model: the share of letters."""


def letters(prompts, completions, **columns):
    return [sum(character.isalpha() for character in text) / max(len(text), 1) for text in completions]
'''
