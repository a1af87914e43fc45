"""Shards of several named tensors, of lengths that vary, and of trees of targets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Dim, TensorSpec
from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array
from penstock.train.data.dataset_examples import DatasetExamples
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.fingerprint import changes
from penstock.train.data.shard_file import describe_file
from penstock.train.data.shard_index import sealed
from penstock.train.data.shard_writer import write_parts, write_shards
from penstock.train.data.shards import Shards
from penstock.train.data.trees import Tree
from penstock.train.recipe import StepExecution
from tests.support.examples import Counted
from tests.support.shards import batches, check_same_batches, read, sharded
from tests.support.trees import RECORD, Scores, texts

SIZES = np.random.default_rng(0).integers(1, 10, 60).tolist()


def pictures_with_boxes(count: int = 30) -> ArraySet:
    """Make pictures with 0 to 6 boxes each; the boxes of a picture are padded to those of the fullest."""
    rng = np.random.default_rng(1)
    boxes = [rng.random((size, 4)).astype(np.float32) for size in rng.integers(0, 7, count)]
    return ArraySet(
        inputs=rng.integers(0, 256, (count, 6, 8, 3), np.uint8),
        targets={
            "boxes": boxes,
            "kinds": [rng.integers(0, 3, len(each)) for each in boxes],
            "sizes": (np.ones(count),),
        },
    )


@pytest.mark.parametrize("to_max", [False, True])
def test_batches_of_texts_are_those_of_the_examples(tmp_path: Path, to_max: bool) -> None:
    examples = texts(SIZES, tags=True).bound(RECORD)
    shards = sharded(examples, tmp_path / "shards", shard_bytes=700)
    assert len(shards.index.shards) > 5
    assert (len(shards), shards.record) == (60, RECORD)
    check_same_batches(examples, shards, to_max=to_max)


def test_batches_of_pictures_with_boxes_are_those_of_the_examples(tmp_path: Path) -> None:
    examples = pictures_with_boxes()
    shards = sharded(examples, tmp_path / "shards", classes=("a", "b", "c"))
    assert (shards.record, shards.input_shape, shards.classes) == (None, (6, 8, 3), ("a", "b", "c"))
    check_same_batches(examples, shards)
    # Without the padding of the boxes.
    boxes = sum(len(each) for each in examples.targets["boxes"])
    header = 128
    assert shards.index.shards[0].bytes == header + 30 * (6 * 8 * 3 + 8) + boxes * (16 + 8)
    cropped = Shards(tmp_path / "shards", size=(4, 4), random=True)
    batch = next(batches(cropped, 0))
    assert batch.inputs.shape == (7, 4, 4, 3)
    assert torch.equal(batch.targets["boxes"], next(batches(examples, 0)).targets["boxes"])


def loss_of(outputs: Any, targets: Any) -> Tensor:
    tags = nn.functional.cross_entropy(outputs["tags"].flatten(0, 1), targets["tags"].flatten())
    return nn.functional.cross_entropy(outputs["label"], targets["label"]) + tags


def test_a_training_from_shards_is_that_from_the_examples(tmp_path: Path) -> None:
    examples = texts(SIZES, tags=True)
    write_parts({"train": examples, "validation": examples}, tmp_path / "shards", shard_bytes=1000)
    shards = Shards(tmp_path / "shards" / "train"), Shards(tmp_path / "shards" / "validation")
    given: dict[str, Any] = {"loss": loss_of, "epochs": 2, "batch_size": 16, "quiet": True, "device": "cpu"}
    given["execution"] = StepExecution(threads=1)
    hashes = [
        penstock.fit(Scores(), train, validation=validation, **given).parameter_hash
        for train, validation in ((examples, examples), shards)
    ]
    assert hashes[0] == hashes[1]


class Boxes(nn.Module):
    """A detector of one box."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.box = nn.Linear(6 * 8 * 3, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.box(pixels.flatten(1).float() / 255)


def box_loss(outputs: Tensor, targets: Any) -> Tensor:
    found = targets["kinds"] != -100
    return ((outputs[:, None] - targets["boxes"]).square().sum(2) * found).mean()


def test_a_detector_trains_from_shards_as_from_the_examples(tmp_path: Path) -> None:
    examples = pictures_with_boxes()
    given: dict[str, Any] = {"loss": box_loss, "epochs": 3, "batch_size": 8, "quiet": True, "device": "cpu"}
    given["execution"] = StepExecution(threads=1)
    hashes = [
        penstock.fit(Boxes(), each, validation=each, **given).parameter_hash
        for each in (examples, sharded(examples, tmp_path / "shards", shard_bytes=500))
    ]
    assert hashes[0] == hashes[1]


