r"""Reward functions that most recipes need, with TRL's signature; 1.0 or 0.0 per completion.

    exact_match      the answer's text; case, space, markup around it and final punctuation aside
    number_match     the answer's number, however it is written in digits
    multiple_choice  the answer's letter, or its option's text
    format           <think> ... </think> <answer> ... </answer>, and nothing else

The first three look at the final answer: what the last <answer> ... </answer> holds, or else what follows the last
</think>, or else the whole completion; a \boxed{...} in it narrows it down to what the last box holds. They compare
with the column `answer`, whose entries may be lists: then any of their items will do. They do not apply (None) where it
is null, and any other answer that cannot be compared with is a ValueError: the data is wrong.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rollplex.algo.written_numbers import RELATIVE_TOLERANCE, last_number

__all__ = ["exact_match", "format", "multiple_choice", "number_match"]

LETTERS = "ABCDEFGHIJ"
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_BRACES = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|(?P<brace>[{}])", re.DOTALL)
_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:bf|it|rm|sf|tt)|mbox)\s*\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[,;: ]")
_LATEX_ESCAPE = re.compile(r"\\(?=[%$#&_{}])")
_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "−": "-"})  # noqa: RUF001
_MARKUP = "\"'`*_$ "
_PUNCTUATION = ".!?,;:"
MAX_NESTED_COMMANDS = 4
"""\\textbf{\\text{...}}: deeper is not written, and each level costs one pass."""

_WORD = r"[^\W\u2e80-\U0010ffff]"
"""A character of a word, in scripts that put spaces between words."""
_LETTER_ALONE = re.compile(r"[\W_]*([A-Ja-j])[\W_]*")
_LETTER_FIRST = re.compile(r"[\W_]*([A-Ja-j])[*_]*\s?[).:\]][*_]*(?!\w)\s*(.*)", re.DOTALL)
_STATED = re.compile(
    r"(?<![^\W_])(?:(?i:answer|option|choice)\s+(?i:is|would\s+be|should\s+be)|(?i:answer)\s*[*_]*[:=]|(?i:option|choice))"
    r"(?![^\W_])[\s:*_$\"']*"
    r"(?:[(\[]([A-Ja-j])[)\]]"  # (b), [B]
    rf"|([B-HJb-hj])(?!{_WORD}|'|\.\w)"
    r"|([AIai])(?=[*_$\"']*\s*(?:[).:,;]|\Z|(?:because|since|as|is|and|but)\b)|[*_$\"']*\n)(?!\.\w)"  # not "a cat"
    r"|(?<=(?:on|ce)\s)([AI])(?=\s))"  # "option A shows"; not "the answer is A cat"
)
_BRACKETED = re.compile(r"\(([A-Ja-j])\)")
_LONE = re.compile(rf"(?<!{_WORD})(?<!')(?:([B-HJ])(?!{_WORD}|')|([AI])(?=[*_.!)]*\s*$))")
"""A capital letter by itself; A and I, which are also English words, only at the end."""


def exact_match(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1.0 where the final answer is the answer's text.

    Case, spacing, quotation marks, `*`, `_` and `$` around it, \\text{}, and final punctuation do not count. Numbers
    are text too: "3.0" is not "3".
    """
    return [_any(_same_text, *pair) for pair in zip(completions, answer, strict=True)]


def number_match(
    completions: Sequence[Any], answer: Sequence[Any], tolerance: float = RELATIVE_TOLERANCE, **_: Any
) -> list[float | None]:
    """1.0 where the last number of the final answer is the answer's, to a relative tolerance: `written_numbers.py`."""
    matches = partial(_same_number, tolerance=tolerance)
    return [_any(matches, *pair) for pair in zip(completions, answer, strict=True)]


def multiple_choice(
    completions: Sequence[Any], answer: Sequence[Any], choices: Sequence[Any] | None = None, **_: Any
) -> list[float | None]:
    """1.0 where the final answer chooses the answer's letter (A to J), or is the text of its option.

    answer: "B", "b", "(B)", "B. Paris", the text of one of `choices`, or an int counted from 0.
    choices: the options' texts in order: per row a list, or a mapping from letters.
    """
    options = [None] * len(completions) if choices is None else choices
    return [
        _any(partial(_chooses, texts=_option_texts(row)), completion, answers, numbered=True)
        for completion, answers, row in zip(completions, answer, options, strict=True)
    ]


def format(completions: Sequence[Any], **_: Any) -> list[float]:
    """1.0 where a completion is one <think> ... </think>, then one <answer> ... </answer>, and nothing around them."""
    return [float(_is_formatted(_text(completion))) for completion in completions]


def final_answer(text: str) -> str:
    """Where a completion states its answer."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if start >= 0:
        text = text[start + len("<answer>") : end]
    elif after := text.rpartition("</think>")[2].strip():
        text = after
    boxed = _last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _text(completion: Any) -> str:
    """A completion's text: a string, or chat messages of which the last counts."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _any(matches: Callable[[str, str], bool], completion: Any, answer: Any, numbered: bool = False) -> float | None:
    """1.0 if the completion matches the answer, or one of several; None if there is no answer."""
    text = _text(completion)
    return None if answer is None else float(any(matches(text, truth) for truth in _truths(answer, numbered)))


