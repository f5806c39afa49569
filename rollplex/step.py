"""START HERE: one exactly on-policy RL step, as a graph of phases.

    vision.encode            per group   pixels -> features, once per distinct image
    rollout.prefill          per group   policy prefix: K/V, and layer inputs kept for the backward pass
    rollout.decode           per step    all responses; announces samples and groups as they finish
    reward                   per sample  the user's functions, in worker processes
    reference.prefix         per group   needs no response
    reference.suffix         per pack    reference log-probs of the responses
    policy.old_logprobs      per pack    for several updates per batch, or KL as reward
    advantage                per group   relative to the group's other responses
    policy.suffix            per pack    log-probs, loss, backward; adds to the K/V gradients of the prefixes
    policy.prefix_backward   per group   one backward pass over the prefix
    policy.update            per step    divide by the batch's size, clip, AdamW, publish the new version

`Step` holds one step's state and has a method for each phase; the stages below put them into the graph. A pack is a few
groups, chosen by numbers of tokens and the order in which groups finish: short responses of one group do not fill a
GPU. This file says what is computed and from what. It knows no stream, no speed, no byte and no option: which stages a
step has is chosen in `build.py`, and what varies within a phase is a function in `algo/`.

Legend: T tokens of one group's responses, packed in order of sample.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from rollplex.algo.grpo import Credit, assign_credit, batch_denominator
from rollplex.algo.loss import LossInputs, LossStats, policy_loss
from rollplex.algo.reward import Score
from rollplex.config import Config
from rollplex.models.prefix import PrefixState
from rollplex.phases.graph import Finished, Graph, Node, WaitFor
from rollplex.rollout.engine import Engine, NeedPrefix
from rollplex.rollout.sampler import SamplingParams
from rollplex.trace import Trace
from rollplex.train.optim import UpdateReport, learning_rate
from rollplex.train.packing import pack_finished
from rollplex.train.policy import GroupLoss, Policy, Responses, Scored, Scorer
from rollplex.train.prompts import PromptPasses
from rollplex.types import Prompt, Sample

Turns = Generator[object, None, None]


class PendingScores(Protocol):
    """Scores that are being computed elsewhere."""

    def done(self) -> bool: ...

    def result(self) -> Sequence[Score]: ...


class Rewards(Protocol):
    """Who scores responses; `algo/reward.py` does it in worker processes."""

    def submit(self, prompt: Prompt, samples: Sequence[Sample]) -> PendingScores: ...


@dataclass(frozen=True, eq=False)
class Workers:
    """Who does the work: the trained policy, the frozen reference (None without a KL term), the engine, the rewards."""

    policy: Policy
    reference: Scorer | None
    engine: Engine
    rewards: Rewards


@dataclass(eq=False)
class Group:
    """What one prompt gathers during a step. A prefix state is dropped with its last use."""

    prompt: Prompt
    samples: dict[int, Sample] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    prefix: PrefixState | None = None
    reference_prefix: PrefixState | None = None
    reference_T: Tensor | None = None
    old_T: Tensor | None = None
    trained_T: Tensor | None = None
    credit: Credit | None = None
    stats: list[LossStats] = field(default_factory=list)

    @property
    def responses(self) -> list[Sample]:
        """The finished samples, in order."""
        return [self.samples[sample] for sample in sorted(self.samples)]

    @property
    def rewards(self) -> list[float]:
        """Their rewards."""
        return [self.scores[sample].total for sample in sorted(self.scores)]

    def over(self, prefix: PrefixState | None) -> Responses:
        """The responses, to be computed over a prefix state."""
        assert prefix is not None
        return Responses(self.prompt, prefix, self.responses)


class Step:
    """One step over a batch of prompts. `number` keys the sampling noise and the learning rate."""

    def __init__(
        self, prompts: Sequence[Prompt], workers: Workers, config: Config, trace: Trace,
        *, number: int, group_size: int, params: SamplingParams,
    ) -> None:  # fmt: skip
        self.groups = [Group(prompt) for prompt in prompts]
        self.graph = Graph(len(prompts), group_size, self.packs)
        self.workers, self.config, self.trace = workers, config, trace
        self.number, self.params = number, params
        self.minibatches = [range(0)]
        self.updates: list[UpdateReport] = []
        self.passes = PromptPasses(prompts, workers.engine.prefill_tokens, trace)

    def encode(self, index: int) -> None:
        self.passes.encode(self.workers.policy, index)

    def prefill(self, index: int) -> Turns:
        policy, first = self.workers.policy, self.minibatches[0]  # the others are trained on with other weights
        alike = first if index in first else range(len(first), len(self.groups))
        self.groups[index].prefix = yield from self.passes.prefix(policy, index, alike, for_training=index in first)

    def decode(self) -> Turns:
        prompts = [group.prompt for group in self.groups]
        events = self.workers.engine.decode(
            prompts, lambda index: self.groups[index].prefix,
            step=self.number, group_size=self.graph.group_size, params=self.params,
        )  # fmt: skip
        for event in events:
            if isinstance(event, NeedPrefix):
                yield WaitFor(Node("rollout.prefill", event.group))
                continue
            for sample in event.finished:
                self.groups[sample.group].samples[sample.sample] = sample
            self.trace.count("tokens.generated", event.num_decoded)
            self.trace.count("tokens.recomputed", event.num_recomputed)
            yield Finished(tuple((sample.group, sample.sample) for sample in event.finished))

    def reward(self, index: int, *sample: int) -> Turns:
        group = self.groups[index]
        chosen = sample or tuple(sorted(group.samples))
        pending = self.workers.rewards.submit(group.prompt, [group.samples[i] for i in chosen])
        while not pending.done():
            yield None
        group.scores.update(zip(chosen, pending.result(), strict=True))

    def release_prefix(self, index: int) -> None:
        self.groups[index].prefix = None

    def reference_prefix(self, index: int) -> Turns:
        group, every = self.groups[index], range(len(self.groups))
        group.reference_prefix = yield from self.passes.prefix(self._reference, index, every)

    def packs(self, finished: Sequence[int]) -> Sequence[Sequence[int]]:
        """Groups whose suffixes share passes, in every phase the same; a pack is of one minibatch."""
        tokens = [sum(sample.length for sample in group.samples.values()) for group in self.groups]
        return pack_finished(finished, tokens, self.config.train.microbatch_tokens, self.minibatches)

    def reference_suffix(self, *indices: int) -> Turns:
        groups = self._pack(indices)
        scored = yield from self._reference.score([group.over(group.reference_prefix) for group in groups])
        for group, logprobs_T in zip(groups, scored, strict=True):
            group.reference_T, group.reference_prefix = logprobs_T, None

    def old_logprobs(self, *indices: int) -> Turns:
        groups = self._pack(indices)
        scored = yield from self.workers.policy.score([group.over(group.prefix) for group in groups])
        for index, group, logprobs_T in zip(indices, groups, scored, strict=True):
            group.old_T = logprobs_T
            if index not in self.minibatches[0]:
                self.release_prefix(index)

    def advantage(self, index: int) -> None:
        group = self.groups[index]
        group.credit = assign_credit(group.rewards, group.responses, self.config.algo, group.old_T, group.reference_T)

    def policy_prefix(self, index: int) -> Turns:
        """The prefix again, with weights that have changed since the rollout."""
        policy = self.workers.policy
        self.groups[index].prefix = yield from self.passes.prefix(policy, index, [index], for_training=True)

    def policy_suffix(self, *indices: int) -> Turns:
        groups = self._pack(indices)
        losses = [self._loss(group) for group in groups]
        scored = yield from self.workers.policy.backward([group.over(group.prefix) for group in groups], losses)
        for group, logprobs_T in zip(groups, scored, strict=True):
            group.trained_T = logprobs_T

    def _loss(self, group: Group) -> GroupLoss:
        credit, device = group.credit, self.workers.policy.model.device
        assert credit is not None
        advantages_T, weights_T = credit.advantages_T.to(device), credit.weights_T.to(device)

        def loss(tokens: slice, scored: Scored) -> Tensor:
            old_T = None if group.old_T is None else group.old_T[tokens]
            reference_T = None if group.reference_T is None else group.reference_T[tokens]
            inputs = LossInputs(
                scored.logprobs_T, old_T, reference_T, scored.entropy_T, advantages_T[tokens], weights_T[tokens]
            )
            outputs = policy_loss(inputs, self.config.algo)
            group.stats.append(outputs.stats)
            return outputs.loss

        return loss

    def prefix_backward(self, index: int) -> Turns:
        group = self.groups[index]
        assert group.prefix is not None
        self.trace.count("tokens.prefix_backward", group.prompt.prefix_length)
        yield from self.workers.policy.prefix_backward(group.prefix)
        self.release_prefix(index)

    def update(self, indices: Sequence[int]) -> None:
        responses = [self.groups[index].responses for index in indices]
        denominator = batch_denominator(responses, self.config.algo, self.config.rollout.max_new_tokens)
        rate = learning_rate(self.number, self.config.train)
        self.updates.append(self.workers.policy.update(denominator, rate))

    def release_features(self) -> None:
        """For after the last phase: the step, which its graph's phases refer to, is not freed as soon as it is left."""
        self.passes.release()

    def _pack(self, indices: Sequence[int]) -> list[Group]:
        groups = [self.groups[index] for index in indices]
        self.trace.count("tokens.suffix", sum(sample.length for group in groups for sample in group.responses))
        return groups

    @property
    def _reference(self) -> Scorer:
        assert self.workers.reference is not None, "this step has a reference stage and no reference"
        return self.workers.reference


