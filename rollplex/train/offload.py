"""Optimizer state in chunks: what belongs together, where it lives, and how it comes to the device and back.

    sizes --plan_state--> chunks of neighbouring elements, each in device memory or in (pinned) host memory

    for chunk, tensors in storage.visit():                           one update, chunk after chunk

        host memory --load lane--> slot --current stream: update--> slot --store lane--> host memory
        device memory -------------------current stream: update------------------------> device memory

While a chunk is updated its neighbours are on their way, in both directions at once, over a few slots of device memory
that are used in turn. CUDA events order all of it: the host never waits. On a CPU the copies happen at once, and the
chunks, slots and results are the same.

This file does not know what the numbers mean: no gradient, no learning rate, no parameter but its name and size.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor

MASTER = "master"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What is kept for each element of a parameter, in float32; a master only beside a parameter of another dtype."""

CHUNK_ELEMENTS = 1 << 24
"""64 MiB per kind: copies long enough for the full rate, and a power of two, to which torch rounds pinned memory up."""
ALIGNMENT = 64
"""Elements; chunks cut a parameter at multiples of it. A CPU's vector loop then covers the same elements as in the
whole parameter (what remains goes through another loop, which may round differently), and a GPU's loads stay wide."""
NUM_SLOTS = 3
"""One is loaded, one updated, one stored. With two, loading waits for updating: 2 % at the rates of an H200."""
NUM_PINNING_THREADS = 8
"""Pinning pages takes seconds per 10 GB in one thread."""
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of a flat parameter; they lie from `offset` on in their chunk."""

    name: str
    start: int
    stop: int
    offset: int

    @property
    def span(self) -> slice:
        """In the parameter."""
        return slice(self.start, self.stop)

    @property
    def place(self) -> slice:
        """In the chunk's tensors."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class Chunk:
    """Pieces whose state lives, moves and is updated together: one flat tensor for each of `kinds`."""

    pieces: tuple[Piece, ...]
    kinds: tuple[str, ...]
    on_host: bool = False

    @property
    def num_elements(self) -> int:
        """Of each tensor, the gaps between aligned pieces included."""
        last = self.pieces[-1]
        return last.offset + last.stop - last.start

    @property
    def num_bytes(self) -> int:
        return self.num_elements * len(self.kinds) * FLOAT32_BYTES


@dataclass(frozen=True)
class StateBytes:
    """Memory of an optimizer's state: on the device, on the host, and the device's slots for what is on the host."""

    device: int
    host: int
    slots: int


def plan_state(
    sizes: Mapping[str, int], narrow: Collection[str], device_gib: float | None, chunk_elements: int = CHUNK_ELEMENTS
) -> tuple[Chunk, ...]:
    """Divide parameters of so many elements into chunks, and place each chunk.

    narrow: names of those that are not float32 and so need a master. device_gib: what may stay on the device; None is
    everything. The chunks that stay are spread evenly, so that their updates fall between the others' transfers.
    """
    wide = {name: size for name, size in sizes.items() if name not in narrow}
    rest = {name: size for name, size in sizes.items() if name in narrow}
    chunks = [
        *(Chunk(pieces, (MASTER, *MOMENTS)) for pieces in _cut(rest, chunk_elements)),
        *(Chunk(pieces, MOMENTS) for pieces in _cut(wide, chunk_elements)),
    ]
    if device_gib is None:
        return tuple(chunks)
    return tuple(_placed(chunks, int(device_gib * 2**30)))


def state_bytes(chunks: Sequence[Chunk]) -> StateBytes:
    """What a plan takes; the update's own workspace, one chunk's gradients in float32, comes on top."""
    hosted = [chunk for chunk in chunks if chunk.on_host]
    slot = _slot_elements(chunks) * len(_slot_kinds(chunks)) * FLOAT32_BYTES
    return StateBytes(
        device=sum(chunk.num_bytes for chunk in chunks if not chunk.on_host),
        host=sum(chunk.num_bytes for chunk in hosted),
        slots=slot * min(NUM_SLOTS, len(hosted)),
    )


def _cut(sizes: Mapping[str, int], chunk_elements: int) -> Iterator[tuple[Piece, ...]]:
    """Fill chunks in order. Pieces start at multiples of ALIGNMENT, in their parameter and in their chunk."""
    assert chunk_elements >= ALIGNMENT and chunk_elements % ALIGNMENT == 0, chunk_elements
    pieces, offset = list[Piece](), 0
    for name, size in sizes.items():
        start = 0
        while start < size:
            if offset >= chunk_elements:
                yield tuple(pieces)
                pieces, offset = [], 0
            stop = min(size, start + chunk_elements - offset)
            pieces.append(Piece(name, start, stop, offset))
            offset += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            start = stop
    if pieces:
        yield tuple(pieces)


def _placed(chunks: Sequence[Chunk], device_bytes: int) -> Iterator[Chunk]:
    """Up to every chunk, the device holds no more than its share: device_bytes x bytes so far / all bytes."""
    total, seen, held = sum(chunk.num_bytes for chunk in chunks), 0, 0
    share = min(device_bytes, total)
    for chunk in chunks:
        seen += chunk.num_bytes
        stays = (held + chunk.num_bytes) * total <= share * seen
        held += chunk.num_bytes * stays
        yield replace(chunk, on_host=not stays)


