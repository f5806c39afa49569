"""The command line: train a recipe, or run a bench. Errors raised on purpose end as one message, not a traceback."""

import os
import sys
from typing import Annotated

import typer

from rollplex.bench.cli import bench
from rollplex.config import load_config
from rollplex.errors import RollplexError

app = typer.Typer(
    help="RL post-training of vision-language models: each prompt computed once, every step exactly on-policy.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
app.add_typer(bench, name="bench")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A TOML file; recipes/ has some.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, as many as wanted.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Short for model.random_weights=true: to measure, not to learn.")
    ] = False,
) -> None:
    """Run a recipe, or go on with it where its run directory stands."""
    config = load_config(recipe, [*(overrides or ()), *(["model.random_weights=true"] if random_weights else [])])
    sys.path.insert(0, os.getcwd())  # as `python -m` does: a recipe may name a module of the present folder
    from rollplex import loop  # torch takes seconds to import: a wrong recipe is refused before

    summary = loop.train(config)
    if not summary.complete:
        typer.echo(f"stopped after step {summary.step}; the same command goes on from there", err=True)
        raise typer.Exit(130)


def main() -> None:
    """Entry point of `rollplex`."""
    _fill_standard_streams()
    try:
        app()
    except RollplexError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)


def _fill_standard_streams() -> None:
    """Started without standard streams, as some schedulers do, a process would give their numbers to its files."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one


if __name__ == "__main__":
    main()
