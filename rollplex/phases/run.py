"""Two ways to execute a step's graph: one phase after the other, or overlapped by taking turns on one host thread.

    serial       every node of a phase, then the next phase: the oracle, and what stacks of today do
    overlapped   decode steps alternate with compute turns; host work is polled; whatever is ready may run

Both call the same functions, and both keep each chain's order, so their results are the same bits. What differs is when
work happens that does not depend on order. At any time one compute node is open: it runs to its end, with decode steps
in between, before the next starts. Of several ready compute nodes, the one that decoding waits for goes first, then the
phase deepest in the graph, because it frees the most memory. This file knows no phase by name.
"""

import time
from collections.abc import Callable, Generator, Iterator
from typing import Literal, TypeVar, cast

from rollplex.phases.graph import Finished, Graph, Node, Phase, WaitFor
from rollplex.trace import Trace

IDLE_S = 0.0005
"""Pause between looks at host work when nothing else can run: short against a decode step, long against a poll."""

Runner = Callable[[Graph, Trace], None]
Result = TypeVar("Result")
_Work = Generator[object, None, object]


class Progress:
    """What is done, what is ready, and which groups finished in which order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done: set[Node] = set()
        self.finish_order: list[int] = []
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

    def finish(self, node: Node) -> None:
        """A node has run to its end."""
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

    def take(self, node: Node) -> Node:
        """Remove a node from the ready ones, because it starts."""
        del self._ready[node.phase][node]
        return node

    def ready(self, phase: Phase) -> Iterator[Node]:
        """Nodes of a phase that may start now, its chain's order included."""
        nodes = self._ready[phase.name]
        if not phase.chain:
            yield from list(nodes)
            return
        group = self._turn_of(phase)
        if group is not None and Node(phase.name, group) in nodes:
            yield Node(phase.name, group)

    def _turn_of(self, phase: Phase) -> int | None:
        """Whose turn it is in the phase's chain: the first finished group that has not passed all of it."""
        last = self.graph.chain(phase.chain)[-1]
        waiting = (group for group in self.finish_order if group in phase.groups)
        return next((group for group in waiting if Node(last.name, group) not in self.done), None)

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
    """A node that has started and not ended."""

    def __init__(self, node: Node, phase: Phase, progress: Progress, trace: Trace) -> None:
        self.node, self.phase = progress.take(node), phase
        self._progress, self._trace = progress, trace
        self._work: _Work | None = None
        self._started = False
        self.waits_for: Node | None = None

    def advance(self) -> bool:
        """Run to the next yield; False once the node has ended."""
        if self.waits_for is not None and self.waits_for not in self._progress.done:
            return True
        self.waits_for = None
        with self._trace.span(self.node.phase, lane=self.phase.lane, group=self.node.group, sample=self.node.sample):
            ended, said = self._step()
        if isinstance(said, WaitFor):
            self.waits_for = said.node
        elif isinstance(said, Finished):
            self._progress.announce(self.node.phase, said)
        if ended:
            self._progress.finish(self.node)
        return not ended

    def _step(self) -> tuple[bool, object]:
        if not self._started:
            self._started = True
            key = [part for part in (self.node.group, self.node.sample) if part >= 0]
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
        while nodes := list(progress.ready(phase)):
            if phase.chain:
                nodes = [Node(link.name, nodes[0].group) for link in graph.chain(phase.chain)]
            if phase.lane == "host":
                _run_together([_Open(node, phase, progress, trace) for node in nodes])
                continue
            for node in nodes:
                _run_together([_Open(node, graph.phases[node.phase], progress, trace)])
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
    phases = [phase for phase in reversed(progress.graph.phases.values()) if phase.lane == lane]
    if lane == "host":
        ready = [(node, phase) for phase in phases for node in progress.ready(phase)]
        lanes[lane] += [_Open(node, phase, progress, trace) for node, phase in ready]
        return
    if lanes[lane]:
        return
    wanted = {node for item in lanes["decode"] if item.waits_for for node in progress.wanted(item.waits_for)}
    first = next((node for phase in phases for node in progress.ready(phase) if node in wanted), None)
    node = first or next((node for phase in phases for node in progress.ready(phase)), None)
    if node is not None:
        lanes[lane].append(_Open(node, progress.graph.phases[node.phase], progress, trace))


def finish(work: Generator[object, None, Result]) -> Result:
    """Run a generator by itself to its end, and return what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return cast(Result, end.value)


RUNNERS: dict[Literal["serial", "overlapped"], Runner] = {"serial": run_serial, "overlapped": run_overlapped}
