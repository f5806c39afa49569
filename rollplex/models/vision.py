"""The vision tower of Qwen2.5-VL: patches of any number of images -> features, in one packed pass.

    patches -> patch_embed -> [window order] -> L x ( norm -> qkv -> rotary -> attention -> out -> + ->
               norm -> gate_up -> silu * -> down -> + ) -> merger -> [image order] -> features

Most layers attend within windows, a few within whole frames. Which row lies in which window, and every row's position,
follow from the images' sizes alone: `window_layout` computes them on the host, before the layers, which neither wait
for the device nor loop over images or windows. It does not know checkpoints, prompts, or which images belong together.

On a CPU every operation is that of transformers' tower, in its order, so that features and gradients of one image are
the same to the last bit. Where the feed-forward part's width is no multiple of 16, the gates, the ups and the columns
of `down` are padded with zeros, which fast matrix kernels need; their gradients are zero, so they stay.

Legend: T patches, F features (merged patches), H hidden, N heads, D head dim, C values of a patch, P padded
feed-forward width, M hidden of a merged patch, O width of a feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rollplex.gpu.device import upload
from rollplex.models.elementwise import add_rms_norm, rms_norm, silu_mul
from rollplex.models.kernels.flash import Segments, flash_backward, flash_forward, sequence_attention

Grid = tuple[int, int, int]
"""Size of one image or clip in patches: (frames, rows, columns)."""

NORM_EPS = 1e-6
"""Not in any config: transformers' tower fixes it."""
ALIGNED_WIDTH, PADDED_WIDTH = 16, 64
"""Published 3B and 7B towers are 3,420 wide: rows of that many bfloat16 values start at odd multiples of 8 bytes, and
the fast matrix kernels want 16. What is padded at all is padded to whole cache lines."""


