"""The declared `decode` of pictures: what it takes, and which applications it fits."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock import Application, PictureFile, Prepare, RawSpec, TensorSpec
from penstock.core.decode import decode_image
from penstock.core.errors import ApplicationError, InvalidInput, TooLarge
from tests.unit.test_decode_jpeg import jpeg

ANY = RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture", max_shape=(64, 64, 4))
OUTPUT = TensorSpec(dtype="float32", shape=(2,), meaning="scores", name="scores")


def application(decode: Any, shape: tuple[int, ...], **more: Any) -> Application:
    dtype = "float32" if "prepare" in more else "uint8"
    return Application(
        name="pictures",
        input=TensorSpec(dtype=dtype, shape=shape, meaning="a picture"),
        model=":Net",
        decode=decode,
        accepts=("image/jpeg",),
        output=OUTPUT,
        **more,
    )


def test_it_decodes_as_the_function_does() -> None:
    body = jpeg(40, 60)
    hows: list[dict[str, Any]] = [{"mode": "L"}, {"mode": "RGB", "size": (12, 9)}, {"mode": "RGBA"}]
    for how in hows:
        assert np.array_equal(PictureFile(**how)(body, "image/jpeg"), decode_image(body, **how))


def test_a_large_jpeg_is_decoded_at_a_fraction_if_that_is_declared() -> None:
    body = jpeg(400, 600)
    assert PictureFile(mode="RGBA", at_least=(90, 90))(body, "image/jpeg").shape == (100, 150, 4)
    small = PictureFile(mode="RGB", size=(90, 90), at_least=(90, 90))(body, "image/jpeg")
    whole = PictureFile(mode="RGB", size=(90, 90))(body, "image/jpeg")
    assert small.shape == whole.shape == (90, 90, 3)
    assert 0 < np.abs(small.astype(int) - whole).mean() < 3


def test_limits_hold_for_the_picture_in_the_file() -> None:
    decode = PictureFile(mode="RGB", max_pixels=10_000, at_least=(1, 1))
    with pytest.raises(TooLarge, match="600 x 400 pixels; at most 10,000"):
        decode(jpeg(400, 600), "image/jpeg")
    with pytest.raises(InvalidInput, match="cut short or damaged"):
        decode(jpeg(40, 60)[:-200], "image/jpeg")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"mode": "rgb"}, "mode='rgb'; choose"),
        ({"mode": "RGB", "size": (224,)}, r"size=\(224,\); give height and width"),
        ({"mode": "RGB", "size": [224, 224]}, "give height and width"),
        ({"mode": "RGB", "at_least": (0, 5)}, r"at_least=\(0, 5\); give height and width"),
        ({"mode": "RGB", "max_pixels": 0}, "max_pixels=0"),
        ({"mode": "RGB", "size": (224, 224), "at_least": (224, 100)}, r"Give at_least=\(224, 224\) or more"),
    ],
)
def test_a_field_of_another_kind_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApplicationError, match=sentence):
        PictureFile(**given)


def test_it_fits_an_input_of_its_size_or_a_prepare_of_any() -> None:
    application(PictureFile(mode="L", size=(8, 9)), (8, 9))
    application(PictureFile(mode="RGB", size=(8, 9)), (8, 9, 3))
    prepare = Prepare(module=":Resize", raw=ANY)
    application(PictureFile(mode="RGBA", at_least=(8, 8)), (8, 8, 3), prepare=prepare)
    others: list[tuple[PictureFile, tuple[int, ...], dict[str, Any]]] = [
        (PictureFile(mode="L", size=(9, 8)), (8, 9), {}),
        (PictureFile(mode="RGB"), (8, 9, 3), {}),
        (PictureFile(mode="RGBA", size=(8, 9)), (8, 9, 3), {}),
        (PictureFile(mode="RGB"), (8, 8, 3), {"prepare": prepare}),
    ]
    for decode, shape, more in others:
        with pytest.raises(ApplicationError, match=r"it needs uint8\["):
            application(decode, shape, **more)


def test_boxes_are_in_the_pixels_of_whole_pictures() -> None:
    from penstock.apps.detect.app import MAX_SIDE, app

    def declared(decode: PictureFile) -> Application:
        more = {name: getattr(app, name) for name in ("inputs", "outputs", "prepare", "finish", "shows", "accepts")}
        return Application(name="detect", model=":network", decode=decode, **more)

    assert declared(PictureFile(mode="RGBA", max_pixels=MAX_SIDE**2)).shows is not None
    with pytest.raises(ApplicationError, match="boxes are in the pixels of the decoded picture, so decode it whole"):
        declared(PictureFile(mode="RGBA", at_least=(256, 448)))


def beside(**how: Any) -> Application:
    return Application(
        name="beside",
        inputs={
            "picture": TensorSpec(dtype="uint8", shape=(8, 6, 3), meaning="a picture"),
            "age": TensorSpec(dtype="float32", shape=(), meaning="age"),
        },
        output=TensorSpec(dtype="float32", shape=(), meaning="", name="seen"),
        model=":none",
        decode=PictureFile(mode="RGB", **how),
        accepts=("image/png",),
    )


def test_a_picture_beside_other_inputs_names_its_own() -> None:
    decode = beside(size=(8, 6), tensor="picture").decode
    assert isinstance(decode, PictureFile)
    sink = io.BytesIO()
    Image.new("RGB", (60, 80)).save(sink, "PNG")
    assert {name: each.shape for name, each in decode(sink.getvalue(), "image/png").items()} == {"picture": (8, 6, 3)}
    for how, sentence in (
        ({"size": (8, 6)}, "it needs uint8"),
        ({"size": (6, 8), "tensor": "picture"}, r"it needs an input 'picture', uint8\[6, 8, 3\], beside others"),
        ({"size": (8, 6), "tensor": "age"}, "it needs an input 'age'"),
        ({"size": (8, 6), "tensor": "photo"}, "it needs an input 'photo'"),
        ({"tensor": "picture"}, "a picture beside other inputs needs their name and its height and width"),
        ({"size": (8, 6), "tensor": 3}, "PictureFile has tensor=3"),
    ):
        with pytest.raises(ApplicationError, match=sentence):
            beside(**how)
    with pytest.raises(ApplicationError, match="beside others"):
        Application(
            name="alone",
            input=TensorSpec(dtype="uint8", shape=(8, 6, 3), meaning="a picture", name="picture"),
            output=TensorSpec(dtype="float32", shape=(), meaning="", name="seen"),
            model=":none",
            decode=PictureFile(mode="RGB", size=(8, 6), tensor="picture"),
            accepts=("image/png",),
        )
