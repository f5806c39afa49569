"""The update against plain torch, masters against a float32 run, skipped updates, state, and the schedule."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rollplex.config import TrainConfig
from rollplex.errors import CheckpointError
from rollplex.train.optim import GradientAccumulator, Optimizer, _global_norm, learning_rate

CONFIG = TrainConfig(learning_rate=1e-2, weight_decay=0.1, betas=(0.9, 0.95), max_grad_norm=0.5)

BFLOAT16_SUM_ERROR = 0.0013
"""Of the gradient's norm, times the square root of the number of backward passes; 0.0010 to 0.0011 was measured."""


def small_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3, bias=False))
    return model.to(torch.bfloat16).to(dtype)  # values that both precisions have


def inputs(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16).to(dtype)


def loss_of(model: nn.Module, seed: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(inputs(seed, dtype)).float().square().sum()
    return loss


def gradients_of(model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in gradients if gradient is not None]


class Trained:
    """A model with its accumulator and optimizer."""

    def __init__(self, dtype: torch.dtype = torch.float32, config: TrainConfig = CONFIG) -> None:
        self.model = small_model(dtype)
        self.parameters = dict(self.model.named_parameters())
        self.accumulator = GradientAccumulator(self.parameters)
        self.optimizer = Optimizer(self.parameters, config)

    def step(self, seed: int, microbatches: int = 3, lr: float = 1e-2) -> float:
        for index in range(microbatches):
            loss_of(self.model, 10 * seed + index).backward()
        return self.optimizer.update(self.accumulator, denominator=4.0, lr=lr).grad_norm

    def snapshot(self) -> dict[str, Tensor]:
        weights = {f"{name}.weight": parameter.detach() for name, parameter in self.parameters.items()}
        return {name: tensor.clone() for name, tensor in (weights | self.optimizer.state()).items()}


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


def plain_optimizer(model: nn.Module, fused: bool) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=fused)


@pytest.mark.parametrize("fused", [True, False])
def test_equals_plain_torch(fused: bool) -> None:
    """Bit for bit the library's fused AdamW, clipped by the same norm; to rounding, its for-loop AdamW and norm."""
    ours, model = Trained(), small_model()
    plain = plain_optimizer(model, fused)
    for step in range(4):
        lr = 1e-2 / (step + 1)
        grad_norm = ours.step(step, lr=lr)
        for index in range(3):
            loss_of(model, 10 * step + index).backward()
        for gradient in gradients_of(model):
            gradient.mul_(1 / 4.0)
        if fused:
            squares = math.fsum(float(gradient.double().square().sum()) for gradient in gradients_of(model))
            expected_norm = torch.tensor(math.sqrt(squares), dtype=torch.float32)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, expected_norm)
        else:
            expected_norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = lr
        plain.step()
        plain.zero_grad()
        assert expected_norm > 0.5, "clipping must have happened, or this test shows little"
        assert grad_norm == pytest.approx(expected_norm.item(), rel=0 if fused else 1e-5)
        for parameter, expected in zip(ours.parameters.values(), model.parameters(), strict=True):
            if fused:
                assert torch.equal(parameter, expected)
            else:
                assert torch.allclose(parameter, expected, rtol=1e-5, atol=1e-7)


def test_a_small_gradient_is_not_clipped() -> None:
    ours = Trained(config=CONFIG.model_copy(update={"max_grad_norm": 1e6}))
    model = small_model()
    loss_of(model, 0).backward()
    gradients = gradients_of(model)
    assert ours.step(0, microbatches=1) == pytest.approx(nn.utils.get_total_norm(gradients).item() / 4)
    for name, gradient in zip(ours.parameters, gradients, strict=True):
        moment = ours.optimizer.state()[f"{name}.exp_avg"]
        assert torch.allclose(moment, 0.1 * gradient / 4, rtol=1e-6, atol=1e-9)


