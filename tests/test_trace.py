"""Spans and counters: sums, events, and what survives an exception."""

import json
from pathlib import Path

import pytest

from rollplex.trace import Trace


def test_spans_add_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0, 10.5, 20.0, 20.25])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    trace = Trace()
    for name in ("decode", "suffix", "decode"):
        with trace.span(name):
            pass
    assert dict(trace.seconds) == {"decode": 2.25, "suffix": 0.5}
    assert trace.events == [], "events are kept only when asked for"


def test_a_span_counts_although_its_body_fails() -> None:
    trace = Trace(keep_events=True)
    with pytest.raises(ZeroDivisionError), trace.span("broken"):
        raise ZeroDivisionError
    assert trace.seconds["broken"] > 0 and len(trace.events) == 1


def test_nested_spans_are_both_timed() -> None:
    trace = Trace()
    with trace.span("outer"), trace.span("inner"):
        pass
    assert trace.seconds["outer"] >= trace.seconds["inner"] > 0


def test_counters_add_up() -> None:
    trace = Trace()
    trace.count("tokens", 3)
    trace.count("tokens", 4)
    assert trace.counts["tokens"] == 7 and trace.counts["other"] == 0


def test_whoever_watches_hears_of_each_span_as_it_begins() -> None:
    heard: list[str] = []
    trace = Trace(on_span=heard.append)
    with trace.span("a"):
        assert heard == ["a"]
        with trace.span("b"):
            assert heard == ["a", "b"]


def test_events_are_written_as_trace_viewers_read_them(tmp_path: Path) -> None:
    trace = Trace(keep_events=True)
    with trace.span("policy.suffix", lane="compute", group=3), trace.span("reward", lane="host", group=1, sample=2):
        pass
    path = tmp_path / "trace.json"
    trace.write(path)
    reward, suffix = json.loads(path.read_text(encoding="utf-8"))
    assert (suffix["name"], suffix["ph"], suffix["tid"]) == ("policy.suffix", "X", "compute")
    assert suffix["args"] == {"group": 3, "sample": -1} and reward["args"] == {"group": 1, "sample": 2}
    assert suffix["ts"] <= reward["ts"] and suffix["dur"] >= reward["dur"] >= 0
    assert isinstance(suffix["ts"], int) and suffix["pid"] == reward["pid"]