def _slot_elements(chunks: Sequence[Chunk]) -> int:
    return max((chunk.num_elements for chunk in chunks if chunk.on_host), default=0)


def _slot_kinds(chunks: Sequence[Chunk]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(chunk.kinds for chunk in chunks if chunk.on_host)))


Moment = torch.cuda.Event | None
"""A point in a stream's work; None is one that has passed, as every one has on a CPU."""


class Lane:
    """Copies in order, on a stream of their own beside the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Moment) -> Moment:
        """Copy (to, from) pairs once `after` has passed; gives the moment at which they are done."""
        if self._stream is None:
            for to, source in pairs:
                to.copy_(source)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
            return done

    def now(self) -> Moment:
        """All that the current stream has been given so far."""
        if self._stream is None:
            return None
        given: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return given

    def wait(self, moment: Moment) -> None:
        """What the current stream is given from here on runs after `moment`."""
        if moment is not None:
            torch.cuda.current_stream(self._device).wait_event(moment)

    def settle(self) -> None:
        """The host waits for every copy."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(eq=False)
class _Slot:
    """Device memory for one chunk from the host; `free` is when it may be overwritten."""

    tensors: Mapping[str, Tensor]
    loaded: Moment = None
    free: Moment = None

    def views(self, chunk: Chunk) -> dict[str, Tensor]:
        return {kind: self.tensors[kind][: chunk.num_elements] for kind in chunk.kinds}


class StateStorage:
    """The tensors of a plan's chunks, all zeros to begin with."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.chunks, self._device = tuple(chunks), device
        self.tensors = self._allocate()
        """Of each chunk by kind, flat, where they live. To be touched only between visits, after `settle`."""
        self._pieces: dict[str, list[tuple[Mapping[str, Tensor], Piece]]] = {}
        for chunk, tensors in zip(self.chunks, self.tensors, strict=True):
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.name, []).append((tensors, piece))
        self._load, self._store = Lane(device), Lane(device)
        elements, kinds = _slot_elements(chunks), _slot_kinds(chunks)
        self._slots = [
            _Slot({kind: torch.empty(elements, dtype=torch.float32, device=device) for kind in kinds})
            for _ in range(min(NUM_SLOTS, sum(chunk.on_host for chunk in chunks)))
        ]
        for slot in self._slots:
            slot.free = self._load.now()  # what used this memory before may still be running

    def _allocate(self) -> list[dict[str, Tensor]]:
        pinned = self._device.type == "cuda"

        def zeros(chunk: Chunk) -> dict[str, Tensor]:
            device = torch.device("cpu") if chunk.on_host else self._device
            return {
                kind: torch.zeros(
                    chunk.num_elements, dtype=torch.float32, device=device, pin_memory=pinned and chunk.on_host
                )
                for kind in chunk.kinds
            }

        with ThreadPoolExecutor(NUM_PINNING_THREADS) as pool:
            hosted = pool.map(zeros, [chunk for chunk in self.chunks if chunk.on_host])
            return [next(hosted) if chunk.on_host else zeros(chunk) for chunk in self.chunks]

    def pieces(self, name: str, kind: str) -> list[tuple[slice, Tensor]]:
        """A parameter's state where it lives: spans of the flat parameter, which cover it in order, and their values.

        Under the rules of `tensors`. A parameter without elements has no pieces.
        """
        return [(piece.span, tensors[kind][piece.place]) for tensors, piece in self._pieces.get(name, [])]

    def visit(self) -> Iterator[tuple[Chunk, Mapping[str, Tensor]]]:
        """Every chunk with its tensors on the device, for the current stream to read and change.

        They are valid until the next chunk is asked for; the host's copy is whole once the visit has ended and
        `settle` was called. A visit must be finished before the next one begins.
        """
        hosted = iter([pair for pair in zip(self.chunks, self.tensors, strict=True) if pair[0].on_host])
        loading = deque[_Slot]()

        def load(slot: _Slot) -> None:
            for chunk, tensors in islice(hosted, 1):
                views = slot.views(chunk)
                slot.loaded = self._load.copy([(views[kind], tensors[kind]) for kind in chunk.kinds], after=slot.free)
                loading.append(slot)

        # A visit takes chunks and slots in the order of the last one, so the stores after which a slot is free include
        # the last one of the chunk that it gets.
        for slot in self._slots:
            load(slot)
        for chunk, tensors in zip(self.chunks, self.tensors, strict=True):
            if not chunk.on_host:
                yield chunk, tensors
                continue
            slot = loading.popleft()
            self._load.wait(slot.loaded)
            views = slot.views(chunk)
            yield chunk, views
            pairs = [(tensors[kind], views[kind]) for kind in chunk.kinds]
            slot.free = self._store.copy(pairs, after=self._store.now())
            load(slot)

    def settle(self) -> None:
        """Wait until host memory holds what the last visit has stored, and may be changed."""
        self._load.settle()
        self._store.settle()