Stage = Callable[[Step], None]


def rollout_stage(step: Step) -> None:
    """Prompts -> responses and their rewards."""
    graph = step.graph
    graph.add("vision.encode", step.encode, lane="compute", per="group")
    graph.add("rollout.prefill", step.prefill, lane="compute", per="group", after=["vision.encode"])
    graph.add("rollout.decode", step.decode, lane="decode", per="step", announces=True)
    graph.add("reward", step.reward, lane="host", per=step.config.reward.per, after=["rollout.decode"])


def release_stage(step: Step) -> None:
    """Drop a group's prefix with its last response: for a rollout that is not trained on."""
    step.graph.add("rollout.release", step.release_prefix, lane="compute", per="group", after=["rollout.decode"])


def reference_stage(step: Step) -> None:
    """Log-probs of the responses under the frozen reference."""
    graph = step.graph
    graph.add("reference.prefix", step.reference_prefix, lane="compute", per="group")
    needs = ["reference.prefix", "rollout.decode"]
    graph.add("reference.suffix", step.reference_suffix, lane="compute", per="pack", after=needs)


def old_logprobs_stage(step: Step) -> None:
    """Log-probs of the responses under the weights that sampled them, as the trainer computes them."""
    step.graph.add("policy.old_logprobs", step.old_logprobs, lane="compute", per="pack", after=["rollout.decode"])


