"""Both runners over random graphs and finishing orders: everything runs once, after what it needs, in chain order."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.phases.graph import Finished, Graph, Node, WaitFor
from rollplex.phases.run import Progress, Runner, run_overlapped, run_serial
from rollplex.trace import Trace
from rollplex.train.packing import pack_finished

RUNNERS = pytest.mark.parametrize("runner", [run_serial, run_overlapped])


@dataclass
class Scenario:
    """A step-like graph over fakes. `schedule` lists which samples finish in which decode step.

    Packs hold at most `budget` tokens, of which a group has one more than its index.
    """

    num_groups: int
    group_size: int
    schedule: Sequence[Sequence[tuple[int, int]]]
    host_polls: Sequence[int]
    turns: int
    budget: int = 1
    log: list[tuple[str, Node]] = field(default_factory=list)
    runs: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def packs(self, finished: Sequence[int]) -> list[list[int]]:
        every = range(self.num_groups)
        return pack_finished(finished, [1 + group for group in every], self.budget, [every])

    def graph(self) -> Graph:
        graph = Graph(self.num_groups, self.group_size, self.packs)
        graph.add("encode", self.work("encode"), lane="compute", per="group")
        graph.add("prefill", self.work("prefill"), lane="compute", per="group", after=["encode"])
        graph.add("decode", self.decode, lane="decode", per="step", announces=True)
        graph.add("reward", self.reward, lane="host", per="sample", after=["decode"])
        graph.add("reference", self.work("reference"), lane="compute", per="group")
        graph.add("score", self.packed("score"), lane="compute", per="pack", after=["reference", "decode"])
        graph.add("advantage", self.work("advantage"), lane="compute", per="group", after=["reward", "score"])
        graph.add("suffix", self.packed("suffix"), lane="compute", per="pack", after=["advantage"], chain="sum")
        graph.add("backward", self.work("backward"), lane="compute", per="group", after=["suffix"], chain="sum")
        graph.add("update", self.work("update"), lane="compute", per="step", after=["backward", "decode"])
        return graph

    def work(self, name: str):  # type: ignore[no-untyped-def]
        def run(*key: int) -> Generator[None, None, None]:
            self.log.append(("start", Node(name, *key)))
            for _ in range(self.turns):
                yield
            self.log.append(("end", Node(name, *key)))

        return run

    def packed(self, name: str):  # type: ignore[no-untyped-def]
        def run(*groups: int) -> Generator[None, None, None]:
            self.runs.append((name, groups))
            self.log += [("start", Node(name, group)) for group in groups]
            for _ in range(self.turns):
                yield
            self.log += [("end", Node(name, group)) for group in groups]

        return run

    def decode(self) -> Generator[object, None, None]:
        self.log.append(("start", Node("decode")))
        for finished in self.schedule:
            for group in sorted({group for group, _ in finished}):
                if ("end", Node("prefill", group)) not in self.log:
                    yield WaitFor(Node("prefill", group))
                    assert ("end", Node("prefill", group)) in self.log
            self.log += [("end", Node("decode", *key)) for key in finished]
            for group in sorted({group for group, _ in finished}):
                if all(("end", Node("decode", group, sample)) in self.log for sample in range(self.group_size)):
                    self.log.append(("end", Node("decode", group)))
            yield Finished(tuple(finished))
        self.log.append(("end", Node("decode")))

    def reward(self, group: int, sample: int) -> Generator[None, None, None]:
        self.log.append(("start", Node("reward", group, sample)))
        for _ in range(self.host_polls[(group * self.group_size + sample) % len(self.host_polls)]):
            yield
        self.log.append(("end", Node("reward", group, sample)))

    def finish_order(self) -> list[int]:
        left = [self.group_size] * self.num_groups
        order = []
        for finished in self.schedule:
            for group, _ in finished:
                left[group] -= 1
            order += [group for group in sorted({group for group, _ in finished}) if left[group] == 0]
        return order


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    keys = draw(st.permutations([(group, sample) for group in range(num_groups) for sample in range(group_size)]))
    schedule: list[list[tuple[int, int]]] = [[]]
    for key in keys:
        schedule[-1].append(key)
        schedule += [[] for _ in range(draw(st.integers(0, 2)))]
    polls = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    return Scenario(num_groups, group_size, schedule, polls, draw(st.integers(0, 2)), draw(st.integers(1, 11)))


@RUNNERS
@given(scenario=scenarios())
@settings(max_examples=60, deadline=None)
def test_every_node_runs_once_after_what_it_needs(runner: Runner, scenario: Scenario) -> None:
    scenario.log.clear()
    graph = scenario.graph()
    runner(graph, Trace())
    starts = {node: index for index, (kind, node) in enumerate(scenario.log) if kind == "start"}
    ends = {node: index for index, (kind, node) in enumerate(scenario.log) if kind == "end"}
    for node in (node for phase in graph.phases.values() for node in graph.nodes(phase)):
        assert sum(entry == ("start", node) for entry in scenario.log) == 1
        for need in graph.needs(node):
            assert ends[need] < starts[node], (node, need)


@RUNNERS
@given(scenario=scenarios())
@settings(max_examples=60, deadline=None)
def test_a_chain_runs_pack_after_pack_in_the_order_in_which_groups_finished(runner: Runner, scenario: Scenario) -> None:
    scenario.log.clear()
    runner(scenario.graph(), Trace())
    chained = [node for kind, node in scenario.log if kind == "start" and node.phase in ("suffix", "backward")]
    packs = scenario.packs(scenario.finish_order())
    assert chained == [Node(name, group) for pack in packs for name in ("suffix", "backward") for group in pack]


@RUNNERS
@given(scenario=scenarios())
@settings(max_examples=60, deadline=None)
def test_both_runners_run_the_packs_that_follow_from_the_whole_finishing_order(
    runner: Runner, scenario: Scenario
) -> None:
    scenario.runs.clear()
    runner(scenario.graph(), Trace())
    packs = {tuple(pack) for pack in scenario.packs(scenario.finish_order())}
    assert sorted(group for pack in packs for group in pack) == list(range(scenario.num_groups))
    for name in ("score", "suffix"):
        runs = [groups for phase, groups in scenario.runs if phase == name]
        assert len(runs) == len(packs) and set(runs) == packs


@pytest.mark.parametrize(
    ("budget", "early"),
    [
        (1, [(0,), (1,)]),  # each is full by itself
        (2, [(0,), (1,)]),  # the second one closes the first, and is full
        (3, [(0, 1)]),  # full with both
        (4, []),  # group 2, of 3 tokens, will not fit; but nobody knows it before it has finished
        (6, []),
    ],
)
def test_a_pack_starts_as_soon_as_no_later_group_can_join_it(budget: int, early: list[tuple[int, ...]]) -> None:
    scenario = Scenario(3, 1, [[(0, 0)], [(1, 0)], *[[]] * 40, [(2, 0)]], [0], 1, budget)
    run_overlapped(scenario.graph(), Trace())
    before = scenario.log[: scenario.log.index(("end", Node("decode", 2, 0)))]
    started = {node.group for kind, node in before if kind == "start" and node.phase == "suffix"}
    assert started == {group for pack in early for group in pack}
    assert [groups for phase, groups in scenario.runs if phase == "suffix"][: len(early)] == early


@given(scenario=scenarios())
@settings(max_examples=30, deadline=None)
def test_one_compute_run_is_open_at_a_time(scenario: Scenario) -> None:
    scenario.log.clear()
    scenario.runs.clear()
    run_overlapped(scenario.graph(), Trace())
    open_nodes: set[Node] = set()
    for kind, node in scenario.log:
        if node.phase not in ("decode", "reward"):
            (open_nodes.add if kind == "start" else open_nodes.remove)(node)
            groups = {node.group for node in open_nodes}
            assert len({node.phase for node in open_nodes}) <= 1
            assert len(groups) <= 1 or any(groups <= set(run) for _, run in scenario.runs)


def test_overlapped_works_while_decoding_and_serial_does_not() -> None:
    def scenario() -> Scenario:
        return Scenario(2, 1, [[(0, 0)], *[[]] * 40, [(1, 0)]], [0], 1)

    logs = {}
    for runner in (run_serial, run_overlapped):
        one = scenario()
        runner(one.graph(), Trace())
        logs[runner] = [node.phase for kind, node in one.log if kind == "start" or node == Node("decode")]
    during = {runner: log[log.index("decode") : len(log) - log[::-1].index("decode")] for runner, log in logs.items()}
    assert set(during[run_serial]) == {"decode"}
    assert {"suffix", "backward", "reference", "reward"} <= set(during[run_overlapped])


@RUNNERS
def test_an_error_in_a_phase_reaches_the_caller_and_closes_what_is_open(runner: Runner) -> None:
    closed = []

    def decode() -> Generator[object, None, None]:
        try:
            yield Finished(((0, 0),))
            yield None
            raise KeyError("broken")
        finally:
            closed.append("decode")

    graph = Graph(1, 1)
    graph.add("decode", decode, lane="decode", per="step", announces=True)
    with pytest.raises(KeyError, match="broken"):
        runner(graph, Trace())
    assert closed == ["decode"]


def test_a_phase_cannot_come_after_one_that_is_not_there() -> None:
    graph = Graph(1, 1)
    with pytest.raises(AssertionError, match="was not added before it"):
        graph.add("late", lambda: None, lane="compute", per="step", after=["early"])


@given(scenario=scenarios())
@settings(max_examples=20, deadline=None)
def test_wanted_is_what_is_left_to_do_for_a_node(scenario: Scenario) -> None:
    progress = Progress(scenario.graph())
    assert progress.wanted(Node("prefill", 0)) == {Node("prefill", 0), Node("encode", 0)}
    progress.finish(progress.take((Node("encode", 0),)))
    assert progress.wanted(Node("prefill", 0)) == {Node("prefill", 0)}


def test_spans_add_up_by_phase() -> None:
    scenario = Scenario(2, 2, [[(0, 0), (0, 1), (1, 0), (1, 1)]], [0], 1)
    trace = Trace(keep_events=True)
    run_overlapped(scenario.graph(), trace)
    assert set(trace.seconds) == set(scenario.graph().phases)
    assert sum(event["name"] == "suffix" for event in trace.events) == 4  # two groups, two turns each
