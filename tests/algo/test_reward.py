"""Rewards in worker processes: TRL's calling convention, weights, and every way in which a function can fail."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollplex.algo.reward import RewardWorkers, Score, load_reward
from rollplex.algo.reward_call import check_kwargs
from rollplex.config import RewardConfig, RewardFunction
from rollplex.errors import ConfigError, RewardError
from rollplex.types import Prompt, Sample

FILE = str(Path(__file__).with_name("reward_functions.py"))


def prompt_of(content: Any = "What?", **columns: Any) -> Prompt:
    return Prompt(0, np.arange(3), np.zeros((3, 3), np.int64), (), content, columns, "train.jsonl, row 7")


def samples_of(*texts: str) -> list[Sample]:
    logprobs = np.zeros(2, np.float32)
    return [
        Sample(0, number, np.array([5, number]), logprobs, logprobs, logprobs, "stop", text, 0, 0)
        for number, text in enumerate(texts)
    ]


def recipe(*functions: str | RewardFunction, **settings: Any) -> RewardConfig:
    tables = [
        item if isinstance(item, RewardFunction) else RewardFunction(function=f"{FILE}:{item}") for item in functions
    ]
    return RewardConfig(functions=tuple(tables), **{"num_workers": 1, **settings})


@contextmanager
def workers_for(*functions: str | RewardFunction, **settings: Any) -> Iterator[RewardWorkers]:
    with RewardWorkers(recipe(*functions, **settings)) as workers:
        workers.check()
        yield workers


@pytest.fixture(scope="module")
def typed() -> Iterator[RewardWorkers]:
    with workers_for("typed") as workers:
        yield workers


@pytest.fixture(scope="module")
def lenient() -> Iterator[RewardWorkers]:
    with workers_for("misbehave", "length", on_error="zero", timeout_s=1.5) as workers:
        yield workers


def scores(workers: RewardWorkers, prompt: Prompt, *texts: str) -> tuple[Score, ...]:
    return workers.submit(prompt, samples_of(*texts)).result()


def totals(scores: Sequence[Score]) -> list[float]:
    return [score.total for score in scores]


def test_arguments_are_those_of_trl() -> None:
    function = RewardFunction(function=f"{FILE}:echo", kwargs={"scale": 3.0})
    chat = [{"role": "user", "content": "What?"}]
    reserved = {"prompt": 1, "completion": 2, "prompts": 3, "completions": 4, "completion_ids": 5}
    with workers_for(function, per="group") as workers:
        assert totals(scores(workers, prompt_of(answer="x"), "ab", "cde")) == [6.0, 9.0]
        seen = (["What?"] * 2, ["ab", "cde"], [[5, 0], [5, 1]], ["show"] * 2, 3.0, [("level", [4, 4])])
        with pytest.raises(RewardError) as caught:
            scores(workers, prompt_of(answer="show", level=4, **reserved), "ab", "cde")
        assert repr(seen) in str(caught.value)
        messages = [[{"role": "assistant", "content": "ab"}]]
        with pytest.raises(RewardError) as caught:
            scores(workers, prompt_of(chat, answer="show"), "ab")
        assert repr(([chat], messages, [[5, 0]], ["show"], 3.0, [])) in str(caught.value)


def test_functions_are_weighted_and_named() -> None:
    functions = [
        RewardFunction(function=f"{FILE}:length", weight=2.0),
        RewardFunction(function=f"{FILE}:slow_length", weight=-0.5),
        RewardFunction(function=f"{FILE}:on_even", weight=10.0),
        RewardFunction(function=f"{FILE}:length", weight=0.25),
        RewardFunction(function="exact_match"),
        RewardFunction(function=f"{FILE}:scorer", weight=0.0),
        RewardFunction(function=f"{FILE}:rank", weight=100.0),
    ]
    with workers_for(*functions, per="group") as workers:
        first, second = scores(workers, prompt_of(answer="ab", unused=1), "ab", "aaa")
    parts = {"length": 2, "slow_length": 2, "on_even": 1, "length_2": 2, "exact_match": 1, "scorer": 2, "rank": 1}
    assert first == Score(4 - 1 + 10 + 0.5 + 1 + 100, parts)
    assert second.parts == {**dict.fromkeys(parts, 3.0), "on_even": None, "exact_match": 0.0, "rank": 0.0}
    assert second.total == 6 - 1.5 + 0.75


@pytest.mark.parametrize(
    ("kind", "value"),
    [("none", None), ("bool", 1.0), ("int", 2.0), ("numpy", 0.5), ("array", 0.25), ("zero_dim", 4.0), ("tuple", 1.5),
     ("generator", 3.0), ("column", 0.75), ("tensor", 1.25)],
)  # fmt: skip
def test_what_counts_as_a_number(typed: RewardWorkers, kind: str, value: float | None) -> None:
    (score,) = scores(typed, prompt_of(), kind)
    assert score == Score(value or 0.0, {"typed": value})
    assert all(part is None or type(part) is float for part in score.parts.values())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "returned '1.0' for a completion; return a number or None"),
        ("string", "returned str; return a list of 1 numbers"),
        ("number", "returned float; return a list of 1 numbers"),
        ("mapping", "returned dict; return a list of 1 numbers"),
        ("set", "returned set; return a list of 1 numbers"),
        ("nothing", "returned NoneType; return a list of 1 numbers"),
        ("zero_dim_alone", "returned ndarray; return a list of 1 numbers"),
        ("matrix", "returned array([1., 1.]) for a completion"),
        ("complex", "returned 1j for a completion"),
        ("nan", "returned nan, which is not finite"),
        ("inf", "returned -inf, which is not finite"),
        ("huge", "returned inf, which is not finite"),
        ("empty", "returned 0 values for 1 completions"),
        ("long", "returned 2 values for 1 completions"),
    ],
)
def test_what_is_no_reward_is_told_with_function_sample_and_remedy(
    typed: RewardWorkers, kind: str, message: str
) -> None:
    with pytest.raises(RewardError) as caught:
        scores(typed, prompt_of(), kind)
    for words in ("'typed'", "train.jsonl, row 7, sample 0", repr(kind), message, 'reward.on_error = "zero"'):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "raised KeyError: 'x' (reward_functions.py, line "),
        ("strange", "raised "),
        ("exit", "raised SystemExit: 3"),
        ("vanish", "ended its process: .*exited with code 9"),
        ("recurse", "raised RecursionError"),
        ("hang", "took more than 1.5 s; make it faster, or raise reward.timeout_s"),
        ("hang_in_c", "took more than 1.5 s"),
        ("interrupt", "raised KeyboardInterrupt"),
        ("generator", "raised LookupError: half way"),
    ],
)
def test_failures_count_as_zero_and_are_listed(lenient: RewardWorkers, kind: str, message: str) -> None:
    start, *end = message.split(".*")
    failed, fine = (scores(lenient, prompt_of(), text)[0] for text in (kind, "ok"))
    assert failed.parts == {"misbehave": 0.0, "length": len(kind)}
    assert failed.total == len(kind)
    (failure,) = failed.failures
    assert all(words in failure for words in ("'misbehave'", "row 7, sample 0", repr(kind), start, *end))
    assert fine == Score(3.0, {"misbehave": 1.0, "length": 2.0})


@pytest.mark.parametrize("kind", ["fork", "print"])
def test_forks_and_prints_do_no_harm(lenient: RewardWorkers, kind: str) -> None:
    for text in (kind, "ok", "ok"):
        (score,) = scores(lenient, prompt_of(), text)
        assert score == Score(1.0 + len(text), {"misbehave": 1.0, "length": len(text)})


def test_one_call_fails_for_all_its_samples_and_one_value_for_its_own() -> None:
    with workers_for("misbehave", "on_even", per="group", on_error="zero") as workers:
        failed = scores(workers, prompt_of(), "raise", "ok", "long text" * 100)
        assert [len(score.failures) for score in failed] == [1, 1, 1]
        assert [score.parts["misbehave"] for score in failed] == [0.0, 0.0, 0.0]
        assert "sample 2" in failed[2].failures[0]
        assert "'long textlong" in failed[2].failures[0]
        assert len(failed[2].failures[0]) < 500


def test_changed_arguments_reach_neither_neighbours_nor_later_calls() -> None:
    function = RewardFunction(function=f"{FILE}:vandal", kwargs={"bag": [1, 2]})
    prompt = prompt_of([{"role": "user", "content": "What?"}], items=["a", "b", "c"])
    with workers_for(function, per="group") as workers:
        for _ in range(2):
            assert totals(scores(workers, prompt, "x", "y")) == [3 + 2 + 1 + 2] * 2
    assert prompt.columns == {"items": ["a", "b", "c"]}
    assert prompt.content == [{"role": "user", "content": "What?"}]


@pytest.mark.parametrize("on_error", ["error", "zero"])
def test_a_missing_column_always_ends_the_run(on_error: str) -> None:
    exact = RewardFunction(function="exact_match")
    with workers_for("needs_column", exact, on_error=on_error) as workers:
        with pytest.raises(ConfigError, match=r"needs_column' needs 'solution'.*it has: question"):
            scores(workers, prompt_of(question="?"), "a")
        with pytest.raises(ConfigError, match=r"'exact_match' needs 'answer'.*set data.answer_column"):
            scores(workers, prompt_of(solution="?"), "a")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("text", "returned 'high' for a completion; return a number or None"),
        ("nan", "returned nan, which is not finite"),
        ("object", "returned <UnshowableError instance"),
        ("much", "returned 1e+30; with its weight that exceeds 1e+18"),
    ],
)
def test_a_wrong_value_names_its_own_sample_only(by_sample: RewardWorkers, kind: str, message: str) -> None:
    for _ in range(2):  # and the function is called again afterwards
        first, second, third = scores(by_sample, prompt_of(), "ok", kind, "none")
        assert (first, third) == (Score(1.0, {"per_sample": 1.0}), Score(0.0, {"per_sample": None}))
        assert second.total == second.parts["per_sample"] == 0.0
        assert f"train.jsonl, row 7, sample 1 ({kind!r}): {message}" in second.failures[0]


@pytest.fixture(scope="module")
def by_sample() -> Iterator[RewardWorkers]:
    with workers_for("per_sample", per="group", on_error="zero") as workers:
        yield workers


def test_the_first_failure_ends_the_run_and_names_every_sample_of_the_call() -> None:
    with workers_for("misbehave", "per_sample", per="group") as workers:
        with pytest.raises(
            RewardError, match=r"'misbehave', train.jsonl, row 7, samples 0, 1, 2: raised KeyError"
        ) as caught:
            scores(workers, prompt_of(), "raise", "ok", "ok")
        assert 'mend the function, or set reward.on_error = "zero"' in str(caught.value)
        assert caught.value.__cause__ is not None
        assert any("reward_functions.py" in note for note in caught.value.__cause__.__notes__)
        with pytest.raises(RewardError, match=r"'per_sample', train.jsonl, row 7, sample 1 \('nan'\): returned nan"):
            scores(workers, prompt_of(), "ok", "nan", "ok")


def test_all_shapes_of_callables() -> None:
    with workers_for("strict_columns", "decorated", "partly", "judge", "mean", per="group") as workers:
        for _ in range(2):
            (score,) = scores(workers, prompt_of(answer="ab", unused=1), "ab")
            parts = {"strict_columns": 7.0, "decorated": 1.0, "partly": 6.0, "judge": 1.0, "mean_2": 1.0}
            assert score == Score(16.0, parts)


def test_endless_results_and_messages_are_cut() -> None:
    with workers_for("endless", "long_winded", on_error="zero") as workers:
        endless, long_winded = scores(workers, prompt_of(), "ab")[0].failures
    assert "'endless'" in endless and "returned too many values for 1 completions" in endless
    assert "raised ValueError: xxx" in long_winded and len(long_winded) < 1000


def test_functions_of_one_name_are_told_apart(tmp_path: Path) -> None:
    other = write(tmp_path, "other.py", "def length(completions): raise ValueError('mine')\n")
    functions = [RewardFunction(function=f"{name}") for name in (f"{FILE}:length", f"{other}:length")]
    functions.append(
        RewardFunction(function=f"{write(tmp_path, 'third.py', 'def length_2(**_): return [5.0]')}:length_2")
    )
    with workers_for(*functions, on_error="zero") as workers:
        (score,) = scores(workers, prompt_of(), "ab")
    assert score.parts == {"length": 2.0, "length_2": 0.0, "length_2_2": 5.0}
    assert f"reward function 'length_2' ({other}:length), " in score.failures[0]


def test_results_do_not_depend_on_the_order_of_completion() -> None:
    with workers_for("slow_then_fast", "length", num_workers=2) as workers:
        pending = [workers.submit(prompt_of(), samples_of(text)) for text in ("aaaaa", "bb", "")]
        late_first = [call.result()[0].total for call in pending]
        assert late_first == [10.0, 4.0, 0.0]


def test_a_call_does_not_pay_for_imports(tmp_path: Path) -> None:
    """Not even the second worker's first call, nor one in a worker that replaces a stopped one."""
    text = (
        "import time\ntime.sleep(0.7)\n"
        "def score(completions):\n    time.sleep(60 * (completions[0] == 'hang'))\n    return [1.0]\n"
    )
    function = RewardFunction(function=f"{write(tmp_path, 'slow.py', text)}:score")
    with workers_for(function, num_workers=2, timeout_s=0.5, on_error="zero") as workers:
        calls = [workers.submit(prompt_of(), samples_of(text)) for text in ("a", "hang", "hang", "b", "c")]
        assert [call.result()[0].total for call in calls] == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_done_tells_without_waiting() -> None:
    with workers_for("misbehave", on_error="zero", timeout_s=1.0) as workers:
        pending = workers.submit(prompt_of(), samples_of("hang"))
        assert not pending.done()
        end = time.monotonic() + 60
        while not pending.done() and time.monotonic() < end:
            time.sleep(0.02)
        assert pending.done()
        assert pending.result()[0].failures


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("exact_mach", ["'exact_mach' is no built-in", "did you mean 'exact_match'"]),
        ("FOLDER/absent.py:score", ["there is no file", "absent.py"]),
        ("FOLDER:score", ["there is no module"]),
        ("no_such_package.rewards:score", ["there is no module 'no_such_package'"]),
        ("json.no_such_module:score", ["there is no module 'json.no_such_module'"]),
        ("json:scor", ["json has no 'scor'"]),
        ("json:dump_", ["json has no 'dump_'", "did you mean 'dump'"]),
        (f"{FILE}:not_callable", ["is a int; name a function"]),
        (f"{FILE}:Scorer", ["is a class; name a function"]),
        (
            "FOLDER/raises.py:score",
            ["raises.py fails to load", "ZeroDivisionError: division by zero (raises.py, line 2)"],
        ),
        ("FOLDER/syntax.py:score", ["syntax.py fails to load", "SyntaxError"]),
        ("FOLDER/leaves.py:score", ["leaves.py fails to load", "SystemExit"]),
        ("FOLDER/needs.py:score", ["needs.py fails to load", "No module named 'no_such_package'"]),
        ("FOLDER/dies.py:score", ["cannot be loaded", "died"]),
    ],
)
def test_functions_that_cannot_be_loaded_are_refused_by_check(tmp_path: Path, name: str, words: list[str]) -> None:
    write(tmp_path, "raises.py", "x = 1\ny = x / 0\ndef score(**_): return []\n")
    write(tmp_path, "syntax.py", "def score(:\n")
    write(tmp_path, "leaves.py", "raise SystemExit(2)\n")
    write(tmp_path, "needs.py", "import no_such_package\n")
    write(tmp_path, "dies.py", "import os\nos._exit(4)\n")
    function = RewardFunction(function=name.replace("FOLDER", str(tmp_path)))
    with RewardWorkers(recipe(function, num_workers=1)) as workers, pytest.raises(ConfigError) as caught:
        workers.check()
    for text in ["reward.functions", *words]:
        assert text in str(caught.value)


