"""Run directories: what they hold, whom they refuse, and that no crash costs a checkpoint or leaves a wrong row."""

import json
import logging
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex import rundir
from rollplex.config import Config, load_config, parse_config
from rollplex.errors import CheckpointError, ConfigError
from rollplex.rundir import CONFIG, LOCK, MANIFEST, RunDirectory


def recipe(**sections: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "run": {}}
    for name, fields in sections.items():
        values.setdefault(name, {}).update(fields)
    values["run"].setdefault("tensorboard", False)
    return parse_config(values)


def begin(path: Path, resume: bool = True, **sections: dict[str, Any]) -> RunDirectory:
    return RunDirectory.open(path, recipe(**sections), resume)


def save(run: RunDirectory, step: int, content: str = "weights") -> None:
    with run.new_checkpoint(step) as directory:
        (directory / "model").mkdir()
        (directory / "model" / "part.bin").write_text(f"{content} {step}")
        (directory / "state.json").write_text(str(step))


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---- the recipe


def test_the_stored_recipe_reads_back_equal(run_dir: Path) -> None:
    functions = [
        {"function": "exact_match"},
        {"function": "r.py:f", "weight": 0.5, "kwargs": {"a": [1, {"b": "ü\n\"'"}]}},
    ]
    config = recipe(
        train={"learning_rate": 1e-7, "betas": [0.9, 0.95]}, rollout={"stop_strings": ["\t</answer>"]},
        data={"system_prompt": 'a "b"\n\\c\x01 é'}, reward={"functions": functions},
    )  # fmt: skip
    with RunDirectory.open(run_dir, config, True):
        assert load_config(run_dir / CONFIG) == config


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(1e-30, 1e30), st.integers(0, 2**31 - 1))
def test_any_text_and_number_survives_toml(text: str, rate: float, seed: int) -> None:
    config = recipe(data={"system_prompt": text}, train={"learning_rate": rate}, run={"seed": seed})
    assert parse_config(tomllib.loads(rundir._to_toml(config).decode())) == config


@pytest.mark.parametrize("value", [None, object(), {"nested": None}])
def test_a_recipe_that_toml_cannot_hold_is_refused(run_dir: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions"):
        begin(run_dir, reward={"functions": [{"function": "f:g", "kwargs": {"x": value}}]})


# ---- opening


def test_a_run_goes_on_or_is_refused_by_run_resume(run_dir: Path) -> None:
    with begin(run_dir, resume=False) as run:
        assert run.newest_checkpoint() is None
    with begin(run_dir, resume=False) as run:  # no checkpoint yet: nothing to lose
        save(run, 1)
    with pytest.raises(ConfigError, match=r"run\.directory.*another directory, or run\.resume=true"):
        begin(run_dir, resume=False)
    with begin(run_dir) as run:
        newest = run.newest_checkpoint()
        assert newest is not None
        assert (newest.step, newest.path) == (1, run_dir / "checkpoints" / "step-000001")


def test_fields_that_enter_the_mathematics_may_not_change(run_dir: Path) -> None:
    with begin(run_dir, train={"steps": 5}, model={"dtype": "float32"}) as run:
        save(run, 5)
    with pytest.raises(ConfigError) as caught:
        begin(
            run_dir, model={"dtype": "bfloat16"}, rollout={"group_size": 4}, run={"seed": 3}, eval={"temperature": 1.0}
        )
    message = str(caught.value)
    assert "model.dtype: was 'float32', is 'bfloat16'" in message
    assert "rollout.group_size: was 8, is 4" in message
    assert "run.seed: was 0, is 3" in message
    assert "eval." not in message
    assert "train.steps" not in message
    free: dict[str, dict[str, Any]] = {
        "train": {"steps": 9, "microbatch_tokens": 64}, "run": {"runner": "serial"}, "eval": {"max_prompts": 3},
        "data": {"num_workers": 7, "prefetch_steps": 1}, "reward": {"num_workers": 5}, "model": {"dtype": "float32"},
    }  # fmt: skip
    with RunDirectory.open(run_dir, recipe(**free), True):
        assert load_config(run_dir / CONFIG).train.steps == 9


def test_every_field_free_to_change_exists() -> None:
    fields = {f"{section}.{field}" for section, part in recipe() for field in type(part).model_fields}
    sections = set(Config.model_fields)
    assert fields | sections >= rundir.FREE_TO_CHANGE


def test_a_stored_recipe_that_cannot_be_read_is_refused(run_dir: Path) -> None:
    with begin(run_dir) as run:
        save(run, 1)
    (run_dir / CONFIG).write_text("no toml")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read"):
        begin(run_dir)


def test_a_directory_of_other_files_is_refused_and_left_alone(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / CONFIG).write_text("mine")
    with pytest.raises(ConfigError, match=r"config\.toml.*no run directory"):
        begin(run_dir)
    assert names(run_dir) == [CONFIG]
    assert (run_dir / CONFIG).read_text() == "mine"


def test_a_jobs_own_output_file_is_no_reason_to_refuse(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "slurm-17.out").write_text("starting")
    begin(run_dir).close()
    (run_dir / "notes.md").write_text("a run directory may get other files later")
    begin(run_dir).close()


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_file_in_the_way_is_refused(run_dir: Path, below: str) -> None:
    run_dir.write_text("a file")
    with pytest.raises(ConfigError, match=r"run\.directory = .*run'?.* a file"):
        begin(run_dir / below if below else run_dir)


def test_a_file_system_that_cannot_be_written_is_refused(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ConfigError, match=r"run\.directory = .*Read-only file system.*another directory"):
        begin(run_dir)


def test_too_little_space_is_refused_and_the_next_checkpoint_counts(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with begin(run_dir) as run:
        save(run, 1, content="x" * 5000)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(rundir.MIN_FREE_BYTES + 4000))
    with pytest.raises(ConfigError, match=r"run\.directory = .*GB are free"):
        begin(run_dir)
    begin(run_dir.parent / "other").close()


def test_only_one_process_writes_and_a_kill_lets_go(run_dir: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(rundir.__file__).parents[1])!r})\n" + _HOLD
    with subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ConfigError, match=rf"run\.directory = .*in use by process {holder.pid} on "):
            begin(run_dir)
        holder.kill()
    begin(run_dir).close()


