"""A decode step as one CUDA graph per batch width: the token source of a GPU.

    host       Rows -> one pinned buffer ----copy----+                       +----copy----> pinned results -> Tokens
    device                                            +-> [ whole step ] ----+
                              drawn tokens of the step before -^

A graph is captured for each width (a number of rows, from a short list) and kind of sampling, when it is first needed;
rows beyond the batch are idle. All that changes from step to step is in the uploaded buffer, so the host does nothing
per layer, and the tokens drawn go into the next step on the device. The host reads them one step late, while the next
step runs. Without graphs the same kernels are launched one by one; the results are the same bits.

Legend: B rows, G groups, M blocks of a row, I work items of the prefixes, W words of a noise key, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollplex.config import RolloutConfig
from rollplex.models.attention import PagedKV, PrefixKV
from rollplex.models.decoder import DecoderConfig
from rollplex.models.kernels.decode import DecodeTables, GroupedDecodeAttention
from rollplex.models.kernels.decode_layers import DecodeLayers
from rollplex.models.kernels.decode_plan import NARROW
from rollplex.models.vlm import VisionLanguageModel
from rollplex.rollout.blocks import blocks_for
from rollplex.rollout.fused_filters import find_kept
from rollplex.rollout.fused_sampler import fused_sample
from rollplex.rollout.rows import Rows, Tokens
from rollplex.rollout.sampler import SamplingParams

LAG = 1
"""Steps that the host is behind: enough to read and schedule while the GPU works, and few tokens past a stop."""
NUM_SLOTS = LAG + 2
"""Pinned buffers in turn: one being written, one per step in flight."""
ALIGNMENT = 16
"""Bytes: what the attention kernel's loads take for granted of a prefix's address."""
RESULTS = 4
"""Rows of the result: the id's bits, and three log-probs."""


def kernels_fit(c: DecoderConfig) -> bool:
    """Whether the kernels of a decode step compute this decoder; if not, eager.py serves a GPU as well."""
    rows = (c.hidden, c.intermediate, c.num_heads * c.head_dim)
    return c.num_heads // c.num_kv_heads <= NARROW and c.head_dim % 8 == 0 and all(size % 16 == 0 for size in rows)


def widths(max_rows: int) -> list[int]:
    """Widths for which graphs are made: every power of two to 8, then steps of 8, 16 and 32."""
    found = [1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_rows, 32), max_rows]
    return sorted({width for width in found if width <= max_rows})