def test_check_tells_everything_that_is_wrong(tmp_path: Path) -> None:
    functions = [
        RewardFunction(function="exact_mach"),
        RewardFunction(function=f"{FILE}:length"),
        RewardFunction(function=f"{FILE}:length", kwargs={"scal": 1}),
        RewardFunction(function=f"{write(tmp_path, 'raises.py', 'x = 1 / 0')}:score"),
    ]
    with RewardWorkers(recipe(*functions)) as workers, pytest.raises(ConfigError) as caught:
        workers.check()
    first, second, third = str(caught.value).splitlines()
    assert "'exact_mach'" in first and "'scal'" in second and "raises.py:score" in third


def test_modules_that_end_or_hold_up_the_process_are_named_beside_the_others(tmp_path: Path) -> None:
    functions = [
        RewardFunction(function=f"{write(tmp_path, 'dies.py', 'import os; os._exit(4)')}:score"),
        RewardFunction(function=f"{write(tmp_path, 'hangs.py', 'import time; time.sleep(600)')}:score"),
        RewardFunction(function="exact_mach"),
        RewardFunction(function="exact_match"),
    ]
    with RewardWorkers(recipe(*functions), start_timeout_s=1.5) as workers, pytest.raises(ConfigError) as caught:
        workers.check()
    dies, hangs, absent = str(caught.value).splitlines()
    assert "dies.py:score' cannot be loaded" in dies and "exited with code 4" in dies
    assert "hangs.py:score': loading it takes longer than 1.5 s" in hangs
    assert "'exact_mach' is no built-in" in absent


