"""Datasets of Hugging Face and of rows by name as examples: the arrays they give, and what is refused."""

import io
import pickle
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from penstock.core.dim import Dim
from penstock.core.errors import BadExample, TrainError
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.dataset_examples import DatasetExamples
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.loader import Batch, ReadingLoader, first_batch
from penstock.train.data.sampler import one_pass, training_order
from penstock.train.data.trees import leaves
from tests.support.pictures import COLOUR, picture_folder, smooth

COUNT = 30
TOKENS = Dim("tokens", max=9)
IDS = RecordSpec((TensorSpec(dtype="int64", shape=(TOKENS,), meaning="", name="ids"),))
SCORES = TensorSpec(dtype="float32", shape=(3,), meaning="")
LABELS = datasets.ClassLabel(names=["cat", "dog"])


def jpeg(seed: int) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(smooth(seed, 48, 64)).save(sink, "JPEG")
    return sink.getvalue()


def table() -> datasets.Dataset:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": LABELS,
            "text": datasets.Value("string"),
            "ids": datasets.List(datasets.Value("int32")),
            "scores": datasets.List(datasets.Value("float32"), length=3),
            "grid": datasets.Array2D((2, 2), "float32"),
            "y": datasets.Value("float64"),
        }
    )
    columns: dict[str, Any] = {
        "image": [{"bytes": jpeg(row), "path": None} for row in range(COUNT)],
        "label": [row % 2 for row in range(COUNT)],
        "text": [f"{'é' * row}." for row in range(COUNT)],
        "ids": [list(range(1, row % 7 + 2)) for row in range(COUNT)],
        "scores": [[1.0, 2.0, row] for row in range(COUNT)],
        "grid": [[[0.0, 1.0], [2.0, row]] for row in range(COUNT)],
        "y": [row / 2 for row in range(COUNT)],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def dataset() -> datasets.Dataset:
    return table()


def with_column(dataset: datasets.Dataset, name: str, values: list[Any]) -> datasets.Dataset:
    columns = dataset.to_dict()
    assert isinstance(columns, dict)
    return datasets.Dataset.from_dict(columns | {name: values}, features=dataset.features)


def batches(examples: DatasetExamples, workers: int) -> list[Batch]:
    with ReadingLoader(examples, training_order(3, len(examples), 16), workers=workers) as loader:
        return [next(loader) for _ in range(6)]


def test_pictures_are_those_of_a_folder_with_the_same_files(tmp_path: Path) -> None:
    picture_folder(tmp_path / "pictures")
    files = datasets.load_dataset(
        "imagefolder", data_dir=str(tmp_path / "pictures"), split="train", cache_dir=str(tmp_path / "cache")
    )
    folder = ImageFolder(tmp_path / "pictures", COLOUR, random=True)
    examples = DatasetExamples(files, COLOUR, inputs="image", targets="label", random=True)
    assert examples.classes == folder.classes
    expected, found = (next(ReadingLoader(each, one_pass(len(each), 12))) for each in (folder, examples))
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.targets, expected.targets)


