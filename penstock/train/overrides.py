"""Settings of a recipe by name, such as `optimizer.lr=0.01`, from a command line, a file or a search."""

import difflib
import inspect
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from penstock.core.errors import TrainError
from penstock.train.callbacks.named_callbacks import check_callbacks
from penstock.train.declared import Declared
from penstock.train.recipe import EMASettings, Recipe
from penstock.train.step.declared_schedule import Schedule

# Fields of a recipe that are functions or records: only their parts are settings.
_FUNCTIONS = (
    "data",
    "loss",
    "metrics",
    "augment",
    "calibrate",
    "raw_examples",
    "callbacks",
    "optimizer",
    "schedule",
    "lr_scale",
)
_WHOLE = (*_FUNCTIONS, "order", "selection", "ema", "checkpoints", "loading", "execution", "parallel")
_CLOSE = 3
# What follows is a pattern, which may have dots itself.
_SCALES = "lr_scale."


class UnknownSetting(TrainError):
    """A recipe has no setting of this name.

    Args:
        sentence: The error.
        setting: The name.
    """

    def __init__(self, sentence: str, setting: str) -> None:
        super().__init__(sentence)
        self.setting = setting


def with_overrides(recipe: Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """Return a recipe with some settings replaced, `{"seed": 1, "execution.graph": False, "optimizer.lr": 0.1}`.

    `steps` replaces `epochs` and the other way round. `callbacks` are names, added to the recipe's own. Settings of an
    optimizer or a schedule are the name and the arguments of an `Optimizer` or a `Schedule`; of a `functools.partial`,
    as a loss may be one too, its arguments. Another `optimizer.name` keeps the arguments that both optimizers have.

    Raises:
        TrainError: There is no such setting, or a value is out of range.
    """
    if ("steps" in overrides) != ("epochs" in overrides):
        overrides = {"steps": None, "epochs": None, **overrides}
    # Together, because one may be in range only with another.
    own = {name: value for name, value in overrides.items() if "." not in name}
    if unknown := [name for name in own if name not in _names(recipe)]:
        raise _unknown(recipe, unknown[0])
    for name, value in own.items():
        _check_type(name, value, recipe, name)
    if "callbacks" in own:
        check_callbacks(own["callbacks"])
        own["callbacks"] = [*recipe.callbacks, *own["callbacks"]]
    recipe = replace(recipe, **own)
    # Names first, because the arguments depend on them.
    for path, value in sorted(overrides.items(), key=lambda item: not item[0].endswith(".name")):
        if path.startswith(_SCALES):
            recipe = _rescaled(recipe, path.removeprefix(_SCALES), value)
        elif "." in path:
            recipe = _changed(recipe, recipe, path, path.split("."), value)
    return recipe


def declared_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of optimizer, schedule and fine-tuning that a recipe has, by name, for run.json."""
    found: dict[str, Any] = {}
    for part in ("optimizer", "schedule"):
        record: Any = getattr(recipe, part)
        if isinstance(record, Declared):
            found |= {f"{part}.{name}": value for name, value in {"name": record.name, **record.arguments}.items()}
        elif isinstance(record, partial):
            found |= {f"{part}.{name}": value for name, value in cast(partial[Any], record).keywords.items()}
    found |= {f"{_SCALES}{pattern}": scale for pattern, scale in recipe.lr_scale.items()}
    if recipe.freeze:
        found |= {"freeze": tuple(recipe.freeze), "frozen_statistics": recipe.frozen_statistics}
    # In the form in which JSON gives them back.
    plain = {name: list(cast(Any, value)) if isinstance(value, tuple) else value for name, value in found.items()}
    return {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | list | None)}


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse settings as they are typed, `NAME=VALUE`: a TOML value, `none`, or else a word.

    Raises:
        TrainError: One has no name or no value.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name.strip() or not equals or not value.strip():
            raise TrainError(f"--set has {text!r}; write NAME=VALUE, such as optimizer.lr=0.01.")
        found[name.strip()] = parse_value(value.strip())
    return checked(found)


def setting_text(value: Any) -> str:
    """Return the text of a value, which `parse_value` reads as the same value."""
    if value is None:
        return "none"
    if isinstance(value, list):
        # A word without quotes is no TOML in a list.
        texts = [_quoted(each) if isinstance(each, str) else setting_text(each) for each in cast(list[Any], value)]
        return f"[{', '.join(texts)}]"
    if isinstance(value, str):
        return value if value and value == value.strip() == parse_value(value) else _quoted(value)
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _quoted(word: str) -> str:
    # TOML has no pairs of surrogates.
    return json.dumps(word, ensure_ascii=False)


def read_settings(file: Path) -> dict[str, Any]:
    """Read settings from a TOML file; the tables of `[optimizer]` are `optimizer.NAME`.

    Raises:
        TrainError: It is no TOML file.
    """
    try:
        loaded = tomllib.loads(file.read_text())
    except OSError as error:
        raise TrainError(f"--config {file} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise TrainError(f"--config {file} is not TOML ({error}).") from None
    return checked(dict(_flat(loaded, "")))


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings whose values can be those of a recipe.

    Raises:
        TrainError: One cannot.
    """
    for name, value in settings.items():
        if not isinstance(value, bool | int | float | str | list | NoneType) or value != value:
            raise TrainError(f"{name} is {value}; a setting is a number, true, false, a word, a list or none.")
    if functions := [name for name in settings if name in _WHOLE]:
        raise TrainError(
            f"{functions[0]!r} of a recipe is no single value; set a part of it, such as optimizer.lr=0.01 or "
            f"optimizer.name=adamw, or change it in the application."
        )
    return settings


def parse_value(text: str) -> Any:
    """Parse a value as it is typed: a TOML value, `none`, or else a word."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _flat(table: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(cast(dict[str, Any], value), f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _changed(recipe: Recipe, record: Any, path: str, names: list[str], value: Any) -> Any:
    """Return a record with one setting replaced."""
    name, *rest = names
    if name not in _names(record):
        raise _unknown(recipe, path)
    now = _value(record, name)
    if rest and now is None and name == "ema":
        return replace(record, ema=_made_ema(path, rest, value))
    if rest and now is None and name == "schedule":
        return replace(record, schedule=_made_schedule(path, rest, value))
    if rest and not _names(now):
        kind = "not given" if now is None else f"of type {type(now).__name__}"
        raise TrainError(
            f"{path.rpartition('.')[0]!r} of the recipe is {kind} and has no settings; a declared one has, "
            f"such as Optimizer('adamw', lr=1e-3), and so has a functools.partial."
        )
    if not rest:
        _check_type(path, value, record, name)
    new = _changed(recipe, now, path, rest, value) if rest else value
    if isinstance(record, Declared):
        return record.with_setting(name, new)
    if isinstance(record, partial):
        function = cast(partial[Any], record)
        return partial(function.func, *function.args, **{**function.keywords, name: new})
    return replace(record, **{name: new})


def _rescaled(recipe: Recipe, pattern: str, value: Any) -> Recipe:
    scales = {name: scale for name, scale in recipe.lr_scale.items() if name != pattern}
    return replace(recipe, lr_scale=scales if value is None else {**scales, pattern: value})


def _made_ema(path: str, rest: list[str], value: Any) -> EMASettings:
    if rest != ["decay"]:
        raise TrainError(f"the recipe has no EMA, so that {path!r} has no effect; set ema.decay first.")
    _check_type(path, value, EMASettings(decay=0.0), "decay")
    return EMASettings(decay=value)


def _made_schedule(path: str, rest: list[str], value: Any) -> Schedule:
    if rest != ["name"]:
        raise TrainError(f"the recipe has no schedule, so that {path!r} has no effect; set schedule.name first.")
    return Schedule(value)


def _check_type(path: str, value: Any, record: Any, name: str) -> None:
    """Check a value against the annotation of a record's field, or against what a partial function has there now."""
    if isinstance(record, Declared):
        # It checks its arguments itself.
        return
    if isinstance(record, partial):
        parameters = inspect.signature(cast(partial[Any], record)).parameters
        now = parameters[name].default if name in parameters else None
        allowed: tuple[type, ...] = (bool,) if isinstance(now, bool) else (int, float)
        if isinstance(now, bool | int | float) and not _is_of(value, allowed):
            raise _wrong(path, value, allowed)
        return
    hint = get_type_hints(type(record))[name]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for option in options if get_origin(option) is Literal for choice in get_args(option)]
    allowed = tuple(option for option in options if option in (bool, int, float, str, NoneType))
    if len(allowed) + bool(choices) < len(options) or value in choices:
        # The recipe itself checks functions and records.
        return
    allowed = (*allowed, str) if choices else allowed
    if not _is_of(value, (*allowed, int) if float in allowed else allowed):
        raise _wrong(path, value, allowed)