def test_bfloat16_follows_a_float32_run() -> None:
    """Given the same gradients, masters are bit for bit the float32 run's weights; parameters are their rounding."""
    narrow, wide = Trained(torch.bfloat16), Trained()
    assert all(shape == narrow.parameters[key.removesuffix(".master")].shape
               for key, shape in narrow.optimizer.state_shapes().items() if key.endswith(".master"))  # fmt: skip
    assert not any(key.endswith(".master") for key in wide.optimizer.state_shapes())
    for step in range(5):
        for index in range(3):
            loss_of(narrow.model, 10 * step + index).backward()
        for name, buffer in narrow.accumulator.buffers.items():
            wide.accumulator.buffers[name].copy_(buffer)
        narrow.optimizer.update(narrow.accumulator, 4.0, 1e-3)
        wide.optimizer.update(wide.accumulator, 4.0, 1e-3)
        masters = narrow.optimizer.state()
        for name, parameter in wide.parameters.items():
            assert torch.equal(masters[f"{name}.master"], parameter)
            assert torch.equal(narrow.parameters[name], parameter.to(torch.bfloat16))


def test_masters_keep_what_bfloat16_would_lose() -> None:
    ours = Trained(torch.bfloat16)
    before = ours.snapshot()
    for step in range(20):
        ours.step(step, lr=1e-6)
    name = "1.weight"
    moved = (ours.optimizer.state()[f"{name}.master"] - before[f"{name}.master"]).abs().mean().item()
    assert 1e-6 < moved < 2.1e-5
    assert torch.equal(ours.parameters[name], before[f"{name}.weight"])  # ones: a bfloat16's half step is 2e-3 here


def test_accumulator_sums_in_float32_and_releases_gradients() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    accumulator = GradientAccumulator({"p": parameter})
    for _ in range(1000):
        parameter.backward(torch.full((1,), 1.0, dtype=torch.bfloat16))
        assert parameter.grad is None
    assert accumulator.buffers["p"].item() == 1000.0  # a bfloat16 sum of ones stops at 256
    accumulator.zero()
    assert accumulator.buffers["p"].item() == 0.0


def test_no_two_gradients_exist_at_a_time() -> None:
    """The accumulator takes each as soon as autograd has it: no second set of gradients beside the buffers."""
    model = small_model()
    parameters, alive = dict(model.named_parameters()), list[list[str]]()

    def look(_: Tensor) -> None:
        alive.append([name for name, parameter in parameters.items() if parameter.grad is not None])

    for parameter in parameters.values():
        parameter.register_post_accumulate_grad_hook(look)  # before the accumulator's
    GradientAccumulator(parameters)
    loss_of(model, 0).backward()
    assert sorted(alive) == sorted([name] for name in parameters)


@pytest.mark.parametrize("num_microbatches", [8, 32, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_error_of_bfloat16_sums(dtype: torch.dtype, num_microbatches: int) -> None:
    """Each microbatch's gradient is a sum over tokens; the bound is what the docstring of the class says."""
    totals = []
    for sums in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)).to(dtype)
        accumulator = GradientAccumulator(dict(model.named_parameters()), sums)
        for _ in range(num_microbatches):
            model(torch.randn(40, 64).to(dtype)).float().square().sum().backward()
        assert all(buffer.dtype == sums for buffer in accumulator.buffers.values())
        totals.append(torch.cat([buffer.float().view(-1) for buffer in accumulator.buffers.values()]))
    error = float((totals[1] - totals[0]).norm() / totals[0].norm())
    bound = BFLOAT16_SUM_ERROR * math.sqrt(num_microbatches)
    assert bound / 2 < error < bound


def test_bfloat16_sums_are_widened_before_they_are_scaled() -> None:
    """An update from bfloat16 sums is, bit for bit, the update from the same sums in float32."""
    runs = []
    for sums in (torch.float32, torch.bfloat16):
        model = small_model(torch.bfloat16)
        parameters = dict(model.named_parameters())
        accumulator, optimizer = GradientAccumulator(parameters, sums), Optimizer(parameters, CONFIG)
        generator = torch.Generator().manual_seed(0)
        for buffer in accumulator.buffers.values():
            buffer.copy_(torch.randn(buffer.shape, generator=generator).bfloat16())
        runs.append((optimizer.update(accumulator, 3.0, 1e-2), optimizer.state()))
        assert not any(buffer.any() for buffer in accumulator.buffers.values())
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])


