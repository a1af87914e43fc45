"""Refusal to resume a run on examples that changed since it began."""

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import TrainError
from penstock.train.data.examples import Examples
from penstock.train.data.fingerprint import changes
from penstock.train.parallel.world import World
from penstock.train.report.run_log import RUN_FILE

Fingerprints = dict[str, dict[str, str]]


def fingerprints(sets: Mapping[str, Examples | None], world: World) -> Fingerprints:
    """Return the fingerprints of the sets of a training by name.

    Args:
        sets: The sets by name; None for one that there is not.
        world: The processes that train together; they must read the same examples.

    Raises:
        TrainError: A set cannot be read, or two processes have different examples.
    """
    # In the words of one process, so that a mistake ends all of them.
    problem, own = "", Fingerprints()
    try:
        own = {name: part.fingerprint() for name, part in sets.items() if part is not None}
    except TrainError as error:
        problem = str(error)
    for other, (sentence, found) in enumerate(world.all_gather_objects((problem, own))):
        if sentence:
            raise TrainError(sentence)
        for name in own if not problem else ():
            if differing := changes(found[name], own[name]):
                raise TrainError(
                    f"the {name} examples are not the same in process {other} as in another "
                    f"({_listed(differing)}); give all processes the same data."
                )
    return own


def check_data(now: Fingerprints, folder: Path, remedy: str) -> None:
    """Refuse examples that are not those of the run in a folder.

    Args:
        now: Of `fingerprints`.
        folder: RUN. A run of an older version recorded no fingerprints, and is not checked.
        remedy: What to do, as the end of a sentence.

    Raises:
        TrainError: They changed.
    """
    for name, then in recorded_data(folder).items():
        differing = changes(then, now[name]) if name in now else ["there are none now"]
        if differing:
            raise TrainError(
                f"the {name} examples changed since the run in {folder} began ({_listed(differing)}), so it cannot be "
                f"resumed exactly; {remedy}."
            )


def recorded_data(folder: Path) -> Fingerprints:
    """Read the fingerprints that the run in a folder recorded; empty if it recorded none."""
    try:
        found = json.loads((folder / RUN_FILE).read_bytes()).get("data")
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def _listed(phrases: list[str]) -> str:
    return "; ".join(phrases[:3]) + ("; ..." if len(phrases) > 3 else "")
