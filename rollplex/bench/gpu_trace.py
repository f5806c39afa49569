"""What a GPU did in a stretch of time, by the profiler: time of each kernel, and the share spent waiting for the host.

The GPU waits for the host when it is idle and the call that launches what comes next had not ended when the work before
it did. Gaps before work that was launched in time are the GPU's own; so are all gaps within one CUDA graph, which is
launched at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

MARK = "traced work"
"""The profiler's name of the host's part, which it repeats on the GPU's side, around all that ran."""


@dataclass(frozen=True)
class GpuEvent:
    """One kernel or copy. Times in microseconds on one clock; launched: when the host's call that launched it ended."""

    name: str
    start_us: float
    end_us: float
    launched_us: float
    launch: int
    """Equal for everything that one call launched."""


@dataclass(frozen=True)
class GpuTrace:
    """What ran on an idle GPU since the host began some work, at start_us."""

    start_us: float
    events: tuple[GpuEvent, ...]


@dataclass(frozen=True)
class KernelTime:
    """All runs of one kernel."""

    name: str
    calls: int
    total_us: float


def kernel_times(events: Iterable[GpuEvent]) -> list[KernelTime]:
    """Time by kernel name, longest first."""
    calls: dict[str, list[float]] = defaultdict(list)
    for event in events:
        calls[event.name].append(event.end_us - event.start_us)
    times = [KernelTime(name, len(spans), sum(spans)) for name, spans in calls.items()]
    return sorted(times, key=lambda time: -time.total_us)


def busy_us(events: Iterable[GpuEvent]) -> float:
    """Time in which anything ran; what overlaps, on several streams, counts once."""
    busy, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        busy += max(0.0, event.end_us - max(event.start_us, until))
        until = max(until, event.end_us)
    return busy


def host_gap_fraction(trace: GpuTrace) -> float:
    """Share of the time from the host's start to the last event's end in which the GPU waits for the host."""
    waiting, busy_until, begun = 0.0, trace.start_us, set[int]()
    for event in sorted(trace.events, key=lambda event: event.start_us):
        if event.launched_us > busy_until and event.launch not in begun:
            waiting += max(0.0, event.start_us - busy_until)
        begun.add(event.launch)
        busy_until = max(busy_until, event.end_us)
    assert busy_until > trace.start_us, "nothing ran on the GPU"
    return waiting / (busy_until - trace.start_us)


def traced(work: Callable[[], object]) -> GpuTrace:
    """Run work on an idle GPU, wait for it, and return what ran."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        torch.zeros(1, device="cuda")  # whatever tracing sets up at its first launch is no part of the work
        torch.cuda.synchronize()
        with record_function(MARK):
            work()
            torch.cuda.synchronize()
    found = profiler.profiler
    assert found is not None and found.kineto_results is not None
    raw = found.kineto_results.events()
    marks = (event for event in raw if event.name() == MARK and event.device_type() == DeviceType.CPU)
    events = gpu_events(raw)
    start_us = min(mark.start_ns() / 1e3 for mark in marks)
    return GpuTrace(start_us, tuple(event for event in events if event.launched_us >= start_us))


class KinetoEvent(Protocol):
    """What is read of the profiler's events."""

    def name(self) -> str: ...

    def device_type(self) -> DeviceType: ...

    def correlation_id(self) -> int: ...

    def start_ns(self) -> int: ...

    def duration_ns(self) -> int: ...


def gpu_events(raw: Iterable[KinetoEvent]) -> list[GpuEvent]:
    """The GPU's events, each with the end of its launch; without a known launch, one of its own as it started."""
    raw = list(raw)
    launches = {
        event.correlation_id(): (event.start_ns() + event.duration_ns()) / 1e3
        for event in raw
        if event.device_type() == DeviceType.CPU and event.name().startswith("cu")  # runtime and driver calls
    }
    events = []
    for index, event in enumerate(raw):
        if event.device_type() != DeviceType.CUDA or event.duration_ns() == 0 or event.name() == MARK:
            continue
        launch, start_us = event.correlation_id(), event.start_ns() / 1e3
        end_us = (event.start_ns() + event.duration_ns()) / 1e3
        known = launch in launches
        events.append(
            GpuEvent(event.name(), start_us, end_us, launches.get(launch, start_us), launch if known else -1 - index)
        )
    return events
