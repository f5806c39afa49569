"""Two ways to execute a step's graph: one phase after the other, or overlapped by taking turns on one host thread.

    serial       every node of a phase, then the next phase: the oracle, and what stacks of today do
    overlapped   decode steps alternate with compute turns; host work is polled; whatever is ready may run

Both call the same functions, and both keep each chain's order, so their results are the same bits. What differs is when
work happens that does not depend on order. At any time one compute node is open: it runs to its end, with decode steps
in between, before the next starts. Of several ready compute nodes, the one that decoding waits for goes first, then the
phase deepest in the graph, because it frees the most memory. This file knows no phase by name.
"""

import time
from collections.abc import Callable, Generator, Sequence
from itertools import product
from typing import Literal, TypeVar, cast

from rollplex.phases.graph import Finished, Graph, Node, Phase, WaitFor
from rollplex.trace import Trace

IDLE_S = 0.0005
"""Pause between looks at host work when nothing else can run: short against a decode step, long against a poll."""

Runner = Callable[[Graph, Trace], None]
Result = TypeVar("Result")
Unit = tuple[Node, ...]
"""The nodes of one run of a phase: several groups' if it runs per pack, else one."""
_Work = Generator[object, None, object]


class Progress:
    """What is done, what is ready, and which groups finished in which order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: set[Node] = set()
        self.finish_order: list[int] = []
        self.packs: Sequence[Sequence[int]] = []
        self._missing: dict[Node, int] = {}
        self._waiting: dict[Node, list[Node]] = {}
        self._num_finished = [0] * graph.num_groups
        self._ready: dict[str, dict[Node, None]] = {name: {} for name in graph.phases}
        for phase in graph.phases.values():
            for node in graph.nodes(phase):
                needs = set(graph.needs(node))
                self._missing[node] = len(needs)
                for need in needs:
                    self._waiting.setdefault(need, []).append(node)
                if not needs:
                    self._ready[phase.name][node] = None
        self._num_nodes = len(self._missing)

    @property
    def complete(self) -> bool:
        return self._num_nodes == 0

    def finish(self, unit: Unit) -> None:
        """Nodes have run to their end."""
        for node in unit:
            self._num_nodes -= 1
            self._mark(node)

    def announce(self, phase: str, finished: Finished) -> None:
        """Samples exist; a group is finished with its last sample, and groups of one announcement in order of index."""
        groups = []
        for group, sample in finished.samples:
            self._mark(Node(phase, group, sample))
            self._num_finished[group] += 1
            if self._num_finished[group] == self.graph.group_size:
                groups.append(group)
        for group in sorted(groups):
            self.finish_order.append(group)
            self._mark(Node(phase, group))
        if groups:
            self.packs = self.graph.packs(self.finish_order)

    def take(self, unit: Unit) -> Unit:
        """Remove nodes from the ready ones, because they start."""
        for node in unit:
            del self._ready[node.phase][node]
        return unit

    def ready(self, phase: Phase) -> list[Unit]:
        """What of a phase may start now, its chain's order included."""
        ready = self._ready[phase.name]
        if not ready or (phase.per != "pack" and not phase.chain):
            return [(node,) for node in ready]
        packs = self._turn(phase) if phase.chain else self.packs
        units = [tuple(Node(phase.name, group) for group in pack if group in phase.groups) for pack in packs]
        return [unit for unit in units if unit and all(node in ready for node in unit)]

    def _turn(self, phase: Phase) -> Sequence[Sequence[int]]:
        """What is next in the phase's chain, if this phase is: of the first pack that has not passed all of it."""
        for pack, link in product(self.packs, self.graph.chain(phase.chain)):
            left = [group for group in pack if group in link.groups and Node(link.name, group) not in self.done]
            if left:
                return [] if link is not phase else [left] if phase.per == "pack" else [left[:1]]
        return []

    def wanted(self, node: Node) -> set[Node]:
        """The node and everything not yet done that it needs."""
        if node in self.done:
            return set()
        found = {node}
        for need in self.graph.needs(node):
            found |= self.wanted(need)
        return found

    def _mark(self, node: Node) -> None:
        assert node not in self.done, f"{node} happened twice"
        self.done.add(node)
        for waiting in self._waiting.pop(node, ()):
            self._missing[waiting] -= 1
            if self._missing[waiting] == 0:
                self._ready[waiting.phase][waiting] = None


