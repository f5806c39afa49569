"""The display: plain lines anywhere, a panel on a terminal that is put back whatever happens, and no cost."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.viewer import live
from rollplex.viewer.live import LiveDisplay, duration, sparkline

ROOT = Path(live.__file__).parents[2]
METRICS = {"reward/mean": 0.5, "reward/std": 0.25, "kl": 0.0012, "tokens_per_s": 12345.0, "time/step": 60.0}


class Clock:
    """A clock that moves when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_plain_output_is_one_line_per_step(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveDisplay(10, 3, stream=stream) as display:
        for name in ("rollout.decode", "policy.suffix") * 50:
            display.phase(name)
        clock.now += 1000  # loading: no part of the time left
        display.step(4, METRICS)
        clock.now += 120
        display.step(5, {})
        clock.now += 60
        display.step(10, {"reward/mean": float("nan")})
        display.finish(["metrics: here"])
    assert stream.getvalue().splitlines() == [
        "step 4/10  reward 0.5 +- 0.25  KL 0.0012  tokens/s 12,345  s/step 60  left 6 min 00 s",
        "step 5/10  left 7 min 30 s",
        "step 10/10  reward nan",
        "10 of 10 steps are done; this run took 19 min 40 s",
        "  metrics: here",
    ]


def test_plain_progress_speaks_seldom_and_at_the_end(clock: Clock) -> None:
    stream = io.StringIO()
    with LiveDisplay(10, stream=stream) as display:
        for done in range(0, 101):
            display.progress("checking train data", done, 100)
            clock.now += 0.25
        display.progress("evaluating", 0, 8)
        clock.now += 3
        display.progress("evaluating", 8, 8)
        display.progress("evaluating", 0, 8)
        clock.now += 5
        display.progress("evaluating", 8, 8)
    assert stream.getvalue().splitlines() == [
        "checking train data: 40/100, 4/s, left 15 s",
        "checking train data: 80/100, 4/s, left 5.0 s",
        "checking train data: 100/100, took 25 s",
        "evaluating: 8/8, took 3.0 s",
        "evaluating: 8/8, took 5.0 s",
    ]


def test_plain_output_has_no_control_characters_and_fits_any_encoding() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    with LiveDisplay(2, stream=stream) as display:
        display.message("a \x1b[31mred\x1b[0m \x07 [bold]größe[/bold]\r")
        display.warn("careful\x00")
        display.step(1, METRICS)
    lines = raw.getvalue().decode("ascii").splitlines()
    assert lines[:2] == ["a red  [bold]gr??e[/bold]", "warning: careful"]
    assert len(lines) == 3


def test_a_reader_that_ends_does_not_end_the_run() -> None:
    class Broken(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            raise BrokenPipeError

    stream = Broken()
    with LiveDisplay(2, stream=stream) as display:
        display.step(1, METRICS)
        display.step(2, METRICS)
        display.finish(["metrics: here"])
    assert stream.writes == 1


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
def test_a_sparkline_is_as_long_as_its_values_and_rises_with_them(values: list[float]) -> None:
    curve = sparkline(values)
    assert len(curve) == len(values)
    assert all(curve[i] <= curve[j] for i in range(len(values)) for j in range(len(values)) if values[i] <= values[j])
    if min(values) / 2 < max(values) / 2:
        assert (curve[values.index(min(values))], curve[values.index(max(values))]) == ("▁", "█")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.44, "0.4 s"), (59.7, "1 min 00 s"), (3599, "59 min 59 s"), (7500, "2 h 05 min"), (97200, "1 d 3 h"),
     (float("nan"), "?")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- on a terminal

_RUN = """
import logging, os, signal, sys, time
from rollplex.viewer.live import LiveDisplay

handler = logging.StreamHandler()  # made before the display, as libraries do at import
logger = logging.getLogger("library")
logger.addHandler(handler)
before = (sys.stdout, sys.stderr)
try:
    with LiveDisplay(9, 0, "runs/[bold]name") as display:
        display.progress("checking train data", 5, 10)
        time.sleep(0.6)
        display.progress("checking train data", 10, 10)
        display.phase("policy.suffix")
        for step in (1, 2, 3):
            display.step(step, {"reward/mean": float(step), "reward/std": 0.5, "kl": 0.125, "phase/rollout.decode": 3.0,
                                "time/step": 4.0})
        print("printed [red]text[/red]")
        logger.warning("logged text")
        display.message("a message [0.5]")
        display.warn("a warning")
        time.sleep(0.6)
        END
        display.finish(["metrics: here"])
except (KeyError, KeyboardInterrupt) as error:
    print("ended by", type(error).__name__)
assert (sys.stdout, sys.stderr) == before
assert handler.stream is before[1]
print("restored")
"""


def on_terminal(end: str, interrupt: bool = False, **environment: str) -> str:
    """What a run writes to a terminal of its own."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + _RUN.replace("END", end)
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env={**env, **environment}
    ) as process:
        os.close(theirs)
        output = b""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and select.select([ours], [], [], 30)[0]:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # how a terminal says that nobody writes to it any more
                break
            if not chunk:
                break
            output += chunk
            if interrupt and b"ready" in output:
                process.send_signal(signal.SIGINT)
                interrupt = False
        os.close(ours)
    text = output.decode()
    assert process.returncode == 0, text
    return text


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", text)


def last_panel(text: str) -> str:
    return visible(text[text.rindex("╭") : text.rindex("╯")])


def test_the_panel_shows_the_run_and_other_output_stays_above_it() -> None:
    text = on_terminal("")
    assert "checking train data: 5/10" in visible(text)
    panel = last_panel(text)
    for words in ("runs/[bold]name", "step 3/9", "now: policy.suffix", "reward 3 ± 0.5", "KL 0.125", "▁", "█", " left",
                  "rollout.decode 75%"):  # fmt: skip
        assert words in panel, panel
    lines = visible(text).splitlines()
    for line in ("printed [red]text[/red]", "logged text", "a message [0.5]", "warning: a warning"):
        assert line in [found.strip() for found in lines], text
        assert line not in panel
    assert text.index("metrics: here") > text.rindex("╯")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back
    assert text.endswith("restored\r\n")


@pytest.mark.parametrize(
    ("end", "interrupt", "error"),
    [("raise KeyError", False, "KeyError"), ("print('ready', flush=True); time.sleep(20)", True, "KeyboardInterrupt")],
)
def test_the_terminal_is_put_back_after_errors_and_ctrl_c(end: str, interrupt: bool, error: str) -> None:
    text = on_terminal(end, interrupt)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith(f"ended by {error}\r\nrestored\r\n")


def test_a_dumb_terminal_gets_plain_lines() -> None:
    text = on_terminal("", TERM="dumb")
    assert "\x1b" not in text
    assert "step 3/9  reward 3 +- 0.5" in text


def test_phases_cost_next_to_nothing() -> None:
    display = LiveDisplay(2, stream=io.StringIO())
    start = time.perf_counter()
    for _ in range(20_000):
        display.phase("rollout.decode")
        display.phase("policy.suffix")
    assert time.perf_counter() - start < 1.0  # 25 µs a call; it takes under 1 µs on an idle machine
