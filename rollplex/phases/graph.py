"""What a step consists of, and what must come before what.

A *phase* runs once per step, once per prompt group, or once per sample; each run of it is a *node*. A phase's function
is called with the node's key - `run()`, `run(group)` or `run(group, sample)` - and is either a plain function or a
generator that yields wherever another lane may take a turn. One that runs per pack has a node for each group, and runs
those of some groups together: `run(*groups)`. What a phase yields is `None`, or one of

    WaitFor(node)    nothing to do before that node is done
    Finished(...)    samples that exist from now on: whatever needs them may start, while this phase goes on

A phase may name only phases added before it, so the graph has no cycle. Which groups are a pack follows from data: from
the order in which groups finish, (decode step, index). So does the order of phases of one *chain*, which add to the
same sums: pack after pack; within a pack, phase after phase; within a phase, group after group. This file knows
nothing of time, streams or models.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Lane = Literal["decode", "compute", "copy", "host"]
Per = Literal["step", "pack", "group", "sample"]


@dataclass(frozen=True)
class Node:
    """One run of a phase. group and sample are -1 where the phase has no such key."""

    phase: str
    group: int = -1
    sample: int = -1


@dataclass(frozen=True)
class WaitFor:
    """Yielded by a phase that cannot go on before `node` is done."""

    node: Node


@dataclass(frozen=True)
class Finished:
    """Yielded by an announcing phase: these (group, sample) exist now."""

    samples: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Phase:
    """A kind of work. `groups` are those it runs for; `announces`: its samples finish one by one while it runs."""

    name: str
    run: Callable[..., object]
    lane: Lane
    per: Per
    after: tuple[str, ...]
    groups: tuple[int, ...]
    chain: str = ""
    announces: bool = False


@dataclass
class Graph:
    """The phases of one step, in the order of the algorithm.

    packs: from the groups that have finished, in order, to the packs that no later one can join.
    """

    num_groups: int
    group_size: int
    packs: Callable[[Sequence[int]], Sequence[Sequence[int]]] = lambda order: [(group,) for group in order]
    phases: dict[str, Phase] = field(default_factory=dict)

    def add(
        self, name: str, run: Callable[..., object], *, lane: Lane, per: Per, after: Sequence[str] = (),
        groups: Sequence[int] | None = None, chain: str = "", announces: bool = False,
    ) -> None:  # fmt: skip
        """Append a phase; `after` names earlier phases, of the same group or sample where both have one."""
        assert name not in self.phases, f"phase {name} was added twice"
        for other in after:
            assert other in self.phases, f"phase {name} comes after {other}, which was not added before it"
        assert not chain or per in ("group", "pack"), f"phase {name}: only groups and packs can be chained"
        chosen = tuple(range(self.num_groups)) if groups is None else tuple(groups)
        self.phases[name] = Phase(name, run, lane, per, tuple(after), chosen, chain, announces)

    def present(self, *names: str) -> tuple[str, ...]:
        """Those of the names that are phases of this step."""
        return tuple(name for name in names if name in self.phases)

    def nodes(self, phase: Phase) -> Iterator[Node]:
        """Every node of a phase, in order of group and sample."""
        if phase.per == "step":
            yield Node(phase.name)
            return
        for group in phase.groups:
            if phase.per == "sample":
                yield from (Node(phase.name, group, sample) for sample in range(self.group_size))
            else:
                yield Node(phase.name, group)

    def needs(self, node: Node) -> Iterator[Node]:
        """The nodes, and announcements, that must be done before `node` may start (its chain aside)."""
        for name in self.phases[node.phase].after:
            yield from self._needed(self.phases[name], node)

    def _needed(self, phase: Phase, node: Node) -> Iterator[Node]:
        if node.group < 0 or (phase.per == "step" and not phase.announces):
            yield from self.nodes(phase)
        elif phase.announces:
            yield Node(phase.name, node.group, node.sample)
        elif phase.per != "sample":
            yield Node(phase.name, node.group)
        elif node.sample >= 0:
            yield Node(phase.name, node.group, node.sample)
        else:
            yield from (Node(phase.name, node.group, sample) for sample in range(self.group_size))

    def chain(self, name: str) -> tuple[Phase, ...]:
        """The phases of a chain, in order."""
        return tuple(phase for phase in self.phases.values() if phase.chain == name)