class _Open:
    """A run of a phase that has started and not ended."""

    def __init__(self, unit: Unit, phase: Phase, progress: Progress, trace: Trace) -> None:
        self.unit, self.phase = progress.take(unit), phase
        self._progress, self._trace = progress, trace
        self._work: _Work | None = None
        self._started = False
        self.waits_for: Node | None = None

    def advance(self) -> bool:
        """Run to the next yield; False once the work has ended."""
        if self.waits_for is not None and self.waits_for not in self._progress.done:
            return True
        self.waits_for = None
        first = self.unit[0]
        with self._trace.span(first.phase, lane=self.phase.lane, group=first.group, sample=first.sample):
            ended, said = self._step()
        if isinstance(said, WaitFor):
            self.waits_for = said.node
        elif isinstance(said, Finished):
            self._progress.announce(first.phase, said)
        if ended:
            self._progress.finish(self.unit)
        return not ended

    def _step(self) -> tuple[bool, object]:
        if not self._started:
            self._started = True
            key = [part for node in self.unit for part in (node.group, node.sample) if part >= 0]
            work = self.phase.run(*key)
            if not isinstance(work, Generator):
                return True, None
            self._work = work
        assert self._work is not None
        try:
            return False, next(self._work)
        except StopIteration:
            return True, None

    def close(self) -> None:
        if self._work is not None:
            self._work.close()


def run_serial(graph: Graph, trace: Trace) -> None:
    """Execute the graph phase after phase."""
    progress = Progress(graph)
    for phase in graph.phases.values():
        links = graph.chain(phase.chain) if phase.chain else (phase,)
        while units := [(unit, link) for link in links for unit in progress.ready(link)]:
            for together in [units] if phase.lane == "host" else [[unit] for unit in units]:
                _run_together([_Open(unit, link, progress, trace) for unit, link in together])
    assert progress.complete, "some phase never became ready"


def _run_together(work: list[_Open]) -> None:
    try:
        while work:
            work = [item for item in work if item.advance()]
            assert all(item.waits_for is None for item in work), "a phase waits for a later one"
            if work and work[0].phase.lane == "host":
                time.sleep(IDLE_S)
    finally:
        for item in work:
            item.close()


def run_overlapped(graph: Graph, trace: Trace) -> None:
    """Execute the graph with every lane taking turns."""
    progress = Progress(graph)
    lanes: dict[str, list[_Open]] = {"host": [], "decode": [], "compute": [], "copy": []}
    try:
        while not progress.complete:
            moved = False
            for lane, work in lanes.items():
                _open(lane, lanes, progress, trace)
                runnable = [item for item in work if item.waits_for is None or item.waits_for in progress.done]
                moved |= lane != "host" and bool(runnable)
                work[:] = [item for item in work if item.advance()]
            if not moved and not progress.complete:
                assert any(lanes.values()), "nothing can start, and the step is not complete"
                time.sleep(IDLE_S)
    finally:
        for work in lanes.values():
            for item in work:
                item.close()


def _open(lane: str, lanes: dict[str, list[_Open]], progress: Progress, trace: Trace) -> None:
    """Start ready nodes of a lane: all of them on the host, one at a time elsewhere."""
    if lane != "host" and lanes[lane]:
        return
    phases = [phase for phase in reversed(progress.graph.phases.values()) if phase.lane == lane]
    ready = [(unit, phase) for phase in phases for unit in progress.ready(phase)]
    if lane != "host" and ready:
        wanted = {node for item in lanes["decode"] if item.waits_for for node in progress.wanted(item.waits_for)}
        ready = [next((each for each in ready if not wanted.isdisjoint(each[0])), ready[0])]
    lanes[lane] += [_Open(unit, phase, progress, trace) for unit, phase in ready]


def finish(work: Generator[object, None, Result]) -> Result:
    """Run a generator by itself to its end, and return what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(Result, end.value)


RUNNERS: dict[Literal["serial", "overlapped"], Runner] = {"serial": run_serial, "overlapped": run_overlapped}