def test_columns_can_be_checked_before_the_run() -> None:
    with workers_for("needs_column", RewardFunction(function="exact_match"), "length") as workers:
        workers.check_columns({"answer", "solution"})
        with pytest.raises(ConfigError) as caught:
            workers.check_columns({"question"})
    column, answer = str(caught.value).splitlines()
    assert "needs_column' needs 'solution', which is no column of the data (it has: question)" in column
    assert "'exact_match' needs 'answer'" in answer and "data.answer_column" in answer


def test_paths_and_modules_are_those_of_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    write(tmp_path, "note.txt", "5")
    text = "from neighbour import BONUS\ndef score(completions): return [BONUS + float(open('note.txt').read())]\n"
    write(tmp_path / "sub", "mine.py", text)
    write(tmp_path / "sub", "neighbour.py", "BONUS = 1.0\n")
    write(tmp_path, "plain_module.py", "def score(completions): return [7.0]\n")
    names = ("sub/mine.py:score", "plain_module:score")
    with workers_for(*[RewardFunction(function=name) for name in names]) as workers:
        (score,) = scores(workers, prompt_of(), "a")
    assert score == Score(13.0, {"score": 6.0, "score_2": 7.0})


def test_keyword_arguments_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"it takes no 'scal'; its arguments are completions"):
        check_kwargs(f"{FILE}:length", {"scal": 1})
    with pytest.raises(ConfigError, match="'prompts' is given by the trainer"):
        check_kwargs(f"{FILE}:echo", {"prompts": 1})
    check_kwargs(f"{FILE}:echo", {"scale": 1, "anything": 2})


