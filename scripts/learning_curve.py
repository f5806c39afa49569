#!/usr/bin/env python3
"""Draws what `rollplex bench learn` found: mean reward of each step, and held-out accuracy, as one SVG.

    python scripts/learning_curve.py benchmarks/results/learn-gpu.json docs/learning.svg

The file is what scripts/bench_to_json stores. The same file always gives the same picture, on a card of its own that a
light and a dark page can show.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

WIDTH, HEIGHT = 900, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 850, 92, 318
"""Where the axes are, pixels."""
SMOOTHING = 9
"""Steps in the mean around each step."""
REWARD, SMOOTH, HELD_OUT, INK, QUIET, GRID = "#f7d39b", "#f0a03c", "#2f5fa8", "#20262e", "#5b6572", "#e3e7ec"
FONT = 'system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif'

Point = tuple[float, float]


def draw(record: dict[str, Any]) -> str:
    """The picture of one stored result."""
    result = record["result"]
    curve, steps = result["curve"], result["steps"]
    rewards = [(step, reward) for step, reward, _, _ in curve if reward is not None]
    held_out = [(step, accuracy) for step, _, accuracy, _ in curve if accuracy is not None]
    smooth = list(zip((step for step, _ in rewards), smoothed([reward for _, reward in rewards]), strict=True))
    first, last = held_out[0], held_out[-1]
    title = f"{_percent(first[1])} to {_percent(last[1])} of held-out answers right, by rewards alone"
    parts = [
        _head(title, _facts(record)),
        *(_horizontal(level / 100, f"{level} %") for level in range(0, 101, 20)),
        *(_text(_x(tick, steps), BOTTOM + 20, f"{tick}", "middle", QUIET) for tick in _ticks(steps)),
        _text((LEFT + RIGHT) / 2, BOTTOM + 44, f"steps of GRPO ({curve[-1][3]:.0f} s in all)", "middle", QUIET),
        _words_alone(result["accuracy_by_words_alone"]),
        _line(rewards, steps, REWARD, 1.2),
        _line(smooth, steps, SMOOTH, 2.5),
        _line(held_out, steps, HELD_OUT, 2.5),
        *(_dot(point, steps) for point in held_out),
        _text(_x(first[0], steps) + 9, _y(first[1]) + 22, _percent(first[1]), "start", HELD_OUT, 600),
        _text(_x(last[0], steps), _y(last[1]) - 12, _percent(last[1]), "end", HELD_OUT, 600),
        *_legend(result["held_out_questions"]),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def smoothed(values: Sequence[float]) -> list[float]:
    """Means over SMOOTHING neighbours, over fewer at the ends."""
    half = SMOOTHING // 2
    return [fmean(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def _facts(record: dict[str, Any]) -> str:
    result, minutes = record["result"], record["result"]["seconds"]["all"] / 60
    return (
        f"Qwen2.5-VL architecture, {result['parameters'] / 1e6:.1f} million parameters, {result['dtype']}, easy-VQA; "
        f"{record['device']}; {minutes:.1f} min from random weights, warm start included"
    )


def _head(title: str, facts: str) -> str:
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" \
aria-labelledby="title desc">
<title id="title">{escape(title)}</title>
<desc id="desc">{escape(facts)}</desc>
<style>text{{font-family:{FONT};font-size:13px}}</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="14" fill="#ffffff" stroke="#c9d0d8"/>
{_text(24, 32, title, "start", INK, 600)}
{_text(24, 53, facts, "start", QUIET)}"""


def _legend(questions: int) -> Iterable[str]:
    for x, color, label in (
        (LEFT, HELD_OUT, f"held-out accuracy, {questions} questions"),
        (LEFT + 260, SMOOTH, f"mean reward of training samples (bold: over {SMOOTHING} steps)"),
    ):
        yield f'<rect x="{x}" y="68" width="18" height="4" rx="2" fill="{color}"/>'
        yield _text(x + 25, 75, label, "start", INK)


def _words_alone(accuracy: float) -> str:
    y = _y(accuracy)
    line = f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{QUIET}" stroke-dasharray="5 5"/>'
    return line + _text(RIGHT, y + 17, f"without the image: {_percent(accuracy)} at best", "end", QUIET)


def _horizontal(level: float, label: str) -> str:
    y = _y(level)
    line = f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{GRID}"/>'
    return line + _text(LEFT - 8, y + 4, label, "end", QUIET)


def _line(points: Sequence[Point], steps: int, color: str, width: float) -> str:
    path = "L".join(f"{_x(step, steps):.1f} {_y(value):.1f}" for step, value in points)
    return f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round"/>'


def _dot(point: Point, steps: int) -> str:
    return f'<circle cx="{_x(point[0], steps):.1f}" cy="{_y(point[1]):.1f}" r="4" fill="{HELD_OUT}"/>'


def _text(x: float, y: float, text: str, anchor: str, color: str, weight: int = 400) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}" font-weight="{weight}">{escape(text)}</text>'


def _ticks(steps: int) -> range:
    """Round steps, at most eleven of them."""
    apart = next(size for size in (1, 2, 5, 10, 20, 50, 100, 200, 500, steps) if steps // size <= 10)
    return range(0, steps + 1, apart)


def _x(step: float, steps: int) -> float:
    return LEFT + (RIGHT - LEFT) * step / steps


def _y(share: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * share


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main(result: str, picture: str) -> None:
    """Write the picture of a stored result."""
    record = json.loads(Path(result).read_text(encoding="utf-8"))
    Path(picture).write_text(draw(record), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
