import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.sampler import example_seeds
from penstock.train.data.shard_writer import write_shards
from penstock.train.data.shards import Shards
from tests.support.examples import Counted
from tests.support.pictures import COLOUR, picture_folder

COUNT = 23
# Five pictures of 6 x 8 x 3 bytes.
SHARD_BYTES = 5 * 144 + 7


def pictures() -> ArraySet:
    inputs = np.random.default_rng(0).integers(0, 256, (COUNT, 6, 8, 3), np.uint8)
    return ArraySet(inputs=inputs, targets=np.arange(COUNT) % 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_shards(pictures(), tmp_path / "shards", classes=("a", "b", "c"), shard_bytes=SHARD_BYTES)
    return tmp_path / "shards"


def read(examples: Examples, indices: list[int], epoch: int = 0) -> tuple[Array, Array]:
    which = np.array(indices)
    inputs = examples.empty(len(which))
    return inputs, examples.read(which, example_seeds(3, np.full(len(which), epoch), which), inputs)


def test_what_was_written_is_read_in_any_order(folder: Path) -> None:
    shards = Shards(folder)
    assert [shard.examples for shard in shards.index.shards] == [5, 5, 5, 5, 3]
    assert (len(shards), shards.input_dtype, shards.input_shape, shards.varies) == (COUNT, "uint8", (6, 8, 3), False)
    assert shards.classes == ("a", "b", "c")
    order = np.random.default_rng(1).permutation(COUNT).tolist()
    inputs, targets = read(shards, order)
    np.testing.assert_array_equal(inputs, pictures().inputs[order])
    np.testing.assert_array_equal(targets, pictures().targets[order])
    assert shards.verify() == []


def test_numpy_reads_the_files_too(folder: Path) -> None:
    files = sorted(folder.glob("0*.npy"))
    whole = np.concatenate([np.load(file, mmap_mode="r", allow_pickle=False) for file in files])
    np.testing.assert_array_equal(whole, pictures().inputs)
    np.testing.assert_array_equal(np.load(folder / "targets.npy", allow_pickle=False), pictures().targets)
    index = json.loads((folder / "index.json").read_text())
    assert (index["examples"], index["dtype"], index["shape"]) == (COUNT, "uint8", [6, 8, 3])
    for shard in index["shards"]:
        assert hashlib.sha256((folder / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]


def test_the_bytes_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    source = ImageFolder(picture_folder(tmp_path / "photos"), COLOUR)
    for workers in (1, 4):
        write_shards(source, tmp_path / str(workers), workers=workers, shard_bytes=4000)
    one, four = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("1", "4"))
    assert one == four
    assert len(one) > 3


def test_any_dtype_and_shape_may_be_sharded(tmp_path: Path) -> None:
    sound = ArraySet(inputs=np.arange(40, dtype=np.int16).reshape(4, 10), targets=np.arange(8.0).reshape(4, 2))
    write_shards(sound, tmp_path / "shards", shard_bytes=1)
    shards = Shards(tmp_path / "shards")
    assert len(shards.index.shards) == 4
    inputs, targets = read(shards, [3, 0])
    np.testing.assert_array_equal(inputs, sound.inputs[[3, 0]])
    np.testing.assert_array_equal(targets, sound.targets[[3, 0]])
    with pytest.raises(TrainError, match=r"are \[10\]; a part of \[2, 2\] can be taken only of pictures"):
        Shards(tmp_path / "shards", size=(2, 2))


def test_a_part_is_the_middle_or_by_chance(folder: Path) -> None:
    middle = Shards(folder, size=(4, 4))
    assert middle.input_shape == (4, 4, 3)
    np.testing.assert_array_equal(read(middle, [7, 20])[0], pictures().inputs[[7, 20], 1:5, 2:6])
    random = Shards(folder, size=(4, 4), random=True)
    assert random.varies
    everything = list(range(COUNT))
    together, _ = read(random, everything)
    for row in (0, 11, 22):
        np.testing.assert_array_equal(read(random, [row])[0][0], together[row])
    seen: set[tuple[int, int, bool]] = set()
    for epoch in range(20):
        for index, part in enumerate(read(random, everything, epoch)[0]):
            seen.add(place_of(part, pictures().inputs[index]))
    # Three tops, five lefts, mirrored or not.
    assert len(seen) == 30
    with pytest.raises(TrainError, match="at least as large"):
        Shards(folder, size=(7, 4))


def place_of(part: Array, whole: Array) -> tuple[int, int, bool]:
    for top in range(3):
        for left in range(5):
            window = whole[top : top + 4, left : left + 4]
            for mirrored, candidate in ((False, window), (True, window[:, ::-1])):
                if (part == candidate).all():
                    return top, left, mirrored
    raise AssertionError("no part of it")


def altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "why"),
    [(altered, "is altered"), (cut, r"has \d+ bytes where \d+ were written"), (Path.unlink, "is missing")],
)
def test_a_damaged_shard_is_named_when_one_of_its_examples_is_read(
    folder: Path, damage: Callable[[Path], None], why: str
) -> None:
    damage(folder / "00002.npy")
    shards = Shards(folder)
    np.testing.assert_array_equal(read(shards, [0, 9, 15])[0], pictures().inputs[[0, 9, 15]])
    for index in (10, 14):
        with pytest.raises(BadExample, match=f"00002.npy {why}") as caught:
            read(shards, [0, index])
        assert (caught.value.index, caught.value.name) == (index, "00002.npy")
    damaged = shards.verify()
    assert len(damaged) == 1
    assert "00002.npy" in damaged[0]


