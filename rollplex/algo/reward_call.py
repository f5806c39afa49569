"""Inside a reward worker: find the user's functions, and call one as TRL would.

    start_worker   when a worker starts        file.py:function, module:function, or a built-in -> callables
    find_problems  before the run              functions that cannot be loaded, kwargs that they do not take
    find_missing   when the columns are known  parameters that nothing fills
    call_reward    per call                    arguments by name -> the function -> one value, or complaint, per sample

A function is `(prompts, completions, **columns) -> list[float]`, plain or async: every argument is a list with one
entry per sample. Chat prompts are lists of messages, and then a completion is one assistant message. Each sample and
each call has its own copy of everything, so a function may change what it is given. Exceptions become RewardError here,
so that the run's own process never has to import the user's classes. Knows no process pool, and no weights.
"""

import asyncio
import importlib
import importlib.util
import inspect
import math
import os
import re
import reprlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from rollplex.algo import builtin_rewards
from rollplex.errors import ConfigError, RewardError

RewardCallable = Callable[..., Any]
Value = float | None
Outcome = float | None | str
"""A sample's value; None: the function does not apply to it. A string says what is wrong with what it returned."""

Request = tuple[str, Mapping[str, Any]]
"""A function of the recipe: its name there, and its kwargs."""

CALL_ARGUMENTS = ("prompts", "completions", "completion_ids")
HIDDEN_COLUMNS = ("prompt", "completion", *CALL_ARGUMENTS)
"""TRL does not pass them on either."""
SHOWN_CHARACTERS = 500
SHOWN_TRACEBACK_CHARACTERS = 4000
_LIBRARY_FOLDERS = (
    "<", str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
)  # fmt: skip


def start_worker(functions: Sequence[Request], folder: str) -> None:
    """Make this process ready for calls; functions that cannot be loaded are left to find_problems."""
    enter_folder(folder)
    for name, _ in functions:
        with suppress(ConfigError):
            load_reward(name)


def enter_folder(folder: str) -> None:
    """Work in the run's folder, and import from it, as `python -m` does."""
    os.chdir(folder)
    _import_from(folder)


def find_problems(functions: Sequence[Request]) -> list[str]:
    """One line for each function that cannot be loaded, or that does not take the recipe's kwargs."""
    problems = []
    for name, kwargs in functions:
        try:
            check_kwargs(name, kwargs)
        except ConfigError as error:
            problems.append(str(error))
    return problems


