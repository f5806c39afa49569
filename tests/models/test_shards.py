"""Weight files: headers against safetensors' own reader, and the threaded reader against the simple one."""

import errno
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollplex.errors import CheckpointError
from rollplex.models import shards
from rollplex.models.load import load_plain, load_staged, save_model
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.shards import SINGLE_FILE, Staging, read_batches, read_header, staged_rows, weight_files
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import tiny_checkpoint, tiny_config, tiny_model

CPU = torch.device("cpu")
SHARD_BYTES = 60_000
SMALL = Staging(num_threads=3, buffer_bytes=5000, spare_buffers=1)
"""Embedding and matrices of the tiny model are larger than a buffer, norms and biases share one."""
STAGINGS = [
    SMALL,
    Staging(num_threads=1, buffer_bytes=1, spare_buffers=0),  # each row by itself, one buffer
    Staging(num_threads=2, buffer_bytes=3000, spare_buffers=3),
    Staging(),
]


def assert_same_bits(actual: VisionLanguageModel, expected: VisionLanguageModel) -> None:
    for (name, one), other in zip(actual.state_dict().items(), expected.state_dict().values(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu()), name


def read_staged(path: Path, staging: Staging) -> dict[str, Tensor]:
    """A file's tensors, put together again from rows."""
    header = read_header(path)
    found = {tensor.name: torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in header}
    seen = {tensor.name: [0] * tensor.num_rows for tensor in header}
    for rows, values in staged_rows(header, CPU, staging):
        assert values.shape == (rows.stop - rows.first, *rows.tensor.shape[1:])
        found[rows.tensor.name].view(rows.tensor.num_rows, *rows.tensor.shape[1:])[rows.first : rows.stop] = values
        for row in range(rows.first, rows.stop):
            seen[rows.tensor.name][row] += 1
    assert all(set(counts) <= {1} for name, counts in seen.items() if found[name].numel())
    return found


def write_file(path: Path, header: object, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: Sequence[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "checkpoint", max_shard_bytes=SHARD_BYTES)


# --- the same bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_both_ways_load_the_same(tmp_path: Path, staging: Staging, tie: bool, num_kv_heads: int) -> None:
    model = tiny_model(tiny_config(tie=tie, num_kv_heads=num_kv_heads), seed=2)
    save_model(model, tmp_path, None, SHARD_BYTES)
    staged = load_staged(str(tmp_path), torch.float32, "cpu", staging)
    assert_same_bits(staged, model)
    assert_same_bits(load_plain(str(tmp_path), torch.float32, "cpu"), model)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_both_ways_convert_the_same(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    directory = tiny_checkpoint(tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in load_file(directory / SINGLE_FILE).items()}
    save_file(tensors, directory / SINGLE_FILE)
    staged = load_staged(str(directory), wanted, "cpu", SMALL)
    assert_same_bits(staged, load_plain(str(directory), wanted, "cpu"))
    assert torch.equal(staged.decoder.embedding, tensors["model.embed_tokens.weight"].to(wanted))
    assert torch.equal(staged.decoder.layer(1).down_t, tensors["model.layers.1.mlp.down_proj.weight"].to(wanted).t())


@pytest.mark.parametrize("staging", STAGINGS)
def test_padding_of_the_vision_tower_stays_zero(tmp_path: Path, staging: Staging) -> None:
    config: Any = tiny_config()
    config.vision_config.intermediate_size = 42
    directory = tiny_checkpoint(tmp_path, config=config, max_shard_bytes=SHARD_BYTES)
    staged = load_staged(str(directory), torch.float32, "cpu", staging)
    num_padding = 0
    for name, parameter in staged.vision.named_parameters():
        filled = torch.zeros_like(parameter)
        for part in QwenVL(config).parts(f"vision.{name}"):
            part.write(filled, torch.ones_like(part.of(filled)))
        num_padding += int((filled == 0).sum())
        assert not parameter[filled == 0].any(), name
    assert num_padding
    assert_same_bits(staged, load_plain(str(directory), torch.float32, "cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_the_same_bits(checkpoint: Path, staging: Staging, dtype: torch.dtype) -> None:
    expected = load_plain(str(checkpoint), dtype, "cpu")
    assert_same_bits(load_staged(str(checkpoint), dtype, "cuda", staging), expected)
    assert_same_bits(load_plain(str(checkpoint), dtype, "cuda"), expected)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64])
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3)


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(DTYPES, SHAPES), min_size=1),
    st.builds(Staging, st.integers(1, 3), st.integers(1, 300), st.integers(0, 2)),
)
def test_any_file_is_read_whole(parts: Mapping[str, tuple[torch.dtype, list[int]]], staging: Staging) -> None:
    tensors = {name: torch.randn(shape).mul(50).to(dtype) for name, (dtype, shape) in parts.items()}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "weights"
        save_file(tensors, path)
        header = {tensor.name: tensor for tensor in read_header(path)}
        with safe_open(path, framework="pt") as file:
            assert header.keys() == set(file.keys())
        found = read_staged(path, staging)
    for name, tensor in tensors.items():
        assert (header[name].shape, header[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert header[name].num_bytes == tensor.nbytes
        assert torch.equal(found[name], tensor)


def test_tensors_at_odd_places(tmp_path: Path) -> None:
    """Three bytes before them, so that no float is at a multiple of its size."""
    values = torch.tensor([[1.5, -2.25], [0.0, 3e7]])
    entries = {"odd": entry("U8", [3], 0, 3), "floats": entry("F32", [2, 2], 3, 19)}
    path = write_file(tmp_path / "weights", entries, b"abc" + bytes(values.view(torch.uint8).flatten().tolist()))
    for staging in (Staging(), Staging(buffer_bytes=1)):
        found = read_staged(path, staging)
        assert torch.equal(found["floats"], values)
        assert bytes(found["odd"].tolist()) == b"abc"


@pytest.mark.parametrize("most", [1, 7, 4099])
def test_reads_that_return_less_than_was_asked_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    whole, lengths = os.preadv, list[int]()

    def short(file: int, buffers: Sequence[Any], place: int) -> int:
        lengths.append(len(buffers[0]))
        return whole(file, [buffers[0][:most]], place)

    expected = load_plain(str(checkpoint), torch.bfloat16, "cpu")
    monkeypatch.setattr(os, "preadv", short)
    staging = SMALL if most > 1 else Staging(buffer_bytes=200_000)
    if most == 1:  # a byte at a time is slow: one small file does
        path = min(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        found = read_staged(path, staging)
        assert all(torch.equal(found[name], tensor) for name, tensor in load_file(path).items())
    else:
        assert_same_bits(load_staged(str(checkpoint), torch.bfloat16, "cpu", staging), expected)
    assert any(length > most for length in lengths)


# --- what it takes -------------------------------------------------------------------------------------------------


def test_buffers_are_few_and_used_over_and_over(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    class Counted(shards.Buffer):
        def __init__(self, num_bytes: int, pinned: bool) -> None:
            sizes.append(num_bytes)
            super().__init__(num_bytes, pinned)

    monkeypatch.setattr(shards, "Buffer", Counted)
    tensors = [tensor for held in weight_files(checkpoint).values() for tensor in held]
    batches = 0
    for batch, buffer in read_batches(tensors, SMALL, pinned=False):
        assert len({rows.tensor.path for rows in batch}) == 1
        assert batch[-1].end - batch[0].start <= SMALL.buffer_bytes == len(buffer.bytes)
        batches += 1
    assert sizes == [SMALL.buffer_bytes] * 4
    assert batches > 40


def test_reading_runs_ahead_in_several_threads(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three reads meet: one thread alone would wait for the others forever."""
    meeting, whole = threading.Barrier(3, timeout=30), os.preadv

    def meet(file: int, buffers: Sequence[Any], place: int) -> int:
        if meeting.n_waiting or place < 10_000:
            meeting.wait()
        return whole(file, buffers, place)

    monkeypatch.setattr(os, "preadv", meet)
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    batches = read_batches(read_header(path), Staging(3, 3000, 0), pinned=False)
    next(batches)
    monkeypatch.setattr(os, "preadv", whole)
    batches.close()


def open_files() -> list[str]:
    return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if name.isdigit()
                  and os.path.lexists(f"/proc/self/fd/{name}"))  # fmt: skip


def test_leaving_early_leaves_no_thread_and_no_file(checkpoint: Path) -> None:
    tensors = [tensor for held in weight_files(checkpoint).values() for tensor in held]
    pieces = staged_rows(tensors, CPU, SMALL)
    next(pieces)
    assert any("safetensors" in path for path in open_files())
    pieces.close()
    assert not any("safetensors" in path for path in open_files())
    assert not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]


# --- what can go wrong ---------------------------------------------------------------------------------------------


def refused_while_reading(directory: Path, *patterns: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_staged(str(directory), torch.float32, "cpu", SMALL)
    assert all(pattern in str(caught.value) for pattern in patterns), str(caught.value)
    assert not [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]
    assert not any(path.endswith(".safetensors") for path in open_files())


def test_a_file_cut_short_while_it_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim, whole = sorted(checkpoint.glob("*.safetensors"))[1], os.preadv
    cut = victim.stat().st_size // 2

    def shrink(file: int, buffers: Sequence[Any], place: int) -> int:
        os.truncate(victim, cut)
        return whole(file, buffers, place)

    monkeypatch.setattr(os, "preadv", shrink)
    refused_while_reading(checkpoint, str(victim), f"ends at byte {cut}", "fetch it again")


def test_a_disk_that_fails(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int, buffers: Sequence[Any], place: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    first = sorted(checkpoint.glob("*.safetensors"))[0]
    refused_while_reading(checkpoint, str(first), os.strerror(errno.EIO))


def test_a_file_that_goes_away(checkpoint: Path) -> None:
    tensors = [tensor for held in weight_files(checkpoint).values() for tensor in held]
    victim = sorted(checkpoint.glob("*.safetensors"))[-1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=victim.name):
        next(staged_rows(tensors, CPU, SMALL))


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"\xff\xfe{}", b""),
        (b"[]", b""),
        (b'"text"', b""),
        (b"[" * 100_000, b""),
        ({"a": 3}, b""),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
        ({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, bytes(4)),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, bytes(4)),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4)),  # the shape needs more
        ({"a": entry("F32", [-1, -1], 0, 4)}, bytes(4)),
        ({"a": entry("F32", [1], 0, 4)}, bytes(3)),  # the file ends before
        ({"a": entry("F32", [1], 0, 4)}, bytes(5)),  # the file goes on
        ({"a": entry("F32", [1], 4, 8)}, bytes(8)),  # a hole
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)}, bytes(4)),  # one over the other
        ({"a": entry("F32", [1], 4, 0)}, bytes(4)),
    ],
)
def test_a_wrong_header(tmp_path: Path, header: object, data: bytes) -> None:
    path = write_file(tmp_path / "weights", header, data)
    with pytest.raises(CheckpointError, match="no whole safetensors file") as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_an_unknown_dtype(tmp_path: Path) -> None:
    path = write_file(tmp_path / "weights", {"a": entry("F4", [2], 0, 1)}, bytes(1))
    with pytest.raises(CheckpointError, match=r"a in .*weights: dtype 'F4' is no weight's"):
        read_header(path)


def test_nothing_is_written_before_all_files_are_checked(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = sorted(checkpoint.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:-1])
    reads = list[int]()
    monkeypatch.setattr(os, "preadv", lambda file, buffers, place: reads.append(place))
    refused_while_reading(checkpoint, str(victim), "no whole safetensors file")
    assert not reads
