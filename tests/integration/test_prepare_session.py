"""Inputs that are prepared of raw arrays of any size: in the bundle, by torch and by ONNX Runtime."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from penstock.cli.inspect import inspect
from penstock.core.bundles.bundle import PREPARE, read_bundle
from penstock.core.errors import (
    ApplicationError,
    BundleCorrupt,
    BundleError,
    GoldenMismatch,
    InvalidInput,
    TooLarge,
    TrainError,
)
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import TensorSpec
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import TorchPrepare, load, make_prepare
from penstock.runtime.onnx.prepare_session import PrepareSession, exported_prepare, open_prepare, random_raws
from penstock.train.recipe import Recipe
from penstock.train.run_folder import check_raw_examples, golden_examples
from tests.support.prepared import MOST, PICTURES_PY, RAWS, SIDE, pictures, pictures_app, shared_pictures
from tests.support.small import small, written

DECODING: dict[str, Any] = {"decode": lambda body, content_type: None, "accepts": ("image/png",)}
FOUR_OF_MANY = RawSpec(dtype="float32", shape=(None,), meaning="numbers", max_shape=(9,))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """One bundle for all tests, since an export takes seconds."""
    return shared_pictures(tmp_path_factory)


@pytest.fixture
def copied(made: Bundle, tmp_path: Path) -> Path:
    """A bundle that a test may damage."""
    return shutil.copytree(made.folder, tmp_path / "bundle")


def test_a_bundle_holds_the_graph_and_the_raw_arrays(made: Bundle) -> None:
    files = made.files
    assert files.prepare == made.folder / PREPARE
    assert PREPARE in files.manifest.files
    assert files.manifest.raw == RawSpec(
        dtype="uint8", shape=(None, None, 4), meaning="a picture, RGBA", max_shape=(MOST, MOST, 4)
    )
    assert [raw.shape for raw in files.golden.raws] == [raw.shape for raw in RAWS]
    assert all(np.array_equal(*pair) for pair in zip(files.golden.raws, RAWS, strict=True))
    assert files.golden.inputs.shape == (len(RAWS), SIDE, SIDE, 3)


def test_a_bundle_without_a_prepare_is_as_it_was(tmp_path: Path) -> None:
    files = written(tmp_path / "bundle").files
    assert (files.prepare, files.manifest.raw, files.golden.raws, open_prepare(files)) == (None, None, (), None)
    assert "raw" not in json.loads((tmp_path / "bundle" / "manifest.json").read_text())


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (2, 3), (11, 13), (12, 12), (77, 200), (MOST, MOST)])
def test_onnx_runtime_prepares_what_torch_does(made: Bundle, size: tuple[int, int]) -> None:
    (raw,) = pictures(size)
    prepared, preparing = open_prepare(made.files), make_prepare(pictures_app(Path(made.manifest.reference).parent))
    assert prepared is not None
    assert preparing is not None
    np.testing.assert_allclose(prepared(raw), preparing(raw), atol=1e-4, rtol=0)


def test_what_prepares_needs_no_torch(made: Bundle) -> None:
    code = (
        "import sys\nfrom penstock.core.bundles.bundle import read_bundle\n"
        "from penstock.runtime.onnx.prepare_session import open_prepare\n"
        f"files = read_bundle({str(made.folder)!r})\nprint(open_prepare(files)(files.golden.raws[0]).shape)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"({SIDE}, {SIDE}, 3)", done.stderr


def test_raw_arrays_and_prepared_ones_are_answered_alike(made: Bundle) -> None:
    predictor = load(made.folder)
    for raw, output in zip(RAWS, made.files.golden.outputs, strict=True):
        np.testing.assert_allclose(predictor.predict(raw), output, atol=1e-6)
        np.testing.assert_allclose(predictor.predict(predictor.prepare(raw)), output, atol=1e-6)
    np.testing.assert_allclose(predictor.predict(made.files.golden.inputs), made.files.golden.outputs, atol=1e-6)


def test_a_file_is_decoded_prepared_and_answered(made: Bundle) -> None:
    sink = io.BytesIO()
    Image.fromarray(RAWS[1]).save(sink, "PNG")
    answer = load(made.folder).answer(sink.getvalue(), "image/png")
    np.testing.assert_allclose(answer, made.files.golden.outputs[1], atol=1e-6)


@pytest.mark.parametrize(
    ("raw", "error", "sentence"),
    [
        (np.zeros((4, 4, 3), np.uint8), InvalidInput, r"raw is uint8\[4, 4, 3\]; it must be uint8\[any, any, 4\]"),
        (np.zeros((0, 4, 4), np.uint8), InvalidInput, r"raw is uint8\[0, 4, 4\]"),
        (np.zeros((1, MOST + 1, 4), np.uint8), TooLarge, "at most"),
    ],
)
def test_another_raw_array_is_refused(made: Bundle, raw: Any, error: type[Exception], sentence: str) -> None:
    prepared, predictor = open_prepare(made.files), load(made.folder)
    assert prepared is not None
    with pytest.raises(error, match=sentence):
        prepared(raw)
    with pytest.raises(error, match=sentence):
        predictor.prepare(raw)


def test_a_predictor_without_a_prepare_says_so(tmp_path: Path) -> None:
    predictor = load(written(tmp_path / "bundle").folder, app=small())
    with pytest.raises(InvalidInput, match="has no prepare; give inputs as they are"):
        predictor.prepare(RAWS[0])


def test_a_damaged_or_missing_graph_is_refused(copied: Path) -> None:
    file = copied / PREPARE
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(BundleCorrupt, match=r"prepare.onnx is not the file that was written"):
        read_bundle(copied)
    file.unlink()
    with pytest.raises(BundleCorrupt, match=r"prepare.onnx is missing"):
        read_bundle(copied)


@pytest.mark.thorough
def test_a_bundle_is_replaced_whole_and_its_graph_is_the_same_each_time(copied: Path, made: Bundle) -> None:
    folder = Path(made.manifest.reference).parent
    found = pictures_app(folder)
    with torch.random.fork_rng(devices=[]):
        again = Bundle.write(found, found.model(), RAWS[:2], to=copied)
    assert len(again.files.golden.raws) == 2
    graph = (copied / PREPARE).read_bytes()
    assert graph == (made.folder / PREPARE).read_bytes()
    # Nor does it name a place.
    assert folder.name.encode() not in graph
    assert b".py" not in graph


def test_other_numbers_than_were_recorded_are_refused(made: Bundle) -> None:
    golden, prepared = made.files.golden, open_prepare(made.files)
    assert prepared is not None
    assert golden.check_prepared(prepared) <= golden.prepared_tolerance
    off = replace(golden, inputs=golden.inputs + 0.1)
    with pytest.raises(GoldenMismatch, match=r"the prepared inputs differ from the recorded ones by 0\.1"):
        off.check_prepared(prepared)
    with pytest.raises(GoldenMismatch, match="differ from the recorded ones by nan"):
        golden.check_prepared(lambda raw: prepared(raw) * np.nan)
    with pytest.raises(GoldenMismatch, match=r"raw \[5, 4, 4\] is prepared to shape \[1\] where"):
        golden.check_prepared(lambda raw: np.zeros(1, np.float32))


def test_another_graph_is_refused(made: Bundle) -> None:
    raw, chunk = made.manifest.raw, made.manifest.inputs[0]
    assert raw is not None
    with pytest.raises(BundleError, match=r"prepare.onnx cannot be loaded"):
        PrepareSession(b"nothing", raw, chunk)
    other = TensorSpec(dtype="float32", shape=(SIDE, SIDE, 4), meaning="more")
    with pytest.raises(BundleError, match=r"it must turn uint8\[any, any, 4\] into float32\[12, 12, 4\]"):
        PrepareSession(made.folder / PREPARE, raw, other)


def test_a_bundle_whose_application_prepares_otherwise_now_is_refused(made: Bundle) -> None:
    changed = pictures_app(
        Path(made.manifest.reference).parent / "other", PICTURES_PY.replace('RGBA", max_shape', 'X", max_shape')
    )
    with pytest.raises(BundleError, match=r"the bundle's inputs are prepared of uint8.*are now prepared of uint8.*X"):
        load(made.folder, app=changed.application)


def found_with(module: Any, reference: str = "") -> FoundApplication:
    application = small(prepare=Prepare(module=module, raw=FOUR_OF_MANY), **DECODING)
    return FoundApplication(application=application, module=sys.modules[__name__], reference=reference)


def test_a_prepare_that_no_other_process_finds_is_refused() -> None:
    with pytest.raises(ApplicationError, match="another process has to find to export it"):
        exported_prepare(found_with(nn.Identity))


def test_a_prepare_that_cannot_be_exported_says_why(tmp_path: Path) -> None:
    branching = (
        "class Branching(SquareResize):\n"
        "        def forward(self, raw):\n"
        "            return super().forward(raw) if raw.sum() > 1000 else super().forward(raw) + 1\n\n"
        "    return Branching"
    )
    found = pictures_app(tmp_path, PICTURES_PY.replace("return SquareResize", branching))
    with pytest.raises(ApplicationError, match=r"'pictures' cannot be exported \(.*data-dependent.*operations that"):
        exported_prepare(found)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (lambda: 3, "gives a int; it must make a torch.nn.Module"),
        (lambda: nn.Linear(4, 4), "has 'weight' in its state, which a bundle does not hold"),
    ],
)
def test_a_wrong_module_is_refused(module: Any, sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        make_prepare(found_with(module))


class Doubled(nn.Module):
    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        return raw.mul_(2)[:4]


def test_what_does_not_give_the_input_is_refused_and_what_works_in_place_changes_nothing() -> None:
    preparing = make_prepare(found_with(Doubled))
    assert isinstance(preparing, TorchPrepare)
    raw = np.ones(7, np.float32)
    assert np.array_equal(preparing(raw), np.full(4, 2, np.float32))
    assert np.array_equal(raw, np.ones(7, np.float32))
    with pytest.raises(ApplicationError, match=r"gives float32\[2\] for float32\[2\], but the input is declared"):
        preparing(raw[:2])


@pytest.mark.parametrize(
    ("examples", "sentence"),
    [
        ([], "the 0 examples of 'pictures' have 0 bytes; give at least one"),
        (np.zeros((2, 12, 12, 3), np.float32), r"are not raw arrays \(raw is float32\[12, 12, 3\]"),
        (None, "are not raw arrays"),
        ([np.zeros((MOST, MOST, 4), np.uint8)] * 50, "and at most 33,554,432 bytes of them"),
    ],
)
def test_other_examples_are_refused(made: Bundle, tmp_path: Path, examples: Any, sentence: str) -> None:
    found = pictures_app(Path(made.manifest.reference).parent)
    with pytest.raises(ApplicationError, match=sentence):
        Bundle.write(found, found.model(), examples, to=tmp_path / "bundle")


def test_random_raw_arrays_have_the_smallest_size_and_none_too_large() -> None:
    raws = random_raws(FOUR_OF_MANY, 6)
    assert sorted({len(raw) for raw in raws}) == [1, 2, 9]
    assert all(FOUR_OF_MANY.check(raw) is raw for raw in raws)


def recipe_with(raw_examples: Any) -> Recipe:
    return Recipe(
        data=lambda: pytest.fail("the data are not needed"),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD,
        epochs=1,
        raw_examples=raw_examples,
    )


def test_a_training_is_refused_before_it_begins_where_no_bundle_could_be_written(made: Bundle) -> None:
    found = pictures_app(Path(made.manifest.reference).parent)
    check_raw_examples(found, recipe_with(lambda: RAWS))
    with pytest.raises(TrainError, match="has a prepare and its recipe no raw_examples"):
        check_raw_examples(found, recipe_with(None))
    with pytest.raises(TrainError, match="another process has to find"):
        check_raw_examples(found_with(nn.Identity), recipe_with(lambda: RAWS))
    without = FoundApplication(application=small(), module=sys.modules[__name__], reference="")
    with pytest.raises(TrainError, match="has raw_examples and application 'small' no prepare"):
        check_raw_examples(without, recipe_with(lambda: RAWS))


def test_the_golden_examples_of_a_run_are_the_raw_ones() -> None:
    data: Any = None
    assert golden_examples(small(), recipe_with(lambda: RAWS), data) is RAWS


def test_inspect_says_what_inputs_are_prepared_of(made: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    inspect(made.folder, app=None, run=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "raw: uint8[any, any, 4], a picture, RGBA" in said
    assert "5, all answers as recorded" in said
    assert PREPARE in said