def check_kwargs(name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError if the function cannot be loaded or does not take these arguments."""
    parameters = _parameters(load_reward(name))
    for argument in kwargs:
        if argument in CALL_ARGUMENTS:
            raise ConfigError(
                f"reward.functions: {name!r}: kwargs: {argument!r} is given by the trainer; use another name"
            )
        if not parameters.takes(argument):
            takes = ", ".join(sorted(parameters.names)) or "none"
            raise ConfigError(
                f"reward.functions: {name!r}: kwargs: it takes no {argument!r}; its arguments are {takes}"
            )


def find_missing(functions: Sequence[Request], columns: Collection[str]) -> list[str]:
    """One line for each loadable function with parameters that neither columns nor kwargs fill."""
    problems = []
    for name, kwargs in functions:
        with suppress(ConfigError):
            complaint = _parameters(load_reward(name)).complaint(kwargs, columns)
            problems += [f"reward.functions: {name!r} {complaint}"] if complaint else []
    return problems


def call_reward(
    name: str, kwargs: Mapping[str, Any], content: Any, completions: Sequence[str], ids: Sequence[list[int]],
    columns: Mapping[str, Any],
) -> list[Outcome]:  # fmt: skip
    """Call one function on some responses to one prompt; one outcome per response.

    Raises:
        RewardError: the function failed, or what it returned is no list of the right length.
        ConfigError: the function cannot be loaded, or needs an argument that there is not.
    """
    function, count = load_reward(name), len(completions)
    columns = {column: value for column, value in columns.items() if column not in HIDDEN_COLUMNS}
    parameters = _parameters(function)
    if complaint := parameters.complaint(kwargs, columns):
        raise ConfigError(f"reward.functions: {name!r} {complaint}")
    as_chat = not isinstance(content, str)
    arguments = {
        **{column: [deepcopy(value) for _ in range(count)] for column, value in columns.items()},
        **kwargs,
        "prompts": [deepcopy(content) for _ in range(count)],
        "completions": [[{"role": "assistant", "content": text}] if as_chat else text for text in completions],
        "completion_ids": list(ids),
    }
    values = _called(function, *parameters.bind(arguments), count)
    return [_outcome(value) for value in values]


@dataclass(frozen=True)
class _Parameters:
    """What a function can be given: names, of which some by position only, some without a default; or anything."""

    names: frozenset[str]
    positional_only: tuple[str, ...]
    required: tuple[str, ...]
    anything: bool

    def takes(self, name: str) -> bool:
        return self.anything or name in self.names

    def complaint(self, kwargs: Collection[str], columns: Collection[str]) -> str | None:
        """What is wrong if these are all the arguments that a call has; None: nothing."""
        missing = [name for name in self.required if name not in {*CALL_ARGUMENTS, *kwargs, *columns}]
        if not missing:
            return None
        remedy = "rename the parameter or the column, or give it a default or a value in kwargs"
        if missing == ["answer"]:
            remedy = "set data.answer_column to the column that holds it"
        names = ", ".join(map(repr, missing))
        return (
            f"needs {names}, which is no column of the data (it has: {', '.join(sorted(columns)) or 'none'}); {remedy}"
        )

    def bind(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        positional = []
        for name in self.positional_only:
            if name not in arguments:  # it has a default, and so have all after it
                break
            positional.append(arguments[name])
        return positional, {
            name: value for name, value in arguments.items() if name not in self.positional_only and self.takes(name)
        }


def _parameters(function: RewardCallable) -> _Parameters:
    """A decorator's `(*args, **kwargs)` takes what the function that it wraps takes."""
    try:
        parameters = list(inspect.signature(function, follow_wrapped=False).parameters.values())
    except (TypeError, ValueError):  # written in C
        parameters = [inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)]
    named = [item for item in parameters if item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)]
    names = frozenset(item.name for item in named)
    positional_only = tuple(item.name for item in named if item.kind is item.POSITIONAL_ONLY)
    required = tuple(item.name for item in named if item.default is item.empty)
    anything = any(item.kind is item.VAR_KEYWORD for item in parameters)
    wrapped = getattr(function, "__wrapped__", None) or getattr(type(function).__call__, "__wrapped__", None)
    if not anything or wrapped is None:
        return _Parameters(names, positional_only, required, anything)
    inner = _parameters(wrapped)
    return _Parameters(names | inner.names, positional_only, required, inner.anything)


def _called(function: RewardCallable, positional: Sequence[Any], named: Mapping[str, Any], count: int) -> list[Any]:
    """The `count` values that the function returns; all that it may do while making them is caught."""
    try:
        values = function(*positional, **named)
        if inspect.isawaitable(values):
            values = _event_loop().run(_awaited(values))
        no_list = isinstance(values, str | bytes | Mapping | Set) or getattr(values, "ndim", 1) == 0
        if no_list or not isinstance(values, Iterable):
            raise RewardError(f"returned {type(values).__name__}; return a list of {count} numbers")
        items = list(islice(values, count + 1))
        if len(items) != count:
            found = len(values) if isinstance(values, Sized) else len(items) if len(items) < count else "too many"
            raise RewardError(f"returned {found} values for {count} completions; return one number for each")
        return items
    except RewardError:
        raise
    except BaseException as error:  # the user's code; sys.exit included
        failure = RewardError(f"raised {_described(error)}")
        failure.add_note("".join(traceback.format_exception(error))[-SHOWN_TRACEBACK_CHARACTERS:])
        raise failure from None


