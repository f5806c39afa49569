"""What a GPU did in a stretch of time, by the profiler: time of each kernel, and the share spent waiting for the host.

The GPU waits for the host when it is idle because the work that comes next had not been launched yet when the work
before it ended. Gaps between kernels that were launched in time are the GPU's own; so are all gaps within one CUDA
graph, which is launched at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


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


def host_gap_fraction(events: Sequence[GpuEvent]) -> float:
    """Share of the time from the first event's start to the last one's end in which the GPU waits for the host."""
    ordered = sorted(events, key=lambda event: event.start_us)
    waiting, busy_until, last = 0.0, ordered[0].start_us, ordered[0].launch
    for event in ordered:
        late_from = max(busy_until, min(event.launched_us, event.start_us))
        if event.start_us > busy_until and event.launch != last and event.launched_us > busy_until:
            waiting += late_from - busy_until
        if event.end_us > busy_until:
            busy_until, last = event.end_us, event.launch
    return waiting / (busy_until - ordered[0].start_us)


def traced(work: Callable[[], object]) -> list[GpuEvent]:
    """Run work, wait for the GPU, and return what ran on it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    found = profiler.profiler
    assert found is not None and found.kineto_results is not None
    raw = found.kineto_results.events()
    launches: dict[int, float] = {}
    for event in raw:
        if event.device_type() == DeviceType.CPU and event.name().startswith(("cuda", "cu")):
            launches[event.correlation_id()] = (event.start_ns() + event.duration_ns()) / 1e3
    return [
        GpuEvent(
            event.name(), event.start_ns() / 1e3, (event.start_ns() + event.duration_ns()) / 1e3,
            launches.get(event.correlation_id(), event.start_ns() / 1e3), event.correlation_id(),
        )
        for event in raw
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]  # fmt: skip
