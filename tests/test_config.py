"""Recipes: every refusal names field, value and remedy; overrides; and what survives being written to TOML."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from rollplex.config import Config, RewardFunction, load_config, parse_config
from rollplex.errors import ConfigError

MINIMAL: dict[str, dict[str, Any]] = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(MINIMAL), encoding="utf-8")
    return path


def refusal(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value)


def with_field(field: str, value: object) -> dict[str, Any]:
    section, name = field.split(".")
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), name: value}}


# Refusals


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("model.dtype", "float16", "'bfloat16' or 'float32'"),
        ("model.train_vision", "perhaps", "boolean"),
        ("model.path", 12, """a string is needed; quote what looks like a number or date: 'model.path="12"'"""),
        ("model.path", ["a"], "string"),
        ("model.path", "", "at least 1 character"),
        ("run.directory", "", "at least 1 character"),
        ("train.steps", True, "a number is needed"),
        ("train.learning_rate", False, "a number is needed"),
        ("rollout.num_blocks", True, "a number is needed"),
        ("data.max_prompt_tokens", 0, "greater than 0"),
        ("data.num_workers", -1, "greater than 0"),
        ("data.image_marks", "append", "'strict' or 'prepend'"),
        ("rollout.group_size", 0, "greater than or equal to 1"),
        ("rollout.temperature", -0.5, "greater than or equal to 0"),
        ("rollout.temperature", 0.0, "use a value above 0"),
        ("rollout.temperature", 0.005, "use 0.01 or more"),
        ("rollout.top_p", 0.0, "greater than 0"),
        ("rollout.top_p", 1.01, "less than or equal to 1"),
        ("rollout.top_k", -1, "greater than or equal to 0"),
        ("rollout.min_p", 1.5, "less than or equal to 1"),
        ("rollout.max_new_tokens", 2.5, "integer"),
        ("rollout.num_blocks", 0, "greater than 0"),
        ("rollout.num_blocks", 31, "rollout.max_new_tokens = 512; use 32 or more"),
        ("rollout.stop_strings", "</answer>", "a list"),
        ("algo.clip_low", 1.0, "less than 1"),
        ("algo.clip_high", 0.0, "greater than 0"),
        ("algo.aggregation", "mean", "'token-mean'"),
        ("algo.kl_coefficient", -0.1, "greater than or equal to 0"),
        ("algo.kl_estimator", "k4", "'k3'"),
        ("algo.kl_in", "advantage", "'loss' or 'reward'"),
        ("algo.entropy_coefficient", float("nan"), "finite"),
        ("algo.num_minibatches", 65, "at most train.prompts_per_step = 64"),
        ("reward.functions", [], "at least one"),
        ("reward.functions", 5, "a name, a list of names, or tables"),
        ("reward.functions", True, "a name, a list of names, or tables"),
        ("reward.per", "batch", "'sample' or 'group'"),
        ("reward.timeout_s", 0, "greater than 0"),
        ("reward.on_error", "ignore", "'error' or 'zero'"),
        ("train.steps", 0, "greater than 0"),
        ("train.learning_rate", float("inf"), "finite"),
        ("train.schedule", "sine", "'cosine'"),
        ("train.min_learning_rate_ratio", 1.1, "less than or equal to 1"),
        ("train.max_grad_norm", 0.0, "greater than 0"),
        ("train.recompute", "all", "'none' or 'layer'"),
        ("eval.temperature", 0.009, "or 0 for greedy"),
        ("eval.every_steps", 5, "set data.eval"),
        ("run.seed", -1, "greater than or equal to 0"),
        ("run.seed", 2**31, "less than 2147483648"),
        ("run.device", "tpu", "'cuda'"),
        ("run.runner", "parallel", "'serial' or 'overlapped'"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_remedy(field: str, value: object, remedy: str) -> None:
    message = refusal(with_field(field, value))
    assert message.startswith(f"{field} = {value!r}: "), message
    assert remedy in message and "\n" not in message


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("rollout.stop_strings", ["</a>", ""], "rollout.stop_strings.1 = ''"),
        ("rollout.stop_token_ids", [3, -1], "rollout.stop_token_ids.1 = -1"),
        ("train.betas", [0.9, 1.0], "train.betas.1 = 1.0"),
        ("reward.functions", ["format", 5], "reward.functions.1 = 5"),
        ("reward.functions", [{"function": "format", "wait": 2}], "reward.functions.0.wait = 2: unknown field"),
        ("reward.functions", [{"weight": 2}], "reward.functions.0.function: missing"),
    ],
)
def test_a_wrong_entry_of_a_list_is_named_by_its_place(field: str, value: object, place: str) -> None:
    assert refusal(with_field(field, value)).startswith(place)


def test_refusals_that_take_two_fields() -> None:
    values = with_field("data.min_pixels", 900)
    values["data"]["max_pixels"] = 800
    assert refusal(values) == "data.min_pixels = 900: above data.max_pixels = 800; lower it"
    assert "use 2 or more" in refusal(with_field("rollout.group_size", 1))
    values = with_field("rollout.group_size", 1)
    values["algo"] = {"scale_advantages": False}
    assert "use 2 or more" in refusal(values)
    for value in (0.0, 0.01, 1.0):
        assert parse_config(with_field("eval.temperature", value)).eval.temperature == value
    assert parse_config(with_field("algo.num_minibatches", 64)).algo.num_updates == 64
    assert parse_config(with_field("rollout.num_blocks", 32)).rollout.num_blocks == 32


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    places = {"model": {"path": "~/m", "reference": "~/r"}, "data": {"train": "~/d.py:rows", "eval": "~/*.jsonl"}}
    config = parse_config({**places, "run": {"directory": "~/runs/1"}})
    assert (config.model.path, config.model.reference) == ("/home/ann/m", "/home/ann/r")
    assert (config.data.train, config.data.eval) == ("/home/ann/d.py:rows", "/home/ann/*.jsonl")
    assert config.run.directory == "/home/ann/runs/1"


def test_missing_and_unknown_fields_are_named_one_a_line() -> None:
    message = refusal({"model": {"pth": "m"}, "traim": {"steps": 3}})
    lines = sorted(message.splitlines())
    assert len(lines) == 4
    assert "data: missing; set it in the recipe" in lines[0]
    assert lines[1].startswith("model.path: missing") and "model.path=VALUE" in lines[1]
    assert lines[2].startswith("model.pth = 'm': unknown field") and "check the spelling" in lines[2]
    assert lines[3].startswith("traim = ")


def test_a_section_that_is_a_value_is_refused() -> None:
    message = refusal({**MINIMAL, "train": 3})
    assert message == "train = 3: Input should be a table"


def test_a_recipe_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml' cannot be read: No such file.*give the path"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    for content in (b"[model\npath = 3", b"\xff\xfe"):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.toml' is not valid TOML"):
            load_config(broken)


def test_a_config_cannot_be_changed() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


# Reward functions


@pytest.mark.parametrize("value", ["format", ["format"], [{"function": "format"}], {"function": "format"}])
def test_one_reward_function_can_be_written_in_four_ways(value: object) -> None:
    assert parse_config(with_field("reward.functions", value)).reward.functions == (RewardFunction(function="format"),)


def test_names_and_tables_can_be_mixed() -> None:
    value = ["my.module:score", {"function": "dir/file.py:other", "weight": 0.5, "kwargs": {"strict": True}}]
    first, second = parse_config(with_field("reward.functions", value)).reward.functions
    assert (first.name, first.weight, dict(first.kwargs)) == ("score", 1.0, {})
    assert (second.name, second.weight, dict(second.kwargs)) == ("other", 0.5, {"strict": True})


# Overrides


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("train.steps=7", "train", "steps", 7),
        ("train.steps = 7 ", "train", "steps", 7),
        ("train.steps=10_000", "train", "steps", 10_000),
        ("train.learning_rate=2e-5", "train", "learning_rate", 2e-5),
        ("train.learning_rate=1", "train", "learning_rate", 1.0),
        ("model.train_vision=true", "model", "train_vision", True),
        ("model.path=org/name-7B", "model", "path", "org/name-7B"),
        ("model.path=/with = sign", "model", "path", "/with = sign"),
        ("model.path='12'", "model", "path", "12"),
        ("run.directory=runs/a#b", "run", "directory", "runs/a#b"),
        ('run.directory="a b"', "run", "directory", "a b"),
        ("data.system_prompt=Think.\nThen = answer", "data", "system_prompt", "Think.\nThen = answer"),
        ('data.system_prompt="x"\nrun.seed = 4', "data", "system_prompt", '"x"\nrun.seed = 4'),
        ('rollout.stop_strings=["</a>", "\\n\\n"]', "rollout", "stop_strings", ("</a>", "\n\n")),
        ("rollout.stop_token_ids=[1, 2]", "rollout", "stop_token_ids", (1, 2)),
        ("train.betas=[0.5, 0.6]", "train", "betas", (0.5, 0.6)),
        ("data.columns.x=1", None, None, None),
        ("reward.functions.0.weight=2", None, None, None),
    ],
)
def test_an_override_is_read_as_toml_or_else_as_a_string(
    recipe: Path, override: str, section: str | None, name: str | None, value: object
) -> None:
    if section is None or name is None:
        with pytest.raises(ConfigError, match=override.split("=")[0].rsplit(".", 1)[0].replace(".0", "")):
            load_config(recipe, [override])
        return
    assert getattr(getattr(load_config(recipe, [override]), section), name) == value


def test_overrides_come_after_the_recipe_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text(tomli_w.dumps({**MINIMAL, "train": {"steps": 3, "warmup_steps": 2}}))
    config = load_config(path, ["train.steps=4", "train.steps=5"])
    assert (config.train.steps, config.train.warmup_steps) == (5, 2)
    functions = load_config(path, ["reward.functions=['format', 'exact_match']"]).reward.functions
    assert [function.name for function in functions] == ["format", "exact_match"]


@pytest.mark.parametrize(
    "override", ["train.steps", "steps=3", "=3", ".steps=3", "train.=3", "train..steps=3", "", "train=3"]
)
def test_a_malformed_override_is_refused_with_an_example(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.field=value, for example train\.steps=200") as caught:
        load_config(recipe, [override])
    assert repr(override) in str(caught.value)


def test_an_override_below_a_value_is_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"'model\.path\.x=1': path is a value, not a section"):
        load_config(recipe, ["model.path.x=1"])


@pytest.mark.parametrize("override", ["train.stepps=4", "trainer.steps=4"])
def test_a_misspelt_override_is_refused(recipe: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="unknown field"):
        load_config(recipe, [override])


# TOML and back

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
places = texts.filter(bool)
numbers = st.floats(1e-9, 1e3)
decays = st.floats(0.0, 0.999)
scalars = texts | st.integers(-(2**40), 2**40) | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
kwargs = st.dictionaries(texts, st.recursive(scalars, st.lists, max_leaves=5), max_size=3)
functions = st.fixed_dictionaries({"function": texts, "weight": numbers, "kwargs": kwargs})


def section(required: dict[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


sections = section(
    {
        "model": section({"path": places}, reference=st.none() | places, train_vision=st.booleans()),
        "data": section({"train": places, "eval": st.none() | places}, system_prompt=st.none() | texts),
    },
    rollout=section(
        {},
        group_size=st.integers(2, 64),
        temperature=st.floats(0.01, 10.0),
        top_p=st.floats(0.01, 1.0),
        stop_strings=st.lists(texts.filter(bool), max_size=3),
        stop_token_ids=st.lists(st.integers(0, 10**6), max_size=3),
        num_blocks=st.none() | st.integers(32, 1000),
    ),
    algo=section({}, kl_coefficient=numbers, clip_high=numbers, epochs=st.integers(1, 9)),
    reward=section({"functions": st.lists(functions, min_size=1, max_size=3)}),
    train=section({}, learning_rate=numbers, betas=st.tuples(decays, decays)),
    run=section({}, seed=st.integers(0, 2**31 - 1), directory=places),
)


@given(sections)
def test_a_valid_config_survives_toml(chosen: dict[str, Any]) -> None:
    config = parse_config(chosen)
    written = tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))
    assert parse_config(tomllib.loads(written)) == config


def test_the_shipped_recipes_are_valid() -> None:
    recipes = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        assert isinstance(load_config(path), Config)
