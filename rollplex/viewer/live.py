"""What a person sees while a run goes on: a live panel on a terminal, one plain line per step elsewhere.

It is told what happens and decides how often to draw. It knows metric names, and no run, file or model.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

REDRAW_S = 0.25
"""Often enough to look alive, seldom enough to cost nothing beside a step."""
PLAIN_PROGRESS_S = 10.0
"""How often a long task says where it is when output goes to a file."""
HISTORY = 60
"""Steps in the reward's sparkline."""
_BARS = "▁▂▃▄▅▆▇█"
_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("KL", "kl", ".4f"),
    ("entropy", "entropy", ".3f"),
    ("grad norm", "grad_norm", ".3f"),
    ("tokens/response", "response/length_mean", ".1f"),
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("s/step", "time/step", ".2f"),
)


class LiveDisplay:
    """One run's display; `steps` in all, `start` of them done before."""

    def __init__(self, steps: int, start: int, console: Console | None = None) -> None:
        self._console = Console() if console is None else console
        self._steps, self._start, self._done = steps, start, start
        self._phase, self._task = "starting", ""
        self._metrics: Mapping[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=HISTORY)
        self._began = self._task_began = self._spoke = time.monotonic()
        self._first_step: float | None = None
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=1 / REDRAW_S, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """What is happening right now; cheap enough to be called thousands of times a second."""
        self._phase = name
        if self._first_step is None:
            self._first_step = time.monotonic()

    def progress(self, task: str, done: int, total: int) -> None:
        """How far a long task has come."""
        now = time.monotonic()
        if not self._task.startswith(task):
            self._task_began = now
        seconds = now - self._task_began
        rate = done / seconds if seconds > 0 else 0.0
        left = f", {_duration((total - done) / rate)} left" if rate > 0 and done < total else ""
        self._task = f"{task}: {done:,}/{total:,}" + (f" ({rate:,.0f}/s{left})" if done else "")
        if self._live is None and (now - self._spoke > PLAIN_PROGRESS_S or done == total):
            self._say(self._task)
        if done == total:
            self._task = ""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step is done."""
        self._done, self._metrics = step, metrics
        if "reward/mean" in metrics:
            self._rewards.append(metrics["reward/mean"])
        if self._live is None:
            numbers = "  ".join(f"{label} {metrics[name]:{form}}" for label, name, form in _SHOWN if name in metrics)
            self._say(f"step {step}/{self._steps}  {numbers}  left {self._time_left()}")

    def message(self, text: str) -> None:
        """One line that stays."""
        self._say(text)

    def warn(self, text: str) -> None:
        """One line that stays and stands out."""
        self._say(f"warning: {text}", style="yellow")

    def finish(self, lines: Sequence[str]) -> None:
        """The end of the run: how long it took, and where its files are."""
        self.__exit__()
        self._say(f"{self._done} of {self._steps} steps done, {_duration(time.monotonic() - self._began)}")
        for line in lines:
            self._say(f"  {line}")

    def _say(self, text: str, style: str | None = None) -> None:
        self._spoke = time.monotonic()
        if self._console.is_terminal:
            self._console.print(text, style=style, markup=False, highlight=False)
        else:
            print(text, file=self._console.file, flush=True)

    def _time_left(self) -> str:
        done = self._done - self._start
        if done <= 0 or self._first_step is None:
            return "-"
        return _duration((time.monotonic() - self._first_step) / done * (self._steps - self._done))

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._steps, completed=self._done, width=40)
        head.add_row(
            f"step {self._done}/{self._steps}", bar, f"left {self._time_left()}", Text(self._phase, style="dim")
        )
        numbers = Table.grid(padding=(0, 2))
        shown = [(label, f"{self._metrics[name]:{form}}") for label, name, form in _SHOWN if name in self._metrics]
        if shown:
            numbers.add_row(*(Text(label, style="dim") for label, _ in shown))
            numbers.add_row(*(value for _, value in shown))
        rows: list[RenderableType] = [head, numbers]
        if self._rewards:
            rows.append(Text(f"reward {sparkline(self._rewards)}"))
        if self._task:
            rows.append(Text(self._task, style="dim"))
        return Panel(Group(*rows), title="rollplex", title_align="left")


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """A curve in one line of text, from the lowest to the highest value."""
    lowest, highest = min(values), max(values)
    scale = (len(_BARS) - 1) / (highest - lowest) if highest > lowest else 0.0
    return "".join(_BARS[round((value - lowest) * scale)] for value in values)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
