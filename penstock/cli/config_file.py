"""Errors in a file of settings, `--config`."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from penstock.core.errors import TrainError

F = TypeVar("F", bound=Callable[..., None])


def naming_config(command: F) -> F:
    """Make a command name its `--config` in the error of a setting of that file that the recipe does not have."""

    @wraps(command)
    def run(*, config: Path | None = None, **arguments: Any) -> None:
        try:
            command(config=config, **arguments)
        except TrainError as error:
            from penstock.train.overrides import UnknownSetting, read_settings

            if config is None or not isinstance(error, UnknownSetting) or error.setting not in read_settings(config):
                raise
            raise TrainError(
                f"--config {config}: {error} The file may be of another version of Penstock or of another application."
            ) from None

    return cast(F, run)