def update_stage(step: Step) -> None:
    """Advantages, then an update per epoch and minibatch; minibatches are fixed ranges of the batch's groups."""
    graph, algo = step.graph, step.config.algo
    scored = graph.present("reference.suffix", "policy.old_logprobs")
    graph.add("advantage", step.advantage, lane="compute", per="group", after=["reward", *scored])
    bounds = [len(step.groups) * part // algo.num_minibatches for part in range(algo.num_minibatches + 1)]
    step.minibatches = minibatches = [range(*pair) for pair in pairwise(bounds)]
    # Weights may change only when nothing of this step still needs the old ones.
    _add_update(step, "", minibatches[0], ["advantage"], ["rollout.decode", *graph.present("policy.old_logprobs")])
    for update in range(1, algo.num_updates):
        tag, before = f"/{update}", f"/{update - 1}" if update > 1 else ""
        groups = minibatches[update % algo.num_minibatches]
        needs = ["advantage", f"policy.update{before}"]
        graph.add(f"policy.prefix{tag}", step.policy_prefix, lane="compute", per="group", groups=groups, after=needs)
        _add_update(step, tag, groups, [f"policy.prefix{tag}"], [])


def _add_update(step: Step, tag: str, groups: Sequence[int], ready: Sequence[str], unneeded: Sequence[str]) -> None:
    graph, chain = step.graph, f"gradients{tag}"
    suffix, backward, update = (f"policy.{name}{tag}" for name in ("suffix", "prefix_backward", "update"))
    graph.add(suffix, step.policy_suffix, lane="compute", per="pack", groups=groups, after=ready, chain=chain)
    graph.add(backward, step.prefix_backward, lane="compute", per="group", groups=groups, after=[suffix], chain=chain)
    graph.add(update, lambda: step.update(groups), lane="compute", per="step", after=[backward, *unneeded])