def test_a_file_is_loaded_as_a_script_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports its neighbours, defines dataclasses, and is read once for several functions."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    write(tmp_path, "neighbour_of_rewards.py", "BONUS = 2.0\n")
    file = write(
        tmp_path,
        "json.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour_of_rewards import BONUS\n"
        "@dataclass\nclass Mark:\n    value: float = BONUS\n"
        "def score(completions): return [Mark().value for _ in completions]\n"
        "def mark(completions): return [Mark is score.__globals__['Mark'] for _ in completions]\n",
    )
    assert load_reward(f"{file}:score")(completions=["a"]) == [2.0]
    assert load_reward(f"{file}:mark").__globals__ is load_reward(f"{file}:score").__globals__
    assert sys.modules["json"].__file__ != str(file)


def test_a_module_in_the_working_directory_is_found_and_the_parent_stays_clean(tmp_path: Path) -> None:
    """A console script's import path lacks the working directory; and the run's own process imports no user code."""
    write(tmp_path, "my_rewards.py", "import torch\nprint('loaded')\ndef score(completions): return [1.0]\n")
    code = (
        "import sys; sys.path = [entry for entry in sys.path if entry not in ('', '.')]\n"
        "from rollplex.algo.reward import RewardWorkers; from rollplex.config import RewardConfig\n"
        "with RewardWorkers(RewardConfig(functions=['my_rewards:score'], num_workers=1)) as workers: workers.check()\n"
        "print({'my_rewards', 'torch'} & set(sys.modules))"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.append({root!r})\n{code}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