def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    class Large(Given):
        @property
        def input_nbytes(self) -> int:
            # So that the examples are read in several pieces.
            return 1 << 22

    for workers in (1, 4):
        write_shards(Large(), tmp_path / str(workers), workers=workers, shard_bytes=200)
    one, four = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("1", "4"))
    assert one == four
    assert len(one) > 3


def test_numpy_reads_the_files_too(tmp_path: Path) -> None:
    examples = texts([2, 5]).bound(RECORD)
    write_shards(examples, tmp_path / "shards")
    content = np.load(tmp_path / "shards" / "00000.npy", allow_pickle=False)
    lengths = np.load(tmp_path / "shards" / "lengths.npy", allow_pickle=False)
    assert lengths.tolist() == [[2], [5]]
    second = content[2 * 8 + 2 * 4 + 8 :]
    np.testing.assert_array_equal(second[:40].view(np.int64), examples.inputs["ids"][1])
    index = json.loads((tmp_path / "shards" / "index.json").read_text())
    assert (index["format"], index["examples"], index["tree"]) == ("penstock shards 2", 2, 0)


class Given(Examples):
    """Six texts of a user, with targets that a test changes."""

    def __init__(self, change: Callable[[int, Any], Any] | None = None) -> None:
        self.declare(RECORD)
        self.change = change

    @property
    def input_nbytes(self) -> int:
        # Four examples at once.
        return 1 << 21

    def __len__(self) -> int:
        return 6

    def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Tree:
        for row, index in enumerate(indices_B.tolist()):
            ids = np.arange(index + 1)
            inputs_B[row] = RECORD.check({"ids": ids, "mask": np.ones(index + 1, np.float32)})
        targets = {"label": indices_B % 2, "box": np.ones((len(indices_B), 4), np.float32)}
        return targets if self.change is None else self.change(int(indices_B[0]), targets)


def later(**changed: Any) -> Callable[[int, Any], Any]:
    return lambda first, targets: targets if first < 4 else targets | changed


class Pair(NamedTuple):
    one: Array
    two: Array


def objects(first: int, targets: Any) -> Any:
    return targets | {"label": np.array([None] * len(targets["label"]), object)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (later(other=np.zeros(2)), r"from example 4 on are .*'other': 'float64\[\]'.*first examples .*'label'"),
        (lambda first, given: given if first < 4 else {"label": given["label"]}, "the targets from example 4 on are"),
        (later(label=np.zeros(2, np.int32)), r"'int32\[\]'.* the same names, dtypes and shapes"),
        (later(box=np.ones((2, 2, 2), np.float32)), r"'float32\[2, 2\]'"),
        (lambda first, given: given if first < 4 else given["label"], r"are int64\[\], and those"),
        (objects, r"^targets\['label'\] is object; shards hold bool"),
        (lambda _, given: given | {"label": given["label"].astype(str)}, r"targets\['label'\] is <U\d+; shards hold"),
        (lambda _, given: given | {"label": given["label"].tolist()}, r"targets\['label'\] is a list; shards hold"),
        (lambda _, given: Pair(given["label"], given["box"]), "targets is a Pair"),
        (lambda _, given: ({3: given["label"]},), r"targets\[0\] has the key 3"),
        (
            lambda _, given: {"label": given["label"][:1]},
            r"of 4 examples has the shape \[1\]; give \[4, ...\]",
        ),
        (lambda _, given: {"label": np.array(1)}, r"has the shape \[\]"),
    ],
)
def test_targets_that_shards_cannot_hold_are_refused(
    tmp_path: Path, change: Callable[[int, Any], Any], said: str
) -> None:
    with pytest.raises(TrainError, match=said):
        write_shards(Given(change), tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []


class OfObjects(Examples):
    """Examples whose targets, or inputs, are no numbers, as one's own class may have them."""

    def __init__(self, inputs: str = "float64") -> None:
        self.input_dtype, self.input_shape = np.dtype(inputs), (3,)

    def __len__(self) -> int:
        return 2

    def read(self, indices_B: Any, seeds_B: Any, inputs_B: Any) -> Any:
        inputs_B[...] = 0
        return np.array([None, {}], object)[indices_B]

    def fingerprint(self) -> dict[str, str]:
        return {}


def test_one_target_of_objects_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"^targets is object; shards hold"):
        write_shards(OfObjects(), tmp_path / "shards")
    with pytest.raises(TrainError, match=r"^targets is object\[2\]; give an array of numbers"):
        ArraySet(inputs=np.zeros((2, 3)), targets=np.array([None, {}], object))


