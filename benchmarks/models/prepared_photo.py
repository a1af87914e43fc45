"""A photograph whose middle square a `prepare` makes 224 x 224, and the mean of each colour: next to no network."""

from functools import partial

from benchmarks.models.sized_photo import MAX_SIDE, MEANS, SIDE, Means
from penstock import Application, PictureFile, Prepare, RawSpec, TensorSpec
from penstock.nn import SquareResize

app = Application(
    name="prepared-photo",
    input=TensorSpec(name="picture", dtype="float32", shape=(SIDE, SIDE, 3), meaning="the middle", units="0..255"),
    output=MEANS,
    model=Means,
    decode=PictureFile(mode="RGBA", max_pixels=MAX_SIDE * MAX_SIDE, at_least=(SIDE, SIDE)),
    accepts=("image/jpeg", "image/png"),
    max_body_bytes=1 << 24,
    prepare=Prepare(
        module=partial(SquareResize, SIDE),
        raw=RawSpec(
            dtype="uint8", shape=(None, None, 4), meaning="a photograph, RGBA", max_shape=(MAX_SIDE, MAX_SIDE, 4)
        ),
    ),
)
