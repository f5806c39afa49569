r"""Numbers as people and models write them: the last one in a text.

    1,234.5   -3   2/3   1 1/2   50%   1e-3   3 \times 10^{5}   10⁵   \dfrac{\sqrt{3}}{2}   12\pi   5 cm^2 (is 5)

A number is one product or quotient of numerals, \frac, \sqrt, \pi and powers, with a sign and a per cent mark: what a
final answer consists of. Sums, variables, number words and decimal commas are not read. It knows no reward.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WINDOW_CHARACTERS = 4096
"""How far from the end a number is looked for: it bounds the time that a hostile text can cost."""
MAX_DEPTH = 8
"""Nested braces that are followed; deeper is no number that anybody writes."""
RELATIVE_TOLERANCE = 1e-6
"""Two spellings of one number may differ by float rounding, not by more: 0.333 is not 1/3."""
ABSOLUTE_TOLERANCE = 1e-12

_TRANSLATION = str.maketrans({"−": "-", "–": "-", "﹣": "-", "－": "-", "＋": "+", "，": ",", "％": "%", "＝": "="})  # noqa: RUF001
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+"), lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\!|\\left\b|\\right\b|\\displaystyle\b"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),  # thin spaces between thousands
    (re.compile(r"\\[,;: ]|~"), " "),
    (re.compile(r"(?<=\d)[^\S\n]?[xX*][^\S\n]?(?=10\^)"), r"\\times "),  # 3 x 10^5
    (re.compile(r"([-+])[^\S\n]*\\?\$"), r"\1"),  # -$5
    (re.compile(r"\\?\$"), " "),
    (re.compile(r"(?<=[^\W\d_])_(?:\{[^{}]*\}|[^\W_])"), ""),  # the 1 of x_1 is no number
)
_UNSPACED = "\u2e80-\U0010ffff"
"""From here on, scripts such as Chinese put no space between words and numbers."""
_TOKEN = re.compile(
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|(?<![\w.])\.\d+(?:[eE][-+]?\d+)?)"
    rf"|(?P<word>[^\W\d_{_UNSPACED}][^\W{_UNSPACED}]*)|(?P<mark>\\[A-Za-z]+|\\.|[^\w\s]|\n|_|[{_UNSPACED}])"
)
_TIMES = frozenset({r"\times", r"\cdot", "×", "·", "⋅"})  # noqa: RUF001
_OVER = frozenset({"/", r"\div", "÷", "⁄"})  # noqa: RUF001
_FRACTIONS = frozenset({r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"})
_ROOTS = frozenset({r"\sqrt", "√"})
_PI = frozenset({r"\pi", "π"})
_PERCENT = frozenset({"%", r"\%", "percent"})
_OPENS_TERM = frozenset("=({[<>≈,")
"""After these, a minus belongs to the number even if a space follows it: "x = - 3"."""
_CLOSING = {"{": "}", "(": ")", "[": "]"}


@dataclass(frozen=True)
class WrittenNumber:
    """A number, per cent mark aside, and whether it had one."""

    value: float
    percent: bool = False

    def equals(self, other: "WrittenNumber", tolerance: float = RELATIVE_TOLERANCE) -> bool:
        """Equal to a relative tolerance. A per cent mark that one of them lacks may count or not: 50% is 0.5 and 50."""
        if self.percent == other.percent:
            return _close(self.value, other.value, tolerance)
        marked, plain = (self, other) if self.percent else (other, self)
        return any(_close(value, plain.value, tolerance) for value in (marked.value, marked.value / 100.0))


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


_END = _Token("end", "", -1, -1)
_Parsed = tuple[float, int] | None
"""A value and the index of the token after it; None: no number begins here."""


def last_number(text: str) -> WrittenNumber | None:
    """The last finite number that the text's last WINDOW_CHARACTERS hold."""
    text = text[-WINDOW_CHARACTERS:].translate(_TRANSLATION)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    tokens = [_Token(str(found.lastgroup), found[0], found.start(), found.end()) for found in _TOKEN.finditer(text)]
    last, at = None, 0
    while at < len(tokens):
        negative = _is_sign(tokens, at) and tokens[at].text == "-"
        parsed = _term(tokens, at + 1 if _is_sign(tokens, at) else at, MAX_DEPTH)
        if parsed is None:
            at = _skip(tokens, at)
            continue
        value, at = parsed
        percent = _peek(tokens, at).text in _PERCENT
        if math.isfinite(value):
            last = WrittenNumber(-value if negative else value, percent)
    return last


def _close(left: float, right: float, tolerance: float) -> bool:
    return math.isclose(left, right, rel_tol=tolerance, abs_tol=ABSOLUTE_TOLERANCE)


def _peek(tokens: Sequence[_Token], at: int) -> _Token:
    return tokens[at] if at < len(tokens) else _END


def _is_sign(tokens: Sequence[_Token], at: int) -> bool:
    """Whether this token is a number's sign: no operator ("5-3"), no dash ("is - 3"), no bullet."""
    token, following = tokens[at], _peek(tokens, at + 1)
    if token.text not in ("-", "+"):
        return False
    before = tokens[at - 1] if at else None
    if following.start != token.end:
        return before is None or before.text in _OPENS_TERM
    ends_value = before is not None and (before.kind in ("number", "word") or before.text in (")", "}", "]"))
    return not (ends_value and before is not None and before.end == token.start)


