"""Reward functions that most recipes need, with TRL's signature; 1.0 or 0.0 per completion.

    exact_match      the answer's text, case and final punctuation aside
    number_match     the answer's number, however it is written
    multiple_choice  the answer's letter
    format           <think> ... </think> <answer> ... </answer>, and nothing else

The first three look at the final answer: inside the last <answer> ... </answer> if there is one, else inside the last
\\boxed{...}, else at the whole completion. They compare with the column `answer`.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

__all__ = ["exact_match", "format", "multiple_choice", "number_match"]

RELATIVE_TOLERANCE = 1e-6
"""Two spellings of one number may differ by float rounding, not by more."""
_NUMBERS = re.compile(
    r"(?P<sign>[-+]?)\\d?frac\{(?P<top>[-+]?\d+)\}\{(?P<bottom>\d+)\}"
    r"|(?P<number>(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?\.\d+(?:[eE][-+]?\d+)?)"
    r"(?:\s*/\s*(?P<divisor>\d+(?:\.\d+)?))?\s*(?P<percent>\\?%)?"
)
_FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_CHOICE_FORMS = (
    re.compile(r"(?i:answer|option|choice)(?:\s+(?:is|would be))?\s*[:=]?\s*\**\(?([A-J])\)?(?![\w'])"),
    re.compile(r"^\W*([A-J])\W*$"),
    re.compile(r"^\W*([A-J])\s*[).:]"),
    re.compile(r"\(([A-J])\)"),
    re.compile(r"(?<![\w'])([B-HJ])(?![\w'])"),  # A and I are also English words
)


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the final answer is the answer's text; case, surrounding space and final punctuation do not count."""
    return [float(_plain(final_answer(_text(c))) == _plain(str(a))) for c, a in zip(completions, answer, strict=True)]


def number_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the last number of the final answer equals the answer's number: 1,234.5, 2/3, 50%, \\frac{1}{2}, 1e-3.

    Raises:
        ValueError: an answer holds no number.
    """
    return [float(_same_number(_text(c), str(a))) for c, a in zip(completions, answer, strict=True)]


def multiple_choice(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where the final answer chooses the answer's letter (A to J): "B", "(B)", "B. Paris", "the answer is B"."""
    return [
        float(_choice(final_answer(_text(c))) == _answer_letter(str(a)))
        for c, a in zip(completions, answer, strict=True)
    ]


def format(completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where a completion is one <think> ... </think>, then one <answer> ... </answer>, and nothing around them."""
    return [float(_is_formatted(_text(completion))) for completion in completions]


def final_answer(text: str) -> str:
    """Where a completion states its answer."""
    tagged = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    if tagged:
        text = tagged[-1]
    boxed = _last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _text(completion: Any) -> str:
    """A completion's text: a string, or chat messages of which the last counts."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".!?,;: ").strip("\"'`*$ ")


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for index in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin + 1 : index]
    return None


def _same_number(completion: str, answer: str) -> bool:
    expected = _last_number(final_answer(answer))
    if expected is None:
        raise ValueError(f"number_match: the answer {answer!r} holds no number; use exact_match, or mend the data")
    found = _last_number(final_answer(completion))
    return found is not None and math.isclose(found, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)


def _last_number(text: str) -> float | None:
    matches = list(_NUMBERS.finditer(text.replace("\\!", "").replace("$", " ")))
    if not matches:
        return None
    match = matches[-1]
    try:
        if match["top"] is not None:
            value = float(Fraction(int(match["top"]), int(match["bottom"])))
            value = -value if match["sign"] == "-" else value
        else:
            value = float(match["number"].replace(",", ""))
        if match["divisor"] is not None:
            value /= float(match["divisor"])
    except (ZeroDivisionError, OverflowError):
        return None
    return value / 100.0 if match["percent"] else value


def _choice(text: str) -> str | None:
    for form in _CHOICE_FORMS:
        if found := form.findall(text):
            return str(found[-1])
    lone = re.findall(r"(?<![\w'])([A-J])[.!]?\s*$", text)  # "... so it must be A"
    return str(lone[-1]) if lone else None


def _answer_letter(answer: str) -> str:
    letter = _choice(final_answer(answer).upper() if len(answer.strip()) <= 3 else final_answer(answer))
    if letter is None:
        raise ValueError(f"multiple_choice: the answer {answer!r} is no letter from A to J; mend the data")
    return letter


def _is_formatted(text: str) -> bool:
    return _FORMAT.fullmatch(text) is not None and all(text.count(tag) == 1 for tag in _TAGS)