def test_inputs_of_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="the examples are object; shards hold"):
        write_shards(OfObjects("object"), tmp_path / "shards")
    with pytest.raises(TrainError, match="the inputs are an array of object; give columns of numbers alone"):
        ArraySet(inputs=np.array([None, {}], object), targets=np.zeros(2))


def test_no_examples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="there are no examples; give at least one"):
        write_shards(Counted(0), tmp_path / "shards")


def test_a_length_that_is_not_declared_is_refused(tmp_path: Path) -> None:
    class Unset(Given):
        def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Tree:
            targets = super().read(indices_B, seeds_B, inputs_B)
            inputs_B["tokens"][indices_B == 2] = 0
            return targets

    with pytest.raises(TrainError, match="example 2 has 0 tokens; it must have from 1 to 9"):
        write_shards(Unset(), tmp_path / "shards")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda index: {"a": index} if index < 2 else {"b": index}, r"the target of row 2 is \{'b'"),
        (lambda index: {"a": index} if index < 2 else {"a": index, "b": 0}, "the target of row 2 is"),
        (lambda index: np.zeros(2 + (index == 2)), r"row 2 is float32\[3\], and that of row 0 is float32\[2\]"),
        (lambda index: 0.5 if index == 2 else 1, r"row 2 is float32\[\], and that of row 0 is int64\[\]"),
        (lambda index: np.zeros((2, 1)) if index == 2 else np.zeros(2), r"float32\[2, 1\]"),
    ],
)
def test_a_row_whose_target_differs_is_named(tmp_path: Path, row: Callable[[int], Any], said: str) -> None:
    rows = [{"index": index} for index in range(4)]
    spec = TensorSpec(dtype="float32", shape=(1,), meaning="a number")
    examples = DatasetExamples(rows, spec, row=lambda given: (np.zeros(1, np.float32), row(given["index"])))
    for on_bad in ("stop", "skip"):
        with pytest.raises(TrainError, match=said):
            write_shards(examples, tmp_path / "shards", on_bad=on_bad)  # pyright: ignore[reportArgumentType]


def test_targets_that_are_read_one_by_one_are_compared(tmp_path: Path) -> None:
    class Bad(Given):
        def read(self, indices_B: Array, seeds_B: Array, inputs_B: Array) -> Tree:
            if 1 in indices_B:
                raise BadExample("it is damaged.", index=1, name="b")
            return super().read(indices_B, seeds_B, inputs_B)

    examples = Bad(lambda first, targets: targets if first < 2 else targets | {"label": np.zeros(1)})
    with pytest.raises(TrainError, match=r"the targets of one example are .*int64.* and of another .*float64"):
        write_shards(examples, tmp_path / "shards", on_bad="skip")


def test_a_damaged_shard_is_named_when_one_of_its_examples_is_read(tmp_path: Path) -> None:
    examples = texts(SIZES, tags=True).bound(RECORD)
    shards = sharded(examples, tmp_path / "shards", shard_bytes=700)
    file = tmp_path / "shards" / "00001.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    first = shards.index.shards[0].examples
    read(shards, [0, first - 1])
    with pytest.raises(BadExample, match=r"00001.npy is altered; write the shards again") as caught:
        read(shards, [0, first])
    assert (caught.value.index, caught.value.name) == (first, "00001.npy")
    assert len(shards.verify()) == 1
    unverified = Shards(tmp_path / "shards", verify=False)
    read(unverified, [first])
    file.write_bytes(content[:-9])
    with pytest.raises(BadExample, match="was cut short while it was read"):
        read(unverified, [first + shards.index.shards[1].examples - 1])
    with pytest.raises(BadExample, match=r"has [\d,]+ bytes where [\d,]+ were written"):
        read(Shards(tmp_path / "shards"), [first])