def _truths(answer: Any, numbered: bool) -> list[str]:
    """The texts of an answer: of one, or of each of several; of an int, if they are numbered, its letter."""
    answers = list(answer) if isinstance(answer, list | tuple) else [answer]
    texts = []
    for item in answers:
        if numbered and isinstance(item, int) and not isinstance(item, bool):
            texts.append(LETTERS[item] if 0 <= item < len(LETTERS) else "")
        elif isinstance(item, float) and item.is_integer():
            texts.append(str(int(item)))  # whole numbers become floats in many tables
        else:
            texts.append(str(item) if isinstance(item, str | int | float) else "")
    if not texts or not all(text.strip() for text in texts) or any(text == "nan" for text in texts):
        raise ValueError(f"the answer {answer!r} is no text to compare with; mend the data")
    return texts


def _same_text(completion: str, answer: str) -> bool:
    return _plain(final_answer(completion)) == _plain(final_answer(answer))


def _plain(text: str) -> str:
    """The text as exact_match compares it; what is nothing but markup stays as it is."""
    text = _LATEX_ESCAPE.sub("", _LATEX_SPACE.sub(" ", _unwrapped(text))).translate(_QUOTES).casefold()
    text = " ".join(unicodedata.normalize("NFC", text).split())
    return text.lstrip(_MARKUP).rstrip(_MARKUP + _PUNCTUATION) or text


def _last_boxed(text: str) -> str | None:
    """What the box that begins last holds; a box that is never closed is none."""
    open_braces: list[int] = []
    last: tuple[int, int] | None = None
    for found in _BRACES.finditer(text):
        if found["box"]:
            open_braces.append(found.end())
        elif found["brace"] == "{":
            open_braces.append(-1)
        elif found["brace"] == "}" and open_braces:
            begin = open_braces.pop()
            if begin >= 0 and (last is None or begin > last[0]):
                last = begin, found.start()
    return None if last is None else text[slice(*last)]


def _same_number(completion: str, answer: str, tolerance: float) -> bool:
    expected = last_number(final_answer(answer))
    if expected is None:
        raise ValueError(f"the answer {answer!r} holds no number; use exact_match, or mend the data")
    found = last_number(final_answer(completion))
    return found is not None and found.equals(expected, tolerance)


def _chooses(completion: str, answer: str, texts: Sequence[str]) -> bool:
    letter, option = _answer_option(final_answer(answer), texts)
    chosen = final_answer(completion)
    plain = _plain(chosen)
    if _LETTER_ALONE.fullmatch(plain) is None and (plain == option or plain in texts):
        return plain == option
    return _chosen_letter(chosen) == letter


def _option_texts(choices: Any) -> list[str]:
    """Plain texts of the options, the letters that begin them left out."""
    texts = []
    if isinstance(choices, Mapping):
        choices = list(choices.values())
    for index, choice in enumerate(choices[: len(LETTERS)] if isinstance(choices, list | tuple) else ()):
        found = _LETTER_FIRST.fullmatch(str(choice))
        texts.append(_plain(found[2] if found and found[1].upper() == LETTERS[index] else str(choice)))
    return texts


def _answer_option(answer: str, texts: Sequence[str]) -> tuple[str, str | None]:
    """The answer's letter, and its option's plain text where that is known."""
    text, plain = _unwrapped(answer), _plain(answer)
    if found := _LETTER_ALONE.fullmatch(text):
        index = LETTERS.index(found[1].upper())
        return LETTERS[index], texts[index] if index < len(texts) else None
    if plain in texts:
        return LETTERS[texts.index(plain)], plain
    if found := _LETTER_FIRST.fullmatch(text):
        return found[1].upper(), _plain(found[2]) or None
    raise ValueError(
        f"the answer {answer!r} is no letter from A to J; mend the data, or give the options in a column `choices`"
    )


def _chosen_letter(text: str) -> str | None:
    """The letter that a text chooses: it is one, states one last, begins with one, or names one last."""
    text = _unwrapped(text)
    if found := _LETTER_ALONE.fullmatch(text):
        return found[1].upper()
    for form in (_STATED, _LETTER_FIRST, _BRACKETED, _LONE):
        matches = [form.match(text)] if form is _LETTER_FIRST else list(form.finditer(text))
        if matches and matches[-1] is not None:
            return next(group for group in matches[-1].groups() if group).upper()
    return None


def _unwrapped(text: str) -> str:
    """Without \\text{...} and its like around what they hold."""
    for _ in range(MAX_NESTED_COMMANDS):
        text = _LATEX_TEXT.sub(r"\1", text)
    return text


def _is_formatted(text: str) -> bool:
    return all(text.count(tag) == 1 for tag in _TAGS) and _FORMAT.fullmatch(text) is not None
