"""What every test starts from: one thread, fixed seeds, a run directory of its own; and which tests run by default.

`gpu` tests are skipped without CUDA. `slow` and `peer` tests are left out unless --slow or --peer asks for them.
"""

import os

# Before torch is loaded, and inherited by worker processes: tiny tensors gain nothing from threads, and results that
# are compared bit for bit must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton: its kernels are tested on the CPU

torch.set_num_threads(1)

# Deadlines measure the machine, not the code; CI replays the same examples in every run.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

SEED = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests marked slow")
    parser.addoption("--peer", action="store_true", help="also run tests marked peer (compare with other libraries)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {name for name in ("slow", "peer") if not config.getoption(f"--{name}")}
    deselected = [item for item in items if left_out.intersection(mark.name for mark in item.iter_markers())]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if item not in deselected]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # libraries under test may use the global generator
    torch.manual_seed(SEED)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A path for one run's files; it does not exist yet, as for a user's first run."""
    return tmp_path / "run"
