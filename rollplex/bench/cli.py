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


Model = Annotated[
    str, typer.Option(help="3b, 7b, 32b or 72b: random weights of Qwen2.5-VL's shapes; tiny; a checkpoint.")
]


@bench.command()
def decode(
    model: Model = "7b",
    batch: Annotated[list[int] | None, typer.Option(help="Samples decoded together; may be given again.")] = None,
    group: Annotated[int, typer.Option(help="Samples of a prompt.")] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 8192,
    suffix: Annotated[int, typer.Option(help="Tokens that each sample has already.")] = 1024,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 50,
    device: Device = "auto",
) -> None:
    """Decode steps against the bandwidth of memory, kernel by kernel, with and without shared prefixes."""
    from rollplex.bench import decode as claim

    _print(claim.run(model, batch or [8, 32, 64, 128], group, prefix, suffix, steps, device))


@bench.command()
def prefill(
    model: Model = "7b",
    tokens: Annotated[int, typer.Option(help="Prefix tokens of the text prompt.")] = 8192,
    images: Annotated[int, typer.Option(help="Images through the vision tower at once.")] = 8,
    pixels: Annotated[int, typer.Option(help="Side of each image, pixels.")] = 896,
    device: Device = "auto",
) -> None:
    """Prefix and vision tower against the rate of matrix products."""
    from rollplex.bench import prefill as claim

    _print(claim.run(model, tokens, images, pixels, device))


@bench.command()
def generate(
    model: Model = "3b",
    prompts: int = 8,
    images: Annotated[int, typer.Option(help="Images of each prompt.")] = 8,
    pixels: Annotated[int, typer.Option(help="Side of each image, pixels.")] = 896,
    group: Annotated[int, typer.Option(help="Samples of a prompt.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each sample, if lengths are fixed.")] = 512,
    lengths: Annotated[str, typer.Option(help="fixed or lognormal.")] = "fixed",
    longest: Annotated[int, typer.Option(help="Longest of log-normal lengths.")] = 4096,
    device: Device = "auto",
) -> None:
    """A whole rollout, from pixel values in host memory to the last token."""
    from rollplex.bench import generate as claim

    _print(claim.run(model, prompts, images, pixels, group, new_tokens, lengths, longest, device))


@bench.command()
def train(
    model: Model = "7b",
    prefix: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8192,
    group: Annotated[int, typer.Option(help="Samples of the prompt.")] = 8,
    suffix: Annotated[int, typer.Option(help="Tokens of each sample.")] = 512,
    recompute: Annotated[str, typer.Option(help="Of suffixes: none or layer.")] = "none",
    unshared: Annotated[bool, typer.Option(help="Also compute a whole sequence per sample.")] = True,
    groups: Annotated[int, typer.Option(help="Prompts whose samples share a pass.")] = 1,
    device: Device = "auto",
) -> None:
    """Gradients of a group against the rate of matrix products, and against computing its prompt for every sample."""
    from rollplex.bench import train as claim

    _print(claim.run(model, prefix, group, suffix, recompute, unshared, device, groups))


@bench.command()
def step(
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, as of a recipe.")] = None,
    model: Model = "3b",
    prompts: int = 8,
    images: Annotated[int, typer.Option(help="Images of each prompt.")] = 8,
    pixels: Annotated[int, typer.Option(help="Side of each image, pixels.")] = 896,
    group: Annotated[int, typer.Option(help="Samples of each prompt.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each sample.")] = 512,
    train_vision: Annotated[bool, typer.Option(help="Train the vision tower as well.")] = False,
    reference: Annotated[bool, typer.Option(help="With a KL term to a frozen reference.")] = True,
    unshared: Annotated[bool, typer.Option(help="Also compute a group's prompt for every sample.")] = False,
    steps: Annotated[int, typer.Option(help="Timed steps.")] = 3,
    device: Device = "auto",
) -> None:
    """A whole training step, by phase, against the rates of products and of memory."""
    from rollplex.bench import step as claim

    shape = claim.Shape(prompts, images, pixels, group, new_tokens)
    _print(claim.run(model, shape, train_vision, reference, unshared, steps, overrides or [], device))


@bench.command()
def gradients(
    model: Model = "3b",
    layers: Annotated[int, typer.Option(help="Decoder layers that are left of it.")] = 4,
    prompts: int = 3,
    images: Annotated[int, typer.Option(help="Images of each prompt.")] = 4,
    pixels: Annotated[int, typer.Option(help="Side of each image, pixels.")] = 448,
    group: Annotated[int, typer.Option(help="Samples of each prompt.")] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each sample.")] = 128,
    device: Device = "auto",
) -> None:
    """Error of a bfloat16 step's gradient beside that of the plain bfloat16 computation."""
    from rollplex.bench import gradients as claim

    _print(claim.run(model, layers, prompts, images, pixels, group, new_tokens, device))


@bench.command()
def learn(
    size: Annotated[str, typer.Option(help="Parameters of the model: 1m, 6m or 90m.")] = "90m",
    device: Device = "auto",
    seed: int = 0,
    directory: Annotated[str | None, typer.Option(help="Where to keep the run's files; by default nowhere.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, of the size's recipe.")] = None,
) -> None:
    """A real task: a model with random weights, warm-started, then trained by rewards alone; held-out accuracy."""
    from rollplex.bench import learn as claim

    _print(claim.run(size, device, seed, directory, overrides=overrides or ()))


def _print(result: dict[str, object]) -> None:
    typer.echo(json.dumps(result))
