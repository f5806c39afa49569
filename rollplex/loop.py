"""A run, from its recipe to its last checkpoint: data -> step -> log -> checkpoint -> evaluate.

Everything that can be wrong with the user's input is found before the weights are loaded: reward functions, tokenizer,
every row of the data. Ctrl-C (or SIGTERM, or the terminal's end) ends the run after the present step, with a
checkpoint; a second one at once. A step that fails loses no step before it.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rollplex.algo.reward import RewardWorkers
from rollplex.build import Data, Runtime, build_workers, check_model, memory_explained, read_data
from rollplex.config import Config
from rollplex.errors import NumericsError
from rollplex.gpu.device import describe, select_device
from rollplex.metrics import held_out_metrics, reward_metrics, sample_rows, training_metrics
from rollplex.models.processor import ProcessorSpec, load_processor
from rollplex.pool import WorkerPool
from rollplex.rundir import RunDirectory
from rollplex.trace import Trace
from rollplex.train.checkpoint import TrainingState, require_room, save_training
from rollplex.viewer.live import LiveDisplay

WARNINGS_PER_STEP = 3
"""Failed rewards shown in full; samples.jsonl has all of them."""


@dataclass(frozen=True)
class Summary:
    """How a run ended: steps done, whether that is all of them, and where its files are."""

    step: int
    complete: bool
    directory: Path


def train(config: Config) -> Summary:
    """Run a recipe, or go on with it from the newest whole checkpoint of its run directory.

    Raises:
        RollplexError: bad input, named; nothing that the directory holds is lost.
    """
    with ExitStack() as stack:
        stack.enter_context(memory_explained())
        device = select_device(config.run.device)
        directory = stack.enter_context(RunDirectory.open(config.run.directory, config, config.run.resume))
        checkpoint = directory.newest_checkpoint()
        start = checkpoint.step if checkpoint else 0
        display = stack.enter_context(LiveDisplay(config.train.steps, start, config.run.directory))
        display.message(f"device: {describe(device)}")
        processor = load_processor(ProcessorSpec.from_config(config))
        check_model(config, processor)
        rewards = stack.enter_context(RewardWorkers(config.reward))
        rewards.check()
        pool = stack.enter_context(WorkerPool(config.data.num_workers))
        data = read_data(config, pool, start, display.progress)
        rewards.check_columns(data.columns)
        for split, rows in data.bad_rows.items():
            display.warn(f"{split} data: {len(rows)} bad rows left out, listed in bad_rows.jsonl")
            directory.log_bad_rows(split, [(row.source, row.reason) for row in rows])
        display.phase("loading weights")
        workers, state = build_workers(config, processor, rewards, device, checkpoint.path if checkpoint else None)
        require_room(directory.path, workers.policy)
        directory.rewind(state.step)
        return _Run(config, Runtime(config, workers), data, directory, display, state).execute()


class _Run:
    """The loop itself; `state` says how far it has come."""

    def __init__(
        self, config: Config, runtime: Runtime, data: Data, directory: RunDirectory, display: LiveDisplay,
        state: TrainingState,
    ) -> None:  # fmt: skip
        self._config, self._runtime, self._data = config, runtime, data
        self._directory, self._display, self._state = directory, display, state
        self._interrupted: list[int] = []
        self._announced = False

    def execute(self) -> Summary:
        """Train until the recipe's last step, or until the user asks to stop."""
        steps = self._config.train.steps
        with _interruption() as self._interrupted:
            if self._state.step == 0:
                self._evaluate()
            while self._state.step < steps and not self._interrupted:
                self._train()
                last = self._state.step == steps
                if last or _due(self._state.step, self._config.eval.every_steps):
                    with self._rescue():
                        self._evaluate()
                if last or self._interrupted or _due(self._state.step, self._config.run.checkpoint_every_steps):
                    self._save()
        self._display.finish(self._directory.describe())
        return Summary(self._state.step, self._state.step >= steps, self._directory.path)

    def _train(self) -> None:
        number, trace, asked = self._state.step, Trace(on_span=self._phase), time.perf_counter()
        self._display.phase("waiting for data")
        with self._rescue():
            prompts = next(self._data.batches)
            start = time.perf_counter()
            step = self._runtime.train(prompts, number, trace)
        metrics = training_metrics(step, trace, time.perf_counter() - start)
        metrics["time/data_wait"] = start - asked
        skipped = sum(update.skipped for update in step.updates)
        self._state = TrainingState(
            number + 1, self._runtime.workers.policy.version, self._state.skipped_updates + skipped
        )
        if skipped:
            self._display.warn(
                f"step {number + 1}: {skipped} of {len(step.updates)} updates skipped: the gradient was not finite, "
                f"or every response was masked ({self._state.skipped_updates} in this run)"
            )
        metrics["updates/skipped_total"] = float(self._state.skipped_updates)
        failures = [text for group in step.groups for score in group.scores.values() for text in score.failures]
        for failure in failures[:WARNINGS_PER_STEP]:
            self._display.warn(f"step {number + 1}: {failure}")
        self._directory.log(self._state.step, "train", metrics)
        if self._config.run.save_samples:
            self._directory.log_samples(self._state.step, sample_rows(step.groups, "train"))
        self._display.step(self._state.step, metrics)

    def _phase(self, name: str) -> None:
        """Show the phase, and (here, because a signal handler must not print) that the run is about to stop."""
        if self._interrupted and not self._announced:
            self._announced = True
            self._display.message("stopping after this step, with a checkpoint; Ctrl-C again stops at once")
        self._display.phase(name)

    def _evaluate(self) -> None:
        """Mean rewards of one response to each held-out prompt."""
        step, totals = self._state.step, list[dict[str, float]]()
        for prompts in self._data.held_out():
            self._display.progress("evaluating", len(totals), self._data.num_held_out)
            groups = self._runtime.evaluate(prompts, step, Trace(on_span=self._phase)).groups
            totals += [reward_metrics([group]) for group in groups]
            if self._config.run.save_samples:
                self._directory.log_samples(step, sample_rows(groups, "eval"))
        if not totals:
            return
        self._display.progress("evaluating", len(totals), len(totals))
        self._directory.log(step, "eval", means := held_out_metrics(totals))
        self._display.message(f"step {step}: held-out reward {means['eval/reward/mean']:.4f} on {len(totals)} prompts")

    @contextmanager
    def _rescue(self) -> Iterator[None]:
        """If the body fails, save the steps before it; not weights that it has changed, or that may be the cause."""
        try:
            yield
        except Exception as error:
            changed = self._runtime.workers.policy.version != self._state.version
            if self._state.step and not changed and not isinstance(error, NumericsError):
                with suppress(Exception):  # the first error is the one to report
                    newest = self._directory.newest_checkpoint()
                    if newest is None or newest.step < self._state.step:
                        self._save()
                    self._display.warn(f"this step failed; the {self._state.step} before it are in a checkpoint")
            raise

    def _save(self) -> None:
        self._display.phase("checkpoint")
        with self._directory.new_checkpoint(self._state.step) as path:
            save_training(path, self._runtime.workers.policy, self._state, self._config.model.path)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@contextmanager
def _interruption() -> Iterator[list[int]]:
    """A list that stays empty until SIGINT, SIGTERM or SIGHUP; the second SIGINT raises KeyboardInterrupt."""
    received: list[int] = []

    def receive(number: int, _: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the run shall outlive its terminal
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