_HOLD = """
import time
from pathlib import Path
from rollplex.config import parse_config
from rollplex.rundir import RunDirectory
with RunDirectory.open(sys.argv[1], parse_config({"model": {"path": "m"}, "data": {"train": "t"}}), True):
    print("open", flush=True)
    time.sleep(60)
"""


# ---- logs


def test_rows_are_valid_json_whatever_they_hold(run_dir: Path) -> None:
    with begin(run_dir) as run:
        run.log(1, "train", {"a": math.nan, "b": -math.inf, "c": 1.5, "n": 3})
        run.log_samples(1, [{"completion": "\ud800 ü\u2028\x85\n", "rewards": {"r": math.inf}, "image": b"\x00"}])
        run.log_bad_rows("train", [("t.jsonl, row 3", "no image")])
        run.log_bad_rows("eval", [("e.jsonl, row 1", "no image")])
        run.log_bad_rows("train", [("t.jsonl, row 4", "too long")])
    assert rows(run_dir / "metrics.jsonl") == [{"step": 1, "kind": "train", "a": None, "b": None, "c": 1.5, "n": 3}]
    (sample,) = rows(run_dir / "samples.jsonl")
    assert sample["completion"] == "\ud800 ü\u2028\x85\n"
    assert sample["rewards"] == {"r": None}
    assert [(row["split"], row["source"]) for row in rows(run_dir / "bad_rows.jsonl")] == [
        ("eval", "e.jsonl, row 1"),
        ("train", "t.jsonl, row 4"),
    ]


@given(st.lists(st.integers(0, 6), max_size=12).map(sorted), st.integers(0, 6), st.integers(0, 30))
def test_rewind_keeps_the_rows_of_done_steps(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], step: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("rewind") / "run"
    with begin(path) as run:
        for number in steps:
            run.log(number, "train", {"loss": 0.5})
        if steps:
            file = path / "metrics.jsonl"
            whole = file.read_bytes()
            file.write_bytes(whole[: len(whole) - min(cut, 40)])  # a kill in the middle of the last row
        run.rewind(step)
        run.log(step + 1, "train", {"loss": 0.25})
    expected = [number for number in (steps[:-1] if cut else steps) if 0 < step >= number]
    assert [row["step"] for row in rows(path / "metrics.jsonl")] == [*expected, step + 1]
    assert names(path) == [CONFIG, "metrics.jsonl", LOCK]


