"""Commands of docs/tutorial/first-hour.md, run from the wheel of this tree in an empty folder."""

import tempfile
from pathlib import Path

from penstock.core.errors import BenchError
from tests.support.first_hour import shell_of_a_newcomer, typed, wrong_turns


def count_commands() -> list[float]:
    """Return the number of commands that the page has a reader type, the installation included.

    Raises:
        BenchError: A command failed or printed something else, so that they are not enough.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = wrong_turns(shell_of_a_newcomer(Path(folder)))
    if found:
        raise BenchError(f"the page has {len(found)} wrong turns, so its commands are not counted: {found[0][:500]}")
    return [float(len(typed()))]