class Mirror:
    """Named arrays that lie one after the other in pinned buffers on the host, and once on the device."""

    def __init__(self, arrays: dict[str, tuple[np.dtype, tuple[int, ...]]], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (dtype, shape) in arrays.items():
            offsets[name] = size
            size += -(-dtype.itemsize * int(np.prod(shape)) // 16) * 16
        self._device_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host_bytes = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_SLOTS)]
        self.device: dict[str, Tensor] = {}
        self.host: list[dict[str, npt.NDArray[np.generic]]] = [{} for _ in range(NUM_SLOTS)]
        for name, (dtype, shape) in arrays.items():
            span = slice(offsets[name], offsets[name] + dtype.itemsize * int(np.prod(shape)))
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self.device[name] = self._device_bytes[span].view(torch_dtype).view(shape)
            for slot, host in enumerate(self.host):
                host[name] = self._host_bytes[slot].numpy()[span].view(dtype).reshape(shape)

    def upload(self, slot: int) -> None:
        """Copy one host buffer to the device, in stream order."""
        self._device_bytes.copy_(self._host_bytes[slot], non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Pending:
    """Results on their way into a pinned buffer, which is not used again before `lag` more steps."""

    results_RB: Tensor
    num_rows: int
    landed: torch.cuda.Event

    def read(self) -> Tokens:
        self.landed.synchronize()
        results_RB = self.results_RB.numpy()[:, : self.num_rows].copy()
        return Tokens(results_RB[0].view(np.int32).astype(np.int64), results_RB[1:])


class GraphTokens:
    """The `TokenSource` of a CUDA device."""

    def __init__(self, model: VisionLanguageModel, pages: PagedKV, config: RolloutConfig, banned_V: Tensor) -> None:
        self._model, self._config, self._banned_V = model, config, banned_V
        c, device, rows = model.decoder.config, model.device, min(config.max_batch_samples, config.max_batch_tokens)
        self._widths, self._num_rows = widths(rows), rows
        self._queries = c.num_heads // c.num_kv_heads
        blocks = blocks_for(config.max_new_tokens, config.block_size)
        self._attention = GroupedDecodeAttention.allocate(c, pages, rows, blocks, config.block_size)
        self._layers = DecodeLayers(model.decoder, rows)
        int32, int64 = np.dtype(np.int32), np.dtype(np.int64)
        self._mirror = Mirror(
            {
                "ids": (int64, (rows,)),
                "sources": (int64, (rows,)),
                "positions": (int64, (rows,)),
                "keys": (int64, (rows, 5)),
                "groups": (int64, (rows, 6)),
                "items": (int32, (self._attention.max_items, 4)),
                "blocks": (int32, (rows, blocks)),
                "lengths": (int32, (rows,)),
                "splits": (int32, (rows,)),
            },
            device,
        )
        self._results_RB = torch.zeros(RESULTS, rows, dtype=torch.float32, device=device)
        self._host_results = [torch.zeros(RESULTS, rows, pin_memory=True) for _ in range(NUM_SLOTS)]
        self._graphs: dict[tuple[int, SamplingParams], Callable[[], None]] = {}
        self._pool = torch.cuda.graph_pool_handle() if config.cuda_graphs else None
        self._capture_stream = torch.cuda.Stream()  # one for all: cuBLAS keeps a workspace for each that it meets
        self._slot = 0
        self._planned: tuple[tuple[tuple[int, int], ...], tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] | None
        self._planned = None

    @property
    def lag(self) -> int:
        return LAG

    @torch.no_grad()
    def launch(self, rows: Rows, params: SamplingParams) -> _Pending:
        """Start one decode step; nothing here waits for the GPU."""
        num_rows = len(rows.ids_B)
        width = next(width for width in self._widths if width >= num_rows)
        run = self._graphs.get((width, params)) or self._make(width, params)
        self._slot = (self._slot + 1) % NUM_SLOTS
        self._fill(self._mirror.host[self._slot], rows, width)
        self._mirror.upload(self._slot)
        run()
        host_RB = self._host_results[self._slot]
        host_RB.copy_(self._results_RB, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return _Pending(host_RB, num_rows, landed)

    def workspace(self) -> tuple[Tensor, ...]:
        scratch = (self._attention.o_TNSD, self._attention.lse_TNS, *self._layers.workspace)
        return (*scratch, *self._mirror.device.values(), self._results_RB, self._banned_V)

    def _fill(self, host: dict[str, npt.NDArray[np.generic]], rows: Rows, width: int) -> None:
        num_rows = len(rows.ids_B)
        host["ids"][:num_rows], host["ids"][num_rows:width] = rows.ids_B, 0
        host["sources"][:num_rows] = rows.sources_B
        host["positions"][:num_rows] = rows.positions_B
        host["keys"][:num_rows] = rows.keys_BW
        host["blocks"][:num_rows] = rows.blocks_BM
        host["lengths"][:num_rows], host["lengths"][num_rows:width] = rows.lengths_B, 0
        groups_GF, items_IF, splits_B = self._plan(rows.prefixes)
        host["groups"][: len(groups_GF)] = groups_GF
        host["items"][: len(items_IF)] = items_IF
        host["items"][len(items_IF) :, 0] = -1
        host["splits"][:num_rows], host["splits"][num_rows:width] = splits_B, 0

    def _plan(
        self, prefixes: tuple[tuple[PrefixKV, int], ...]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Groups with the places of their prefixes, the work items, and each row's number of partial results."""
        shape = tuple((prefix.length, num_rows) for prefix, num_rows in prefixes)
        if self._planned is None or self._planned[0] != shape:
            lengths, counts = (list(column) for column in zip(*shape, strict=True))
            self._planned = shape, self._attention.plan(lengths, counts)
        first, groups = 0, []
        for prefix, num_rows in prefixes:
            k, v = prefix.k_LPKD, prefix.v_LPKD
            assert k.stride(0) == v.stride(0) and k[0].is_contiguous() and v[0].is_contiguous()
            assert k.data_ptr() % ALIGNMENT == v.data_ptr() % ALIGNMENT == 0
            groups.append((first, num_rows, prefix.length, k.data_ptr(), v.data_ptr(), k.stride(0)))
            first += num_rows
        return np.array(groups, dtype=np.int64), *self._planned[1]

    def _make(self, width: int, params: SamplingParams) -> Callable[[], None]:
        """What runs a step of this width: a graph's replay, or the step itself."""

        def step() -> None:
            self._step(width, params)

        if self._pool is not None:
            # A trial run compiles and allocates outside the capture; idle rows leave no trace in the pages.
            before_RB = self._results_RB.clone()
            self._mirror.device["lengths"].zero_()
            self._mirror.device["items"][:, 0] = -1
            self._mirror.device["ids"].zero_()
            graph, stream = torch.cuda.CUDAGraph(), self._capture_stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
            torch.cuda.current_stream().wait_stream(stream)
            self._results_RB.copy_(before_RB)
            self._graphs[width, params] = graph.replay
        else:
            self._graphs[width, params] = step
        return self._graphs[width, params]

    def _step(self, width: int, params: SamplingParams) -> None:
        """The step itself, on the uploaded rows."""
        model, on = self._model, self._mirror.device
        drawn_B = self._results_RB[0].view(torch.int32).long()
        ids_B = on["ids"][:width]
        ids_B = torch.where(ids_B < 0, drawn_B[on["sources"][:width].clamp(min=0)], ids_B)
        attention = self._attention.on(
            DecodeTables(on["blocks"][:width], on["lengths"][:width], on["groups"], on["items"], on["splits"][:width])
        )
        rope = model.decoder.rope(on["positions"][:width].expand(3, -1))
        hidden_BH = self._layers(model.embed(ids_B), rope, attention)
        logits_BV = hidden_BH @ model.decoder.head.t()
        kept = find_kept(logits_BV, params, self._banned_V)
        draw = fused_sample(logits_BV, on["keys"][:width], params.temperature, self._banned_V, kept=kept)
        self._results_RB[0, :width].view(torch.int32).copy_(draw.ids_B)
        columns = (draw.raw_logprobs_B, draw.tempered_logprobs_B, draw.sampling_logprobs_B)
        self._results_RB[1:, :width] = torch.stack(columns)
