"""The documentation says what is there: generated pages, links, files, symbols, fields, commands and recipes."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import PIL.Image
import pytest
import typer.main

from rollplex.algo import builtin_rewards
from rollplex.algo.reward import call_reward
from rollplex.cli import app
from rollplex.config import Config, load_config, parse_config
from rollplex.data.prompts import PromptSpec, parse
from rollplex.data.rows import RawRow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rollplex"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "recipes/README.md", ROOT / "examples/README.md"]
RECIPES = sorted(ROOT.glob("recipes/**/*.toml"))

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
MODULE_SYMBOL = re.compile(r"((?:[\w-]+/)*[\w-]+\.py):(\w+)")
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
USERS_FILES = re.compile(r"(my|my_\w+|geometry3k|path|runs|file)\b")
"""What stands for the reader's own files."""


def read(page: Path) -> str:
    if not page.exists() and page.name == "README.md" and page.parent == ROOT:
        pytest.skip("README.md is not written yet")
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Bodies of the fenced blocks in this language."""
    return [body for found, body in FENCE.findall(text) if found == language]


def spans(text: str) -> list[str]:
    """Inline code, outside fenced blocks."""
    return CODE.findall(FENCE.sub("", text))


@pytest.fixture(scope="module")
def recipe_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_docs", ROOT / "scripts/recipe_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_recipe_page_is_what_the_script_makes(recipe_docs: ModuleType) -> None:
    committed = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    assert committed == recipe_docs.page(), "run python scripts/recipe_docs.py"


def test_recipe_page_lists_every_field() -> None:
    text = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    for name, section in Config.model_fields.items():
        _, _, rest = text.partition(f"## [{name}]\n")
        table = rest.partition("\n## ")[0]
        for field in section.annotation.model_fields:  # type: ignore[union-attr]
            assert f"| `{field}` |" in table, f"{name}.{field}"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_parse(recipe: Path) -> None:
    config = load_config(recipe)
    assert config.model.path and config.data.train


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", read(page))
    for target in (first or second for first, second in LINK.findall(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page.name} links to {target}"


def anchors(text: str) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_and_symbols_exist(page: Path) -> None:
    missing = [span for span in spans(read(page)) if not names_something(span)]
    assert not missing, f"{page.name} names what does not exist: {missing}"


def names_something(span: str) -> bool:
    """False for a file, a symbol of a file, a class's attribute, a module or a recipe field that does not exist."""
    if USERS_FILES.match(span):
        return True
    if symbol := MODULE_SYMBOL.fullmatch(span):
        file = find(symbol[1])
        return file is not None and symbol[2] in definitions(file)
    if looks_like_path(span):
        return find(span) is not None
    if DOTTED.fullmatch(span):
        return names_dotted(span)
    return True


def looks_like_path(span: str) -> bool:
    """A file of the package or the repository, rather than the name of a user's file or a package elsewhere."""
    if not PATH.fullmatch(span):
        return False
    first = span.split("/")[0]
    own = (ROOT / first).is_dir() or (PACKAGE / first).is_dir()
    return ("/" in span and own) or span.endswith((".py", ".svg", ".md"))


def find(path: str) -> Path | None:
    """A path of the repository, of the package, or a bare file name that is somewhere in the package."""
    for base in (ROOT, PACKAGE, ROOT / "docs"):
        if (base / path).exists():
            return base / path
    return next(PACKAGE.rglob(path), None) if "/" not in path else None


def names_dotted(name: str) -> bool:
    """Fields (`train.steps`), phases (`policy.suffix`), attributes (`Trace.write`), modules and what is in them."""
    first, second, *_ = name.split(".")
    if first == "rollplex":
        return resolves(name)
    if first in Config.model_fields or first in ("policy", "vision", "reference"):
        section = Config.model_fields.get(first)
        fields = section.annotation.model_fields if section else {}  # type: ignore[union-attr]
        return second in fields or name in phases()
    if first[0].isupper():
        owners = [members for module in PACKAGE.rglob("*.py") for owner, members in classes(module) if owner == first]
        return any(second in members for members in owners)
    return True  # a library's


