"""Continuation of the run in a folder: the differences between what a command asks for and that run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.errors import TrainError
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.source_files.unrun_sources import UnrunSources

# A run may become longer.
LENGTHS = ("epochs", "steps")
# They change the speed or the record of a run and not its result. The callbacks of a command are loggers; those of a
# recipe are part of the application's code, because `EarlyStopping` changes where a run ends.
FREE = ("callbacks", "checkpoints.every_steps", "loading.workers")


def changed_sources(fields: Mapping[str, Any], found: FoundApplication) -> list[str]:
    """Return the files of an application whose code differs from that of a run; comments do not count.

    Args:
        fields: The run.json of the run.
        found: The application.
    """
    # A run of an older version has no hashes of the code.
    for name, now in (("sources", found.source_sha256()), ("code", found.code_sha256())):
        then = fields.get(name)
        if then == now:
            return []
    then, now = fields.get("sources", {}), found.source_sha256()
    code, code_now = fields.get("code", {}), found.code_sha256()
    return [
        name
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name) and (name not in code or code[name] != code_now.get(name))
    ]


def check_unrun_sources(
    fields: Mapping[str, Any], reference: str, run: Path | str, remedy: str, copy: Path | None = None
) -> None:
    """Refuse an application whose code differs from that of a run, before any of it is imported.

    Args:
        fields: The run.json of the run.
        reference: The application, see `find_application`.
        run: The folder of the run, or its URL.
        remedy: What to do, as the end of a sentence.
        copy: A file that is imported in place of the one that the reference names.

    Raises:
        TrainError: It differs.
        ApplicationError: Its file is not there.
    """
    # A run of a notebook has no sources.
    if sources := fields.get("sources"):
        found = UnrunSources.of(reference if copy is None else str(copy)).read(sources)
        changed = found.changed_code(sources, fields.get("code", {}))
        _refuse_changed(changed, fields.get("name", reference), run, remedy)


def check_sources(fields: Mapping[str, Any], found: FoundApplication, run: Path | str, remedy: str) -> None:
    """Refuse an application whose code differs from that of a run.

    Args:
        fields: The run.json of the run.
        found: The application.
        run: The folder of the run, or its URL.
        remedy: What to do, as the end of a sentence.

    Raises:
        TrainError: It differs.
    """
    _refuse_changed(changed_sources(fields, found), found.application.name, run, remedy)


def _refuse_changed(changed: list[str], name: str, run: Path | str, remedy: str) -> None:
    if changed:
        raise TrainError(
            f"{', '.join(changed)} of {name!r} changed since the run in {run} began{remedy}, or "
            f"accept the change by --accept-changed-app."
        )


def differences(fields: Mapping[str, Any], found: FoundApplication, overrides: Mapping[str, Any]) -> list[str]:
    """Return the differences between a command and a run, one phrase each; none if the command goes on with the run.

    Args:
        fields: The run.json of the run.
        found: The application of the command.
        overrides: The recipe's fields that the command gives.
    """
    if fields.get("application") != found.reference:
        return [f"the application is {found.reference}, the run's is {fields.get('application')}"]
    given, recipe = fields.get("overrides", {}), fields.get("recipe", {})
    found_differences: list[str] = []
    for name in sorted({*given, *overrides}):
        # The recipe in run.json has the values that were used.
        then = given.get(name, recipe.get(name))
        same = name in overrides and overrides[name] == then
        if name not in FREE and not same and not _is_longer(fields, name, overrides.get(name)):
            found_differences.append(f"{name} is {_shown(overrides, name)}, the run's is {_shown(given, name, recipe)}")
    return found_differences


def is_longer(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Check whether a command asks for more steps or epochs than a run was begun with."""
    return any(_is_longer(fields, name, overrides.get(name)) for name in LENGTHS)


def _is_longer(fields: Mapping[str, Any], name: str, value: float | None) -> bool:
    if name not in LENGTHS or value is None:
        return False
    then = fields.get("total_steps") if name == "steps" else fields.get("recipe", {}).get("epochs")
    return then is not None and value > then


def next_folder(folder: Path) -> Path:
    """Return the first of `run-2`, `run-3` and so on that does not exist."""
    number = 2
    while (made := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return made


def _shown(values: Mapping[str, Any], name: str, recipe: Mapping[str, Any] | None = None) -> str:
    """Write a value that a command gave, or else the one of the recipe, where it is known."""
    if name in values:
        return _plain(values[name])
    known = None if recipe is None else recipe.get(name)
    return "the recipe's" if known is None else f"the recipe's {_plain(known)}"


def _plain(value: Any) -> str:
    # An option of epochs makes 20.0 of 20.
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
