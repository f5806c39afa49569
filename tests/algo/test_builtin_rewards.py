"""The built-in rewards read answers as people and models write them, and no text makes them slow or makes them fail."""

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex.algo import builtin_rewards
from rollplex.algo.builtin_rewards import exact_match, final_answer, format, multiple_choice, number_match
from rollplex.algo.written_numbers import WrittenNumber, last_number

HOSTILE_CHARACTERS = 100_000
HOSTILE_SECONDS = 0.1

texts = st.text(st.one_of(st.characters(), st.sampled_from("\\{}()[]$%^/*-+., \n0123456789ABCIabci<>")), max_size=80)
latex = st.lists(
    st.sampled_from(
        ["\\frac", "\\sqrt", "\\boxed", "\\text", "\\pi", "\\times", "{", "}", "(", ")", "^", "-", "/", "%", "1", "0",
         "2.5", "10", "e", "x", " ", "\n", "<answer>", "</answer>", "A", "is", "answer"]
    ), max_size=40
).map("".join)  # fmt: skip


def one(reward: Any, completion: str, answer: Any, **columns: Any) -> float:
    (value,) = reward(completions=[completion], answer=[answer], **{name: [row] for name, row in columns.items()})
    assert value in (0.0, 1.0)
    return float(value)


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        ("42", "42"),
        ("<think>7</think><answer> 42 </answer>", "42"),
        ("<answer>1</answer> no, <answer>2</answer> done", "2"),
        ("<answer>1</answer><answer>2", "1"),
        ("</answer>1<answer>", "</answer>1<answer>"),
        ("<think>Rome, 12</think>\nParis", "Paris"),
        ("<think>a</think>b</think> c", "c"),
        (r"<think>\boxed{3}</think>", r"3"),
        (r"so \boxed{1} and \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed {a \{ b \}}", r"a \{ b \}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{1", r"\boxed{1"),
        (r"\boxed{9} <answer>x is \boxed{5}</answer> \boxed{8}", "5"),
        ("", ""),
    ],
)
def test_final_answer(completion: str, found: str) -> None:
    assert final_answer(completion) == found


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris", "paris"),
        ("  New \n York. ", "new york"),
        ("**Yes.**", "yes"),
        ('"Yes".', "yes"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{\textbf{\text{Paris}}}", "Paris"),
        (r"$x^2$", "x^2"),
        (r"50\%", "50%"),
        ("it’s", "it's"),  # noqa: RUF001
        ("cafe\u0301", "caf\u00e9"),
        ("STRASSE", "straße"),
        ("7", 7),
        ("7", 7.0),
        ("7.5", 7.5),
        ("<answer>4</answer>", r"\boxed{4}"),
        ("dog", ["a dog", "dog"]),
        ("?", "?"),
        ("*", "*"),
    ],
)
def test_exact_match_accepts(completion: str, answer: Any) -> None:
    assert one(exact_match, completion, answer) == 1.0


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "?"),
        ("", "*"),
        ("...", "$"),
        ("The answer is Paris", "Paris"),
        ("3.0", "3"),
        ("-3", "3"),
        ("+", "-"),
        ("ab", "a b"),
        ("<answer>no</answer> yes", "yes"),
        ("cat", ["a dog", "dog"]),
    ],
)
def test_exact_match_refuses(completion: str, answer: Any) -> None:
    assert one(exact_match, completion, answer) == 0.0


