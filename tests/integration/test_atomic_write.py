"""The hidden folder beside a place: who was killed leaves one, and the next one to write there removes it."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.storage.atomic_write import folder_beside

KILLED = """
import os, sys
from pathlib import Path
from penstock.core.storage.atomic_write import folder_beside

with folder_beside(Path(sys.argv[1])) as beside:
    (beside / "half").write_text("half")
    os.kill(os.getpid(), 9)
"""


KILLED_BEFORE_ITS_LOCK = """
import os, sys
from pathlib import Path
from penstock.core.storage.atomic_write import folder_beside

os.open = lambda *_: os.kill(os.getpid(), 9)
with folder_beside(Path(sys.argv[1])):
    pass
"""


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


@pytest.mark.parametrize("code", [KILLED, KILLED_BEFORE_ITS_LOCK], ids=["half", "unlocked"])
def test_what_a_killed_process_left_is_removed(tmp_path: Path, code: str) -> None:
    place = tmp_path / "runs" / "pack"
    killed = subprocess.run([sys.executable, "-c", code, place], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = names(place.parent)
    assert left.startswith(".pack-being-written-")
    with folder_beside(place) as beside:
        assert names(place.parent) == {beside.name}
        assert names(beside) == set()
        beside.rename(place)
    assert names(place.parent) == {"pack"}


def test_that_of_one_who_lives_stays_and_so_does_what_is_of_another(tmp_path: Path) -> None:
    others = {".pack", ".pack-12345678", ".packs-being-written-12345678", ".pack-being-written-12345678-old", "pack"}
    for name in others:
        (tmp_path / name).mkdir()
    with folder_beside(tmp_path / "pack") as one, folder_beside(tmp_path / "pack") as other:
        assert names(tmp_path) == others | {one.name, other.name}
    assert names(tmp_path) == others


def test_it_is_gone_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with folder_beside(tmp_path / "pack") as beside:
            (beside / "half").write_text("half")
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert names(tmp_path) == set()


def test_it_is_gone_after_a_signal_that_comes_before_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> int:
        monkeypatch.undo()
        raise SystemExit(143)

    monkeypatch.setattr("os.open", ended)
    with pytest.raises(SystemExit), folder_beside(tmp_path / "pack"):
        pass
    assert names(tmp_path) == set()


@pytest.mark.parametrize("before", ["open", "flock"])
def test_another_is_made_where_one_is_taken_for_a_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    owner: Any = os if before == "open" else fcntl
    real, taken = getattr(owner, before), list[str]()

    def late(*arguments: Any) -> Any:
        if not taken:
            taken.extend(names(tmp_path))
            (tmp_path / taken[0]).rmdir()
        return real(*arguments)

    monkeypatch.setattr(owner, before, late)
    with folder_beside(tmp_path / "pack") as beside:
        assert len(taken) == 1
        assert names(tmp_path) == {beside.name}
        assert beside.name != taken[0]
