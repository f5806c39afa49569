#!/usr/bin/env python3
"""Writes docs/recipes.md: every field of a recipe, from rollplex/config.py itself. Run it after changing a field.

    python scripts/recipe_docs.py          # tests/test_docs.py fails while the committed page is another one

Types, limits and defaults are read from the pydantic models, meanings from the docstrings under the fields; a field
without one is an error. Knows no field by name.
"""

import json
import sys
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rollplex.config import Config, RewardFunction  # noqa: E402  (the checkout's, before any installed one)

PAGE = ROOT / "docs" / "recipes.md"
INTRO = """\
# Recipes

*Made by `scripts/recipe_docs.py` from `rollplex/config.py`; edit the docstrings there.*

A recipe is a TOML file that says what a run is. Two fields are required, `model.path` and `data.train`; every other one
has a default that works. [recipes/](../recipes/README.md) has whole ones.

```toml
[model]
path = "Qwen/Qwen2.5-VL-3B-Instruct"

[data]
train = "my/train.parquet"
answer_column = "answer"

[reward]
functions = ["exact_match"]
```

Overrides after the recipe change single fields, later ones last. A value is read as TOML, and what is not TOML as text,
so most strings need no quotes:

```bash
rollplex train recipes/geometry3k_3b.toml train.steps=200 rollout.group_size=8 run.directory=runs/short
rollplex train recipes/geometry3k_3b.toml 'rollout.stop_strings=["</answer>"]'
```

Where no weights are at hand, speed and memory can be measured with random ones. The checkpoint's config and tokenizer
are still needed:

```bash
rollplex train recipes/geometry3k_3b.toml --random-weights run.directory=runs/random
```

A field that does not exist, a value out of range and a combination that makes no sense end the run before anything is
loaded, with one line for each mistake. The resolved recipe is stored in the run directory. Batches, lengths and budgets
are in prompts, samples or tokens, times in seconds, as each field says.
"""
TYPE_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}
LIMITS = (("gt", "above"), ("ge", "from"), ("lt", "below"), ("le", "to"))


def page() -> str:
    """The whole page."""
    parts = [INTRO]
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type), name
        parts.append(table(f"[{name}]", section))
    parts.append(table("An entry of reward.functions", RewardFunction))
    return "\n".join(parts)


def table(title: str, section: type[BaseModel]) -> str:
    """One section: its docstring and its fields."""
    lines = [f"## {title}", "", text(section.__doc__), "", "| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no docstring in rollplex/config.py"
        cells = f"`{name}`", kind(field.annotation, field.metadata), default(field), text(field.description)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def kind(annotation: Any, metadata: list[Any]) -> str:
    """A type in words, with its limits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        nested = [extra.metadata if isinstance(extra, FieldInfo) else [extra] for extra in arguments[1:]]
        return kind(arguments[0], [*chain.from_iterable(nested), *metadata])
    if origin in (Union, UnionType):
        return ", or ".join(kind(argument, metadata) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if origin is tuple and Ellipsis not in arguments:
        return f"list of {len(arguments)}: {kind(arguments[0], [])}"
    if origin is tuple:
        return f"list of: {kind(arguments[0], [])}"
    if origin is dict:
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "entries"
    return " ".join([TYPE_NAMES[annotation], *limits(metadata)])


def limits(metadata: list[Any]) -> list[str]:
    """`from 0`, `to 1`, `above 0` ... in this order."""
    found = []
    for attribute, word in LIMITS:
        values = [getattr(item, attribute) for item in metadata if getattr(item, attribute, None) is not None]
        found += [f"{word} {value:g}" if isinstance(value, float) else f"{word} {value}" for value in values]
    return found


def default(field: FieldInfo) -> str:
    """The default as TOML; required and unset fields in words."""
    if field.default is PydanticUndefined:
        return "**required**"
    return "not set" if field.default is None else f"`{toml(field.default)}`"


def toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, RewardFunction):
        return json.dumps(value.function)
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value)


def text(docstring: str | None) -> str:
    """A docstring on one line; marks such as <image> as code, for Markdown takes them for tags."""
    line = " ".join((docstring or "").split())
    return line if "`<image>`" in line else line.replace("<image>", "`<image>`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
