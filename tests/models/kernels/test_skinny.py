"""Skinny products against float32 written out: every operand, ragged edges, the split sum, and bits that repeat."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rollplex.models.decoder import RMSNorm
from rollplex.models.kernels.skinny import Plan, Workspace, plan_gate_up, plan_linear, skinny_gate_up, skinny_linear

BFLOAT16_ERROR = 1e-2
FLOAT32_ERROR = 1e-5
NO_WORSE = 1.1
"""Times the error of torch's own bfloat16, at most."""
EPS = 0.1  # large enough to be seen


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_columns: int
    depth: int
    plan: Plan
    transposed: bool = False
    bias: bool = False
    residual: bool = False
    norm: bool = False


WHOLE = Plan(rows=64, depth=32, splits=1, stages=3)
SPLIT = replace(WHOLE, splits=3)
LINEAR = {
    "head": Case(5, 128, 64, WHOLE),
    "qkv": Case(5, 64, 96, WHOLE, bias=True, norm=True),
    "qkv, split": Case(3, 128, 96, SPLIT, bias=True, norm=True),
    "out": Case(16, 64, 64, WHOLE, transposed=True, residual=True),
    "out, split": Case(17, 128, 96, SPLIT, transposed=True, residual=True),
    "ragged rows and contraction": Case(1, 80, 112, SPLIT, bias=True, norm=True),
    "ragged, transposed": Case(33, 80, 48, SPLIT, transposed=True, residual=True),
    "all of it": Case(7, 48, 144, SPLIT, transposed=True, bias=True, residual=True, norm=True),
    "tall tile": Case(2, 144, 64, Plan(rows=128, depth=64, splits=1)),
}


@dataclass(frozen=True)
class Operands:
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    norm_weight: Tensor | None

    def to(self, dtype: torch.dtype) -> "Operands":
        return Operands(*(None if t is None else t.to(dtype) for t in vars(self).values()))  # type: ignore[arg-type]

    def normalized(self) -> Tensor:
        if self.norm_weight is None:
            return self.x
        norm = RMSNorm(self.x.shape[1], EPS)
        norm.weight = torch.nn.Parameter(self.norm_weight)
        with torch.no_grad():
            y: Tensor = norm(self.x)
        return y


def draw(case: Case, device: torch.device, dtype: torch.dtype) -> Operands:
    generator = torch.Generator().manual_seed(case.num_tokens * 1000 + case.depth)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    shape = (case.depth, case.num_columns) if case.transposed else (case.num_columns, case.depth)
    return Operands(
        normal(case.num_tokens, case.depth, scale=3.0),
        normal(*shape, scale=case.depth**-0.5),
        normal(case.num_columns) if case.bias else None,
        normal(case.num_tokens, case.num_columns) if case.residual else None,
        1 + normal(case.depth, scale=0.2) if case.norm else None,
    )


def linear(o: Operands, transposed: bool) -> Tensor:
    """The oracle: torch's own operators, in the operands' dtype."""
    y = F.linear(o.normalized(), o.weight.t() if transposed else o.weight, o.bias)
    return y if o.residual is None else o.residual + y


def gate_up(o: Operands, num_slots: int) -> Tensor:
    slots = F.linear(o.normalized(), o.weight).view(o.x.shape[0], num_slots, 2, -1)
    return (F.silu(slots[:, :, 0]) * slots[:, :, 1]).reshape(o.x.shape[0], -1)


def poisoned(num_tokens: int, num_columns: int, o: Operands) -> Tensor:
    return o.x.new_full((num_tokens, num_columns), float("nan"))


def workspace(plan: Plan, num_tokens: int, num_columns: int, device: torch.device, gated: bool = False) -> Workspace:
    space = Workspace.allocate(
        device, plan.num_partials(num_tokens, num_columns, gated), plan.grid(num_columns, gated) // plan.splits
    )
    space.partials.fill_(float("nan"))
    return space


def error(y: Tensor, reference: Tensor) -> float:
    return float((y.float() - reference).norm() / reference.norm())


def check(y: Tensor, reference: Tensor, plain: Tensor) -> None:
    """Close to float32; in bfloat16 as close as torch."""
    if y.dtype == torch.float32:
        assert error(y, reference) < FLOAT32_ERROR
    else:
        assert error(y, reference) < BFLOAT16_ERROR
        assert error(y, reference) < NO_WORSE * error(plain, reference)


