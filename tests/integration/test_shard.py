"""`penstock shard` from the command line."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.train.shards import Shards
from tests.support.pictures import picture_folder


def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "photos")


def test_pictures_are_sharded_and_checked(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    done = penstock("shard", root, out, "--size", "24x32", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"12 examples of 3 classes, 0 left out: {out}\n"
    shards = Shards(out)
    assert (len(shards), shards.input_shape, shards.classes) == (12, (24, 32, 3), ("cats", "dogs", "eels"))
    assert shards.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    checked = penstock("shard", "--check", out)
    assert (checked.returncode, checked.stdout) == (0, "12 examples in 1 shards are as they were written.\n")
    content = bytearray((out / "00000.npy").read_bytes())
    content[500] ^= 255
    (out / "00000.npy").write_bytes(content)
    damaged = penstock("shard", "--check", out)
    assert damaged.returncode == 2
    assert "1 of 1 shards are damaged" in damaged.stderr
    assert "00000.npy is altered" in damaged.stderr


def test_what_cannot_be_read_is_left_out_only_when_asked(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos")
    (root / "dogs" / "1.jpg").write_bytes(b"")
    stopped = penstock("shard", root, tmp_path / "out", "--grey")
    assert stopped.returncode == 2
    assert "dogs/1.jpg cannot be read" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert not (tmp_path / "out").exists()
    done = penstock("shard", root, tmp_path / "out", "--grey", "--skip-bad")
    assert done.returncode == 0, done.stderr
    assert "dogs/1.jpg cannot be read" in done.stdout
    assert "11 examples of 3 classes, 1 left out" in done.stdout
    assert Shards(tmp_path / "out").input_shape == (256, 256)


def test_an_applications_decode_may_be_used(root: Path, tmp_path: Path) -> None:
    done = penstock("shard", root, tmp_path / "out", "--app", "digits")
    assert done.returncode == 0, done.stderr
    shards = Shards(tmp_path / "out")
    inputs = shards.empty(1)
    shards.read(np.array([5]), np.array([0], np.uint64), inputs)
    from penstock.apps.digits.app import decode

    np.testing.assert_array_equal(inputs[0], decode((root / "dogs" / "1.jpg").read_bytes(), "image/jpeg"))


def test_reading_is_measured(root: Path, tmp_path: Path) -> None:
    assert penstock("shard", root, tmp_path / "shards", "--size", "32x32").returncode == 0
    for source in (root, tmp_path / "shards"):
        done = penstock(
            *("bench", "feed", source, "--size", "16x16", "--workers", 2),
            *("--batch-size", 20, "--batches", 2, "--repeat", 2),
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("2 threads: ")
    refused = penstock("bench", "feed", root, "--batches", 0)
    assert (refused.returncode, "above 0" in refused.stderr) == (2, True)


def test_mistakes_are_said_in_a_sentence(root: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    mistakes: list[tuple[tuple[object, ...], str]] = [
        ((), "say what to read and where to write"),
        ((root,), "say what to read and where to write"),
        ((root, tmp_path / "there"), "is there already"),
        ((tmp_path / "none", tmp_path / "x"), "there is no folder"),
        ((root, tmp_path / "x", "--size", "24"), "--size is '24'; give height and width"),
        ((root, tmp_path / "x", "--shard-mb", "0"), "--shard-mb is 0"),
        ((root, tmp_path / "x", "--app", "keywords"), "cannot be read"),
        ((root, "--check", tmp_path / "there"), "give --check FOLDER alone"),
        (("--check", tmp_path / "there"), "cannot be read"),
    ]
    for arguments, sentence in mistakes:
        done = penstock("shard", *arguments)
        assert done.returncode == 2, arguments
        assert sentence in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
