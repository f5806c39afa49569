"""The vision tower against transformers': bit for bit on a CPU, to rounding on CUDA; padding, passes, costs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from rollplex.models import vision, vlm
from rollplex.models.load import random_model, to_transformers
from rollplex.models.qwen_vl import QwenVL
from rollplex.models.vision import (
    Grid,
    Packing,
    VisionLayer,
    VisionTower,
    attention_by_runs,
    flash_attention,
    vision_flops,
    window_layout,
)
from rollplex.models.vlm import VisionLanguageModel
from rollplex.testing import tiny_config
from rollplex.types import Image

CPU = torch.device("cpu")
GRIDS: tuple[Grid, ...] = ((1, 4, 4), (1, 6, 10), (1, 2, 8), (1, 10, 4), (1, 8, 8), (2, 6, 4))
"""One window; ragged ones; whole ones; two frames."""
PADDED = 44
"""A feed-forward width that is no multiple of 16."""
SUMMATION_TOLERANCE = 1e-5
"""Relative, float32: the same numbers added in another order."""
BF16_TOLERANCE = 0.02
"""Relative, bfloat16 against float32, through a tower of two layers."""

grids = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 20))
"""In merged patches."""


def config_of(intermediate: int = 48) -> Qwen2_5_VLConfig:
    config: Any = tiny_config()
    config.vision_config.intermediate_size = intermediate
    return config  # type: ignore[no-any-return]


def model_of(
    intermediate: int = 48, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> VisionLanguageModel:
    """Random weights, biases and norms too, and padding as it has to be."""
    model = random_model(config_of(intermediate), 3, dtype, device)
    generator = torch.Generator(device).manual_seed(4)
    assert isinstance(model.family, QwenVL)
    with torch.no_grad():
        for name, parameter in model.vision.named_parameters():
            for part in model.family.parts(f"vision.{name}") if parameter.dim() == 1 else ():
                values = part.of(parameter)
                noise = torch.randn(values.shape, generator=generator, dtype=dtype, device=device)
                part.write(parameter, values + 0.1 * noise)
    return model


def images_of(grids: Sequence[Grid], seed: int = 0) -> list[Image]:
    rng = np.random.default_rng(seed)
    size = 3 * 2 * 14 * 14
    return [
        Image(str(index), rng.standard_normal((int(np.prod(grid)), size)).astype(np.float32), grid)
        for index, grid in enumerate(grids)
    ]


def twin_of(model: VisionLanguageModel) -> Any:
    """transformers' tower with the same weights, stored as it stores them."""
    tower = to_transformers(model).model.visual.requires_grad_(True)
    for parameter in tower.parameters():
        parameter.data = parameter.data.contiguous()
    return tower


def twin_features(tower: Any, image: Image) -> Tensor:
    patches = torch.from_numpy(image.patches).to(tower.dtype)
    features: Tensor = tower(patches, grid_thw=torch.tensor([image.grid])).pooler_output
    return features


def loss_of(features: Sequence[Tensor]) -> Tensor:
    return torch.stack([feature.float().sin().sum() for feature in features]).sum()


def published_gradients(model: VisionLanguageModel) -> dict[str, Tensor]:
    assert isinstance(model.family, QwenVL)
    gradients = dict[str, Tensor]()
    for name, parameter in model.vision.named_parameters():
        assert parameter.grad is not None, name
        gradients.update(model.family.unpack(f"vision.{name}", parameter.grad))
    return gradients


def layers_of(tower: nn.Module) -> list[VisionLayer]:
    return [layer for layer in tower.modules() if isinstance(layer, VisionLayer)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.cpu().float() - expected.float()).detach().norm() / expected.detach().float().norm())


@given(grid=grids, window=st.integers(1, 5), merge=st.integers(1, 3))
def test_layouts_are_those_of_transformers(grid: Grid, window: int, merge: int) -> None:
    patches: Grid = grid[0], grid[1] * merge, grid[2] * merge
    layout = window_layout(patches, merge, window)
    order, offsets = get_vision_window_index(torch.tensor([patches]), merge, window * merge * 14, 14)
    assert layout.order_F.tolist() == order.tolist()
    assert np.cumsum([0, *layout.lengths]).tolist() == offsets.tolist()
    positions = get_vision_position_ids(torch.tensor([patches]), merge).view(len(order), merge**2, 2)[order]
    assert layout.positions_2T.tolist() == positions.view(-1, 2).t().tolist()


