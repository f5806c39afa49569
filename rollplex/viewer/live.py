"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step anywhere else.

    phase, progress, step        state, kept        -> the panel, drawn twice a second whatever is called how often
    message, warn, finish        lines that stay    -> above the panel
    print, logging, from others  passed on          -> above the panel

Plain output has no control characters, so that `| tee`, job logs and CI keep it readable. A terminal that goes away
ends the display, never the run. This file knows metric names, and no run, file or model.
"""

import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

DRAWS_PER_S = 2.0
"""Often enough to look alive; a drawing takes a few milliseconds of the interpreter that drives the decode loop."""
PLAIN_PROGRESS_S = 10.0
"""How often a long task says where it is in plain output."""
PANEL_WIDTH = 100
HISTORY = 40
"""Steps in the reward's sparkline."""
RECENT = 20
"""Steps whose mean duration the time left is counted with."""
SHOWN = {
    "reward": ("reward/mean", ".4g"),
    "KL": ("kl", ".3g"),
    "entropy": ("entropy", ".3g"),
    "clipped": ("clip_fraction", ".2%"),
    "grad norm": ("grad_norm", ".3g"),
    "tokens/response": ("response/length_mean", ",.0f"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "s/step": ("time/step", ".3g"),
}
"""Label, and the metric with its format. Every one is optional."""
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.,-=+*#"
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Escape sequences and control characters; line breaks and tabs stay."""


class LiveDisplay:
    """One run's display; `total_steps` in all, `start_step` of them done before. A context manager."""

    def __init__(
        self, total_steps: int, start_step: int = 0, name: str = "rollplex", stream: TextIO | None = None
    ) -> None:
        """Show the run called `name` on `stream`, by default standard output."""
        self._stream: TextIO | None = sys.stdout if stream is None else stream
        self._name, self._total_steps, self._step = name, total_steps, start_step
        self._phase = self._task = ""
        self._task_state = (0, 0)
        self._metrics: Mapping[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._began = self._step_ended = self._task_began = self._phase_began = time.monotonic()
        self._spoke = -math.inf
        self._console: Console | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "LiveDisplay":
        stream = self._stream
        console = Console(file=stream, highlight=False, markup=False, emoji=False)
        if stream is not None and stream.isatty() and not console.is_dumb_terminal:
            self._console = console
            self._stack.enter_context(_panel(console, self._render))
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def phase(self, name: str) -> None:
        """What is happening now. Only remembered, so that it may be called thousands of times a second."""
        if name != self._phase:
            self._phase, self._phase_began = name, time.monotonic()

    def progress(self, task: str, done: int, total: int) -> None:
        """How far a task outside the steps has come; ends with done == total."""
        now = time.monotonic()
        if task != self._task or done < self._task_state[0]:
            self._task, self._task_began, self._spoke = task, now, now
        self._task_state = (done, total)
        if self._console is None and (done >= total or now - self._spoke >= PLAIN_PROGRESS_S):
            self._spoke = now
            self._say(f"{task}: {self._progress_text(now)}")
        if done >= total:
            self._task, self._task_state = "", (0, 0)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step number `step` is done, with these metrics."""
        now = time.monotonic()
        self._durations.append(now - self._step_ended)
        if len(self._durations) == 1 and "time/step" in metrics:  # the interval also holds what went before the loop
            self._durations[0] = metrics["time/step"]
        self._step, self._step_ended, self._metrics = step, now, dict(metrics)
        reward = metrics.get("reward/mean", math.nan)
        if math.isfinite(reward):
            self._rewards.append(reward)
        if self._console is None:
            numbers = [f"{label} {value}" for label, value in _numbers(metrics, "+-")]
            left = [] if step >= self._total_steps else [f"left {duration(self._seconds_left(now))}"]
            self._say("  ".join([f"step {step}/{self._total_steps}", *numbers, *left]))

    def message(self, text: str) -> None:
        """A line that stays."""
        self._say(text)

    def warn(self, text: str) -> None:
        """A line that stays, and stands out."""
        self._say(f"warning: {text}", "yellow")

    def finish(self, lines: Sequence[str]) -> None:
        """The end of the run: how far it came, how long it took, and where its files are."""
        self._close()
        took = duration(time.monotonic() - self._began)
        self._say(f"{self._step} of {self._total_steps} steps are done; this run took {took}", "bold")
        for line in lines:
            self._say(f"  {line}")

    def _close(self) -> None:
        try:
            self._stack.close()
        except OSError:
            self._stream = None

    def _say(self, text: str, style: str = "") -> None:
        if self._stream is None:
            return
        text = _CONTROLS.sub("", text)
        try:
            if self._console is not None:
                self._console.print(Text(text, style), soft_wrap=True)
            else:
                encoding = self._stream.encoding or "utf-8"
                self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
                self._stream.flush()
        except OSError:  # the reader of a pipe ended, or the terminal was closed: the run goes on
            self._stream = None

    def _progress_text(self, now: float) -> str:
        done, total = self._task_state
        seconds = now - self._task_began
        if done >= total:
            return f"{done:,}/{total:,}, took {duration(seconds)}"
        if not done or seconds <= 0:
            return f"{done:,}/{total:,}"
        rate = done / seconds
        return f"{done:,}/{total:,}, {rate:,.3g}/s, left {duration((total - done) / rate)}"

    def _seconds_left(self, now: float) -> float:
        if not self._durations:
            return math.nan
        mean = sum(self._durations) / len(self._durations)
        return max(mean * (self._total_steps - self._step) - (now - self._step_ended), 0.0)

    def _render(self) -> RenderableType:
        now = time.monotonic()
        ascii_only = self._console is None or self._console.options.ascii_only
        width = min(PANEL_WIDTH, self._console.width) if self._console is not None else PANEL_WIDTH
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(self._total_steps, min(self._step, self._total_steps), width=30)
        spent, left = duration(now - self._began), duration(self._seconds_left(now))
        head.add_row(Text(f"step {self._step}/{self._total_steps}"), bar, Text(f"{spent} so far, {left} left"))
        rows: list[RenderableType] = [head]
        if self._task:
            rows.append(Text(f"{self._task}: {self._progress_text(now)}", "cyan"))
        elif self._phase:
            rows.append(Text(f"now: {self._phase} {duration(now - self._phase_began)}", "cyan"))
        numbers = _numbers(self._metrics, "+-" if ascii_only else "±")
        if numbers:
            rows += [_columns(numbers), Text(self._shares(), "dim")]
        rewards = tuple(self._rewards)  # at once: another thread draws
        if len(rewards) > 1:
            rows.append(Text(f"reward {sparkline(rewards, _ASCII_BLOCKS if ascii_only else _BLOCKS)}", "green"))
        return Panel(Group(*rows), title=Text(_CONTROLS.sub("", self._name)), title_align="left", width=width)

    def _shares(self) -> str:
        """Where the last step's time went: its longest phases."""
        seconds = {name[6:]: value for name, value in self._metrics.items() if name.startswith("phase/") and value > 0}
        total = self._metrics.get("time/step", 0.0) or sum(seconds.values())
        longest = sorted(seconds, key=lambda name: -seconds[name])[:4]
        return ", ".join(f"{name} {seconds[name] / total:.0%}" for name in longest)


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """A curve in one line, from the lowest to the highest of the finite `values`."""
    top, lowest = len(blocks) - 1, min(values) / 2
    spread = max(values) / 2 - lowest  # halves, because the whole may overflow
    if spread == 0.0:
        return blocks[top // 2] * len(values)
    return "".join(blocks[round((value / 2 - lowest) / spread * top)] for value in values)


def duration(seconds: float) -> str:
    """Seconds as people say them: 0.4 s, 50 s, 3 min 20 s, 2 h 05 min, 1 d 3 h; "?" if not known."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes:02} min"


def _numbers(metrics: Mapping[str, float], plus_minus: str) -> list[tuple[str, str]]:
    shown = [(label, f"{metrics[name]:{form}}") for label, (name, form) in SHOWN.items() if name in metrics]
    spread = metrics.get("reward/std")
    if spread is None:
        return shown
    return [(label, f"{text} {plus_minus} {spread:.2g}" if label == "reward" else text) for label, text in shown]


def _columns(numbers: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 3))
    for first in range(0, len(numbers), 4):
        table.add_row(*(Text.assemble((f"{label} ", "dim"), value) for label, value in numbers[first : first + 4]))
    return table


@contextmanager
def _panel(console: Console, render: Callable[[], RenderableType]) -> Iterator[None]:
    """A live panel; while it is there, what others print or log to the terminal appears above it."""
    live = Live(
        console=console, get_renderable=render, refresh_per_second=DRAWS_PER_S, vertical_overflow="crop",
        redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty(),
    )  # fmt: skip
    originals = (sys.stdout, sys.stderr)
    with live:
        moved = _redirect_handlers(dict(zip(map(id, originals), (sys.stdout, sys.stderr), strict=True)))
        try:
            yield
        finally:
            for handler, stream in moved:
                handler.setStream(stream)


def _redirect_handlers(streams: Mapping[int, TextIO]) -> list[tuple["logging.StreamHandler[TextIO]", TextIO]]:
    """Point log handlers that hold a stream to its replacement; returns them with what they held."""
    loggers = [
        logging.root,
        *(item for item in logging.root.manager.loggerDict.values() if isinstance(item, logging.Logger)),
    ]
    moved = list[tuple["logging.StreamHandler[TextIO]", TextIO]]()
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if isinstance(handler, logging.StreamHandler) and id(handler.stream) in streams:
            moved.append((handler, handler.stream))
            handler.setStream(streams[id(handler.stream)])
    return moved