def resolves(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        file = ROOT.joinpath(*parts[:length])
        module = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
        if module.exists():
            rest = parts[length:]
            return not rest or rest[0] in definitions(module)
    return False


def phases() -> set[str]:
    """Names of phases: the table in step.py's docstring, and the names given to Graph.add."""
    source = (PACKAGE / "step.py").read_text(encoding="utf-8")
    listed = re.findall(r"^    ([a-z_.]+) +per (?:step|pack|group|sample)", source, re.MULTILINE)
    return {*listed, *re.findall(r"add\(\s*f?\"([a-z_.]+)", source)}


def definitions(module: Path) -> set[str]:
    """Names defined at the top level of a module, or imported there."""
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        names |= set(defined(node))
    return names


def classes(module: Path) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name, {name for item in node.body for name in defined(item)}


def defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (alias.asname or alias.name for alias in node.names)


@pytest.mark.parametrize("name", ["step.py", "phases/run.py:Progress", "train.steps", "policy.suffix", "Trace.write"])
def test_names_that_exist_are_found(name: str) -> None:
    assert names_something(name)


@pytest.mark.parametrize(
    "name", ["gone.py", "models/gone.py", "step.py:Gone", "train.gone", "policy.gone", "Trace.gone"]
)
def test_names_that_do_not_exist_are_found_out(name: str) -> None:
    assert not names_something(name)


def commands(text: str) -> Iterator[list[str]]:
    """Lines of shell blocks, and inline code that runs rollplex or a script."""
    for body in (*blocks(text, "bash"), *blocks(text, "sh"), *blocks(text, "console")):
        for line in body.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words:
                yield words
    for span in spans(text):
        if re.match(r"(rollplex \w|scripts/\w+$|python [\w/]+\.py)", span) and "|" not in span:
            yield shlex.split(span)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_can_be_run(page: Path) -> None:
    for words in commands(read(page)):
        if words[0] == "rollplex":
            check_rollplex(words[1:])
        elif words[0].startswith(("scripts/", ".ci/")):
            assert os.access(ROOT / words[0], os.X_OK), words
        elif words[0] == "python" and words[1].endswith(".py") and not USERS_FILES.match(words[1]):
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            assert all(f'"{word}"' in source for word in words[2:] if word.startswith("--")), words


def check_rollplex(words: list[str]) -> None:
    """The command exists, takes these arguments, and a recipe of ours takes these overrides."""
    command: Any = typer.main.get_command(app)
    arguments = list(words)
    while hasattr(command, "commands") and arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        assert name in command.commands, f"rollplex {' '.join(words)}: there is no command {name}"
        command = command.commands[name]
    if "--help" in arguments or words == arguments:
        return
    given = [word for word in arguments if word not in ("RECIPE.toml", "[section.field=value", "...]")]
    if command.name == "train" and not given:
        return
    given_values = command.make_context(command.name, list(arguments)).params
    if command.name == "train" and (ROOT / given_values["recipe"]).exists():
        load_config(ROOT / given_values["recipe"], given_values["overrides"] or ())


def test_a_wrong_command_is_found_out() -> None:
    with pytest.raises(AssertionError, match="no command gone"):
        check_rollplex(["gone"])


def test_rows_of_other_trainers_need_the_lines_that_the_page_says(tmp_path: Path) -> None:
    section = read(ROOT / "docs/data.md").partition("## Formats of other trainers")[2].partition("\n## ")[0]
    rows, lines = blocks(section, "json"), blocks(section, "toml")
    assert len(rows) == len(lines) == 3
    PIL.Image.new("RGB", (60, 40), "red").save(tmp_path / "triangle.png")
    for row, recipe in zip(rows, lines, strict=True):
        values: dict[str, Any] = {"model": {"path": "tiny"}, **tomllib.loads(recipe)}
        config = parse_config({**values, "data": {"train": "rows", **values["data"]}})
        stored = RawRow(json.dumps(json.loads(row)).encode(), "docs/data.md", str(tmp_path))
        parsed = parse(PromptSpec.from_config(config), stored)
        assert parsed.images == (str(tmp_path / "triangle.png"),)
        assert parsed.columns["answer"] == "3"


def test_reward_functions_of_the_page_work(tmp_path: Path) -> None:
    text = read(ROOT / "docs/rewards.md")
    (tmp_path / "my_rewards.py").write_text("\n".join(blocks(text, "python")), encoding="utf-8")

    def scores(function: str, **kwargs: Any) -> Sequence[object]:
        name, columns = f"{tmp_path}/my_rewards.py:{function}", {"answer": "3", "index": 0}
        return call_reward(name, kwargs, "Find x.", ["3 ", "four"], [[1], [2]], columns)

    assert scores("correct") == [1.0, 0.0]
    assert scores("short", limit=3) == [1.0, 0.0]


def test_reward_page_lists_the_built_ins() -> None:
    table = read(ROOT / "docs/rewards.md").partition("| Name | 1 where |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(builtin_rewards.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_lines_parse(page: Path) -> None:
    for block in blocks(read(page), "toml"):
        values = tomllib.loads(block)
        required: dict[str, dict[str, Any]] = {"model": {"path": "tiny"}, "data": {"train": "rows"}}
        merged = {name: {**required.get(name, {}), **values.get(name, {})} for name in {*required, *values}}
        parse_config(merged)


def test_the_step_of_the_architecture_page_is_what_the_code_does() -> None:
    text = read(ROOT / "docs/architecture.md")
    program, printed = blocks(text, "python")[0], blocks(text, "text")[0]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


def test_the_picture_is_plain_svg() -> None:
    text = (ROOT / "docs/idea.svg").read_text(encoding="utf-8")
    assert "<script" not in text and "@import" not in text and "@font-face" not in text
    outside = {url for url in re.findall(r"https?://[^\"]+", text) if url != "http://www.w3.org/2000/svg"}
    assert not outside and "<title" in text and "<desc" in text