def _is_of(value: Any, allowed: tuple[type, ...]) -> bool:
    # A bool is an int to Python.
    return type(value) in allowed


def _wrong(path: str, value: Any, allowed: tuple[type, ...]) -> TrainError:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a word", NoneType: "none"}
    wanted = [words[each] for each in (bool, float, int, str, NoneType) if each in allowed]
    if float in allowed and int in allowed:
        wanted.remove(words[int])
    return TrainError(f"{path} is {value!r}; it must be {' or '.join(wanted)}.")


def _value(record: Any, name: str) -> Any:
    if isinstance(record, Declared):
        return record.value(name)
    return record.keywords.get(name) if isinstance(record, partial) else getattr(record, name)


def _names(record: Any) -> list[str]:
    """The settings of a record, or the arguments of a partial function that have a value."""
    if isinstance(record, Declared):
        return ["name", *record.settings]
    if not isinstance(record, partial):
        return [each.name for each in fields(record)] if is_dataclass(record) else []
    function = cast(partial[Any], record)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return list(function.keywords)
    named = [each for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return [each.name for each in named if each.default is not each.empty]


def _unknown(recipe: Recipe, path: str) -> UnknownSetting:
    every = list(_paths(recipe, ""))
    last = path.rpartition(".")[2]
    ends = {name: name.rpartition(".")[2] for name in every}
    # Often the part before the dot is left out or is another one.
    near = [name for name, end in ends.items() if end == last][:_CLOSE]
    near = near or difflib.get_close_matches(path, every, _CLOSE, 0.5)
    near = near or [name for name, end in ends.items() if difflib.get_close_matches(last, [end], 1, 0.7)][:_CLOSE]
    advice = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(every)}"
    return UnknownSetting(f"the recipe has no setting {path!r}; {advice}.", path)


def _paths(record: Any, before: str) -> Iterator[str]:
    for name in _names(record):
        value = _value(record, name)
        if _names(value):
            yield from _paths(value, f"{before}{name}.")
        elif before or name not in _WHOLE:
            yield f"{before}{name}"