NUMBERS = [
    ("1,234.5", 1234.5),
    ("1234.50", 1234.5),
    ("-3", -3),
    ("−3", -3),  # noqa: RUF001
    ("+3", 3),
    (".5", 0.5),
    ("3.", 3),
    ("x = 3", 3),
    ("x = - 3", -3),
    ("$x=-3$", -3),
    ("{ - 3 }", -3),
    ("(-3)", -3),
    ("5-3", 3),  # the last number, not a sum
    ("it is - 3", 3),  # a dash
    ("Answer:\n- 3", 3),  # a bullet
    ("Answer:\n-3", -3),
    ("COVID-19", 19),
    ("3 cm", 3),
    ("3cm", 3),
    ("3 cm^2", 3),
    ("3 cm²", 3),
    (r"3\,\text{cm}^2", 3),
    (r"3 m/s^{2}", 3),
    (r"45^\circ", 45),
    (r"45^{\circ}", 45),
    ("45°", 45),
    ("$5", 5),
    ("-$1,234", -1234),
    (r"\$5.20", 5.2),
    ("2/3", 2 / 3),
    ("2 / 3", 2 / 3),
    ("-2/3", -2 / 3),
    ("1 1/2", 1.5),
    ("Step 1\n1/2", 0.5),
    (r"1\frac{1}{2}", 1.5),
    (r"2\frac{\pi}{3}", 2 * math.pi / 3),
    (r"\frac{1}{2}", 0.5),
    (r"\dfrac{-1}{2}", -0.5),
    (r"-\tfrac{1}{2}", -0.5),
    (r"\frac12", 0.5),
    (r"\frac1{20}", 0.05),
    (r"\frac { 5 } { 2 }", 2.5),
    (r"\frac{\sqrt{3}}{2}", math.sqrt(3) / 2),
    (r"\frac{1,000}{3}", 1000 / 3),
    (r"2 \sqrt { 221 }", 2 * math.sqrt(221)),
    (r"\sqrt[3]{8}", 2),
    ("2√3", 2 * math.sqrt(3)),
    (r"12\pi", 12 * math.pi),
    ("12π", 12 * math.pi),
    (r"\frac{2}{3}\pi", 2 / 3 * math.pi),
    ("1e-3", 1e-3),
    ("1.5E6", 1.5e6),
    (r"3 \times 10^{5}", 3e5),
    ("3×10^-4", 3e-4),  # noqa: RUF001
    ("3·10⁵", 3e5),
    ("3*10^5", 3e5),
    ("3 x 10^5", 3e5),
    ("3x10^{5}", 3e5),
    ("3 x 4", 4),
    ("10^999999999999", None),
    ("\u7b54\u6848\u662f5", 5),  # Chinese: "the answer is 5"
    ("\u662f5\u4e2a", 5),
    ("\uff11\uff12", 12),  # full-width digits
    ("10⁻³", 1e-3),
    ("2^{10}", 1024),
    ("-2^2", -4),
    (r"12\,345", 12345),
    (r"1{,}234", 1234),
    ("12\u202f345", 12345),
    (r"1\!000", 1000),
    ("x_1", None),
    (r"x_{12} = 7", 7),
    ("x3", None),
    ("H2O", None),
    ("x^2", None),
    ("is...5", 5),
    ("the answer is 42.", 42),
    ("12 and 13", 13),
    ("(3, 4)", 4),
    ("1/0", None),
    (r"\frac{1}{0}", None),
    ("0^{-1}", None),
    (r"\sqrt{-4}", None),
    ("9" * 5000, None),
    ("1e999", None),
    ("no number", None),
    ("", None),
    ("-", None),
]


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_last_number(text: str, value: float | None) -> None:
    found = last_number(text)
    if value is None:
        assert found is None
    else:
        assert found is not None and found.value == pytest.approx(value, rel=1e-12) and not found.percent


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The area is 1,234.50 cm^2.", "1234.5", 1.0),
        ("<think>12, 13</think><answer>0.5</answer>", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{2}}", "0.8660254", 1.0),
        ("18", "She has 9 * 2 = 18 eggs.\n#### 18", 1.0),
        ("42", 42, 1.0),
        ("41", [40, 41], 1.0),
        ("50%", "0.5", 1.0),
        (r"50\%", "50", 1.0),
        ("50 percent", "50%", 1.0),
        ("0.5", "50%", 1.0),
        ("50", "50%", 1.0),
        ("0.5%", "50%", 0.0),
        ("5", "50%", 0.0),
        ("0.3333", "1/3", 0.0),
        ("3", r"2\sqrt{3}", 0.0),
        ("12", r"12\pi", 0.0),
        ("2", "2^{10}", 0.0),
        ("-3", "3", 0.0),
        ("none", "3", 0.0),
        ("0", "1e-9", 0.0),
        ("9" * 5000, "3", 0.0),
    ],
)
def test_number_match(completion: str, answer: Any, reward: float) -> None:
    assert one(number_match, completion, answer) == reward