def test_a_shard_that_shrinks_while_it_is_read_is_bad_and_kills_nothing(folder: Path) -> None:
    shards = Shards(folder)
    read(shards, [10])
    cut(folder / "00002.npy")
    with pytest.raises(BadExample, match="was cut short while it was read"):
        read(shards, [14])


def test_without_verifying_altered_bytes_are_not_seen_but_others_headers_are(folder: Path) -> None:
    altered(folder / "00002.npy")
    inputs, _ = read(Shards(folder, verify=False), [14])
    assert (inputs != pictures().inputs[[14]]).sum() == 1
    content = (folder / "00002.npy").read_bytes()
    (folder / "00002.npy").write_bytes(b"x" * len(content))
    with pytest.raises(BadExample, match=r"does not hold what index.json says"):
        read(Shards(folder, verify=False), [14])


def test_a_damaged_index_or_damaged_targets_are_refused(folder: Path) -> None:
    index = (folder / "index.json").read_text()

    def changed(**fields: Any) -> str:
        return json.dumps(json.loads(index) | fields)

    cases = [
        ("{", "is not JSON"),
        ("[]", "is damaged"),
        (changed(format="penstock shards 9"), "has format 'penstock shards 9'; this version of Penstock reads"),
        (changed(shards=[]), "counts of examples do not add up"),
        (changed(shape=["x"]), "is damaged"),
        (changed(targets={"file": "targets.npy"}), "is damaged"),
    ]
    for text, sentence in cases:
        (folder / "index.json").write_text(text)
        with pytest.raises(TrainError, match=sentence):
            Shards(folder)
    (folder / "index.json").write_text(index)
    altered(folder / "targets.npy")
    with pytest.raises(TrainError, match=r"targets.npy is not as it was written"):
        Shards(folder)
    (folder / "targets.npy").unlink()
    with pytest.raises(TrainError, match=r"targets.npy cannot be read"):
        Shards(folder)
    with pytest.raises(TrainError, match=r"'penstock shard SOURCE .*' makes one"):
        Shards(folder.parent)


def test_what_cannot_be_read_is_not_said_to_be_unwritable(tmp_path: Path) -> None:
    examples = Counted(4, bad=(1,), raises=OSError(5, "Input/output error"))
    with pytest.raises(TrainError, match=r"the examples cannot be read \(Input/output error\)"):
        write_shards(examples, tmp_path / "shards")


def test_a_disk_that_fails_below_a_shard_makes_its_examples_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(Counted(4), tmp_path / "shards")
    shards = Shards(tmp_path / "shards")

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("penstock.train.data.open_shard.os.preadv", failing)
    with pytest.raises(BadExample, match=r"cannot be read \(Input/output error\); write the shards again"):
        shards.read(np.arange(2), example_seeds(0, np.zeros(2, np.int64), np.arange(2)), shards.empty(2))


def test_bad_examples_stop_the_writing_or_are_left_out(tmp_path: Path) -> None:
    examples = Counted(20, bad=(3, 17), varies=False)
    with pytest.raises(BadExample, match="example 3 is bad"):
        write_shards(examples, tmp_path / "shards")
    assert list(tmp_path.iterdir()) == []
    seen: list[int] = []
    left_out = write_shards(examples, tmp_path / "shards", on_bad="skip", progress=seen.append)
    assert [error.name for error in left_out] == ["3.jpg", "17.jpg"]
    assert seen[-1] == 20
    inputs, targets = read(Shards(tmp_path / "shards"), list(range(18)))
    assert inputs[:, 0].tolist() == [index for index in range(20) if index not in (3, 17)]
    assert (targets == 10 * inputs[:, 0]).all()
    with pytest.raises(TrainError, match="exists; choose"):
        write_shards(examples, tmp_path / "shards", on_bad="skip")
    with pytest.raises(TrainError, match="none of 2 examples can be read; the first: example 0"):
        write_shards(Counted(2, bad=(0, 1)), tmp_path / "none", on_bad="skip")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainError, match="cannot be written"):
        write_shards(pictures(), tmp_path / "file" / "shards")
    waves = ArraySet(inputs=np.zeros((2, 3), np.complex64), targets=np.zeros(2))
    with pytest.raises(TrainError, match="are complex64; shards hold bool, uint8"):
        write_shards(waves, tmp_path / "shards")
