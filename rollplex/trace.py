"""Where a step's time and tokens went: spans and counters, gathered by whoever is handed the `Trace`.

A span is one stretch of a phase on its lane; a phase that is a generator makes one per turn. Sums by name are always
kept; single events only when asked for, as JSON lines that trace viewers understand (Chrome trace format, "X" events).
Knows no phase, no torch: on a GPU a span measures the host's side.
"""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


class Trace:
    """Seconds by span name, counts by counter name, and (with keep_events) every span.

    on_span is called with a span's name when it begins: whoever shows what is happening.
    """

    def __init__(self, *, keep_events: bool = False, on_span: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)
        self.events: list[dict[str, object]] = []
        self._keep_events = keep_events
        self._on_span = on_span
        self._origin = time.perf_counter()

    @contextmanager
    def span(self, name: str, *, lane: str = "", group: int = -1, sample: int = -1) -> Iterator[None]:
        """Time the body under `name`."""
        if self._on_span is not None:
            self._on_span(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[name] += elapsed
            if self._keep_events:
                self.events.append(self._event(name, lane, group, sample, start, elapsed))

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        self.counts[name] += amount

    def write(self, path: Path) -> None:
        """Write the kept events as a JSON array for chrome://tracing or Perfetto."""
        path.write_text(json.dumps(self.events), encoding="utf-8")

    def _event(self, name: str, lane: str, group: int, sample: int, start: float, elapsed: float) -> dict[str, object]:
        microseconds = {"ts": round((start - self._origin) * 1e6), "dur": round(elapsed * 1e6)}
        return {
            "ph": "X",
            "name": name,
            "pid": 0,
            "tid": lane,
            "args": {"group": group, "sample": sample},
            **microseconds,
        }