def _outcome(item: Any) -> Outcome:
    if item is None:
        return None
    try:
        if isinstance(item, str | bytes):
            raise TypeError("text is no number")
        value = float(item.item() if hasattr(item, "item") else item)  # a tensor or an array of one element
    except OverflowError:
        value = math.inf
    except Exception:  # the item may be an object of the user's
        return f"returned {_shown.repr(item)} for a completion; return a number or None"
    return value if math.isfinite(value) else f"returned {value}, which is not finite"


async def _awaited(values: Any) -> Any:
    return await values


@cache
def _event_loop() -> asyncio.Runner:
    """One loop for all calls of this process: the user's clients may stay connected to it."""
    return asyncio.Runner()


@cache
def load_reward(name: str) -> RewardCallable:
    """A built-in by name, `package.module:function`, or `path/to/file.py:function`.

    Raises:
        ConfigError: there is no such file, module or function; it is no function; or its module fails to load.
    """
    owner, separator, attribute = name.rpartition(":")
    if not separator:
        if name in builtin_rewards.__all__:
            return getattr(builtin_rewards, name)  # type: ignore[no-any-return]
        known = builtin_rewards.__all__
        raise ConfigError(
            f"reward.functions: {name!r} is no built-in ({', '.join(known)}){_closest(name, known)}; or write "
            "package.module:function or file.py:function"
        )
    module = _load_file(name, Path(owner)) if owner.endswith(".py") else _load_module(name, owner)
    function = getattr(module, attribute, None)
    if function is None:
        file = getattr(module, "__file__", None) or owner
        raise ConfigError(
            f"reward.functions: {name!r}: {owner} has no {attribute!r}{_closest(attribute, dir(module))}; "
            f"check the name after the colon, and that {file} is the file that you mean"
        )
    if not callable(function) or isinstance(function, type):
        kind = "class" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"reward.functions: {name!r} is a {kind}; name a function, or an object that can be called")
    return function  # type: ignore[no-any-return]


def _closest(name: str, names: Sequence[str]) -> str:
    found = get_close_matches(name, names, 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _load_file(name: str, path: Path) -> ModuleType:
    path = path.expanduser()
    if not path.is_file():
        raise ConfigError(f"reward.functions: {name!r}: there is no file {str(path)!r} (looked from {Path.cwd()})")
    path = path.resolve()
    module_name = "rollplex_reward_" + re.sub(r"\W", "_", str(path))
    if module_name in sys.modules:  # another function of the same file
        return sys.modules[module_name]
    _import_from(str(path.parent))
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code
        del sys.modules[module_name]
        raise ConfigError(f"reward.functions: {name!r}: {path} fails to load: {_described(error)}") from None
    return module


def _load_module(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # the user's code, or no such module
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"reward.functions: {name!r}: there is no module {error.name!r} in {Path.cwd()} or installed; a file "
                "is written path/to/file.py:function"
            ) from None
        raise ConfigError(f"reward.functions: {name!r}: {module} fails to load: {_described(error)}") from None


def _import_from(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _described(error: BaseException) -> str:
    """The exception, and the last line of the user's own code that it came through."""
    try:
        message = str(error)
    except Exception:  # the user's exception class
        message = "(its message cannot be shown)"
    if len(message) > SHOWN_CHARACTERS:
        message = message[:SHOWN_CHARACTERS] + "..."
    lines = list(_users_lines(error))
    return f"{type(error).__name__}: {message}" + (f" ({lines[-1]})" if lines else "")


def _users_lines(error: BaseException) -> Iterator[str]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARY_FOLDERS):
            yield f"{Path(file).name}, line {line}"


_shown = reprlib.Repr()
"""Short, and safe against objects that cannot be shown."""
_shown.maxstring = _shown.maxother = 80
