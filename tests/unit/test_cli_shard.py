"""`penstock shard` and `penstock bench feed`, as they are typed."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.cli import build, main
from penstock.train.data.loader import first_batch
from penstock.train.data.shards import Shards
from tests.support.pictures import picture_folder


def typed(*words: object) -> str:
    """What a command that succeeds prints."""
    result = CliRunner().invoke(build(), [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The sentence on stderr of a command that is refused with status 2."""

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("penstock: ")
        return said

    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return picture_folder(tmp_path_factory.mktemp("data") / "photos")


def test_pictures_are_sharded_and_checked(root: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    out = tmp_path / "shards"
    said = typed("shard", root, "--out", out, "--size", "24x32", "--workers", 2)
    assert said == f"12 examples of 3 classes (cats, dogs, eels), 0 left out: {out}\n"
    shards = Shards(out)
    assert (len(shards), shards.input_shape, shards.classes) == (12, (24, 32, 3), ("cats", "dogs", "eels"))
    assert shards.targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert typed("shard", "--check", out) == "12 examples in 1 shard, all as they were written.\n"
    content = bytearray((out / "00000.npy").read_bytes())
    content[500] ^= 255
    (out / "00000.npy").write_bytes(content)
    damaged = refused("shard", "--check", out)
    assert "1 of 1 shards are damaged" in damaged
    assert "00000.npy is altered" in damaged


def test_what_cannot_be_read_is_left_out_only_when_asked(tmp_path: Path, refused: Callable[..., str]) -> None:
    root = picture_folder(tmp_path / "photos")
    (root / "dogs" / "1.jpg").write_bytes(b"")
    stopped = refused("shard", root, "--out", tmp_path / "out", "--grey")
    assert "dogs/1.jpg cannot be read" in stopped
    assert "Mend or remove it, or leave such out with --skip-bad" in stopped
    assert not (tmp_path / "out").exists()
    said = typed("shard", root, "--out", tmp_path / "out", "--grey", "--skip-bad")
    assert "dogs/1.jpg cannot be read" in said
    assert "11 examples of 3 classes (cats, dogs, eels), 1 left out" in said
    assert Shards(tmp_path / "out").input_shape == (256, 256)


def test_folders_of_splits_are_no_classes(tmp_path: Path, refused: Callable[..., str]) -> None:
    for split in ("train", "val"):
        picture_folder(tmp_path / "pics" / split, classes=tuple("abcdef"))
    pics = tmp_path / "pics"
    assert (
        f"{pics} has the folders of splits, train and val, not of classes; shard each: penstock shard {pics}/train"
        in (refused("shard", pics, "--out", tmp_path / "out"))
    )
    said = typed("shard", pics / "val", "--out", tmp_path / "out")
    assert said.startswith("24 examples of 6 classes (a, b, c, d, e, ...), 0 left out")
    # One class more, and they may be classes.
    (pics / "boats").mkdir()
    (pics / "boats" / "1.jpg").write_bytes((pics / "val" / "a" / "0.jpg").read_bytes())
    assert "of 3 classes (boats, train, val)" in typed("shard", pics, "--out", tmp_path / "other")


def test_an_applications_decode_may_be_used(root: Path, tmp_path: Path) -> None:
    from penstock.apps.digits.app import decode

    typed("shard", root, "--out", tmp_path / "out", "--app", "digits")
    shards = Shards(tmp_path / "out")
    inputs = shards.empty(1)
    shards.read(np.array([5]), np.array([0], np.uint64), inputs)
    np.testing.assert_array_equal(inputs[0], decode((root / "dogs" / "1.jpg").read_bytes(), "image/jpeg"))


WORDS = """
import numpy as np
from torch import nn

from penstock import Application, Dim, Recipe, TensorSpec
from penstock.train.data.examples import ArraySet
from penstock.train.recipe import Data
from tests.support.examples import Counted

ids = [np.arange(size) for size in (2, 9, 4)]


def texts():
    return ArraySet(inputs={"ids": ids}, targets={"tags": [row % 2 for row in ids]})


def data():
    return Data(train=texts(), validation=texts(), test=texts())


spec = TensorSpec(dtype="int64", shape=(Dim("tokens", max=512),), meaning="token ids")
scores = TensorSpec(dtype="float32", shape=(2,), meaning="scores")
recipe = Recipe(data=data, loss=lambda outputs, targets: outputs.sum(), optimizer=lambda given: None, epochs=1)
app = Application(name="words", inputs={"ids": spec}, output=scores, model=nn.Identity, recipe=recipe)

plain = TensorSpec(dtype="float64", shape=(2,), meaning="two numbers")


def counted(bad=()):
    return Recipe(
        data=lambda: Data(train=Counted(5, bad=bad), validation=Counted(3, varies=False)),
        loss=lambda outputs, targets: outputs.sum(),
        optimizer=lambda given: None,
        epochs=1,
    )


numbers = Application(name="numbers", input=plain, output=scores, model=nn.Identity, recipe=counted())
damaged = Application(name="damaged", input=plain, output=scores, model=nn.Identity, recipe=counted((1,)))
unlike = Application(name="unlike", inputs={"other": spec}, output=scores, model=nn.Identity, recipe=recipe)
untrained = Application(name="untrained", input=plain, output=scores, model=nn.Identity)
"""


@pytest.fixture
def words(tmp_path: Path) -> Path:
    (tmp_path / "words.py").write_text(WORDS)
    return tmp_path / "words.py"


def test_the_examples_of_an_application_are_sharded_and_checked(
    words: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    out = tmp_path / "shards"
    said = typed("shard", "--app", words, "--out", out)
    assert said == "".join(
        f"{name}: 3 examples, 0 left out: {out / name}\n" for name in ("train", "validation", "test")
    )
    batch = first_batch(Shards(out / "train"), 3)
    assert batch.inputs["tokens"].tolist() == [2, 9, 4]
    assert batch.targets["tags"][0].tolist() == [0, 1, *[-100] * 7]
    assert typed("shard", "--check", out) == "".join(
        f"{name}: 3 examples in 1 shard, all as they were written.\n" for name in ("train", "validation", "test")
    )
    said = typed("bench", "feed", out / "train", "--workers", 1, "--batch-size", 3, "--batches", 1, "--repeat", 1)
    assert said.startswith("1 thread: ")
    (out / "validation" / "00000.npy").unlink()
    assert "validation: 1 of 1 shards are damaged" in refused("shard", "--check", out)
    # All damage is reported at once, with that of parts without an index or without a folder.
    (out / "train" / "index.json").unlink()
    shutil.rmtree(out / "test")
    said = refused("shard", "--check", out)
    assert f"train: {out}/train/index.json cannot be read" in said
    assert "validation: 1 of 1 shards are damaged" in said
    assert f"test: {out}/test/index.json cannot be read" in said
    index = out / "index.json"
    index.write_text(index.read_text().replace('"train",', ""))
    assert f"{index} is altered" in refused("shard", "--check", out)
    index.unlink()
    assert f"{index} cannot be read" in refused("shard", "--check", out)


def test_examples_that_vary_are_reported(words: Path, tmp_path: Path) -> None:
    said = typed("shard", "--app", f"{words}:numbers", "--out", tmp_path / "shards")
    assert "The train examples change from epoch to epoch; the shards hold those of the first epoch." in said
    assert "The validation examples" not in said


def test_examples_of_an_application_that_cannot_be_sharded_are_refused(
    words: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    out = tmp_path / "shards"
    for name, sentence in [
        ("damaged", "example 1 is bad. Mend or remove it, or leave such out with --skip-bad"),
        ("unlike", "the train data of application 'unlike'"),
        ("untrained", "has no recipe"),
    ]:
        assert sentence in refused("shard", "--app", f"{words}:{name}", "--out", out)
        assert not out.exists()
    said = typed("shard", "--app", f"{words}:damaged", "--out", out, "--skip-bad")
    assert "Left out: example 1 is bad." in said
    assert f"train: 4 examples, 1 left out: {out / 'train'}" in said
    assert "exists; choose another folder" in refused("shard", "--app", words, "--out", out)


def test_reading_is_measured(root: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    typed("shard", root, "--out", tmp_path / "shards", "--size", "32x32")
    for source in (root, tmp_path / "shards"):
        said = typed(
            *("bench", "feed", source, "--size", "16x16", "--workers", 2),
            *("--batch-size", 20, "--batches", 2, "--repeat", 2),
        )
        assert said.startswith("2 threads: ")
    assert "--batches is '0'; give a whole number from 1" in refused("bench", "feed", root, "--batches", 0)


def test_mistakes_are_said_in_a_sentence(root: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "there").mkdir()
    mistakes: list[tuple[tuple[object, ...], str]] = [
        ((), "SOURCE or --out is missing"),
        ((root,), "SOURCE or --out is missing"),
        ((root, "--out", tmp_path / "there"), "exists; choose"),
        ((tmp_path / "none", "--out", tmp_path / "x"), "there is no folder"),
        ((root, "--out", tmp_path / "x", "--size", "24"), "--size is '24'; give height and width"),
        ((root, "--out", tmp_path / "x", "--shard-mb", "0"), "--shard-mb is '0'; give a whole number from 1"),
        ((root, "--out", tmp_path / "x", "--app", "keywords"), "pictures are read as int16"),
        (("--app", "digits", "--out", tmp_path / "x", "--size", "9x9"), "leave --size and --grey out"),
        ((tmp_path, "--app", "digits", "--out", tmp_path / "x", "--grey"), "leave --size and --grey out"),
        ((root, "--check", tmp_path / "there"), "give --check FOLDER alone"),
        (("--check", tmp_path / "there"), "cannot be read"),
    ]
    for arguments, sentence in mistakes:
        assert sentence in refused("shard", *arguments), arguments