def test_accumulator_equals_autograd_on_float32() -> None:
    ours, model = Trained(), small_model()
    for index in range(5):
        loss_of(ours.model, index).backward()
        loss_of(model, index).backward()
    for buffer, parameter in zip(ours.accumulator.buffers.values(), model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(buffer, parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bad", "denominator"), [(math.inf, 4.0), (-math.inf, 4.0), (math.nan, 4.0), (1.0, 0.0)])
def test_skipped_update_changes_nothing(dtype: torch.dtype, bad: float, denominator: float) -> None:
    ours, undisturbed = Trained(dtype), Trained(dtype)
    ours.step(0)
    undisturbed.step(0)
    before = ours.snapshot()
    loss_of(ours.model, 7).backward()
    ours.accumulator.buffers["3.weight"].view(-1)[5] = bad
    report = ours.optimizer.update(ours.accumulator, denominator, 1e-2)
    assert report.skipped
    assert report.learning_rate == 1e-2
    assert report.grad_norm == 0.0 if denominator == 0.0 else not math.isfinite(report.grad_norm)
    assert_same(before, ours.snapshot())
    assert not any(buffer.any() for buffer in ours.accumulator.buffers.values())
    assert all(parameter.grad is None for parameter in ours.parameters.values())
    ours.step(1)  # and the run goes on as if it had not been
    undisturbed.step(1)
    assert_same(undisturbed.snapshot(), ours.snapshot())


def test_norm_of_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient = torch.full((3_000_001,), 1e-3)
    expected = math.sqrt(3_000_001) * gradient[0].item()
    assert _global_norm([gradient]).item() == pytest.approx(expected, rel=1e-7)
    monkeypatch.setattr("rollplex.train.optim.NORM_PIECE", 1000)
    assert _global_norm([gradient, torch.zeros(2, 3)]).item() == pytest.approx(expected, rel=1e-7)


def test_a_finite_update_reports_and_leaves_no_gradients() -> None:
    ours = Trained()
    loss_of(ours.model, 0).backward()
    report = ours.optimizer.update(ours.accumulator, 4.0, 3e-3)
    assert not report.skipped
    assert report.grad_norm > 0
    assert report.learning_rate == 3e-3
    assert not any(buffer.any() for buffer in ours.accumulator.buffers.values())
    assert all(parameter.grad is None for parameter in ours.parameters.values())


def test_unused_parameters_get_gradient_zero() -> None:
    """Moments fade and decay applies, as torch does for a gradient of zeros (and not for none)."""
    ours, model = Trained(), small_model()
    plain = plain_optimizer(model, fused=True)
    ours.step(0, microbatches=1)
    loss_of(model, 0).backward()
    for step in range(2):
        for gradient in gradients_of(model):
            gradient.mul_(1 / 4.0)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        plain.step()
        plain.zero_grad(set_to_none=False)
        if step == 0:
            gradients_of(model)[-1].fill_(0.25)
            ours.accumulator.buffers["3.weight"].fill_(0.25)
            assert not ours.optimizer.update(ours.accumulator, 4.0, 1e-2).skipped
    for parameter, expected in zip(ours.parameters.values(), model.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=1e-6, atol=1e-7)
    assert ours.optimizer.state()["step"].item() == 2


def test_only_matrices_decay() -> None:
    ours = Trained()
    before = ours.snapshot()
    ours.optimizer.update(ours.accumulator, 4.0, 1e-2)  # all gradients zero: only decay is left
    for name, parameter in ours.parameters.items():
        factor = 1 - 1e-2 * 0.1 if parameter.ndim >= 2 else 1.0
        assert torch.allclose(parameter, before[f"{name}.weight"] * factor, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_state_round_trip(dtype: torch.dtype, steps_before: int) -> None:
    ours = Trained(dtype)
    for step in range(steps_before):
        ours.step(step)
    saved = {name: tensor.clone() for name, tensor in ours.optimizer.state().items()}
    assert ("0.weight.master" in saved) == (dtype == torch.bfloat16)
    resumed = Trained(dtype)
    if dtype == torch.float32:  # such weights are in the weights' checkpoint
        resumed.model.load_state_dict(copy.deepcopy(ours.model.state_dict()))
    resumed.optimizer.load_state(saved)
    assert_same(ours.snapshot(), resumed.snapshot())
    for step in range(10, 13):
        ours.step(step)
        resumed.step(step)
    assert_same(ours.snapshot(), resumed.snapshot())


def test_state_that_does_not_fit_is_refused() -> None:
    ours = Trained(torch.bfloat16)
    before = ours.snapshot()
    good = {name: tensor.clone() + 1 for name, tensor in before.items() if name in ours.optimizer.state()}
    missing = {name: tensor for name, tensor in good.items() if name != "1.bias.exp_avg"}
    wrong_shape = good | {"3.weight.master": torch.zeros(8, 3)}
    wrong_dtype = good | {"3.weight.exp_avg": torch.zeros(3, 8, dtype=torch.bfloat16)}
    unknown = good | {"9.weight.exp_avg": torch.zeros(())}
    for state, named in [
        (missing, "1.bias.exp_avg"), (wrong_shape, "3.weight.master"),
        (wrong_dtype, "3.weight.exp_avg"), (unknown, "9.weight.exp_avg"),
    ]:  # fmt: skip
        with pytest.raises(CheckpointError, match=named):
            ours.optimizer.load_state(state)
        assert_same(before, ours.snapshot())


schedules = st.builds(
    TrainConfig,
    steps=st.integers(1, 60),
    warmup_steps=st.integers(0, 80),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    min_learning_rate_ratio=st.floats(0, 1),
    learning_rate=st.floats(1e-7, 1.0),
)


@given(schedules)
def test_schedule_is_bounded_and_rises_then_falls(config: TrainConfig) -> None:
    rates = [learning_rate(step, config) for step in range(config.steps + 1)]
    assert all(0 < rate <= config.learning_rate * (1 + 1e-12) for rate in rates[:-1])
    warm = config.warmup_steps
    slack = 1e-12 * config.learning_rate
    assert all(a < b for a, b in pairwise(rates[:warm]))
    assert all(a >= b - slack for a, b in pairwise(rates[warm:]))
    if warm < config.steps:
        assert rates[warm] == pytest.approx(config.learning_rate)
        end = 1.0 if config.schedule == "constant" else config.min_learning_rate_ratio
        assert rates[-1] == pytest.approx(end * config.learning_rate, abs=slack)


@pytest.mark.parametrize("warmup_steps", [0, 5])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule_equals_transformers(schedule: str, warmup_steps: int) -> None:
    ratio = 0.1 if schedule == "cosine" else 0.0
    config = TrainConfig.model_validate({
        "steps": 30, "warmup_steps": warmup_steps, "schedule": schedule,
        "learning_rate": 0.3, "min_learning_rate_ratio": ratio,
    })  # fmt: skip
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    if schedule == "constant":
        scheduler = get_constant_schedule_with_warmup(plain, warmup_steps)
    elif schedule == "linear":
        scheduler = get_linear_schedule_with_warmup(plain, warmup_steps, 30)
    else:
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(plain, warmup_steps, 30, min_lr_rate=ratio)
    theirs = []
    for _ in range(31):
        theirs.append(scheduler.get_last_lr()[0])
        plain.step()
        scheduler.step()
    ours = [learning_rate(step, config) for step in range(30)]
    assert ours[warmup_steps:] == pytest.approx(theirs[warmup_steps:30], rel=1e-9)
    assert ours[:warmup_steps] == pytest.approx(theirs[1 : warmup_steps + 1], rel=1e-9)  # they begin at zero
