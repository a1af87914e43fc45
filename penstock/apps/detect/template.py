"""Template of the file that declares a detector."""

import json
from pathlib import Path

from penstock.apps.detect.layouts import BoxedPicture, coco_labels, coco_pictures
from penstock.core.errors import ApplicationError

FILE = """\
\"\"\"Find objects in pictures of any size: boxes, each with a class and a score.

penstock train {file} --out runs/{name}
penstock serve runs/{name}/bundle --latency-ms 500
curl --data-binary @picture.png -H 'Content-Type: image/png' http://127.0.0.1:8000/v1/apps/{name}
penstock export runs/{name}/bundle --out packs/{name}
penstock watch packs/{name} --source 0

What to change, from the top: the labels, the frame, the network, the examples and the number of steps.
\"\"\"

import numpy as np

from penstock import Application, Boxes, Dim, Finish, Prepare, RawSpec, TensorSpec
from penstock.core.decode import decode_image

# In the order of the classes' numbers.
LABELS = (
{labels}
)
# The frame: height and width of what the network sees, multiples of 32. Pictures of any size are scaled to fit.
# A larger frame finds smaller things, and takes more time.
HEIGHT, WIDTH = {height}, {width}
# The longest side of a picture that is taken.
MAX_SIDE = 4096
# Pixels of the frame for each cell of the network's outputs.
STRIDE = 4
# The network gives boxes from THRESHOLD on, to measure precision; pictures are answered with those from LEAST on.
THRESHOLD, LEAST = 0.05, 0.3
# The boxes of a picture, at most.
OBJECTS = Dim("objects", max=100, min=0)


def decode(body, content_type):
    \"\"\"Bytes of a file to pixels.\"\"\"
    return decode_image(body, mode="RGBA", max_pixels=MAX_SIDE * MAX_SIDE)


def frame():
    \"\"\"Pixels of any size to the frame; it is exported, and runs on servers, devices and in browsers.\"\"\"
    from penstock.nn.letterbox import Letterbox

    return Letterbox(HEIGHT, WIDTH)


def network():
    \"\"\"Without anchors: for each cell the score of an object's middle, and the distances to the sides of its box.

    Any module with the outputs of `Finish.inputs` below takes its place.
    \"\"\"
    from penstock.models.detector import CentreDetector

    return CentreDetector(len(LABELS))


def peaks():
    \"\"\"The network's outputs to boxes.\"\"\"
    from penstock.nn.peak_boxes import PeakBoxes

    return PeakBoxes(stride=STRIDE, most=int(OBJECTS), threshold=THRESHOLD)


{data}


def recipe():
    # A focal loss, GIoU of the boxes, AdamW with one cosine, mirrored pictures in other light, an EMA of the weights.
    # `dataclasses.replace` changes a field.
    from penstock.apps.detect.recipe import detect_recipe

    return detect_recipe(
        data, raw_examples, steps={steps}, batch_size=16, classes=len(LABELS), finish=peaks
    )


app = Application(
    name="{name}",
    description="Finds objects of {count} classes.",
    input=TensorSpec(
        name="picture",
        dtype="float32",
        shape=(3, HEIGHT, WIDTH),
        meaning="a picture scaled to fit, at the top left, 0 beyond it: red, green, blue",
        units="0..255",
    ),
    outputs={{
        "boxes": TensorSpec(
            dtype="float32",
            shape=(OBJECTS, 4),
            meaning="left, top, right and bottom of each object",
            units="pixels of the frame",
        ),
        "classes": TensorSpec(dtype="int64", shape=(OBJECTS,), meaning="class of each object"),
        "scores": TensorSpec(dtype="float32", shape=(OBJECTS,), meaning="score of each object", units="probability"),
    }},
    decode=decode,
    accepts=("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"),
    max_body_bytes=1 << 24,
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
    model=":network",
    # Training sees the network's own outputs; every other place sees boxes.
    finish=Finish(
        module=":peaks",
        inputs={{
            "heat": TensorSpec(
                dtype="float32",
                shape=(len(LABELS), HEIGHT // STRIDE, WIDTH // STRIDE),
                meaning="logit of an object's middle",
            ),
            "sides": TensorSpec(
                dtype="float32",
                shape=(4, HEIGHT // STRIDE, WIDTH // STRIDE),
                meaning="logarithm of the distance to each side",
            ),
        }},
        score="scores",
        threshold=THRESHOLD,
    ),
    # The answer to a picture has boxes in its own pixels; the page, `penstock watch` and the web app draw them.
    shows=Boxes(labels=LABELS, frame=(HEIGHT, WIDTH), least=LEAST),
    recipe=":recipe",
)
"""