@dataclass(frozen=True)
class VisionConfig:
    """Shapes of a tower; a family's adapter makes it from the Hugging Face config.

    patch_shape: (channels, frames, rows, columns) of pixels in a patch.
    merge: side of the square of patches that makes one feature. window: side of a window, in features.
    """

    num_layers: int
    hidden: int
    num_heads: int
    intermediate: int
    feature_size: int
    patch_shape: tuple[int, int, int, int]
    merge: int
    window: int
    full_layers: frozenset[int]
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def padded_intermediate(self) -> int:
        """Feed-forward width with padding, P."""
        width = self.intermediate
        return width if width % ALIGNED_WIDTH == 0 else -(-width // PADDED_WIDTH) * PADDED_WIDTH


@dataclass(frozen=True, eq=False)
class WindowLayout:
    """Where one image's patches go: window after window, within a window as in the image.

    order_F: int64, for each feature in window order its number in the image's own order.
    positions_2T: int64, row and column of each patch, in window order.
    lengths: patches of each window.
    """

    order_F: npt.NDArray[np.int64]
    positions_2T: npt.NDArray[np.int64]
    lengths: tuple[int, ...]


@lru_cache(maxsize=1024)
def window_layout(grid: Grid, merge: int, window: int) -> WindowLayout:
    """The layout of one image of this size; windows at the right and lower edge may be smaller."""
    frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    frame_F, row_F, column_F = np.indices((frames, rows, columns)).reshape(3, -1)
    windows_down, windows_across = -(-rows // window), -(-columns // window)
    window_F = (frame_F * windows_down + row_F // window) * windows_across + column_F // window
    order_F = np.argsort(window_F, kind="stable")
    corner_2F11 = merge * np.stack([row_F, column_F])[:, order_F, None, None]
    positions_2T = (corner_2F11 + np.indices((merge, merge))[:, None]).reshape(2, -1)
    lengths = np.bincount(window_F) * merge**2
    order_F.setflags(write=False)
    positions_2T.setflags(write=False)
    return WindowLayout(order_F, positions_2T, tuple(lengths.tolist()))


@dataclass(frozen=True, eq=False)
class Packing:
    """Sequences packed into T rows. runs: (length, how many) of neighbours of equal length."""

    segments: Segments
    runs: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Packing":
        """The packing of these lengths, with everything that kernels need already on the device."""
        segments = Segments(tuple(lengths), device)
        _ = segments.offsets  # made now, not within the first layer
        return cls(segments, tuple((length, len(list(same))) for length, same in groupby(lengths)))


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary angles of every patch, float32: cos and sin [T, D]; their halves are equal."""

    cos_TD: Tensor
    sin_TD: Tensor


@dataclass(frozen=True, eq=False)
class _Batch:
    """What the layers need to know of a batch of images; rows are in window order, image after image."""

    order_F: Tensor
    inverse_F: Tensor
    rotary: Rotary
    windows: Packing
    frames: Packing


class VisionLayer(nn.Module):
    """One layer: attention within the packing's sequences, then the feed-forward part."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        hidden, padded = config.hidden, config.padded_intermediate
        self.num_heads, self.width = config.num_heads, config.intermediate
        self.attention_norm = nn.Parameter(torch.ones(hidden))
        self.mlp_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out = nn.Parameter(torch.empty(hidden, hidden))
        self.out_bias = nn.Parameter(torch.zeros(hidden))
        self.gate_up = nn.Parameter(torch.zeros(2 * padded, hidden))
        self.gate_up_bias = nn.Parameter(torch.zeros(2 * padded))
        self.down = nn.Parameter(torch.zeros(hidden, padded))
        self.down_bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x_TH: Tensor, rotary: Rotary, packing: Packing) -> Tensor:
        qkv = F.linear(rms_norm(x_TH, self.attention_norm, NORM_EPS), self.qkv, self.qkv_bias)
        o_TND = packed_attention(*rotated(qkv, self.num_heads, rotary), packing)
        out_TH = F.linear(o_TND.reshape(x_TH.shape), self.out, self.out_bias)
        x_TH, normed_TH = add_rms_norm(x_TH, out_TH, self.mlp_norm, NORM_EPS)
        feed_forward = self.packed_feed_forward if x_TH.is_cuda else self.plain_feed_forward
        return x_TH + feed_forward(normed_TH)

    def packed_feed_forward(self, x_TH: Tensor) -> Tensor:
        """Gates and ups from one product, padding included."""
        hidden_TP = silu_mul(F.linear(x_TH, self.gate_up, self.gate_up_bias), num_slots=1)
        return F.linear(hidden_TP, self.down, self.down_bias)

    def plain_feed_forward(self, x_TH: Tensor) -> Tensor:
        """The same as transformers computes it, sum by sum."""
        halves = zip(self.gate_up.chunk(2), self.gate_up_bias.chunk(2), strict=True)
        gate, up = (F.linear(x_TH, weight[: self.width], bias[: self.width]) for weight, bias in halves)
        return F.linear(F.silu(gate) * up, self.down[:, : self.width], self.down_bias)


class Merger(nn.Module):
    """Squares of patches -> features."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        merged = config.hidden * config.merge**2
        self.norm = nn.Parameter(torch.ones(config.hidden))
        self.up = nn.Parameter(torch.empty(merged, merged))
        self.up_bias = nn.Parameter(torch.zeros(merged))
        self.down = nn.Parameter(torch.empty(config.feature_size, merged))
        self.down_bias = nn.Parameter(torch.zeros(config.feature_size))

    def forward(self, x_TH: Tensor) -> Tensor:
        x_FM = rms_norm(x_TH, self.norm, NORM_EPS).view(-1, self.up.shape[1])
        return F.linear(F.gelu(F.linear(x_FM, self.up, self.up_bias)), self.down, self.down_bias)


class VisionTower(nn.Module):
    """Patches of images, one after the other, to features in the same order."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Parameter(torch.empty(config.hidden, *config.patch_shape))
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_layers))
        self.merger = Merger(config)
        # On the CPU, whatever the default device: they are the same everywhere, and real where weights have no storage.
        exponents = torch.arange(0, config.head_dim // 2, 2, dtype=torch.float32, device="cpu")
        self._frequencies = (1.0 / (config.rope_theta ** (exponents / (config.head_dim // 2)))).numpy()

    def forward(self, patches_TC: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Features [F, O] of all images. Layers are recomputed in the backward pass: their values are never all kept.

        Args:
            patches_TC: as the image processor cuts them, in the weights' dtype.
            grids: size of each image.
        """
        batch = self._batch(grids, patches_TC.device)
        x_TH = _reorder(self._embed(patches_TC), batch.order_F, batch.inverse_F)
        for index, layer in enumerate(self.layers):
            packing = batch.frames if index in self.config.full_layers else batch.windows
            if torch.is_grad_enabled():
                recomputed = checkpoint(
                    layer, x_TH, batch.rotary, packing, use_reentrant=False, preserve_rng_state=False
                )
                x_TH = cast(Tensor, recomputed)
            else:
                x_TH = layer(x_TH, batch.rotary, packing)
        return _reorder(self.merger(x_TH), batch.inverse_F, batch.order_F)

    def num_features(self, grid: Grid) -> int:
        """Features of one image of this size."""
        return grid[0] * grid[1] * grid[2] // self.config.merge**2

    def _embed(self, patches_TC: Tensor) -> Tensor:
        if patches_TC.is_cuda:
            return F.linear(patches_TC, self.patch_embed.flatten(1))
        # The same product, but its sums in the order of transformers' convolution.
        pixels = patches_TC.view(-1, *self.config.patch_shape)
        return F.conv3d(pixels, self.patch_embed, stride=self.config.patch_shape[1:]).flatten(1)

    def _batch(self, grids: Sequence[Grid], device: torch.device) -> _Batch:
        c = self.config
        layouts = [window_layout(grid, c.merge, c.window) for grid in grids]
        starts = np.cumsum([0, *(len(layout.order_F) for layout in layouts)])
        order_F = np.concatenate([layout.order_F + start for layout, start in zip(layouts, starts, strict=False)])
        inverse_F = np.empty_like(order_F)
        inverse_F[order_F] = np.arange(len(order_F))
        positions_2T = upload(np.concatenate([layout.positions_2T for layout in layouts], axis=1), device)
        return _Batch(
            upload(order_F, device),
            upload(inverse_F, device),
            self._rotary(positions_2T),
            Packing.of([length for layout in layouts for length in layout.lengths], device),
            Packing.of([rows * columns for frames, rows, columns in grids for _ in range(frames)], device),
        )

    def _rotary(self, positions_2T: Tensor) -> Rotary:
        """The first half of the frequencies turns with the row, the second with the column."""
        angles = positions_2T.unsqueeze(-1).float() * upload(self._frequencies, positions_2T.device)
        cos_TD, sin_TD = (torch.cat([*values, *values], dim=-1) for values in (angles.cos(), angles.sin()))
        return Rotary(cos_TD, sin_TD)


def rotated(qkv: Tensor, num_heads: int, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys (both rotated, in float32) and values, each [T, N, D], of projections [T, 3 H].

    On CUDA the projections are rotated in place.
    """
    if qkv.is_cuda:
        from rollplex.models.kernels.rotary import rotate_queries_and_keys  # Triton is there only with CUDA

        qkv = rotate_queries_and_keys(qkv, rotary.cos_TD, rotary.sin_TD, num_heads)
        q_TND, k_TND, v_TND = qkv.view(len(qkv), 3, num_heads, -1).unbind(1)
        return q_TND, k_TND, v_TND
    q_TND, k_TND, v_TND = qkv.view(len(qkv), 3, num_heads, -1).unbind(1)
    return _rotate(q_TND, rotary), _rotate(k_TND, rotary), v_TND


def packed_attention(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, packing: Packing) -> Tensor:
    """Attention within each of the packed sequences [T, N, D]: which kernel computes it."""
    if not q_TND.is_cuda or q_TND.dtype == torch.float32:
        return attention_by_runs(q_TND, k_TND, v_TND, packing)
    return flash_attention(q_TND, k_TND, v_TND, packing)


def attention_by_runs(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, packing: Packing) -> Tensor:
    """Torch's attention, called once for neighbours of equal length."""
    rows = [length * count for length, count in packing.runs]
    outputs = []
    for (length, _), *qkv in zip(packing.runs, *(x.split(rows) for x in (q_TND, k_TND, v_TND)), strict=True):
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in qkv)
        outputs.append(sequence_attention(q, k, v, causal=False).transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def flash_attention(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, packing: Packing) -> Tensor:
    """The same in one call, for sequences of any lengths."""
    o_TND: Tensor = _FlashAttention.apply(q_TND, k_TND, v_TND, packing.segments)  # type: ignore[no-untyped-call]
    return o_TND


def vision_flops(config: VisionConfig, grids: Sequence[Grid]) -> int:
    """Floating-point operations of one forward pass: two per multiply-add of every matrix product, unpadded.

    patch embedding 2 T C H; per layer 2 T (4 H^2 + 3 H intermediate), and 4 H n^2 per sequence of n patches that attend
    to each other; merger 2 F (M^2 + M O).
    """
    c, layouts = config, [window_layout(grid, config.merge, config.window) for grid in grids]
    num_patches = sum(sum(layout.lengths) for layout in layouts)
    merged = c.hidden * c.merge**2
    linear = num_patches * (int(np.prod(c.patch_shape)) * c.hidden)
    linear += num_patches * c.num_layers * (4 * c.hidden**2 + 3 * c.hidden * c.intermediate)
    linear += num_patches // c.merge**2 * (merged**2 + merged * c.feature_size)
    windows = sum(length**2 for layout in layouts for length in layout.lengths)
    frames = sum(count * (rows * columns) ** 2 for count, rows, columns in grids)
    pairs = windows * (c.num_layers - len(c.full_layers)) + frames * len(c.full_layers)
    return 2 * linear + 4 * c.hidden * pairs


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, segments: Segments) -> Tensor:
        o_TND, lse_NT = flash_forward(q_TND, k_TND, v_TND, causal=False, segments=segments)
        ctx.save_for_backward(q_TND, k_TND, v_TND, o_TND, lse_NT)
        ctx.segments = segments
        return o_TND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        return *flash_backward(grad_TND, *ctx.saved_tensors, causal=False, segments=ctx.segments), None


class _Reorder(torch.autograd.Function):
    """Rows in another order; the gradient is a gather too, where indexing would scatter with sorted additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _reorder(x: Tensor, order_F: Tensor, inverse_F: Tensor) -> Tensor:
    """Rows, or squares of neighbouring rows, in this order."""
    squares = x.view(len(order_F), -1)
    return cast(Tensor, _Reorder.apply(squares, order_F, inverse_F)).view(x.shape)  # type: ignore[no-untyped-call]


def _rotate(x_TND: Tensor, rotary: Rotary) -> Tensor:
    """Rotate halves: (a, b) -> (a cos - b sin, b cos + a sin)."""
    x32 = x_TND.float()
    a, b = x32.chunk(2, dim=-1)
    turned = x32 * rotary.cos_TD.unsqueeze(1) + torch.cat((-b, a), dim=-1) * rotary.sin_TD.unsqueeze(1)
    return turned.to(x_TND.dtype)