@given(texts | latex)
def test_no_completion_makes_a_reward_fail(completion: str) -> None:
    for reward, answer in ((exact_match, "x"), (number_match, "3"), (multiple_choice, "B. Paris"), (format, "")):
        one(reward, completion, answer)


@given(texts | latex)
def test_an_answer_matches_itself_or_is_refused(answer: str) -> None:
    for reward in (exact_match, number_match, multiple_choice):
        try:
            assert one(reward, answer, answer) == 1.0
        except ValueError as error:
            assert "mend the data" in str(error)  # noqa: PT017


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["{}", "x = {}.", "({})", "${}$", "is {} cm^2"]),
)
def test_every_float_is_read_back(value: float, sentence: str) -> None:
    found = last_number(sentence.format(repr(value)))
    assert found == WrittenNumber(value) or value == 0


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_fractions_and_thousands_are_the_same_number(top: int, bottom: int) -> None:
    spellings = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", f"{top:,} / {bottom:,}", repr(top / bottom)]
    assert number_match(spellings, [f"{top}/{bottom}"] * len(spellings)) == [1.0] * len(spellings)
    assert one(number_match, f"{2 * top + bottom}/{bottom}", f"{top}/{bottom}") == float(top == -bottom)


@pytest.mark.parametrize(
    "completion",
    [
        "B", "b", " b ", "(B)", "(b)", "B)", "b)", "B.", "b.", "**B**", "__B__", "[B]", "$B$", r"\boxed{\text{B}}",
        r"\boxed{\mathbf{(B)}}", "<answer>b</answer>", "<answer>(B) Paris</answer>", "B. Paris", "b) Paris",
        "(b) Paris",
        "**B.** Paris", "**B**: Paris", "B: Paris", "Option B", "option b", "The answer is B.", "the answer is b",
        "The correct answer is **B**", "Answer: B", "**Answer:** (B)", "ANSWER: b.", "The answer is: B", "answer = B",
        "The answer is option B, because A is a river.", "A is wrong, so it must be B",
        "I think a good answer would be B", "I choose B!", "B is right; I am sure", "\u7b54\u6848\u662fB",
        "\u7b54\u6848B\u3002", "Answer: I think B",
        "A. is not it. The answer is B", "Paris", "paris.", "<answer>Paris</answer>",
    ],
)  # fmt: skip
def test_multiple_choice_reads_b(completion: str) -> None:
    assert one(multiple_choice, completion, "B. Paris") == 1.0
    assert one(multiple_choice, completion, "A. Rome") == 0.0


@pytest.mark.parametrize(
    "completion",
    ["A", "a", "(a)", "a.", "A) a cat", "Answer: A", "the answer is a.", "The answer is A because it fits",
     "Option A shows it", "B is wrong. The answer is A\nDone.", "So it must be A", "it must be **A**.",
     "Answer: (a) cat"],
)  # fmt: skip
def test_multiple_choice_reads_a(completion: str) -> None:
    assert one(multiple_choice, completion, "A") == 1.0


@pytest.mark.parametrize(
    "completion",
    ["", "A cat sits there.", "a cat", "Answer: A cat", "The answer is A cat", "The answer is a cat",
     "The best option is a river", "I see a dog",
     "I", "e.g. this", "the answer is e.g. this", "Adoption a.", "Its grade", "D'accord", "A1"],
)  # fmt: skip
def test_articles_and_pronouns_are_no_choice(completion: str) -> None:
    for letter in "ABCDEFGH":
        assert one(multiple_choice, completion, letter) == 0.0


@pytest.mark.parametrize(
    "answer", ["B", "b", "(B)", "B)", "B.", "B. Paris", "(b) Paris", "B: Paris", "**B**",
    1, ["B"], "<answer> B </answer>",
               r"\boxed{B}", "Paris"]
)  # fmt: skip
def test_multiple_choice_understands_the_answer_column(answer: Any) -> None:
    choices = ["Rome", "Paris", "Vitamin C"]
    assert one(multiple_choice, "The answer is B", answer, choices=choices) == 1.0
    assert one(multiple_choice, "paris", answer, choices=choices) == 1.0
    assert one(multiple_choice, "Paris", answer, choices=["A. Rome", "B. Paris"]) == 1.0
    assert one(multiple_choice, "Vitamin C", answer, choices=choices) == 0.0
    assert one(multiple_choice, "C", answer, choices=choices) == 0.0