def test_threads_read_the_same_in_any_number(dataset: datasets.Dataset) -> None:
    examples = DatasetExamples(dataset.shuffle(seed=1), COLOUR, inputs="image", targets="label", random=True)
    for one, other in zip(batches(examples, 0), batches(examples, 3), strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_lists_and_arrays_become_named_tensors(dataset: datasets.Dataset) -> None:
    spec = RecordSpec((*IDS.tensors, TensorSpec(dtype="float32", shape=(2, 2), meaning="", name="board")))
    examples = DatasetExamples(
        dataset, spec, inputs={"ids": "ids", "board": "grid"}, targets={"label": "label", "of": ("y", "scores")}
    )
    batch = first_batch(examples, 3)
    assert batch.inputs["ids"].tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    assert batch.inputs["tokens"].tolist() == [1, 2, 3]
    assert batch.inputs["board"][2].tolist() == [[0.0, 1.0], [2.0, 2.0]]
    assert batch.targets["label"].tolist() == [0, 1, 0]
    y, scores = batch.targets["of"]
    assert (y.dtype, y.tolist()) == (torch.float32, [0.0, 0.5, 1.0])
    assert scores[1].tolist() == [1.0, 2.0, 1.0]


def test_targets_as_long_as_the_inputs_are_padded(dataset: datasets.Dataset) -> None:
    batch = first_batch(DatasetExamples(dataset, IDS, targets="ids", target_axes=("tokens",)), 2)
    assert batch.targets.tolist() == [[1, -100], [1, 2]]


def test_text_is_decoded_as_the_server_does(dataset: datasets.Dataset) -> None:
    spec = RecordSpec((TensorSpec(dtype="uint8", shape=(Dim("bytes", max=99),), meaning="", name="body"),))
    seen: list[str] = []

    def decode(body: bytes, content_type: str) -> dict[str, Array]:
        seen.append(content_type)
        return {"body": np.frombuffer(body, np.uint8)}

    batch = first_batch(DatasetExamples(dataset, spec, inputs="text", targets="label", decode=decode), 2)
    assert [bytes(row).rstrip(b"\0").decode() for row in batch.inputs["body"].numpy()] == [".", "é."]
    assert set(seen) == {"text/plain"}


def test_a_function_of_a_row_makes_any_example(dataset: datasets.Dataset) -> None:
    def example(row: Any) -> tuple[Any, Any]:
        return {"ids": np.array(row["ids"])}, {"count": len(row["text"]), "wide": row["image"].width}

    batch = first_batch(DatasetExamples(dataset, IDS, row=example), 3)
    assert batch.inputs["tokens"].tolist() == [1, 2, 3]
    assert batch.targets["count"].tolist() == [1, 2, 3]
    assert batch.targets["wide"].tolist() == [64, 64, 64]


def test_classes_may_have_another_order(dataset: datasets.Dataset) -> None:
    examples = DatasetExamples(dataset, SCORES, inputs="scores", targets="label", classes=("dog", "eel", "cat"))
    assert first_batch(examples, 3).targets.tolist() == [2, 0, 2]
    named = datasets.Dataset.from_dict({"x": [[1.0, 2.0, 3.0]] * 3, "y": ["b", "a", "b"]})
    assert first_batch(
        DatasetExamples(named, SCORES, inputs="x", targets="y", classes=("a", "b")), 3
    ).targets.tolist() == [1, 0, 1]


@pytest.mark.parametrize("suffix", ["flac", "wav"])
def test_sounds_are_decoded_mixed_and_resampled(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(0)
    tones = [(6000 * np.sin(np.arange(800 + row) / 9)).astype(np.int16) for row in range(3)]
    for row, tone in enumerate(tones):
        soundfile.write(tmp_path / f"{row}.{suffix}", np.stack([tone, tone], 1), 8000, subtype="PCM_16")
    rng.shuffle(tones)
    files = [str(tmp_path / f"{row}.{suffix}") for row in range(3)]
    columns = {"sound": files, "y": [0, 1, 2], "bytes": [Path(file).read_bytes() for file in files]}
    sounds = datasets.Dataset.from_dict(columns).cast_column("sound", datasets.Audio(sampling_rate=8000))
    fixed = TensorSpec(dtype="int16", shape=(801,), meaning="")
    inputs = first_batch(DatasetExamples(sounds, fixed, inputs="sound", targets="y"), 3).inputs.numpy()
    expected = (6000 * np.sin(np.arange(801) / 9)).astype(np.int16)
    assert np.array_equal(inputs[0][:800], expected[:800])
    assert inputs[0][800] == 0
    assert np.array_equal(inputs[2], expected)
    varying = RecordSpec((TensorSpec(dtype="float32", shape=(Dim("frames", max=2000),), meaning="", name="x"),))
    examples = DatasetExamples(sounds, varying, inputs="bytes", targets="y", sample_rate_hz=16_000)
    assert first_batch(examples, 3).inputs["frames"].tolist() == [1600, 1602, 1604]
    with pytest.raises(TrainError, match="have no rate; give sample_rate_hz"):
        DatasetExamples(sounds, varying, inputs="bytes", targets="y")


class Rows:
    """A map-style dataset whose size is not its length, as MosaicML's is in one of several processes."""

    def __init__(self, count: int = 12) -> None:
        self.size = count
        self.shards = [
            SimpleNamespace(samples=count, file_pairs=[(SimpleNamespace(basename="0.mds", bytes=9, hashes={}), None)])
        ]

    def __len__(self) -> int:
        return self.size // 2

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if index == 7:
            raise ValueError("the shard is cut short")
        return {"image": Image.open(io.BytesIO(jpeg(index))), "y": index % 3, "v": np.full(3, index, np.float32)}


def test_rows_that_are_dictionaries() -> None:
    rows = Rows()
    pictures = DatasetExamples(rows, COLOUR, inputs="image", targets="y")
    assert len(pictures) == 12
    assert first_batch(pictures, 5).targets.tolist() == [0, 1, 2, 0, 1]
    assert first_batch(DatasetExamples(rows, SCORES, inputs="v", targets="y"), 5).inputs[:, 0].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]
    with pytest.raises(BadExample, match=r"row 7 cannot be read \(ValueError: the shard is cut short\)"):
        first_batch(pictures, 8)
    skipped = first_batch(pictures, 8, on_bad="skip")
    assert len(skipped.targets) == 8


def test_shards_of_mosaicml_are_read_and_identified(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming needs torchvision", exc_type=ImportError)
    columns = {"image": "jpeg", "y": "int"}
    with streaming.MDSWriter(out=str(tmp_path / "mds"), columns=columns, size_limit=1 << 14) as writer:
        for row in range(COUNT):
            writer.write({"image": Image.fromarray(smooth(row, 48, 64)), "y": row % 3})
    sets = [
        streaming.LocalDataset(str(tmp_path / "mds")),
        streaming.StreamingDataset(remote=str(tmp_path / "mds"), local=str(tmp_path / "cache"), batch_size=4),
    ]
    one, other = (DatasetExamples(each, COLOUR, inputs="image", targets="y", random=True) for each in sets)
    for left, right in zip(batches(one, 0), batches(other, 3), strict=True):
        assert torch.equal(left.inputs, right.inputs)
        assert torch.equal(left.targets, right.targets)
    assert one.fingerprint() == other.fingerprint()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"inputs": "imag", "targets": "label"}, "no column 'imag'; it has .* Did you mean 'image'?"),
        ({"inputs": "image", "targets": "labels"}, "no column 'labels'; .* Did you mean 'label'?"),
        ({"inputs": "image"}, "no column of the targets; give targets='COLUMN'"),
        ({"targets": "label"}, "inputs is None; give inputs='COLUMN'"),
        ({"inputs": "text", "targets": "label"}, "'text' holds text, .* give decode=app.decode, or row=FUNCTION"),
        ({"inputs": "image", "targets": "text"}, "'text' holds text; give classes="),
        ({"inputs": "image", "targets": "image"}, "holds no numbers or labels"),
        ({"inputs": "image", "targets": "label", "classes": ("cat",)}, "has the class 'dog', which is not one of"),
        ({"inputs": "image", "targets": "label", "share": 2.0}, "has share 2.0"),
        ({"inputs": "label", "targets": "label", "random": True}, "no column of pictures to crop"),
        ({"inputs": "image", "row": len}, "leave the columns out"),
        ({"inputs": "y", "targets": "label", "decode": len}, "no text, bytes or files to decode"),
    ],
)
def test_columns_that_do_not_fit_are_refused(dataset: datasets.Dataset, arguments: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        DatasetExamples(dataset, COLOUR, **arguments)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: given.select([]), "the dataset has no rows"),
        (lambda given: given.to_iterable_dataset(), "is an IterableDataset .* save it once: Dataset.from_generator"),
        (lambda given: datasets.DatasetDict({"train": given}), r"DatasetDict of the splits 'train'; .*\['train'\]"),
        (lambda given: given.with_transform(lambda row: row), "has a transform .* row=FUNCTION"),
        (lambda given: iter([1]), "cannot be read at random"),
        (lambda given: [1, 2], "must be dictionaries of columns by name"),
        (lambda given: [], "the list has no rows"),
    ],
)
def test_datasets_that_cannot_be_read_at_random_are_refused(dataset: datasets.Dataset, change: Any, said: str) -> None:
    with pytest.raises(TrainError, match=said):
        DatasetExamples(change(dataset), COLOUR, inputs="image", targets="label")


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("image", {"bytes": jpeg(0)[:300], "path": None}, "the file of row 5 cannot be read"),
        ("image", {"bytes": b"no picture", "path": None}, "the file of row 5 cannot be read"),
        ("image", {"bytes": None, "path": "/nowhere/5.jpg"}, "the file of row 5 is missing"),
        ("image", None, "row 5 has no value in column 'image'"),
        ("label", None, "row 5 has no value in column 'label'"),
        ("label", -1, "row 5 has -1 in column 'label', which is no class"),
    ],
)
def test_a_bad_row_is_named_and_can_be_skipped(dataset: datasets.Dataset, column: str, value: Any, said: str) -> None:
    values = dataset.with_format("arrow")[:][column].to_pylist()
    values[5] = value
    examples = DatasetExamples(with_column(dataset, column, values), COLOUR, inputs="image", targets="label")
    with pytest.raises(BadExample, match=said) as caught:
        first_batch(examples, 9)
    assert caught.value.index == 5
    assert len(first_batch(examples, 9, on_bad="skip").targets) == 9


