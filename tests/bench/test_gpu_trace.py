"""Waiting for the host, in traces made by hand. Times in microseconds."""

import pytest

from rollplex.bench.gpu_trace import GpuEvent, host_gap_fraction, kernel_times


def event(start: float, end: float, launched: float, launch: int, name: str = "k") -> GpuEvent:
    return GpuEvent(name, start, end, launched, launch)


def test_a_queue_that_is_never_empty_has_no_gap() -> None:
    events = [event(10, 20, 1, 1), event(21, 30, 2, 2), event(32, 40, 3, 3)]
    assert host_gap_fraction(events) == 0.0


def test_a_launch_that_comes_late_is_the_hosts() -> None:
    # Idle from 20; launched at 50, begun at 52: 30 of 90 waited for the host, 2 are the GPU's own.
    events = [event(10, 20, 1, 1), event(52, 100, 50, 2)]
    assert host_gap_fraction(events) == pytest.approx(30 / 90)


def test_gaps_within_a_graph_are_not_the_hosts() -> None:
    graph = [event(10, 20, 15, 7), event(30, 40, 15, 7), event(60, 100, 15, 7)]
    assert host_gap_fraction(graph) == 0.0


def test_work_on_another_stream_fills_the_gap() -> None:
    events = [event(0, 10, 0, 1), event(5, 60, 0, 2), event(50, 100, 40, 3)]
    assert host_gap_fraction(events) == 0.0


def test_an_early_short_event_does_not_end_a_longer_one() -> None:
    events = [event(0, 50, 0, 1), event(10, 20, 0, 2), event(80, 100, 70, 3)]
    assert host_gap_fraction(events) == pytest.approx(20 / 100)


def test_kernels_are_summed_by_name() -> None:
    events = [event(0, 10, 0, 1, "a"), event(10, 13, 0, 2, "b"), event(20, 25, 0, 3, "a")]
    assert [(time.name, time.calls, time.total_us) for time in kernel_times(events)] == [("a", 2, 15.0), ("b", 1, 3.0)]