def test_an_options_text_may_hold_a_letter() -> None:
    choices = ["Calcium", "Vitamin A", "Vitamin C"]
    assert one(multiple_choice, "Vitamin C", "B", choices=choices) == 0.0
    assert one(multiple_choice, "Vitamin A", "B", choices=choices) == 1.0
    assert one(multiple_choice, "Vitamin C", "B. Vitamin C") == 1.0
    assert one(multiple_choice, "B", "B", choices="A. Calcium\nB. Vitamin A") == 1.0
    assert one(multiple_choice, "vitamin a", "B", choices={"A": "Calcium", "B": "Vitamin A"}) == 1.0


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (exact_match, ""), (exact_match, []), (exact_match, {"a": 1}), (exact_match, math.nan),
        (number_match, "none"), (number_match, "1/0"), (number_match, ["1", "x"]), (number_match, ""),
        (multiple_choice, "Paris"), (multiple_choice, "K"), (multiple_choice, 10), (multiple_choice, -1),
        (multiple_choice, True), (multiple_choice, ""), (multiple_choice, "A photo"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_compared_with_is_an_error(reward: Any, answer: Any) -> None:
    with pytest.raises(ValueError, match=r"the answer .* mend the data"):
        one(reward, "3", answer)


def test_a_null_answer_means_that_the_function_does_not_apply() -> None:
    for reward in (exact_match, number_match, multiple_choice):
        assert reward(completions=["B 1", "1"], answer=[None, None]) == [None, None]


def test_number_match_takes_a_tolerance() -> None:
    assert number_match(["0.67", "0.69", "1%"], ["2/3", "2/3", "0.0101"], tolerance=0.01) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("well <think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think> so <answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><think>a</think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<Think>a</Think><answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format(completion: str, reward: float) -> None:
    assert one(format, completion, "") == reward


def test_chat_completions_and_several_rows() -> None:
    chat = [[{"role": "assistant", "content": text}] for text in ("3", "4")]
    for reward in (exact_match, number_match):
        assert reward(completions=chat, answer=["3", "3"], prompts=["p", "p"], completion_ids=[[1], [2]]) == [1.0, 0.0]
    assert sorted(builtin_rewards.__all__) == ["exact_match", "format", "multiple_choice", "number_match"]


HOSTILE = [
    "<answer>", "</answer>", "<answer></answer>", "</think><answer></answer>", "<think></think>", "\\boxed{",
    "\\boxed{1}",
    "\\boxed ", "\\boxed", "\\text{", "\\text ", "\\frac{", "\\frac{1", "\\sqrt[", "\\pi", "2^{", "2^", "1\\frac{",
    "{", "}",
    "(", "((1)", "1", "1,", "1,000,", "1.", "-", "1 ", "1/", "1 1/", "x_", "⁵", " ", "\n", "*", "_", "A", "A ",
    "a.", "(A)",
    "(A", "answer", "answer ", "answer:", "answer is ", "option ", "option*", "answer is A!", "$", "\\", "\\!",
    "%", ".",
    "e.g.", "B", "B'", "\u0301", "\uff11", "\u7b54", "é",
]  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_text_costs_little(piece: str) -> None:
    body = piece * (HOSTILE_CHARACTERS // len(piece))
    nested = "\\text{" * (HOSTILE_CHARACTERS // 7) + "}" * (HOSTILE_CHARACTERS // 7)
    completions = [body, f"answer is {body}!", f"<think>{body}</think><answer>{body}</answer>", f"A{body}x", nested]
    for completion in completions:
        for reward, answer in ((exact_match, "x"), (number_match, "3"), (multiple_choice, "B"), (format, "")):
            seconds = _seconds(reward, completion, answer)
            if seconds >= HOSTILE_SECONDS:  # a busy machine, or a slow reward
                seconds = min(_seconds(reward, completion, answer) for _ in range(5))
            assert seconds < HOSTILE_SECONDS, f"{reward.__name__} on {completion[:40]!r}... took {seconds:.2f} s"


def _seconds(reward: Any, completion: str, answer: str) -> float:
    started = time.process_time()
    one(reward, completion, answer)
    return time.process_time() - started