def test_a_full_disk_is_named(run_dir: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with begin(run_dir) as run:
        (run_dir / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl could not be written: No space left"):
            run.log(1, "train", {"loss": 1.0})


def test_tensorboard_forgets_what_a_crash_undid(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((1, 1.0), (3, 2.0)):  # the second process goes on from step 2
        with begin(run_dir, run={"tensorboard": True}) as run:
            run.rewind(first - 1)
            for step in range(first, first + 4):
                run.log(step, "train", {"loss": value})
            run.log(first, "eval", {"eval/reward/mean": value})
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip
    assert "eval/reward/mean" in events.Tags()["scalars"]


# ---- checkpoints


def test_the_newest_checkpoints_are_kept(run_dir: Path) -> None:
    with begin(run_dir, run={"keep_checkpoints": 2}) as run:
        for step in (1, 2, 1_000_000, 999_999_9):
            save(run, step)
            assert len(names(run_dir / "checkpoints")) <= 2
        assert names(run_dir / "checkpoints") == ["step-1000000", "step-9999999"]
        manifest = json.loads((run_dir / "checkpoints" / "step-9999999" / MANIFEST).read_text())
        assert manifest == {"files": {"model/part.bin": 15, "state.json": 7}}
        assert run.describe() == [f"checkpoint: {run_dir / 'checkpoints' / 'step-9999999'}"]


def test_a_failed_checkpoint_leaves_the_earlier_ones(run_dir: Path) -> None:
    with begin(run_dir, run={"keep_checkpoints": 1}) as run:
        save(run, 1)
        with pytest.raises(KeyboardInterrupt), run.new_checkpoint(2):
            raise KeyboardInterrupt
        with pytest.raises(CheckpointError, match=r"step-000002 could not be written.*No space"), run.new_checkpoint(2):
            raise OSError(28, "No space left on device")
        assert names(run_dir / "checkpoints") == ["step-000001"]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "model" / "part.bin").unlink(), "model/part.bin is missing"),
        (lambda path: os.truncate(path / "state.json", 0), "state.json has 0 bytes instead of 1"),
        (lambda path: (path / MANIFEST).unlink(), f"{MANIFEST} is missing"),
        (lambda path: (path / MANIFEST).write_text("[]"), f"{MANIFEST} is not readable"),
        (lambda path: (path / MANIFEST).write_text('{"files": {'), f"{MANIFEST} is not readable"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    run_dir: Path, caplog: pytest.LogCaptureFixture, damage: Any, words: str
) -> None:
    with begin(run_dir) as run:
        save(run, 2)
        save(run, 4)
    damage(run_dir / "checkpoints" / "step-000004")
    with caplog.at_level(logging.WARNING), begin(run_dir) as run:
        newest = run.newest_checkpoint()
        assert newest is not None
        assert newest.step == 2
        assert "step-000004" in caplog.text
        assert caplog.text.count(words) == 1
        run.rewind(2)
        save(run, 3)
        assert names(run_dir / "checkpoints") == ["damaged-step-000004", "step-000002", "step-000003"]


def test_only_damaged_checkpoints_do_not_begin_a_run_anew(run_dir: Path) -> None:
    with begin(run_dir) as run:
        run.log(1, "train", {"loss": 1.0})
        save(run, 1)
    (run_dir / "checkpoints" / "step-000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001 is damaged: state\.json is missing"):
        begin(run_dir)
    with pytest.raises(ConfigError):
        begin(run_dir, resume=False)
    assert len(rows(run_dir / "metrics.jsonl")) == 1


# ---- crashes

_RUN = '''
import json, os, sys, time
from pathlib import Path
from rollplex.config import parse_config
from rollplex.rundir import RunDirectory

OPTIONS = {"tensorboard": False, "keep_checkpoints": 1}
CONFIG = parse_config({"model": {"path": "m"}, "data": {"train": "t"}, "run": OPTIONS})

def content(step):
    return f"weights of step {step} " * 500

def newest(run):
    checkpoint = run.newest_checkpoint()
    if checkpoint is None:
        return 0
    assert (checkpoint.path / "model" / "a.bin").read_text() == content(checkpoint.step), checkpoint
    return checkpoint.step

def live(path, steps, done=lambda step: None):
    """A run: go on from the newest checkpoint, log, save at every step, announce."""
    with RunDirectory.open(path, CONFIG, True) as run:
        start = newest(run)
        run.rewind(start)
        for step in range(start + 1, steps + 1):
            run.log(step, "train", {"loss": 1.0 / step})
            run.log_samples(step, [{"sample": index} for index in range(3)])
            with run.new_checkpoint(step) as directory:
                (directory / "model").mkdir()
                with (directory / "model" / "a.bin").open("w") as file:
                    for piece in (content(step)[:100], content(step)[100:]):
                        file.write(piece)
                        file.flush()
                        sys.audit("piece")
            done(step)
        if start == steps and steps > 1:  # the same step once more takes the place of the old one
            with run.new_checkpoint(steps) as directory:
                (directory / "model").mkdir()
                (directory / "model" / "a.bin").write_text(content(steps))

def inspect(path, steps_at_least):
    """What a crash left: a whole checkpoint no older than the last announced, and exactly its rows."""
    with RunDirectory.open(path, CONFIG, True) as run:
        step = newest(run)
        assert step >= steps_at_least, (step, steps_at_least)
        run.rewind(step)
        metrics = path / "metrics.jsonl"
        logged = [json.loads(line)["step"] for line in metrics.open()] if metrics.exists() else []
        assert logged == list(range(1, step + 1)), logged
        samples = path / "samples.jsonl"
        logged = [json.loads(line)["step"] for line in samples.open()] if samples.exists() else []
        assert logged == [number for number in range(1, step + 1) for _ in range(3)], logged
        folder = path / "checkpoints"
        found = sorted(os.listdir(folder)) if folder.exists() else []
        assert set(found) <= {f"step-{step:06d}", f"step-{step - 1:06d}"}, found  # killed before the old one went
    return step
'''

_EVERY_POINT = (
    _RUN
    + '''
WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate", "piece"}
os.fsync = lambda descriptor: sys.audit("piece")  # a killed process loses nothing without it, and disks are slow

def crash_before(number, action):
    """Run `action` in a child that vanishes before its number-th change of the file system; whether it was reached."""
    child = os.fork()
    if child == 0:
        seen = 0
        def count(event, arguments):
            nonlocal seen
            seen += event in WRITES
            if seen > number:
                os._exit(9)
        sys.addaudithook(count)
        action()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), code
    return code == 9

root = Path(sys.argv[1])
announced = os.open(root / "announced", os.O_RDWR | os.O_CREAT)
points = 0
for begun in (0, 1, 2):  # a first start; a resumed run; a checkpoint of the same step again
    number = 0
    while True:
        path = root / f"{begun}-{number}"
        if begun:
            live(path, begun)
        os.pwrite(announced, b"%d" % begun, 0)
        announce = lambda step: os.pwrite(announced, b"%d" % step, 0)
        crashed = crash_before(number, lambda: live(path, min(begun + 1, 2), announce))
        inspect(path, int(os.pread(announced, 9, 0)))
        live(path, 3)
        assert inspect(path, 3) == 3
        if not crashed:
            break
        number += 1
    points += number
print(points)
'''
)

_LIVE = _RUN + "\nlive(Path(sys.argv[1]), 10**6, lambda step: print(step, flush=True))\n"


def run_script(code: str, *arguments: str) -> subprocess.Popen[str]:
    setup = f"import sys; sys.path.insert(0, {str(Path(rundir.__file__).parents[1])!r})\n"
    return subprocess.Popen(
        [sys.executable, "-c", setup + code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_crash_at_any_point_leaves_the_last_good_checkpoint_and_its_rows(tmp_path: Path) -> None:
    with run_script(_EVERY_POINT, str(tmp_path)) as process:
        output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert int(output) > 60  # points at which it crashed


def test_kills_at_random_moments(run_dir: Path) -> None:
    rng = random.Random(1)
    announced = 0
    for _ in range(4):
        with run_script(_LIVE, str(run_dir)) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first, process.communicate()[1]
            assert int(first) > announced
            try:
                process.wait(timeout=rng.uniform(0.0, 0.3))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            announced = int((first + process.stdout.read()).splitlines()[-1])
        code = _RUN + "\nprint(inspect(Path(sys.argv[1]), int(sys.argv[2])))\n"
        with run_script(code, str(run_dir), str(announced)) as process:
            output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        announced = int(output)
