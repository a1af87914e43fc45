"""Names of options in the errors of a recipe's settings: of `--config`, and of the options that are settings too."""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.core.errors import TrainError

F = TypeVar("F", bound=Callable[..., None])
_WRONG = re.compile(r"the recipe has ([\w.]+) (?=\S)")
# Settings whose option has another name.
_PARAMETERS = {
    "checkpoints.every_steps": "checkpoint_every_steps",
    "execution.accumulation_steps": "gradient_accumulation",
    "execution.threads": "threads",
    "loading.bad_examples": "bad_examples",
    "loading.workers": "workers",
}


def naming_config(command: F) -> F:
    """Make a command name its option in the error of a setting that came from it.

    It names `--config` for a setting of that file that the recipe does not have.
    """

    @wraps(command)
    def run(*, config: Path | None = None, **arguments: Any) -> None:
        try:
            command(config=config, **arguments)
        except TrainError as error:
            from penstock.train.overrides import UnknownSetting, read_settings

            if named := _by_option(str(error), arguments):
                raise TrainError(named) from None
            if config is None or not isinstance(error, UnknownSetting) or error.setting not in read_settings(config):
                raise
            raise TrainError(
                f"--config {config}: {error} The file may be of another version of Penstock or of another application."
            ) from None

    return cast(F, run)


def _by_option(sentence: str, arguments: Mapping[str, Any]) -> str | None:
    """Name the option that gave a setting its wrong value; None if no option did."""
    found = _WRONG.match(sentence)
    if found is None:
        return None
    parameter, rest = _PARAMETERS.get(found[1], found[1]), sentence[found.end() :]
    value = arguments.get(parameter)
    # A setting of the same name may come from --set.
    if value is None or not rest.startswith((f"{value};", f"{value!r};")):
        return None
    return f"--{parameter.replace('_', '-')} is {rest}"