def test_a_damaged_index_or_damaged_lengths_are_refused(tmp_path: Path) -> None:
    write_shards(texts(SIZES, tags=True).bound(RECORD), tmp_path / "shards")
    file = tmp_path / "shards" / "index.json"
    index = json.loads(file.read_text())
    label, tags = index["targets"]

    def spoiled(**fields: Any) -> str:
        return json.dumps(sealed(index | fields))

    for text, sentence in [
        (json.dumps(index | {"classes": ["a"]}), r"index.json is altered \(its fields do not have the SHA-256 in it"),
        (json.dumps({name: value for name, value in index.items() if name != "sha256"}), "index.json is altered"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"format": "penstock shard parts 1", "parts": ' + "[" * 980 + "]" * 980 + "}", "is damaged|is altered"),
        ("{", "is not JSON"),
        (spoiled(targets=[label, tags | {"axes": []}]), "is damaged"),
        (spoiled(tensors=[index["tensors"][0] | {"limits": [0, 10**400]}]), "is damaged"),
        (spoiled(shards=[index["shards"][0] | {"examples": n} for n in (61, -1)]), "counts of examples do not add up"),
        (spoiled(format="penstock shards 3"), "reads 'penstock shards 1' and 'penstock shards 2'"),
        (spoiled(tree={"label": 0, "tags": 0}), "is damaged"),
        (spoiled(tree={"label": 0, "tags": "x"}), "is damaged"),
        (spoiled(tree={"label": 0}), "is damaged"),
        (spoiled(tensors=[]), "is damaged"),
        (spoiled(tensors=[{"dtype": "int64"}]), "is damaged"),
        (spoiled(targets=[label, tags | {"dtype": "object"}]), "is damaged"),
        (spoiled(targets=[label, tags | {"room": [9, 9]}]), "is damaged"),
        (spoiled(targets=[label, tags | {"lengths": [-1]}]), "is damaged"),
        (spoiled(targets=[label, tags | {"lengths": [7]}]), r"lengths.npy does not hold what the index says"),
        (spoiled(shards=[]), "counts of examples do not add up"),
        (spoiled(lengths={"file": "lengths.npy"}), "is damaged"),
    ]:
        file.write_text(text)
        with pytest.raises(TrainError, match=sentence):
            Shards(tmp_path / "shards")
    file.write_text(json.dumps(index))
    lengths = tmp_path / "shards" / "lengths.npy"
    content = bytearray(lengths.read_bytes())
    content[-1] ^= 1
    lengths.write_bytes(content)
    with pytest.raises(TrainError, match=r"lengths.npy is not as it was written"):
        Shards(tmp_path / "shards")
    lengths.unlink()
    with pytest.raises(TrainError, match=r"lengths.npy cannot be read"):
        Shards(tmp_path / "shards")


def test_shards_of_earlier_versions_are_read(tmp_path: Path) -> None:
    inputs, targets = np.arange(12, dtype=np.int16).reshape(4, 3), np.array([3, 1, 2, 0])
    np.save(tmp_path / "00000.npy", inputs[:3])
    np.save(tmp_path / "00001.npy", inputs[3:])
    np.save(tmp_path / "targets.npy", targets)

    def entry(name: str, examples: int) -> dict[str, Any]:
        described = describe_file(tmp_path / name, examples)
        return {each: getattr(described, each) for each in ("file", "examples", "bytes", "sha256")}

    index = {
        "format": "penstock shards 1",
        "dtype": "int16",
        "shape": [3],
        "examples": 4,
        "classes": ["a", "b", "c", "d"],
        "targets": entry("targets.npy", 4),
        "shards": [entry("00000.npy", 3), entry("00001.npy", 1)],
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    found, read_targets = read(Shards(tmp_path), [3, 0, 2])
    np.testing.assert_array_equal(found, inputs[[3, 0, 2]])
    np.testing.assert_array_equal(read_targets, targets[[3, 0, 2]])


def test_a_part_can_be_taken_only_of_one_picture(tmp_path: Path) -> None:
    write_shards(texts(SIZES).bound(RECORD), tmp_path / "shards")
    for how in ({"size": (2, 2)}, {"random": True}):
        with pytest.raises(TrainError, match=r"are ids: int64\[tokens<=9\], mask: .* only of pictures"):
            Shards(tmp_path / "shards", **how)  # pyright: ignore[reportArgumentType]


def record_of_texts(tokens: int, *, limits: tuple[float, float] | None = None, dtype: str = "int64") -> RecordSpec:
    length = Dim("words", max=tokens)
    return RecordSpec(
        (
            TensorSpec(dtype="float32", shape=(length,), meaning="", name="mask"),
            TensorSpec(dtype=dtype, shape=(length,), meaning="", name="ids", limits=limits),
        )
    )


def test_another_declaration_of_the_same_tensors_fits(tmp_path: Path) -> None:
    examples = texts(SIZES, tags=True)
    shards = sharded(examples, tmp_path / "shards")
    assert shards.record == examples.record
    # The lengths have another name, the tensors another order, and there is more room.
    for tokens in (max(SIZES), 20):
        record = record_of_texts(tokens)
        for to_max in (False, True):
            check_same_batches(examples.bound(record), shards.bound(record), to_max=to_max)
    assert changes(shards.fingerprint(), shards.bound(examples.record).fingerprint()) == []  # pyright: ignore
    with pytest.raises(TrainError, match=r"'mask' of example \d+ of the shards in .* has \d entries along an axis"):
        shards.bound(record_of_texts(5))
    with pytest.raises(TrainError, match=r"'ids' .* is int64\[ids_length<=9\], and .* declares int32\[words<=9\]"):
        shards.bound(record_of_texts(9, dtype="int32"))
    with pytest.raises(TrainError, match=r"has the limits None, and the application declares \(0, 9\)"):
        shards.bound(record_of_texts(9, limits=(0, 9)))
    with pytest.raises(TrainError, match="have the inputs 'ids', 'mask', and the application 'ids'; write"):
        shards.bound(RecordSpec((TensorSpec(dtype="int64", shape=(Dim("n", max=9),), meaning="", name="ids"),)))


def test_a_fixed_size_may_become_a_length_and_the_other_way_round(tmp_path: Path) -> None:
    fixed = ArraySet(inputs={"a": np.ones((4, 3), np.float32)}, targets=np.zeros(4))
    varying = ArraySet(inputs={"a": [np.ones(3, np.float32)] * 4}, targets=np.zeros(4))

    def record(size: int) -> RecordSpec:
        return RecordSpec((TensorSpec(dtype="float32", shape=(size,), meaning="", name="a"),))

    for number, examples in enumerate((fixed, varying)):
        shards = sharded(examples, tmp_path / str(number))
        check_same_batches(examples.bound(record(Dim("n", max=5))), shards.bound(record(Dim("n", max=5))))
        check_same_batches(examples.bound(record(3)), shards.bound(record(3)))
        with pytest.raises(TrainError, match="has 3 entries along an axis"):
            shards.bound(record(4))
    with pytest.raises(TrainError, match="has 3 entries along an axis"):
        Shards(tmp_path / "0").bound(record(Dim("n", max=5, min=4)))


def test_a_change_of_the_targets_or_their_names_is_noticed(tmp_path: Path) -> None:
    def shards(name: str, targets: Any) -> Shards:
        return sharded(ArraySet(inputs={"a": [[1], [2, 3]]}, targets=targets), tmp_path / name)

    one, same = shards("one", {"x": np.zeros(2)}), shards("same", {"x": np.zeros(2)})
    other, renamed = shards("other", {"x": np.ones(2)}), shards("renamed", {"y": np.zeros(2)})
    # The bytes and the lengths of these are equal.
    dtype, signed = shards("dtype", {"x": np.zeros(2, np.int64)}), shards("signed", {"x": np.zeros(2, np.uint64)})
    narrow, wide = (shards(str(room), {"x": np.eye(2, room, dtype=np.float32)}) for room in (3, 5))
    assert changes(one.fingerprint(), same.fingerprint()) == []
    for before, after in [(one, other), (one, renamed), (one, dtype), (one, signed), (dtype, signed), (narrow, wide)]:
        assert changes(before.fingerprint(), after.fingerprint()) == ["the shards changed"]


def test_several_sets_appear_together_or_not_at_all(tmp_path: Path) -> None:
    good = texts(SIZES)
    with pytest.raises(TrainError, match=r"^the validation data: the targets from example 4 on"):
        write_parts({"train": good, "validation": Given(later(box=np.zeros(2)))}, tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []
    seen: list[tuple[str, int]] = []
    bad = Counted(6, bad=(2,), varies=False)
    left_out = write_parts(
        {"train": good, "validation": bad},
        tmp_path / "shards",
        on_bad="skip",
        progress=lambda name, count: seen.append((name, count)),
    )
    assert [error.name for error in left_out["validation"]] == ["2.jpg"]
    assert {("train", 60), ("validation", 6)} <= set(seen)
    assert (len(Shards(tmp_path / "shards/train")), len(Shards(tmp_path / "shards/validation"))) == (60, 5)
    with pytest.raises(TrainError, match="exists; choose"):
        write_parts({"train": good}, tmp_path / "shards")
