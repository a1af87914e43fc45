"""Cars, people, road signs and traffic lights in road scenes: boxes in a photograph of any size."""

from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.dim import Dim
from penstock.core.finish import Finish
from penstock.core.pictures.boxes import Boxes
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.spec import Array, TensorSpec

LABELS = ("car", "person", "sign", "light")
HEIGHT, WIDTH, STRIDE = 256, 448, 4
MAX_SIDE = 4096
THRESHOLD = 0.05

_objects = Dim("objects", max=100, min=0)
_cells = (HEIGHT // STRIDE, WIDTH // STRIDE)


def decode(body: bytes, content_type: str) -> Array:
    """Decode a picture to the pixels that a browser has, uint8 `[H, W, 4]`."""
    return decode_image(body, mode="RGBA", max_pixels=MAX_SIDE * MAX_SIDE)


def frame() -> Any:
    """Make the module that scales a picture into the network's frame."""
    from penstock.nn.letterbox import Letterbox

    return Letterbox(HEIGHT, WIDTH)


def network() -> Any:
    """Make the network."""
    from penstock.models.detector import CentreDetector

    return CentreDetector(len(LABELS))


def peaks() -> Any:
    """Make the module that finds boxes in the network's outputs."""
    from penstock.nn.peak_boxes import PeakBoxes

    return PeakBoxes(stride=STRIDE, most=int(_objects), threshold=THRESHOLD)


app = Application(
    name="detect",
    description="Finds cars, people, road signs and traffic lights in a road scene.",
    input=TensorSpec(
        name="picture",
        dtype="float32",
        shape=(3, HEIGHT, WIDTH),
        meaning="a picture scaled to fit, at the top left, 0 beyond it: red, green, blue",
        units="0..255",
    ),
    outputs={
        "boxes": TensorSpec(
            dtype="float32",
            shape=(_objects, 4),
            meaning="left, top, right and bottom of each object",
            units=f"pixels of the frame, {WIDTH} x {HEIGHT}",
        ),
        "classes": TensorSpec(dtype="int64", shape=(_objects,), meaning="class of each object: " + ", ".join(LABELS)),
        "scores": TensorSpec(dtype="float32", shape=(_objects,), meaning="score of each object", units="probability"),
    },
    decode=decode,
    prepare=Prepare(
        module=":frame",
        raw=RawSpec(
            dtype="uint8",
            shape=(None, None, 4),
            meaning="a whole picture: red, green, blue, opacity",
            units="0..255",
            max_shape=(MAX_SIDE, MAX_SIDE, 4),
        ),
    ),
    finish=Finish(
        module=":peaks",
        inputs={
            "heat": TensorSpec(dtype="float32", shape=(len(LABELS), *_cells), meaning="logit of an object's middle"),
            "sides": TensorSpec(dtype="float32", shape=(4, *_cells), meaning="logarithm of the distance to each side"),
        },
        score="scores",
        threshold=THRESHOLD,
    ),
    shows=Boxes(labels=LABELS, frame=(HEIGHT, WIDTH)),
    accepts=("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"),
    max_body_bytes=1 << 24,
    model=":network",
    recipe="penstock.apps.detect.recipe:recipe",
)
