"""Template of the file that declares an image classifier for a folder of pictures."""

import json
from pathlib import Path

from penstock.core.errors import ApplicationError
from penstock.train.data.picture_layouts import find_pictures, labels_of, split_pictures

SIDE = 128
# 1.1 million parameters, 4.5 MB.
WIDTH = 0.75
# Examples of a training run, about; fewer pictures mean more epochs.
VIEWS = 30_000
MIN_EPOCHS = 15

FILE = '''\
"""Classify pictures, trained on a folder of them.

penstock train {file} --out runs/{name}
"""

from penstock.apps.images.declare import image_application

FOLDER = {folder}
# Side of the network's square input, in pixels.
SIDE = {side}
# Labels of the network's outputs, in order; "dog/terrier" is the label "terrier" of the group "dog".
LABELS = (
{labels}
)


def network():
    from penstock.models.calibrated import Calibrated
{network}


def recipe():
    from penstock.apps.images.recipe import folder_data, images_recipe, raw_pictures

    return images_recipe(
        lambda: folder_data(FOLDER, LABELS, SIDE), lambda: raw_pictures(FOLDER), LABELS, epochs={epochs}
    )


app = image_application(
    name="{name}",
    description="Classifies pictures into {count} classes.",
    labels=LABELS,
    side=SIDE,
    model=":network",
    recipe=":recipe",
)
'''

NETWORKS = {
    "mobile": """\
    from penstock.models.mobile import MobileNet

    return Calibrated(MobileNet(len(LABELS), width={width}))""",
    "resnet50": """\
    from penstock.models.resnet import ResNet50

    return Calibrated(ResNet50(len(LABELS)))""",
}


def application_file(folder: Path, name: str, *, file: str, side: int = SIDE, network: str = "mobile") -> str:
    """Fill in the template.

    Args:
        folder: The pictures, see `penstock.train.data.picture_layouts.find_pictures`.
        name: Name of the application.
        file: Name of the file.
        side: Side of the network's square input, in pixels.
        network: `"mobile"` or `"resnet50"`.

    Raises:
        TrainError: The folder holds no labelled pictures, or too few of a class.
        ApplicationError: There is no such network, or only one class.
    """
    if network not in NETWORKS:
        raise ApplicationError(f"there is no network {network!r}; choose {' or '.join(NETWORKS)}.")
    if side < 32:
        raise ApplicationError(f"the side is {side} pixels; give 32 at least, 96 to 224 is usual.")
    pictures = find_pictures(folder)
    labels = labels_of(pictures)
    if len(labels) < 2:
        raise ApplicationError(f"{folder} has the one class {pictures[0].label!r}; there must be two to tell apart.")
    training = len(split_pictures(pictures)["train"])
    return FILE.format(
        folder=json.dumps(str(folder.resolve()), ensure_ascii=False),
        file=file,
        name=name,
        side=side,
        labels="\n".join(f"    {json.dumps(label, ensure_ascii=False)}," for label in labels),
        network=NETWORKS[network].format(width=WIDTH),
        epochs=max(MIN_EPOCHS, round(VIEWS / training)),
        count=len(labels),
    )
