"""`rollplex bench NAME`: each prints what it found as one JSON object, on the last line."""

import json
from typing import Annotated

import typer

bench = typer.Typer(help="Check a claim on this machine; the last line is one JSON object.", no_args_is_help=True)

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="float32 or bfloat16.")]


@bench.command()
def parity(new_tokens: int = 32, device: Device = "cpu", dtype: Dtype = "float32") -> None:
    """Logits and greedy continuations against transformers."""
    from rollplex.bench import parity as claim

    _print(claim.run(new_tokens, device, dtype))


@bench.command()
def exactness(steps: int = 5, device: Device = "cpu", dtype: Dtype = "float32") -> None:
    """Serial against overlapped, bit for bit; gradients against transformers and autograd."""
    from rollplex.bench import exactness as claim

    _print(claim.run(steps, device, dtype))


@bench.command()
def resume(kills: int = 3, steps: int = 12, seed: int | None = None) -> None:
    """A run killed at random moments and resumed, against an undisturbed one."""
    from rollplex.bench import resume as claim

    _print(claim.run(kills, steps, seed))


@bench.command()
def forwards(group: int = 8, device: Device = "cpu") -> None:
    """How often a prefix is really computed."""
    from rollplex.bench import forwards as claim

    _print(claim.run(group, device))


@bench.command()
def load(
    model: Annotated[str, typer.Option(help="3b, 7b, 32b or 72b: shapes of Qwen2.5-VL; or tiny.")] = "3b",
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    shard_gb: Annotated[float, typer.Option(help="Largest weight file, GB.")] = 5.0,
    directory: Annotated[str | None, typer.Option(help="Where to put the checkpoint, which is removed again.")] = None,
) -> None:
    """Weights from disk to device: speed beside that of reading alone, and the host memory that it takes."""
    from rollplex.bench import load as claim

    _print(claim.run(model, device, dtype, shard_gb, directory))


def _print(result: dict[str, object]) -> None:
    typer.echo(json.dumps(result))
