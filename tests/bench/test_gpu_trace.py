"""Waiting for the host, in traces made by hand. Times in microseconds."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._autograd import DeviceType

from rollplex.bench.gpu_trace import GpuEvent, GpuTrace, busy_us, gpu_events, host_gap_fraction, kernel_times


def event(start: float, end: float, launched: float, launch: int, name: str = "k") -> GpuEvent:
    return GpuEvent(name, start, end, launched, launch)


def gap(*events: GpuEvent, since: float = 0) -> float:
    return host_gap_fraction(GpuTrace(since, events))


def test_a_queue_that_is_never_empty_has_no_gap() -> None:
    assert gap(event(10, 20, 1, 1), event(21, 30, 2, 2), event(32, 40, 3, 3), since=10) == 0.0


def test_a_launch_that_comes_late_is_the_hosts() -> None:
    # Idle from 20, launched at 50, begun at 52: launched in time, it would have begun at about 20.
    assert gap(event(10, 20, 1, 1), event(52, 100, 50, 2), since=10) == pytest.approx(32 / 90)
    assert gap(event(10, 20, 1, 1), event(52, 100, 19, 2), since=10) == 0.0


def test_what_the_host_does_before_the_first_launch_counts() -> None:
    assert gap(event(30, 100, 29, 1)) == pytest.approx(30 / 100)


def test_gaps_within_a_graph_are_not_the_hosts() -> None:
    # The call that launches it returns when its first kernel has ended; a copy on another stream comes between.
    graph = [event(10, 20, 25, 7), event(30, 40, 25, 7), event(60, 100, 25, 7)]
    assert gap(*graph, since=10) == 0.0
    assert gap(*graph, event(31, 45, 12, 8), since=10) == 0.0


def test_work_on_another_stream_fills_the_gap() -> None:
    assert gap(event(0, 10, 0, 1), event(5, 60, 0, 2), event(50, 100, 40, 3)) == 0.0


def test_an_early_short_event_does_not_end_a_longer_one() -> None:
    assert gap(event(0, 50, 0, 1), event(10, 20, 0, 2), event(80, 100, 70, 3)) == pytest.approx(30 / 100)


def test_kernels_are_summed_by_name() -> None:
    events = [event(0, 10, 0, 1, "a"), event(10, 13, 0, 2, "b"), event(20, 25, 0, 3, "a")]
    assert [(time.name, time.calls, time.total_us) for time in kernel_times(events)] == [("a", 2, 15.0), ("b", 1, 3.0)]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 30)), min_size=1))
def test_busy_time_against_counting_microseconds(spans: list[tuple[int, int, int]]) -> None:
    events = [event(start, start + length, start - ahead, index) for index, (start, length, ahead) in enumerate(spans)]
    busy = {at for start, length, _ in spans for at in range(start, start + length)}
    assert busy_us(events) == len(busy)
    window = max(each.end_us for each in events)
    assert 0 <= gap(*events) <= 1 - len(busy) / window + 1e-9
    late = [event(each.start_us, each.end_us, each.start_us, each.launch) for each in events]
    assert gap(*late) == pytest.approx(1 - len(busy) / window), "the host launches at the last moment: every gap is its"


@dataclass
class Raw:
    """An event as the profiler gives it."""

    what: str
    on: DeviceType
    correlation: int
    start: int
    length: int

    def name(self) -> str:
        return self.what

    def device_type(self) -> DeviceType:
        return self.on

    def correlation_id(self) -> int:
        return self.correlation

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.length


def test_events_are_matched_with_the_calls_that_launched_them() -> None:
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    raw = [
        Raw("aten::mm", cpu, 7, 0, 900_000), Raw("cudaGraphLaunch", cpu, 7, 1000, 4000), Raw("one", gpu, 7, 6000, 2000),
        Raw("other", gpu, 7, 9000, 1000), Raw("marker", gpu, 7, 9000, 0), Raw("orphan", gpu, 0, 20_000, 500),
        Raw("cuLaunchKernelEx", cpu, 9, 10_000, 1000), Raw("triton", gpu, 9, 11_500, 500), Raw("orphan", gpu, 0, 1, 1),
    ]  # fmt: skip
    one, other, orphan, triton, second = gpu_events(raw)
    assert (one, other) == (event(6, 8, 5, 7, "one"), event(9, 10, 5, 7, "other"))
    assert triton == event(11.5, 12, 11, 9, "triton")
    assert orphan.launched_us == orphan.start_us == 20 and orphan.launch != second.launch
