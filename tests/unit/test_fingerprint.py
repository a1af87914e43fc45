"""Fingerprints of examples: equal where the content is, and the change in words where it is not."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from penstock.core.errors import TrainError
from penstock.core.spec import TensorSpec
from penstock.train.data.dataset_examples import DatasetExamples
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.fingerprint import changes, spread_indices
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.shard_writer import write_shards
from penstock.train.data.shards import Shards
from penstock.train.parallel.world import World
from penstock.train.same_data import check_data, fingerprints
from tests.support.examples import Counted
from tests.support.pictures import COLOUR, picture_folder
from tests.unit.test_dataset_examples import IDS, Rows, table, with_column


def differing(one: Examples, other: Examples) -> str:
    return "; ".join(changes(one.fingerprint(), other.fingerprint()))


def test_the_indices_that_are_looked_at_are_spread() -> None:
    assert spread_indices(5) == [0, 1, 2, 3, 4]
    assert spread_indices(1000, 3) == [0, 500, 999]
    assert spread_indices(0) == []


def test_arrays_are_compared_whole() -> None:
    inputs = np.arange(4000.0).reshape(1000, 4)
    one = ArraySet(inputs=inputs, targets=np.zeros(1000))
    assert differing(one, ArraySet(inputs=inputs.copy(), targets=np.zeros(1000))) == ""
    other = inputs.copy()
    other[777, 1] = 0
    assert differing(one, ArraySet(inputs=other, targets=np.zeros(1000))) == "the numbers changed"
    shorter = differing(one, ArraySet(inputs=inputs[1:], targets=np.zeros(999)))
    assert shorter == "examples: 999 now, 1,000 then; the numbers changed"


def test_a_set_of_ones_own_is_compared_by_some_examples() -> None:
    assert differing(Counted(50), Counted(50)) == ""
    assert differing(Counted(50), Counted(51)) == "examples: 51 now, 50 then"
    assert "example 0 changed, and 31 more" in differing(Counted(50), Counted(50, varies=False))
    # A picture that is mended is no other set.
    assert differing(Counted(50, bad=(0, 49)), Counted(50)) == ""


def test_pictures_that_are_replaced_renamed_or_added(tmp_path: Path) -> None:
    for name in ("one", "other"):
        picture_folder(tmp_path / name)
    one, other = (ImageFolder(tmp_path / name, COLOUR) for name in ("one", "other"))
    assert differing(one, other) == ""
    (tmp_path / "other/cats/1.jpg").write_bytes((tmp_path / "other/cats/0.jpg").read_bytes())
    assert differing(one, ImageFolder(tmp_path / "other", COLOUR)) == "example 1 changed"
    (tmp_path / "other/cats/0.jpg").rename(tmp_path / "other/cats/9.jpg")
    assert "the names of the pictures changed" in differing(one, ImageFolder(tmp_path / "other", COLOUR))
    (tmp_path / "other/cats/9.jpg").unlink()
    assert "examples: 11 now, 12 then" in differing(one, ImageFolder(tmp_path / "other", COLOUR))


def test_shards_are_compared_by_their_hashes(tmp_path: Path) -> None:
    for name, first in (("one", 0.0), ("same", 0.0), ("other", 1.0)):
        inputs = np.arange(8.0, dtype=np.float32).reshape(4, 2)
        inputs[0, 0] = first
        write_shards(ArraySet(inputs=inputs, targets=np.zeros(4, np.int64)), tmp_path / name)
    one, same, other = (Shards(tmp_path / name) for name in ("one", "same", "other"))
    assert differing(one, same) == ""
    assert differing(one, other) == "the shards changed"


def test_a_dataset_is_the_same_wherever_it_is(tmp_path: Path) -> None:
    given = table()
    given.save_to_disk(str(tmp_path / "saved"))
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    arguments: Any = {"inputs": "image", "targets": "label"}
    one, other = (DatasetExamples(each, COLOUR, **arguments) for each in (given, saved))
    assert differing(one, other) == ""
    # Columns that are not read may change.
    assert differing(one, DatasetExamples(given.remove_columns("text"), COLOUR, **arguments)) == ""
    assert "the column 'label' changed" in differing(one, DatasetExamples(given.shuffle(seed=2), COLOUR, **arguments))


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("y", 3.25, "the column 'y' changed"),
        ("ids", [1, 2, 3, 4, 5, 6], "the column 'ids' changed"),
        ("ids", [1, 2, 3, 4, 9], "example 11 changed"),
    ],
)
def test_a_row_of_a_dataset_that_changed_is_found(column: str, value: Any, said: str) -> None:
    given = table()
    values = list(given[column])
    values[11] = value
    one, other = (DatasetExamples(each, IDS, targets="y") for each in (given, with_column(given, column, values)))
    assert said in differing(one, other)


def test_shards_of_others_are_compared_by_their_index() -> None:
    spec = TensorSpec(dtype="float32", shape=(3,), meaning="")
    one, same, other = (DatasetExamples(rows, spec, inputs="v", targets="y") for rows in (Rows(), Rows(), Rows(11)))
    assert differing(one, same) == ""
    assert differing(one, other) == "examples: 11 now, 12 then; the shards changed"


def test_a_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    now = fingerprints({"train": Counted(50), "test": None}, World())
    check_data(now, tmp_path, "begin anew")
    (tmp_path / "run.json").write_text('{"data": {"train": {"examples": "49"}, "test": {"examples": "3"}}}')
    with pytest.raises(TrainError, match=r"the train examples changed since the run in .*examples: 50 now, 49 then"):
        check_data(now, tmp_path, "begin anew")
    with pytest.raises(TrainError, match=r"the test examples changed .*there are none now"):
        check_data({"train": {"examples": "49"}}, tmp_path, "begin anew")
