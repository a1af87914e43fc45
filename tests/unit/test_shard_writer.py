"""Writing of shards: targets of any form, names of inputs, sets in one folder, and another writer."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import Dim, TensorSpec
from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.shard_writer import write_parts, write_shards
from penstock.train.data.shards import Shards
from penstock.train.data.trees import Tree, leaves
from tests.support.examples import Counted
from tests.support.shards import check_same_batches, read, sharded


class Plain(Examples):
    """Four examples of one array, read in pieces of one, with targets that a test gives."""

    def __init__(self, target: Callable[[int], Any], shape: tuple[int, ...] = (3,), dtype: str = "float32") -> None:
        self.input_shape, self.input_dtype, self.target = shape, np.dtype(dtype), target

    @property
    def input_nbytes(self) -> int:
        return 1 << 23

    def __len__(self) -> int:
        return 4

    def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Tree:
        inputs_B[...] = 1.5
        return self.target(int(indices_B[0]))


@pytest.mark.parametrize("dtype", ["U", "S"])
def test_one_target_of_texts_of_any_length_is_written(tmp_path: Path, dtype: str) -> None:
    shards = sharded(Plain(lambda index: np.array(["x" * (index + 1)], dtype)), tmp_path / "shards")
    assert shards.targets.astype(str).tolist() == ["x", "xx", "xxx", "xxxx"]
    with pytest.raises(TrainError, match=r"from example 1 on are (str|bytes)\[1\], and .* (str|bytes)\[\]"):
        write_shards(Plain(lambda index: np.array([["x"]] if index else ["x"], dtype)), tmp_path / "other")


def test_texts_that_are_read_one_by_one_are_written(tmp_path: Path) -> None:
    class Bad(Plain):
        @property
        def input_nbytes(self) -> int:
            return 1

        def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Tree:
            if 1 in indices_B:
                raise BadExample("it is damaged.", index=1, name="b")
            return super().read(indices_B, seeds_B, inputs_B)

    shards = sharded(Bad(lambda index: np.array(["x" * (index + 1)])), tmp_path / "shards", on_bad="skip")
    assert shards.targets.tolist() == ["x", "xxx", "xxxx"]


def test_one_target_of_several_number_dtypes_is_converted(tmp_path: Path) -> None:
    shards = sharded(Plain(lambda index: np.array([0.5 if index == 2 else index])), tmp_path / "shards")
    assert shards.targets.tolist() == [0, 1, 0.5, 3]
    with pytest.raises(TrainError, match=r"from example 2 on are str\[\], and .* numbers\[\]"):
        write_shards(Plain(lambda index: np.array(["a" if index == 2 else index])), tmp_path / "other")


def test_arrays_after_targets_without_arrays_are_refused(tmp_path: Path) -> None:
    examples = Plain(lambda index: {"a": np.zeros(1)} if index else None)
    with pytest.raises(TrainError, match=r"from example 1 on are \{'a': 'float64"):
        write_shards(examples, tmp_path / "shards")
    assert read(sharded(Plain(lambda index: None), tmp_path / "none"), [0, 3])[1] is None


@pytest.mark.parametrize("target", [lambda index: np.array([index]), lambda index: {"a": np.array([index])}])
def test_inputs_without_numbers_and_of_another_byte_order_are_read(
    tmp_path: Path, target: Callable[[int], Any]
) -> None:
    inputs, targets = read(sharded(Plain(target, shape=(0,)), tmp_path / "none"), [1, 3])
    assert inputs.shape == (2, 0)
    assert leaves(targets)[0].tolist() == [1, 3]
    inputs, _ = read(sharded(Plain(target, dtype=">f4"), tmp_path / "big"), [1, 3])
    assert inputs.tolist() == [[1.5] * 3] * 2


def lists_as(name: str, size: int, other: int | None = None) -> RecordSpec:
    """Declare one tensor of a list, or two of lists of the same or another length."""
    shapes = {name: size} if other is None else {"p": size, "q": other}
    return RecordSpec(
        tuple(TensorSpec(dtype="int64", shape=(shape,), meaning="", name=each) for each, shape in shapes.items())
    )


def test_a_list_without_a_name_fits_the_one_tensor_of_an_application(tmp_path: Path) -> None:
    rows = [np.arange(size) for size in (3, 5, 1, 4)]
    examples = ArraySet(inputs=rows, targets=[2 * row for row in rows])
    shards, record = sharded(examples, tmp_path / "shards"), lists_as("sound", Dim("words", max=9))
    check_same_batches(examples.bound(record), shards.bound(record))
    assert shards.bound(record).target_axes == examples.bound(record).target_axes == ("words",)
    with pytest.raises(TrainError, match="have the inputs 'input', and the application 'p', 'q'"):
        shards.bound(lists_as("", Dim("a", max=9), Dim("b", max=9)))


def test_the_first_name_of_equal_lengths_is_that_of_the_targets(tmp_path: Path) -> None:
    rows = [np.arange(size) for size in (3, 5, 1, 4)]
    one = lists_as("", Dim("n", max=9), Dim("n", max=9))
    examples = ArraySet(inputs={"p": rows, "q": rows}, targets=rows, record=one)
    two = lists_as("", Dim("a", max=7), Dim("b", max=9))
    shards = sharded(examples, tmp_path / "shards")
    assert shards.bound(two).target_axes == examples.bound(two).target_axes == ("a",)
    check_same_batches(examples.bound(two), shards.bound(two))


def test_lengths_that_do_not_fit_an_application_are_refused_with_the_cause(tmp_path: Path) -> None:
    rows = [np.arange(size) for size in (3, 5, 1, 4)]
    longer = [np.arange(len(row) + (len(row) == 1)) for row in rows]
    shards = sharded(ArraySet(inputs={"p": rows, "q": longer}, targets=np.zeros(4)), tmp_path / "shards")
    n, m, short, long = Dim("n", max=9), Dim("m", max=9), Dim("n", max=4), Dim("n", max=9, min=2)
    for record, said in [
        (lists_as("", long, m), r"'p' of example 2 .* has 1 entries along an axis, and n must be at least 2; change"),
        (lists_as("", short, m), r"'p' of example 1 .* has 5 entries along an axis, and n may be at most 4; change"),
        (lists_as("", n, n), r"'q' of example 2 .* 2 entries along an axis, and another array has another number of n"),
        (lists_as("", 4, n), r"'p' of example 0 .* has 3 entries along an axis, and the application declares int64\[4"),
    ]:
        with pytest.raises(TrainError, match=said):
            shards.bound(record)


def test_a_folder_that_another_process_writes_meanwhile_is_kept(tmp_path: Path) -> None:
    def target(index: int) -> Array:
        if not (tmp_path / "shards").exists():
            write_shards(Counted(3), tmp_path / "shards")
        return np.array([index])

    with pytest.raises(TrainError, match="shards was written meanwhile by another process; choose another folder"):
        write_shards(Plain(target), tmp_path / "shards", workers=1)
    assert len(Shards(tmp_path / "shards")) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["shards"]


def test_new_names_are_flushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    for module in ("penstock.train.data.shard_writer", "penstock.core.storage.atomic_write"):
        monkeypatch.setattr(f"{module}.sync", flushed.append)
    write_parts({"train": Counted(3)}, tmp_path / "shards")
    assert {"shards", "train"} <= {path.name.partition("-being")[0].lstrip(".") for path in flushed}
    assert flushed[-1] == tmp_path


def test_a_set_without_a_plain_name_is_refused(tmp_path: Path) -> None:
    for name in ("../out", "a/b", "", "..", ".a", "index.json", "/tmp/x"):
        with pytest.raises(TrainError, match=r"a set has the name .*; use letters, digits"):
            write_parts({"train": Counted(3), name: Counted(3)}, tmp_path / "shards")
    with pytest.raises(TrainError, match="there are no sets to write; give at least one"):
        write_parts({}, tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_example_of_several_sets_names_its_set(tmp_path: Path) -> None:
    with pytest.raises(BadExample, match=r"^the validation data: example 2 is bad") as caught:
        write_parts({"train": Counted(6), "validation": Counted(6, bad=(2,))}, tmp_path / "shards")
    assert (caught.value.index, caught.value.name) == (2, "2.jpg")


def test_the_folder_of_several_sets_is_no_set(tmp_path: Path) -> None:
    write_parts({"train": Counted(6), "other": Counted(3)}, tmp_path / "shards")
    with pytest.raises(TrainError, match=r"has its shards in subfolders; give one of them: .*shards/train, .*other\."):
        Shards(tmp_path / "shards")
    shutil.rmtree(tmp_path / "shards" / "other")
    assert len(Shards(tmp_path / "shards" / "train")) == 6