# Pictures that the template draws itself, so that every command works before there are others.
MADE_LABELS = ("square", "disc")
MADE_FRAME, MADE_STEPS = (128, 192), 400
MADE = """\
def drawn(seed):
    \"\"\"A picture `[H, W, 3]`, its boxes `[n, 4]` in pixels and their classes `[n]`; to be replaced by yours.\"\"\"
    rng = np.random.default_rng(seed)
    pixels = np.clip(rng.normal(90, 12, (HEIGHT, WIDTH, 3)), 0, 255).astype(np.uint8)
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    boxes, classes = [], []
    for _ in range(rng.integers(0, 4)):
        half = rng.integers(8, 24)
        across, down = rng.integers(half, WIDTH - half), rng.integers(half, HEIGHT - half)
        kind = rng.integers(len(LABELS))
        if kind == LABELS.index("square"):
            inside = (abs(x - across) < half) & (abs(y - down) < half)
        else:
            inside = (x - across) ** 2 + (y - down) ** 2 < half**2
        pixels[inside] = rng.integers(0, 256, 3)
        boxes.append((across - half, down - half, across + half, down + half))
        classes.append(kind)
    return pixels, np.array(boxes, np.float32).reshape(-1, 4), np.array(classes, np.int64)


def data():
    from penstock.train.recipe import ArraySet, Data

    def examples(seeds):
        made = [drawn(seed) for seed in seeds]
        # Rows beyond the objects of a picture have the class -1.
        boxes, classes = np.zeros((len(made), 4, 4), np.float32), np.full((len(made), 4), -1)
        for row, (_, found, kinds) in enumerate(made):
            boxes[row, : len(found)], classes[row, : len(kinds)] = found, kinds
        pixels = np.stack([pixels.transpose(2, 0, 1) for pixels, _, _ in made])
        return ArraySet(inputs=pixels, targets={{"boxes": boxes, "classes": classes}})

    # The second range is held out.
    return Data(train=examples(range(400)), validation=examples(range(1_000, 1_040)))


def raw_examples():
    \"\"\"Whole pictures as `decode` gives them, to check with that every place gives the same boxes.\"\"\"
    return [np.dstack([drawn(seed)[0], np.full((HEIGHT, WIDTH), 255, np.uint8)]) for seed in range(2_000, 2_008)]"""

READ_FRAME = (320, 320)
# Views of pictures in a training, about; a training from scratch needs many.
VIEWS, MIN_STEPS, BATCH = 200_000, 2_000, 16
READ = """\
# Boxes in COCO's format, and the folder of the pictures.
ANNOTATIONS = {annotations}
PICTURES = {pictures}


def pictures():
    \"\"\"All pictures with their boxes, in a fixed order; every tenth is held out.\"\"\"
    from penstock.apps.detect.layouts import coco_pictures

    found = coco_pictures(ANNOTATIONS, PICTURES, names={{label: label for label in LABELS}}, labels=LABELS)
    order = np.random.default_rng(0).permutation(len(found))
    held = max(1, len(found) // 10)
    return [found[at] for at in order[held:]], [found[at] for at in order[:held]]


def data():
    from penstock.apps.detect.layouts import BoxedPictures
    from penstock.train.recipe import Data

    training, held_out = (BoxedPictures(part, frame=(HEIGHT, WIDTH)) for part in pictures())
    return Data(train=training, validation=held_out)


def raw_examples():
    \"\"\"Whole pictures as `decode` gives them, to check with that every place gives the same boxes.\"\"\"
    from penstock.apps.detect.layouts import raw_picture

    return [raw_picture(each.file) for each in pictures()[1][:8]]"""


def application_file(
    name: str, *, file: str, annotations: Path | None = None, pictures: Path | None = None
) -> tuple[str, list[BoxedPicture]]:
    """Fill in the template.

    Args:
        name: Name of the application.
        file: Name of the file.
        annotations: Boxes in COCO's format; None for pictures that the file draws itself.
        pictures: The folder of the pictures; by default that of `annotations`.

    Returns:
        The text, and the pictures of the annotations.

    Raises:
        TrainError: The annotations cannot be read, or have no boxes.
        ApplicationError: There are pictures without annotations, or fewer than two pictures.
    """
    if annotations is None:
        if pictures is not None:
            raise ApplicationError(f"--pictures is {pictures}, without boxes; give them with --data, in COCO's format.")
        return _filled(name, file, MADE_LABELS, MADE_FRAME, MADE.format(), MADE_STEPS), []
    labels, folder = coco_labels(annotations), pictures or annotations.parent
    found = coco_pictures(annotations, folder, names={label: label for label in labels}, labels=labels)
    if len(found) < 2:
        raise ApplicationError(f"{annotations} has {len(found)} picture; give two at least, as one is held out.")
    data = READ.format(annotations=_quoted(annotations), pictures=_quoted(folder))
    return _filled(name, file, labels, READ_FRAME, data, max(MIN_STEPS, VIEWS // BATCH)), found


def _quoted(path: Path) -> str:
    return json.dumps(str(path.resolve()), ensure_ascii=False)


def _filled(name: str, file: str, labels: tuple[str, ...], frame: tuple[int, int], data: str, steps: int) -> str:
    return FILE.format(
        name=name,
        file=file,
        labels="\n".join(f"    {json.dumps(label, ensure_ascii=False)}," for label in labels),
        height=frame[0],
        width=frame[1],
        data=data,
        steps=f"{steps:_}",
        count=len(labels),
    )