def _skip(tokens: Sequence[_Token], at: int) -> int:
    """Past a token that begins no number, and past its exponent: the 2 of cm^2 is no number."""
    ends_base = tokens[at].kind == "word" or tokens[at].text in (")", "}")
    at += 1
    if ends_base and _peek(tokens, at).text == "^":
        exponent = _group(tokens, at + 1, 1)
        return at + 1 if exponent is None else exponent[1]
    return at


def _term(tokens: Sequence[_Token], at: int, depth: int) -> _Parsed:
    """factor { times factor | / factor | \\sqrt.. | \\pi }, or a mixed number."""
    parsed = _factor(tokens, at, depth)
    if parsed is None:
        return None
    mixed = _mixed(tokens, at, parsed, depth)
    value, at = parsed if mixed is None else mixed
    while True:
        sign = _peek(tokens, at).text
        joined = sign in _TIMES or sign in _OVER
        following = _factor(tokens, at + joined, depth) if joined or sign in _ROOTS or sign in _PI else None
        if following is None:
            return value, at
        value = _divided(value, following[0]) if sign in _OVER else value * following[0]
        at = following[1]


def _mixed(tokens: Sequence[_Token], at: int, whole: tuple[float, int], depth: int) -> _Parsed:
    """1 1/2 or 1\\frac{1}{2}: a whole number, then a fraction below one. 2\\frac{\\pi}{3} is a product."""
    start = whole[1]
    if not tokens[at].text.isdecimal() or start != at + 1:
        return None
    top, sign, bottom = (_peek(tokens, start + offset).text for offset in range(3))
    if top in _FRACTIONS:
        part = _factor(tokens, start, depth)
        if part is None:
            return None
        numerals = all(token.text not in _PI and token.text not in _ROOTS for token in tokens[start : part[1]])
        return (whole[0] + part[0] if numerals and 0.0 < part[0] < 1.0 else whole[0] * part[0]), part[1]
    if top.isdecimal() and sign in _OVER and bottom.isdecimal() and 0.0 < float(top) < float(bottom):
        return whole[0] + float(top) / float(bottom), start + 3
    return None


def _factor(tokens: Sequence[_Token], at: int, depth: int) -> _Parsed:
    """atom [ ^ exponent ]"""
    parsed = _atom(tokens, at, depth)
    if parsed is None or _peek(tokens, parsed[1]).text != "^":
        return parsed
    exponent = _group(tokens, parsed[1] + 1, depth)
    return parsed if exponent is None else (_power(parsed[0], exponent[0]), exponent[1])


def _atom(tokens: Sequence[_Token], at: int, depth: int) -> _Parsed:
    """A numeral, \\pi, \\frac{}{}, \\sqrt[n]{}, or a value in brackets."""
    token = _peek(tokens, at)
    if token.kind == "number":
        return float(token.text.replace(",", "")), at + 1
    if token.text in _PI:
        return math.pi, at + 1
    if token.text in _FRACTIONS:
        return _fraction(tokens, at + 1, depth)
    if token.text in _ROOTS:
        degree = _group(tokens, at + 1, depth) if _peek(tokens, at + 1).text == "[" else (2.0, at + 1)
        root = None if degree is None else _group(tokens, degree[1], depth)
        return None if degree is None or root is None else (_power(root[0], _divided(1.0, degree[0])), root[1])
    return _group(tokens, at, depth) if token.text in ("{", "(") else None


def _fraction(tokens: Sequence[_Token], at: int, depth: int) -> _Parsed:
    """What follows \\frac: {1}{2}, or 12 for one half."""
    digits = _peek(tokens, at).text
    if len(digits) == 2 and digits.isdecimal():
        return _divided(float(digits[0]), float(digits[1])), at + 1
    top = _group(tokens, at, depth)
    bottom = None if top is None else _group(tokens, top[1], depth)
    return None if top is None or bottom is None else (_divided(top[0], bottom[0]), bottom[1])


def _group(tokens: Sequence[_Token], at: int, depth: int) -> _Parsed:
    """A value in brackets, or one numeral or \\pi, with an optional sign."""
    closing = _CLOSING.get(_peek(tokens, at).text)
    at += closing is not None
    sign = _peek(tokens, at).text
    at += sign in ("-", "+")
    if closing is None:
        token = _peek(tokens, at)
        parsed = _atom(tokens, at, depth) if token.kind == "number" or token.text in _PI else None
    else:
        parsed = _term(tokens, at, depth - 1) if depth else None
        if parsed is not None:
            parsed = (parsed[0], parsed[1] + 1) if _peek(tokens, parsed[1]).text == closing else None
    return (-parsed[0], parsed[1]) if parsed is not None and sign == "-" else parsed


def _divided(top: float, bottom: float) -> float:
    return top / bottom if bottom else math.nan


def _power(base: float, exponent: float) -> float:
    try:
        value = base**exponent
    except (OverflowError, ZeroDivisionError):
        return math.nan
    return value if isinstance(value, float) else math.nan  # complex: a root of a negative number
