"""The golden examples of a pack: few bytes, all labels, and the tolerances of all of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.agreement import scales_of
from penstock.core.bundles.bundle import BundleFiles, Manifest
from penstock.core.bundles.golden import Golden
from penstock.core.dim import Dim
from penstock.core.record import RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.export.golden_choice import MAX_BYTES, golden_arrays, with_few_examples

LABELS = ("one", "two", "three")
SMALL = TensorSpec(dtype="float32", shape=(4,), meaning="numbers", name="numbers")
SIGNAL = TensorSpec(dtype="int16", shape=(16_000,), meaning="sound", name="sound")
CLASSES = TensorSpec(dtype="float32", shape=(3,), meaning="scores", labels=LABELS, name="scores")


def bundle(input: Any, output: Any, inputs: Array, outputs: Array, raws: tuple[Array, ...] = ()) -> BundleFiles:
    golden = Golden(inputs=inputs, outputs=outputs, raws=raws, tolerance=1e-4)
    about: dict[str, Any] = {"name": "any", "reference": "", "sources": {}, "files": {}, "metrics": {}, "versions": {}}
    tensors = {"inputs": input.tensors, "outputs": output.tensors}
    manifest = Manifest(tolerance=1e-4, parameters=1, **about, **tensors)
    return BundleFiles(folder=Path(), manifest=manifest, golden=golden)


def scores(rows: int) -> Array:
    outputs = np.zeros((rows, 3), np.float32)
    outputs[np.arange(rows), np.where(np.arange(rows) < rows - 2, 0, np.arange(rows) % 2 + 1)] = 1
    return outputs


def size_of(files: BundleFiles) -> int:
    return sum(array.nbytes for array in golden_arrays(files).values())


def test_examples_that_are_small_all_stay() -> None:
    files = bundle(SMALL, CLASSES, np.ones((32, 4), np.float32), scores(32))
    assert len(with_few_examples(files, 1000).golden.inputs) == 32


def test_large_ones_stay_within_the_bound_with_each_label() -> None:
    inputs = np.repeat(np.arange(32, dtype=np.int16)[:, None], 16_000, axis=1)
    files = bundle(SIGNAL, CLASSES, inputs, scores(32))
    few = with_few_examples(files, 188_000)
    # Two seconds of sound are within 64 KiB.
    assert len(few.golden.inputs) == 2
    assert size_of(few) <= MAX_BYTES
    more = with_few_examples(files, 1_500_000)
    assert 3 <= len(more.golden.inputs) < 6
    assert set(more.golden.outputs.argmax(1)) == {0, 1, 2}
    # In their order, each with its own answer.
    rows = more.golden.inputs[:, 0].tolist()
    assert rows == sorted(rows)
    np.testing.assert_array_equal(more.golden.outputs, files.golden.outputs[rows])


@pytest.mark.parametrize("at", [0, 7, 31])
def test_the_largest_output_stays_so_that_tolerances_are_the_same(at: int) -> None:
    outputs = scores(32)
    outputs[at] *= 900
    few = with_few_examples(bundle(SIGNAL, CLASSES, np.zeros((32, 16_000), np.int16), outputs), 0)
    assert scales_of(few.golden.outputs) == scales_of(outputs) == {"": 900.0}
    assert len(few.golden.inputs) == 2


def test_the_smallest_pictures_stay_however_large_they_are() -> None:
    raws = tuple(np.zeros((side, side, 4), np.uint8) for side in (900, 200, 300, 800))
    files = bundle(SMALL, CLASSES, np.zeros((4, 4), np.float32), scores(4), raws)
    few = with_few_examples(files, 0)
    assert [raw.shape[0] for raw in few.golden.raws] == [200, 300]
    assert list(golden_arrays(few)) == ["raw.0", "raw.1", "outputs"]


def test_the_shortest_and_the_longest_input_stay() -> None:
    tokens = Dim("tokens", max=20_000)
    spec = RecordSpec((TensorSpec(dtype="int64", shape=(tokens,), meaning="ids", name="ids"),))
    records = spec.of_many([{"ids": np.arange(length)} for length in (5, 3, 4000, 4, 9, 5000)])
    files = bundle(spec, CLASSES, records, scores(6))
    few = with_few_examples(files, 0)
    assert [int(record["tokens"]) for record in few.golden.inputs] == [3, 5000]