def run_linear(case: Case, o: Operands, space: Workspace) -> Tensor:
    out = poisoned(case.num_tokens, case.num_columns, o)
    norm = None if o.norm_weight is None else (o.norm_weight, EPS)
    skinny_linear(
        o.x, o.weight, transposed=case.transposed, bias_R=o.bias, residual_TR=o.residual, norm=norm, out_TR=out,
        workspace=space, plan=case.plan,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", LINEAR.values(), ids=LINEAR.keys())
def test_linear_matches_float32(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    o = draw(case, device, dtype)
    y = run_linear(case, o, workspace(case.plan, case.num_tokens, case.num_columns, device))
    check(y, linear(o.to(torch.float32), case.transposed), linear(o, case.transposed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_tokens", "width", "depth", "num_slots", "splits", "norm"),
    [(5, 64, 64, 1, 1, True), (17, 80, 80, 2, 1, True), (2, 48, 96, 1, 3, True), (3, 128, 32, 8, 1, False)],
)
def test_gate_up_matches_float32(
    num_tokens: int, width: int, depth: int, num_slots: int, splits: int, norm: bool,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    plan = replace(WHOLE, splits=splits)
    o = draw(Case(num_tokens, 2 * width, depth, plan, norm=norm), device, dtype)
    out = poisoned(num_tokens, width, o)
    skinny_gate_up(
        o.x, o.weight, num_slots, norm=None if o.norm_weight is None else (o.norm_weight, EPS), out_TF=out,
        workspace=workspace(plan, num_tokens, width, device, gated=True), plan=plan,
    )  # fmt: skip
    check(out, gate_up(o.to(torch.float32), num_slots), gate_up(o, num_slots))


def test_same_bits_twice_and_a_workspace_that_serves_again(device: torch.device) -> None:
    case = LINEAR["all of it"]
    o = draw(case, device, torch.bfloat16)
    space = workspace(case.plan, case.num_tokens, case.num_columns, device)
    first = run_linear(case, o, space)
    assert not space.counters.any()
    assert torch.equal(first, run_linear(case, o, space))


def test_the_output_may_be_the_residual(device: torch.device) -> None:
    case = LINEAR["out, split"]
    o = draw(case, device, torch.bfloat16)
    assert o.residual is not None
    space = workspace(case.plan, case.num_tokens, case.num_columns, device)
    expected = run_linear(case, o, space)
    skinny_linear(
        o.x, o.weight, transposed=True, residual_TR=o.residual, out_TR=o.residual, workspace=space, plan=case.plan
    )
    assert torch.equal(o.residual, expected)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    case = LINEAR["qkv"]
    o = draw(case, device, torch.float32)
    wide = torch.full((case.num_tokens, case.depth + 32), float("nan"), device=device)
    wide[:, 16:-16] = o.x
    space = workspace(case.plan, case.num_tokens, case.num_columns, device)
    assert torch.equal(run_linear(case, replace(o, x=wide[:, 16:-16]), space), run_linear(case, o, space))


def test_default_plans_and_workspace(device: torch.device) -> None:
    case = Case(2, 64, 1024, plan_linear(2, 64, 1024), bias=True)
    assert case.plan.splits == 4
    o = draw(case, device, torch.bfloat16)
    space = Workspace.for_products(device, 5, [(64, 1024)])
    y = skinny_linear(o.x, o.weight, transposed=False, bias_R=o.bias, workspace=space)
    check(y, linear(o.to(torch.float32), False), linear(o, False))
    o = draw(Case(2, 128, 64, WHOLE), device, torch.bfloat16)
    check(skinny_gate_up(o.x, o.weight, 2, workspace=space), gate_up(o.to(torch.float32), 2), gate_up(o, 2))


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 64, 128])
@pytest.mark.parametrize(
    ("num_rows", "depth"), [(2560, 2048), (2048, 11008), (4608, 3584), (3584, 18944), (152064, 3584)]
)
def test_default_plans_fill_the_pipeline_and_fit_shared_memory(num_tokens: int, num_rows: int, depth: int) -> None:
    for plan in (plan_linear(num_tokens, num_rows, depth), plan_gate_up(num_tokens, num_rows)):
        assert depth // plan.depth // plan.splits >= plan.stages or plan.splits == 1
        assert (plan.rows + max(16, num_tokens)) * plan.depth * 2 * plan.stages < 227 * 1024
    assert plan_linear(num_tokens, num_rows, depth).grid(num_rows, False) >= (100 if 32 < num_tokens <= 64 else 256)


def test_a_workspace_too_small_is_refused(device: torch.device) -> None:
    case = LINEAR["out, split"]
    with pytest.raises(AssertionError, match="workspace too small"):
        run_linear(case, draw(case, device, torch.float32), Workspace.allocate(device, 16, 1))


@pytest.mark.gpu
def test_replays_from_a_graph(device: torch.device) -> None:
    """Counters are zero again after every replay, and kernels launched beside the one before read what it wrote."""
    plan = Plan(rows=64, depth=64, splits=4)
    case = Case(8, 512, 512, plan, residual=True, transposed=True)
    o = draw(case, device, torch.bfloat16)
    space = workspace(plan, case.num_tokens, case.num_columns, device)

    def chain() -> Tensor:
        x = o.x
        for _ in range(4):
            x = skinny_linear(x, o.weight, transposed=True, residual_TR=x, workspace=space, plan=plan)
        return x

    expected = chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, expected)
