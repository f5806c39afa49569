"""Where optimizer state lives changes nothing: the planner, the order of copies, and updates against plain torch."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from rollplex.config import TrainConfig
from rollplex.models.load import load_model
from rollplex.testing import tiny_checkpoint
from rollplex.train.checkpoint import TrainingState, checkpoint_bytes, restore_training, save_training
from rollplex.train.offload import (
    ALIGNMENT,
    MASTER,
    MOMENTS,
    Chunk,
    StateBytes,
    StateStorage,
    plan_state,
    state_bytes,
)
from rollplex.train.optim import GradientAccumulator, Optimizer
from rollplex.train.policy import Policy

GIB = 2**30
CPU = torch.device("cpu")
SHAPES = ((30, 257), (7,), (1,), (130, 33), (500,), (64, 64), (3, 5, 7, 11), (0, 4), ())
"""Uneven sizes; one that chunks divide, one of a single element, one of none, and a scalar."""
NUM_ELEMENTS = sum(int(torch.Size(shape).numel()) for shape in SHAPES)
PLACEMENTS = {"gpu": None, "host": 0.0, "split": 6 * NUM_ELEMENTS / GIB}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

sizes_of_parameters = st.lists(st.integers(0, 700), max_size=12).map(
    lambda sizes: {f"p{index}": size for index, size in enumerate(sizes)}
)
chunk_sizes = st.integers(1, 6).map(lambda count: count * ALIGNMENT)


@given(sizes_of_parameters, st.sets(st.integers(0, 11)), chunk_sizes)
def test_chunks_cover_every_parameter_once(sizes: dict[str, int], narrow: set[int], chunk_elements: int) -> None:
    names = {f"p{index}" for index in narrow}
    chunks = plan_state(sizes, names, None, chunk_elements)
    covered = dict.fromkeys(sizes, 0)
    for chunk in chunks:
        assert chunk.kinds == ((MASTER, *MOMENTS) if chunk.pieces[0].name in names else MOMENTS)
        end = 0
        for piece in chunk.pieces:
            assert (piece.name in names) == (MASTER in chunk.kinds)
            assert piece.start == covered[piece.name] < piece.stop
            assert piece.start % ALIGNMENT == piece.offset % ALIGNMENT == 0
            assert end <= piece.offset < end + ALIGNMENT
            covered[piece.name], end = piece.stop, piece.place.stop
            assert piece.span == slice(piece.start, piece.stop)
            assert piece.place.stop - piece.place.start == piece.stop - piece.start
        assert end == chunk.num_elements <= chunk_elements
        assert not chunk.on_host
    assert covered == sizes
    for one, following in pairwise(chunks):
        if one.kinds == following.kinds:
            assert one.num_elements > chunk_elements - ALIGNMENT, "a chunk was not filled"


@given(sizes_of_parameters, chunk_sizes, st.floats(0.0, 1.5))
def test_the_device_holds_its_share(sizes: dict[str, int], chunk_elements: int, share: float) -> None:
    total = state_bytes(plan_state(sizes, sizes, None, chunk_elements)).device
    chunks = plan_state(sizes, sizes, share * total / GIB, chunk_elements)
    largest = max((chunk.num_bytes for chunk in chunks), default=0)
    seen = held = 0
    for chunk in chunks:  # spread evenly: near its share after every chunk, not only after the last
        seen, held = seen + chunk.num_bytes, held + chunk.num_bytes * (not chunk.on_host)
        wanted = min(share, 1.0) * seen
        assert wanted - largest - 1 <= held <= wanted + 1
    planned = state_bytes(chunks)
    assert (planned.device, planned.host) == (held, seen - held)
    assert planned.slots <= 3 * largest
    assert (planned.slots == 0) == (planned.host == 0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_planned_bytes_are_allocated_bytes(placement: str) -> None:
    sizes = {str(index): torch.Size(shape).numel() for index, shape in enumerate(SHAPES)}
    storage = StateStorage(plan_state(sizes, {"0", "3"}, PLACEMENTS[placement], 2048), CPU)
    allocated = {
        on_host: sum(
            tensor.nbytes
            for chunk, tensors in zip(storage.chunks, storage.tensors, strict=True)
            for tensor in tensors.values()
            if chunk.on_host == on_host
        )
        for on_host in (False, True)
    }
    slots = sum(tensor.nbytes for slot in storage._slots for tensor in slot.tensors.values())
    planned = state_bytes(storage.chunks)
    assert planned == StateBytes(allocated[False], allocated[True], slots)
    assert (planned.device > 0, planned.host > 0) == (placement != "host", placement != "gpu")


def test_a_7b_models_state() -> None:
    chunks = plan_state({"decoder": 7_615_616_512}, {"decoder"}, 40.0)
    planned = state_bytes(chunks)
    assert planned.device + planned.host == 12 * 7_615_616_512
    assert 40 * GIB - 3 * 64 * 2**20 < planned.device <= 40 * GIB
    assert planned.slots == 3 * 3 * 64 * 2**20
    tensors = {len(chunk.kinds) * chunk.num_elements * 4 for chunk in chunks[:-1]}
    assert tensors == {3 * 64 * 2**20}, "torch would round pinned memory of another size up to a power of two"


class LateLane:
    """A lane that puts every copy off until somebody has waited for it: what no event orders happens too late."""

    def __init__(self, device: torch.device) -> None:
        self.pending: list[LateCopy] = []

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: "LateCopy | None") -> "LateCopy":
        self.pending.append(LateCopy(self, pairs, after))
        return self.pending[-1]

    def now(self) -> None:
        return None  # the current stream's work is always done

    def wait(self, moment: "LateCopy | None") -> None:
        if moment is not None:
            moment.run()

    def settle(self) -> None:
        if self.pending:
            self.pending[-1].run()


class LateCopy:
    """One call of LateLane.copy."""

    def __init__(self, lane: LateLane, pairs: Sequence[tuple[Tensor, Tensor]], after: "LateCopy | None") -> None:
        self.lane, self.pairs, self.after = lane, pairs, after

    def run(self) -> None:
        while self in self.lane.pending:  # a lane works in order
            first = self.lane.pending.pop(0)
            if first.after is not None:
                first.after.run()
            for to, source in first.pairs:
                to.copy_(source)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_no_copy_is_needed_before_its_event(monkeypatch: pytest.MonkeyPatch, num_chunks: int, share: float) -> None:
    monkeypatch.setattr("rollplex.train.offload.Lane", LateLane)
    num_bytes = num_chunks * ALIGNMENT * 3 * 4
    chunks = plan_state({"p": num_chunks * ALIGNMENT}, {"p"}, share * num_bytes / GIB, ALIGNMENT)
    storage = StateStorage(chunks, CPU)
    for visit in range(3):
        seen = []
        for chunk, tensors in storage.visit():
            seen.append(chunk)
            for number, kind in enumerate(chunk.kinds):
                assert torch.all(tensors[kind] == visit * (chunk.pieces[0].start + number))
                tensors[kind] += chunk.pieces[0].start + number
        assert seen == list(chunks)
    storage.settle()
    for number, kind in enumerate((MASTER, *MOMENTS)):
        for span, values in storage.pieces("p", kind):
            assert torch.all(values == 3 * (span.start + number))


def parameters_of(dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in SHAPES]
    return {f"p{index}": nn.Parameter(value.to(device, dtype)) for index, value in enumerate(values)}


def gradients_of(parameters: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator).to(p.device) for name, p in parameters.items()}


class Run:
    """Parameters that are updated with made-up gradients."""

    def __init__(self, dtype: torch.dtype, placement: str, chunk_elements: int, device: str = "cpu") -> None:
        config = TrainConfig(
            weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=3.0, optimizer_gpu_gib=PLACEMENTS[placement]
        )
        self.parameters = parameters_of(dtype, device)
        self.accumulator = GradientAccumulator(self.parameters)
        self.optimizer = Optimizer(self.parameters, config, chunk_elements)

    def step(self, number: int, bad: float | None = None) -> float:
        for name, gradient in gradients_of(self.parameters, number).items():
            self.accumulator.buffers[name].copy_(gradient)
        if bad is not None:
            self.accumulator.buffers["p3"].view(-1)[4000] = bad
        return self.optimizer.update(self.accumulator, denominator=7.0, lr=1e-2 / (number + 1)).grad_norm

    def snapshot(self) -> dict[str, Tensor]:
        weights = {name: parameter.detach().cpu().clone() for name, parameter in self.parameters.items()}
        return weights | self.optimizer.state()


class PlainRun(Run):
    """The same as one would write it first: whole tensors, torch's clipping and torch's optimizer."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu") -> None:
        self.parameters = parameters_of(dtype, device)
        self.masters = {
            name: parameter if dtype == torch.float32 else nn.Parameter(parameter.detach().float())
            for name, parameter in self.parameters.items()
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.masters.values() if (p.ndim >= 2) == decayed], "weight_decay": decay}
            for decayed, decay in ((True, 0.1), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, number: int, bad: float | None = None) -> float:
        for name, gradient in gradients_of(self.parameters, number).items():
            self.masters[name].grad = gradient * (1 / 7.0)
        gradients = [p.grad for p in self.masters.values() if p.grad is not None]
        norm = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt().float()
        nn.utils.clip_grads_with_norm_(self.masters.values(), 3.0, norm)
        for group in self.adamw.param_groups:
            group["lr"] = 1e-2 / (number + 1)
        self.adamw.step()
        for name, parameter in self.parameters.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])
        return norm.item()

    def snapshot(self) -> dict[str, Tensor]:
        found = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        for name, master in self.masters.items():
            found |= {f"{name}.{moment}": self.adamw.state[master][moment].cpu() for moment in MOMENTS}
            if master is not self.parameters[name]:
                found[f"{name}.{MASTER}"] = master.detach().cpu()
        return found | {"step": self.adamw.state[self.masters["p0"]]["step"].cpu()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_elements", [ALIGNMENT, 1024, 1 << 20])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_plain_torch_bit_for_bit(dtype: torch.dtype, placement: str, chunk_elements: int, device: str) -> None:
    ours, plain = Run(dtype, placement, chunk_elements, device), PlainRun(dtype, device)
    on_host = {chunk.on_host for chunk in ours.optimizer.storage.chunks}
    if chunk_elements <= 1024:
        assert on_host == {"gpu": {False}, "host": {True}, "split": {False, True}}[placement]
    assert_same({k: v for k, v in ours.snapshot().items() if "." not in k and k != "step"},
                {name: parameter.detach().cpu() for name, parameter in plain.parameters.items()})  # fmt: skip
    for number in range(4):
        norm = ours.step(number)
        assert norm == pytest.approx(plain.step(number), rel=1e-7)
        assert norm > 3.0, "clipping must have happened"
        assert_same(ours.snapshot(), plain.snapshot())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_skipped_update_leaves_the_state_alone(dtype: torch.dtype, placement: str, bad: float) -> None:
    ours, undisturbed = Run(dtype, placement, 1024), Run(dtype, "gpu", 1024)
    for run in (ours, undisturbed):
        run.step(0)
    ours.step(1, bad=bad)
    assert_same(ours.snapshot(), undisturbed.snapshot())
    for run in (ours, undisturbed):
        run.step(2)
    assert_same(ours.snapshot(), undisturbed.snapshot())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("before", "after"), [("host", "gpu"), ("gpu", "host"), ("split", "host"), ("gpu", "split")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_with_another_placement(dtype: torch.dtype, before: str, after: str, device: str) -> None:
    one, other = Run(dtype, before, 1024, device), Run(dtype, after, 192, device)
    for number in range(2):
        one.step(number)
    for name, parameter in other.parameters.items():
        with torch.no_grad():  # a float32 model's weights are in the model's checkpoint
            parameter.copy_(one.parameters[name] if dtype == torch.float32 else torch.zeros_like(parameter))
    other.optimizer.load_state(one.optimizer.state())
    assert_same(other.snapshot(), one.snapshot())
    for run in (one, other):
        for number in range(2, 4):
            run.step(number)
    assert_same(other.snapshot(), one.snapshot())


def test_saving_reads_the_live_state_in_pieces() -> None:
    """So that no second copy of what is in host memory is made."""
    run = Run(torch.bfloat16, "host", 1024)
    run.step(0)
    owned = {tensor.data_ptr() for tensors in run.optimizer.storage.tensors for tensor in tensors.values()}
    pieces = list(run.optimizer.state_pieces("p0.master"))
    assert [len(piece) for piece in pieces] == [1024] * 7 + [30 * 257 - 7 * 1024]
    assert all(piece.data_ptr() in owned for piece in pieces)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoint_between_placements(tmp_path: Path, dtype: torch.dtype) -> None:
    source = str(tiny_checkpoint(tmp_path / "source", seed=3))

    def policy_of(path: str, gib: float | None) -> Policy:
        config = TrainConfig(optimizer_gpu_gib=gib)
        return Policy(load_model(path, dtype, CPU), config, 1.0, train_vision=True)

    def train(policy: Policy, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for buffer in policy.gradients.buffers.values():
            buffer.normal_(generator=generator)
        assert not policy.update(2.0, 1e-3).skipped

    def snapshot(policy: Policy) -> dict[str, Tensor]:
        weights = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
        return weights | policy.optimizer.state()

    first = policy_of(source, 0.0)
    train(first, 0)
    for number, gib in enumerate((None, 0.0)):
        directory = tmp_path / str(number)
        directory.mkdir()
        save_training(directory, first, TrainingState(1, 1, 0), source)
        assert_same(load_file(directory / "optimizer.safetensors"), first.optimizer.state())
        written = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
        assert 0 <= written - checkpoint_bytes(first) < 50_000, "headers"
        second = policy_of(str(directory / "model"), gib)
        restore_training(directory, second)
        assert_same(snapshot(second), snapshot(first))
        for policy in (first, second):
            train(policy, number + 1)
        assert_same(snapshot(second), snapshot(first))
        first = second


@pytest.mark.gpu
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_streaming_on_a_gpu_keeps_every_bit(share: float) -> None:
    """Chunks large enough for copies to overlap updates, over several updates without a wait between them."""
    sizes, states = (3_000_017, 5_000_000, 700), list[dict[str, Tensor]]()
    num_bytes = 12 * sum(sizes)
    for gib in (None, share * num_bytes / GIB):
        generator = torch.Generator("cuda").manual_seed(0)
        values = [torch.randn(size, device="cuda", generator=generator).bfloat16() for size in sizes]
        parameters = {str(index): nn.Parameter(value) for index, value in enumerate(values)}
        optimizer = Optimizer(parameters, TrainConfig(optimizer_gpu_gib=gib), 1 << 19)
        assert all(
            tensor.is_pinned() == chunk.on_host and tensor.is_cuda != chunk.on_host
            for chunk, tensors in zip(optimizer.storage.chunks, optimizer.storage.tensors, strict=True)
            for tensor in tensors.values()
        )
        accumulator = GradientAccumulator(parameters)
        for _ in range(5):
            for buffer in accumulator.buffers.values():
                buffer.normal_(generator=generator)
            optimizer.update(accumulator, 1.0, 1e-2)
        weights = {name: parameter.detach().cpu() for name, parameter in parameters.items()}
        states.append(weights | optimizer.state())
    assert_same(states[1], states[0])


def test_chunk_bytes() -> None:
    (chunk,) = plan_state({"a": 5, "b": 70}, {"a", "b"}, None, 256)
    assert isinstance(chunk, Chunk)
    assert [piece.place for piece in chunk.pieces] == [slice(0, 5), slice(64, 134)]
    assert chunk.num_bytes == 134 * 3 * 4
