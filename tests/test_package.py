"""The package as users get it: public surface, what importing it costs, the wheel, and the size of the reading path."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rollplex

ROOT = Path(__file__).parents[1]

PUBLIC = ["Config", "RollplexError", "__version__", "load_config"]

TORCH_FREE = [
    "rollplex",
    "rollplex.algo.reward",
    "rollplex.config",
    "rollplex.errors",
    "rollplex.phases.graph",
    "rollplex.pool",
    "rollplex.rollout.blocks",
    "rollplex.rollout.scheduler",
    "rollplex.types",
]

# A newcomer reads these, in this order, in ten minutes: a thousand lines is what ten minutes allow.
READING_PATH = ["loop.py", "step.py", "phases/graph.py", "phases/run.py", "algo/loss.py"]
READING_PATH_MAX_LINES = 1000


def run_python(*arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a fresh interpreter started outside the checkout, with only `path` added to its imports."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, f"{arguments} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def package_files(folder: Path) -> set[str]:
    """Every file of the package at `folder`, relative to it, caches left out."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel, built from a copy of the sources, has been installed without a network."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    # A copy: building in the checkout would leave build/ behind, and later builds would pick up deleted files from it.
    shutil.copytree(ROOT / "rollplex", source / "rollplex", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(work), str(source), cwd=work)
    (wheel,) = work.glob("rollplex-*.whl")
    target = work / "site"
    run_python(
        "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=work
    )  # fmt: skip
    return target


def test_public_surface_is_pinned() -> None:
    assert rollplex.__all__ == PUBLIC
    assert all(getattr(rollplex, name) is not None for name in PUBLIC)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_no_torch(module: str, tmp_path: Path) -> None:
    code = f"import sys, {module}; print(*{{'torch', 'transformers', 'triton'}}.intersection(sys.modules))"
    assert run_python("-c", code, cwd=tmp_path, path=ROOT).split() == []


def test_wheel_holds_every_file(installed: Path) -> None:
    files = package_files(installed / "rollplex")
    assert files == package_files(ROOT / "rollplex")
    assert "py.typed" in files


def test_wheel_imports_from_where_it_was_installed(installed: Path, tmp_path: Path) -> None:
    code = "import rollplex; print(rollplex.__version__, rollplex.__file__)"
    version, file = run_python("-c", code, cwd=tmp_path, path=installed).split(maxsplit=1)
    assert version == rollplex.__version__
    assert Path(file.strip()) == installed / "rollplex" / "__init__.py"


def test_wheel_metadata(installed: Path) -> None:
    (info,) = installed.glob("rollplex-*.dist-info")
    assert info.name == f"rollplex-{rollplex.__version__}.dist-info"
    assert (info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert "rollplex = rollplex.cli:main" in (info / "entry_points.txt").read_text()


def test_wheel_command_prints_help(installed: Path, tmp_path: Path) -> None:
    output = run_python(str(installed / "bin" / "rollplex"), "--help", cwd=tmp_path, path=installed)
    assert "train" in output
    assert "bench" in output


def test_reading_path_is_short() -> None:
    lines = {name: len((ROOT / "rollplex" / name).read_text().splitlines()) for name in READING_PATH}
    assert sum(lines.values()) <= READING_PATH_MAX_LINES, lines
