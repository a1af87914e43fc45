"""How a bundle takes its place: whole or not at all, instead of an older one, and never instead of anything else."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.core.bundles import bundle as bundle_files
from penstock.core.bundles.bundle import GOLDEN, MANIFEST, WEIGHTS, read_bundle
from penstock.core.errors import BundleError
from penstock.core.storage import atomic_write
from tests.support.small import written
from tests.support.thorough import thorough

ROOT = Path(__file__).parents[2]
FILES = (MANIFEST, WEIGHTS, GOLDEN)


def weights_of(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def hidden(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


def test_a_bundle_is_replaced(tmp_path: Path) -> None:
    old = weights_of(written(tmp_path / "b", seed=0).folder)
    assert weights_of(written(tmp_path / "b", seed=1).folder) != old
    assert hidden(tmp_path) == []


def test_there_is_no_moment_without_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "b", seed=0)
    real = Path.rename
    moved: list[Path] = []

    def watched(self: Path, target: Path) -> Path:
        moved.append(self)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    written(tmp_path / "b", seed=1)
    assert moved
    assert tmp_path / "b" not in moved


def test_an_empty_folder_and_a_new_path_are_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    written(tmp_path / "empty")
    written(tmp_path / "new" / "below" / "it")
    assert hidden(tmp_path) == []


def test_a_link_to_a_bundle_stays_a_link(tmp_path: Path) -> None:
    written(tmp_path / "real", seed=0)
    (tmp_path / "link").symlink_to("real")
    made = written(tmp_path / "link", seed=1)
    assert (tmp_path / "link").is_symlink()
    assert weights_of(tmp_path / "real") == weights_of(made.folder)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["notes.txt"], "holds 'notes.txt', so it is not a bundle to be replaced; choose another place"),
        # A web app or a browser extension has a manifest.json as well.
        ([MANIFEST, "index.html"], "holds 'index.html'"),
        ([MANIFEST], r"only part of a bundle \(manifest.json\)"),
        ([*FILES, "mine.txt"], "holds 'mine.txt'"),
        ([WEIGHTS], "only part of a bundle"),
    ],
)
def test_what_is_not_only_a_bundle_is_never_replaced(tmp_path: Path, names: list[str], sentence: str) -> None:
    (tmp_path / "b").mkdir()
    for name in names:
        (tmp_path / "b" / name).write_text("precious")
    with pytest.raises(BundleError, match=sentence):
        written(tmp_path / "b")
    assert sorted(entry.name for entry in (tmp_path / "b").iterdir()) == sorted(names)
    assert all((tmp_path / "b" / name).read_text() == "precious" for name in names)


def test_a_place_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(BundleError, match="file is a file; choose another place"):
        written(tmp_path / "file")
    with pytest.raises(BundleError, match=r"cannot be written \(Not a directory\)|cannot be written \(File exists\)"):
        written(tmp_path / "file" / "b")
    with pytest.raises(BundleError, match="choose another place"):
        written(Path("/"))
    assert (tmp_path / "file").read_text() == "precious"


def broken(step: int, number: int) -> Any:
    """A write that fails at its n-th step, as a full disk does."""
    real = bundle_files.write_through
    steps = iter(range(10))

    def write(file: Path, data: bytes) -> None:
        if next(steps) == step:
            file.write_bytes(data[: len(data) // 2])
            raise OSError(number, os.strerror(number))
        real(file, data)

    return write


@pytest.mark.parametrize("there_already", [True, False])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, there_already: bool
) -> None:
    old = weights_of(written(tmp_path / "b").folder) if there_already else b""
    monkeypatch.setattr(bundle_files, "write_through", broken(step, errno.ENOSPC))
    with pytest.raises(BundleError, match=r"cannot be written \(No space left on device\)"):
        written(tmp_path / "b", seed=1)
    assert hidden(tmp_path) == []
    assert (tmp_path / "b").exists() == there_already
    if there_already:
        assert weights_of(read_bundle(tmp_path / "b").folder) == old


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from penstock.core.storage import atomic_write
from penstock.core.bundles import bundle
from tests.support.small import written

folder, moment = Path(sys.argv[1]), sys.argv[2]
dead = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if moment == "put_folder":
    atomic_write.put_folder = dead
elif moment == "rmtree":
    shutil.rmtree = dead
else:
    real, left = bundle.write_through, [int(moment)]
    def write(file, data):
        if left[0] == 0:
            file.write_bytes(data[:9])
            dead()
        left[0] -= 1
        real(file, data)
    bundle.write_through = write
written(folder, seed=1)
"""


@pytest.mark.parametrize(("moment", "is_new"), [thorough("1", False), thorough("put_folder", False), ("rmtree", True)])
def test_a_killed_writer_leaves_the_old_bundle_or_the_new_one(tmp_path: Path, moment: str, is_new: bool) -> None:
    old = weights_of(written(tmp_path / "b", seed=0).folder)
    new = weights_of(written(tmp_path / "new", seed=1).folder)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "b"), moment], cwd=ROOT, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert weights_of(read_bundle(tmp_path / "b").folder) == (new if is_new else old)
    assert weights_of(written(tmp_path / "b", seed=1).folder) == new
    assert hidden(tmp_path) == []


def test_a_killed_first_writer_leaves_nothing_in_the_place(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "b"), "2"], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("missing", [OSError(errno.EINVAL, "Invalid argument"), AttributeError("renameat2")])
def test_where_folders_cannot_be_exchanged_two_renames_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: Exception
) -> None:
    def refuse(*_: Path) -> None:
        raise missing

    old = weights_of(written(tmp_path / "b", seed=0).folder)
    monkeypatch.setattr(atomic_write, "_exchange", refuse)
    new = weights_of(written(tmp_path / "b", seed=1).folder)
    assert new != old
    assert hidden(tmp_path) == []
    real = Path.rename
    calls = iter(range(9))

    def third_fails(self: Path, target: Path) -> Path:
        # Onto the old one, the old one away, and now the new one in.
        if next(calls) == 2:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", third_fails)
    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "b", seed=2)
    assert weights_of(read_bundle(tmp_path / "b").folder) == new
    assert hidden(tmp_path) == []