@pytest.mark.parametrize("hole", ["ids", "tags", "pairs", "nested"])
def test_a_list_with_a_hole_is_a_row_without_a_value(hole: str) -> None:
    whole: dict[str, Any] = {"ids": [1, 2], "tags": [0, 1], "pairs": [1.0, 2.0], "nested": [[1.0], [2.0]]}
    holes: dict[str, Any] = {"ids": [1, None], "tags": [0, None], "pairs": [1.0, None], "nested": [[1.0], [None]]}
    features = datasets.Features(
        {
            "ids": datasets.List(datasets.Value("int64")),
            "tags": datasets.List(datasets.Value("int64")),
            "pairs": datasets.List(datasets.Value("float32"), length=2),
            "nested": datasets.List(datasets.List(datasets.Value("float32"))),
        }
    )
    rows = [whole, whole | {hole: holes[hole]}, whole]
    made = datasets.Dataset.from_list(rows, features=features)
    targets = {"tags": "tags", "pairs": "pairs", "nested": "nested"}
    examples = DatasetExamples(
        made, IDS, targets=targets, target_axes={"tags": ("tokens",), "pairs": None, "nested": None}
    )
    with pytest.raises(BadExample, match=f"row 1 has no value in column {hole!r}"):
        first_batch(examples, 3)
    batch = first_batch(examples, 3, on_bad="skip")
    assert batch.targets["tags"].tolist() == [[0, 1]] * 3
    assert batch.targets["tags"].dtype == torch.int64