@given(grid=grids, window=st.integers(1, 5))
def test_a_window_is_a_square_of_the_image(grid: Grid, window: int) -> None:
    frames, rows, columns = grid[0], grid[1] * 2, grid[2] * 2
    layout = window_layout((frames, rows, columns), 2, window)
    assert sorted(layout.order_F.tolist()) == list(range(grid[0] * grid[1] * grid[2]))
    start, side, seen = 0, 2 * window, set[tuple[int, int, int]]()
    for length in layout.lengths:
        frame = layout.order_F[start // 4] // (grid[1] * grid[2])
        row, column = layout.positions_2T[:, start : start + length]
        assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == length
        corner = int(frame), int(row.min()) // side, int(column.min()) // side
        assert corner not in seen and set(row // side) == {corner[1]} and set(column // side) == {corner[2]}
        seen.add(corner)
        start += length
    assert start == frames * rows * columns


def test_a_layout_is_computed_once_and_cannot_be_changed() -> None:
    layout = window_layout((1, 8, 8), 2, 2)
    assert window_layout((1, 8, 8), 2, 2) is layout
    with pytest.raises(ValueError, match="read-only"):
        layout.order_F[0] = 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("intermediate", [48, PADDED])
def test_features_and_gradients_are_to_the_last_bit_those_of_transformers(
    intermediate: int, dtype: torch.dtype
) -> None:
    model = model_of(intermediate, dtype)
    tower = twin_of(model)
    for image in images_of(GRIDS):
        (features,) = model.encode([image])
        expected = twin_features(tower, image)
        assert features.dtype == dtype and torch.equal(features, expected), image.grid
        loss_of([features]).backward()
        loss_of([expected]).backward()
    gradients = published_gradients(model)
    theirs = {f"visual.{name}": parameter.grad for name, parameter in tower.named_parameters()}
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        assert gradient.any() and torch.equal(gradient, theirs[name]), name


@pytest.mark.parametrize("intermediate", [48, PADDED])
def test_both_feed_forward_parts_agree(intermediate: int) -> None:
    layer = layers_of(model_of(intermediate).vision)[0]
    x_TH, weight = torch.randn(12, 32, requires_grad=True), torch.randn(12, 32)
    inputs = [x_TH, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias]
    results = []
    for feed_forward in (layer.packed_feed_forward, layer.plain_feed_forward):
        y_TH = feed_forward(x_TH)
        results.append([y_TH, *torch.autograd.grad((y_TH * weight).sum(), inputs)])
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) <= SUMMATION_TOLERANCE


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("intermediate", [1, PADDED, 63])
def test_padding_stays_zero_under_training(intermediate: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed:  # as on CUDA
        monkeypatch.setattr(VisionLayer, "plain_feed_forward", VisionLayer.packed_feed_forward)
    model = model_of(intermediate)
    tower = model.vision
    assert isinstance(tower, VisionTower) and tower.config.padded_intermediate == 64
    adamw = torch.optim.AdamW(tower.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(2):
        loss_of(model.encode(images_of(GRIDS[:2]))).backward()
        for layer in layers_of(tower):
            down, gate_up, bias = layer.down.grad, layer.gate_up.grad, layer.gate_up_bias.grad
            assert down is not None and gate_up is not None and bias is not None
            wholes = [layer.down.t(), *layer.gate_up.chunk(2), *layer.gate_up_bias.chunk(2)]
            wholes += [down.t(), *gate_up.chunk(2), *bias.chunk(2)]
            assert all(len(whole) == 64 and not whole[intermediate:].any() for whole in wholes)
            assert down[:, :intermediate].any(dim=0).all()
        adamw.step()
        adamw.zero_grad()


def test_rows_that_kernels_take_as_they_are_get_no_padding() -> None:
    sizes = {rows: QwenVL(config_of(rows)).vision_config.padded_intermediate for rows in (16, 48, 3420, 5120)}
    assert sizes == {16: 16, 48: 48, 3420: 3456, 5120: 5120}


def test_one_packed_pass_equals_passes_image_by_image() -> None:
    model, packed = model_of(PADDED), model_of(PADDED)
    images = images_of(GRIDS)
    features = model.encode(images)
    tower = packed.vision
    assert isinstance(tower, VisionTower)
    together = tower(torch.cat([torch.from_numpy(image.patches) for image in images]), GRIDS)
    assert relative_error(together, torch.cat(features)) <= SUMMATION_TOLERANCE
    loss_of(features).backward()
    loss_of([together]).backward()
    expected = published_gradients(model)
    for name, gradient in published_gradients(packed).items():
        assert relative_error(gradient, expected[name]) <= SUMMATION_TOLERANCE, name


def test_an_image_does_not_depend_on_those_beside_it_on_a_cpu() -> None:
    model = model_of()
    images = images_of(GRIDS)
    with torch.no_grad():
        alone = [model.encode([image])[0] for image in images]
        assert all(torch.equal(*pair) for pair in zip(model.encode(images), alone, strict=True))
        assert model.encode([]) == ()


@pytest.mark.parametrize("lengths", [(5,), (4, 4, 4), (16, 16, 3, 3, 16, 1)])
def test_both_attentions_agree_and_do_not_cross_sequences(lengths: tuple[int, ...]) -> None:
    packing = Packing.of(lengths, CPU)
    assert sum(length * count for length, count in packing.runs) == sum(lengths)
    qkv = [torch.randn(sum(lengths), 3, 20, requires_grad=True) for _ in range(3)]
    weight = torch.randn(sum(lengths), 3, 20)
    results = []
    for attention in (attention_by_runs, flash_attention):
        o_TND = attention(qkv[0], qkv[1], qkv[2], packing)
        results.append([o_TND, *torch.autograd.grad((o_TND * weight).sum(), qkv)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    start = 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in qkv)
        scores = (q @ k.transpose(1, 2) * 20**-0.5).softmax(-1)
        expected = (scores @ v).transpose(0, 1)
        torch.testing.assert_close(results[0][0][start : start + length], expected, atol=1e-5, rtol=1e-5)
        start += length


def test_reordering_has_the_gradient_of_indexing() -> None:
    order = torch.randperm(6)
    x, weight = torch.randn(24, 5, requires_grad=True), torch.randn(24, 5)
    reordered = vision._reorder(x, order, torch.argsort(order))
    expected = x.view(6, 4, 5)[order].view(24, 5)
    assert torch.equal(reordered, expected)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (reordered, expected)]
    assert torch.equal(*gradients)


def test_layers_are_computed_again_when_there_is_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = VisionLayer.forward

    def counting(self: VisionLayer, *arguments: Any) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return forward(self, *arguments)

    monkeypatch.setattr(VisionLayer, "forward", counting)
    model, images = model_of(), images_of(GRIDS[:1])
    with torch.no_grad():
        model.encode(images)
    assert calls == [False] * 2
    calls.clear()
    loss_of(model.encode(images)).backward()
    assert len(calls) == 4
    model.requires_grad_(False)
    assert not model.encode(images)[0].requires_grad


@given(st.lists(st.integers(1, 6)), st.integers(1, 8))
@example([2, 1, 3], 3)
def test_passes_follow_from_the_sizes(sizes: list[int], limit: int) -> None:
    images = [Image(str(index), np.zeros((size, 1), np.float32), (1, 1, size)) for index, size in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vlm, "MAX_PATCHES_OF_PASS", limit)
        patch.setattr(VisionLanguageModel, "device", torch.device("cuda"))
        passes = VisionLanguageModel.__new__(VisionLanguageModel).vision_passes(images)
    assert [image for together in passes for image in together] == images
    totals = [sum(len(image.patches) for image in together) for together in passes]
    for together, total in zip(passes, totals, strict=True):
        assert together and (total <= limit or len(together) == 1)
    for total, following in zip(totals, passes[1:], strict=False):
        assert total + len(following[0].patches) > limit, "a pass ends only where the next image does not fit"


def test_operations_are_those_that_run() -> None:
    model = model_of()
    tower = model.vision
    assert isinstance(tower, VisionTower)
    pairs = 0
    for image in images_of(GRIDS):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.encode([image])
        counts = counter.get_flop_counts()["Global"]
        linear = sum(count for operator, count in counts.items() if "attention" not in str(operator))
        layout = window_layout(image.grid, 2, 2)
        pairs = sum(length**2 for length in layout.lengths) + image.grid[0] * (image.grid[1] * image.grid[2]) ** 2
        assert vision_flops(tower.config, [image.grid]) == linear + 4 * 32 * pairs
    assert vision_flops(tower.config, GRIDS) == sum(vision_flops(tower.config, [grid]) for grid in GRIDS)


def cuda_backward(model: VisionLanguageModel, images: Sequence[Image]) -> tuple[list[Tensor], dict[str, Tensor]]:
    features = model.encode(images)
    loss_of(features).backward()
    gradients = {name: gradient.clone() for name, gradient in published_gradients(model).items()}
    model.zero_grad()
    return [feature.detach() for feature in features], gradients


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, BF16_TOLERANCE)])
@pytest.mark.parametrize("chosen", [GRIDS, [(1, 32, 32)] * 3], ids=["ragged", "equal"])
def test_one_pass_on_cuda_equals_the_cpu_and_is_repeatable(
    chosen: Sequence[Grid], dtype: torch.dtype, tolerance: float
) -> None:
    from rollplex.gpu.device import select_device

    device, images = select_device("cuda"), images_of(chosen)
    model = model_of(PADDED, dtype, device)
    reference = model_of(PADDED, dtype)
    with torch.no_grad():
        for parameter, other in zip(reference.parameters(), model.parameters(), strict=True):
            parameter.copy_(other)
    reference.float()
    expected, expected_gradients = cuda_backward(reference, images)
    features, gradients = cuda_backward(model, images)
    for actual, feature in zip(features, expected, strict=True):
        assert relative_error(actual, feature) <= tolerance
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected_gradients[name]) <= 2 * tolerance, name
    again, gradients_again = cuda_backward(model, images)
    assert all(torch.equal(*pair) for pair in zip(features, again, strict=True))
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


@pytest.mark.gpu
def test_a_pass_never_waits_for_the_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model, images = model_of(PADDED, torch.bfloat16, device), images_of(GRIDS)
    with torch.no_grad():
        model.encode(images)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.encode(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")
