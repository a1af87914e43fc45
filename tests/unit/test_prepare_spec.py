"""Raw arrays of any size: how they and what prepares them are declared, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from penstock.core.application import describe
from penstock.core.errors import ApplicationError, BundleCorrupt, InvalidInput, TooLarge
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.recognition import Recognition
from penstock.core.source_files.find_application import find_application
from tests.support.small import APP_PY, small, write_app

PICTURE: dict[str, Any] = {
    "dtype": "uint8",
    "shape": (None, None, 4),
    "meaning": "a picture, RGBA",
    "max_shape": (40, 40, 4),
}
RAW = RawSpec(**PICTURE)


def decode(body: bytes, content_type: str) -> Any:
    return np.zeros((2, 2, 4), np.uint8)


def test_a_raw_spec_survives_json() -> None:
    assert RawSpec.from_json(json.loads(json.dumps(RAW.to_json()))) == RAW
    assert RAW.describe() == "uint8[any, any, 4]"
    assert RAW.max_bytes == 40 * 40 * 4


def test_a_fixed_shape_needs_no_most() -> None:
    assert RawSpec(dtype="float32", shape=(3,), meaning="three").max_shape == (3,)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dtype": "complex64"}, "has dtype 'complex64'"),
        ({"shape": ()}, r"has shape \(\); it must be a tuple"),
        ({"shape": (None, 0)}, r"has shape \(None, 0\)"),
        ({"shape": [None, 4]}, r"has shape \[None, 4\]"),
        ({"max_shape": ()}, "name the largest size of each dimension"),
        ({"max_shape": (40, 40)}, "name the largest size of each dimension"),
        ({"max_shape": (40, 40, 3)}, "name the largest size of each dimension"),
        ({"max_shape": (40, None, 4)}, "name the largest size of each dimension"),
    ],
)
def test_a_wrong_raw_spec_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        RawSpec(**(PICTURE | fields))


@pytest.mark.parametrize(
    ("raw", "error", "sentence"),
    [
        ([[1]], InvalidInput, r"raw is a list; it must be an array, uint8\[any, any, 4\]"),
        (np.zeros((2, 2, 3), np.uint8), InvalidInput, r"raw is uint8\[2, 2, 3\]; it must be"),
        (np.zeros((2, 2, 4), np.float32), InvalidInput, r"raw is float32\[2, 2, 4\]"),
        (np.zeros((0, 2, 4), np.uint8), InvalidInput, r"raw is uint8\[0, 2, 4\]"),
        (np.zeros((2, 41, 4), np.uint8), TooLarge, r"raw has shape \[2, 41, 4\]; at most \[40, 40, 4\]"),
    ],
)
def test_another_raw_array_is_refused(raw: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        RAW.check(raw)


def test_a_fraction_that_is_no_number_is_refused() -> None:
    spec = RawSpec(dtype="float32", shape=(None,), meaning="numbers", max_shape=(4,))
    assert spec.check(np.ones(4, np.float32)).shape == (4,)
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        spec.check(np.array([np.nan], np.float32))


@pytest.mark.parametrize("change", [{"more": 1}, {"max_shape": None}, {"dtype": "words"}])
def test_a_damaged_raw_spec_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BundleCorrupt, match="raw spec is not readable"):
        RawSpec.from_json(RAW.to_json() | change)


def test_an_application_declares_how_its_input_is_prepared() -> None:
    application = small(prepare=Prepare(module=partial(nn.Upsample, 4), raw=RAW), decode=decode, accepts=("image/png",))
    told = describe(application)
    assert told["raw"] == RAW.to_json()
    assert told["recognition"] is None
    assert describe(small())["raw"] is None


def test_an_application_declares_what_is_said_of_its_output() -> None:
    recognition = Recognition(labels=("a", "b", "c"), groups=("x", "x", "y"))
    assert describe(small(recognition=recognition))["recognition"] == recognition.to_json()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prepare": ":Resize"}, "has prepare=':Resize'; it must be a Prepare"),
        ({"prepare": Prepare(module=":Resize", raw=RAW)}, "has a prepare and no decode"),
        ({"recognition": ("a", "b", "c")}, "it must be a Recognition"),
        ({"recognition": Recognition(labels=("a", "b"))}, "whose labels are not those of its output"),
    ],
)
def test_a_wrong_application_says_what_is_right(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        small(**fields)


@pytest.mark.parametrize("module", [nn.Identity(), 3, None])
def test_a_prepare_makes_its_module_when_it_is_asked(module: Any) -> None:
    with pytest.raises(ApplicationError, match=r"has module=.*; it must be a class or function that makes the module"):
        Prepare(module=module, raw=RAW)


def test_the_module_of_a_prepare_is_found_by_its_path_and_is_a_source(tmp_path: Path) -> None:
    text = APP_PY.replace("import Application", "import Application, Prepare, RawSpec").replace(
        "model=Small,",
        """model=Small,
    decode=lambda body, content_type: None,
    accepts=("image/png",),
    prepare=Prepare(
        module="resizing:Resize",
        raw=RawSpec(dtype="uint8", shape=(None, 4), meaning="rows", max_shape=(9, 4)),
    ),""",
    )
    file = write_app(tmp_path, text)
    (tmp_path / "resizing.py").write_text("from torch import nn\n\n\nclass Resize(nn.Identity):\n    pass\n")
    found = find_application(str(file))
    assert type(found.prepare()).__name__ == "Resize"
    assert set(found.source_sha256()) == {"app.py", "resizing.py"}


def test_an_application_without_a_prepare_makes_none() -> None:
    with pytest.raises(ApplicationError, match="has no prepare; its input is of one size"):
        find_application("digits").prepare()