def test_rows_that_do_not_fit_the_spec_are_named(dataset: datasets.Dataset) -> None:
    short = RecordSpec((TensorSpec(dtype="int64", shape=(Dim("tokens", max=2),), meaning="", name="ids"),))
    with pytest.raises(BadExample, match=r"row 2 does not fit: 'ids' has the shape \[3\]"):
        first_batch(DatasetExamples(dataset, short, targets="label"), 3)
    four = TensorSpec(dtype="float32", shape=(4,), meaning="")
    with pytest.raises(BadExample, match=r"row 0 does not fit: .*float32\[3\]; it must be float32\[4\]"):
        first_batch(DatasetExamples(dataset, four, inputs="scores", targets="y"), 3)
    with pytest.raises(TrainError, match=r"shapes \[1\] and \[2\]; give target_axes"):
        first_batch(DatasetExamples(dataset, IDS, targets="ids"), 3)
    with pytest.raises(BadExample, match=r"row 0 does not fit: the row function fails \(KeyError: 'no'\)"):
        first_batch(DatasetExamples(dataset, COLOUR, row=lambda row: (row["no"], 1)), 3)


def first_byte(content: bytes, content_type: str) -> Array:
    return np.array([content[0], len(content), len(content_type)], np.float32)


@pytest.mark.parametrize(
    ("spec", "columns"),
    [
        (COLOUR, {"inputs": "image", "targets": "label", "random": True}),
        (SCORES, {"inputs": "scores", "targets": "y"}),
        (SCORES, {"inputs": "text", "targets": {"a": "y", "b": "label"}, "decode": first_byte}),
        (IDS, {"inputs": "ids", "targets": "label"}),
    ],
)
def test_a_process_reads_what_a_thread_reads(spec: Any, columns: dict[str, Any]) -> None:
    examples = DatasetExamples(table(), spec, **columns)
    # What the loader sends to its processes.
    copied = pickle.loads(bytes(ForkingPickler.dumps(examples)))
    ours, theirs = ([*ReadingLoader(each, one_pass(COUNT, 8))] for each in (examples, copied))
    for one, other in zip(ours, theirs, strict=True):
        for part, same in zip(leaves(tuple(one)), leaves(tuple(other)), strict=True):
            assert torch.equal(part, same)


def test_rows_that_are_copied_together_are_checked_as_one_by_one() -> None:
    rows: list[dict[str, Any]] = [{"x": np.array([1.0, 2.0, row], np.float32), "y": row} for row in range(8)]
    spec = TensorSpec(dtype="int16", shape=(3,), meaning="")
    batch = first_batch(DatasetExamples(rows, spec, inputs="x", targets="y"), 8)
    assert batch.inputs.tolist() == [[1, 2, row] for row in range(8)]
    rows[5]["x"][0] = 1.5
    with pytest.raises(BadExample, match=r"^row 5 does not fit: ") as raised:
        first_batch(DatasetExamples(rows, spec, inputs="x", targets="y"), 8)
    assert raised.value.index == 5
    rows[5]["x"] = np.zeros(4, np.float32)
    with pytest.raises(BadExample, match=r"^row 5 does not fit: .*\[4\]"):
        first_batch(DatasetExamples(rows, spec, inputs="x", targets="y"), 8)
