"""A chain of a detector and a classifier of its crops: over every protocol, and drawn over the picture by the page."""

import io
import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from penstock import Bundle, Client, load_chain
from penstock.core.source_files.find_application import find_application
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

# Each cell of 8 x 8 pixels of the frame that is brighter than its surroundings is a box.
THINGS = """
from functools import partial

import torch
from torch import nn

from penstock import Application, Boxes, Dim, Finish, PictureFile, Prepare, RawSpec, TensorSpec
from penstock.nn.letterbox import Letterbox
from penstock.nn.peak_boxes import PeakBoxes

things = Dim("things", max=4, min=0)


class Network(nn.Module):
    def forward(self, picture):
        bright = nn.functional.avg_pool2d(picture.amax(1, keepdim=True), 8) / 255
        return {"heat": 20 * bright - 10, "sides": torch.full_like(bright, -0.6931472).expand(-1, 4, -1, -1)}


app = Application(
    name="things",
    input=TensorSpec(dtype="float32", shape=(3, 32, 64), meaning="a picture", name="picture"),
    outputs={
        "boxes": TensorSpec(dtype="float32", shape=(things, 4), meaning="a box", units="pixels of the frame"),
        "classes": TensorSpec(dtype="int64", shape=(things,), meaning="its class"),
        "scores": TensorSpec(dtype="float32", shape=(things,), meaning="its score"),
    },
    model=Network,
    decode=PictureFile(mode="RGBA", max_pixels=1 << 16),
    accepts=("image/png",),
    prepare=Prepare(
        module=partial(Letterbox, 32, 64),
        raw=RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture", max_shape=(512, 512, 4)),
    ),
    finish=Finish(
        module=partial(PeakBoxes, stride=8, most=4, threshold=0.05, count="things"),
        inputs={
            "heat": TensorSpec(dtype="float32", shape=(1, 4, 8), meaning="brightness"),
            "sides": TensorSpec(dtype="float32", shape=(4, 4, 8), meaning="logarithm of half a cell"),
        },
        score="scores",
        threshold=0.05,
    ),
    shows=Boxes(labels=("thing",), frame=(32, 64)),
)
"""
COLOURS = """
from functools import partial

from torch import nn

from penstock import Application, PictureFile, Prepare, RawSpec, TensorSpec
from penstock.nn import SquareResize


class Network(nn.Module):
    def forward(self, pixels):
        return (pixels.mean((1, 2)) / 16).softmax(1)


app = Application(
    name="colours",
    input=TensorSpec(dtype="float32", shape=(4, 4, 3), meaning="a crop", name="crop"),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="probability", name="probabilities"),
    model=Network,
    decode=PictureFile(mode="RGBA", max_pixels=1 << 16),
    accepts=("image/png",),
    prepare=Prepare(
        module=partial(SquareResize, 4),
        raw=RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a crop", max_shape=(512, 512, 4)),
    ),
)
"""
CHAIN = """
import numpy as np

from penstock import Boxes, Chain, ChainStep, Dim, TensorSpec
from things import app as things

LABELS = ("red", "green", "blue")
found_things = Dim("found", max=4, min=0)


def found(results, picture):
    return things.shows.found(results["things"], *picture.shape[:2])


def crops(results, picture):
    return [each.crop(picture) for each in found(results, picture)]


def join(results, picture):
    sure = np.array(results["colours"]).reshape(-1, 3)
    boxes = np.array([each.box for each in found(results, picture)], np.float32).reshape(-1, 4)
    return {"boxes": boxes, "classes": sure.argmax(1), "scores": sure.max(1)}


chain = Chain(
    name="painted",
    steps=(ChainStep(part=things), ChainStep(part="colours", each=crops)),
    join=join,
    outputs={
        "boxes": TensorSpec(dtype="float32", shape=(found_things, 4), meaning="a box"),
        "classes": TensorSpec(dtype="int64", shape=(found_things,), meaning="its colour"),
        "scores": TensorSpec(dtype="float32", shape=(found_things,), meaning="its probability"),
    },
    shows=Boxes(labels=LABELS, least=0.6),
)
"""
pytestmark = pytest.mark.slow

PNG = {"Content-Type": "image/png"}
PATH = "/v1/apps/painted"
# In the picture, which is twice as large as the frame.
RED, BLUE, MUD = (16, 16, 32, 32), (80, 32, 96, 48), (48, 0, 64, 16)
COLOUR_OF = {RED: (255, 0, 0), BLUE: (20, 20, 255), MUD: (250, 250, 10)}


class Painted(NamedTuple):
    chain: Path
    things: Path
    colours: Path


def picture(*boxes: tuple[int, int, int, int]) -> np.ndarray:
    """A dark picture with a full square at each box."""
    pixels = np.zeros((64, 128, 4), np.uint8)
    pixels[..., 3] = 255
    for left, top, right, bottom in boxes:
        pixels[top:bottom, left:right, :3] = COLOUR_OF[left, top, right, bottom]
    return pixels


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels[..., :3]).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def painted(tmp_path_factory: pytest.TempPathFactory) -> Painted:
    folder = tmp_path_factory.mktemp("painted")
    examples = {"things": [picture(), picture(RED)], "colours": [picture(RED)[:9], picture(BLUE)[:, :50]]}
    for name, text in (("things", THINGS), ("colours", COLOURS)):
        (folder / f"{name}.py").write_text(text)
        found = find_application(str(folder / f"{name}.py"))
        Bundle.write(found, found.model(), examples[name], to=folder / name)
    (folder / "painted.py").write_text(CHAIN)
    return Painted(folder / "painted.py", folder / "things", folder / "colours")


@pytest.fixture(scope="module")
def server(painted: Painted) -> Iterator[RunningServer]:
    with RunningServer(None, *map(str, painted), "--frontends", "0") as server:
        yield server


def post(server: RunningServer, body: bytes, headers: dict[str, str]) -> tuple[int, Any]:
    status, _, reply = server.ask("POST", PATH, body, headers)
    return status, reply


def test_a_picture_is_answered_with_the_classifiers_labels_in_its_pixels(server: RunningServer) -> None:
    status, reply = post(server, png(picture(RED, BLUE, MUD)), PNG)
    assert status == 200
    found = {tuple(box): kind for box, kind in zip(reply["boxes"], reply["classes"], strict=True)}
    # The third is yellow, for which no class is sure: its score is below `least`.
    assert found == {RED: 0, BLUE: 2}
    assert min(reply["scores"]) > 0.99
    # Of nothing there are no crops, and no error.
    assert post(server, png(picture()), PNG) == (200, {"boxes": [], "classes": [], "scores": []})


def test_arrays_have_all_boxes_over_every_protocol(server: RunningServer, painted: Painted) -> None:
    pixels = picture(RED, MUD)
    expected = load_chain(painted.chain, painted[1:]).predict(pixels)
    assert sorted(map(tuple, expected["boxes"].tolist())) == [RED, MUD]
    with Client(f"http://{server.host}:{server.port}") as client:
        found = client.predict("painted", {"raw": pixels})
        assert {name: found[name].tolist() for name in found} == {name: expected[name].tolist() for name in expected}
    by_name = post(server, json.dumps({"raw": pixels.tolist()}).encode(), {"Content-Type": "application/json"})[1]
    assert by_name["boxes"] == expected["boxes"].tolist()
    given = [{"name": "raw", "datatype": "UINT8", "shape": [1, 64, 128, 4], "data": pixels.ravel().tolist()}]
    reply = server.ask("POST", "/v2/models/painted/infer", json.dumps({"inputs": given}).encode())[2]
    outputs = {each["name"]: each["data"] for each in reply["outputs"]}
    assert outputs["found"] == [2]
    assert outputs["boxes"] == expected["boxes"].ravel().tolist()


def test_what_is_no_picture_is_refused_with_a_sentence(server: RunningServer) -> None:
    whole = png(picture(RED))
    status, reply = post(server, whole[:90], PNG)
    assert (status, reply["error"]) == (400, "The picture is cut short or damaged; send the whole file.")
    assert post(server, b"", PNG)[0] == 400
    status, reply = post(server, png(np.zeros((600, 20, 4), np.uint8)), PNG)
    assert (status, reply["error"][:27]) == (400, "raw has 600 raw_0; it must "), reply
    assert post(server, whole, {"Content-Type": "image/tiff"})[0] == 415
    status, reply = post(server, json.dumps({"raw": [[[0, 0, 0]]]}).encode(), {"Content-Type": "application/json"})
    assert status == 400
    assert "uint8" in reply["error"]


def test_the_page_draws_the_boxes_with_the_classifiers_labels(
    browser: Browser, server: RunningServer, watch: Watch, tmp_path: Path
) -> None:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator("#apps").select_option("painted")
    (tmp_path / "painted.png").write_bytes(png(picture(BLUE)))
    page.locator("#file").set_input_files(tmp_path / "painted.png")
    drawn = page.locator("canvas.boxed")
    expect(drawn).to_be_visible()
    expect(drawn).to_have_attribute("aria-label", "The picture with boxes: blue 1.00")
    url = drawn.evaluate("canvas => canvas.toDataURL()")
    seen = Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")
    # The side of the box has the colour of the class, its inside that of the picture.
    side: Any = seen.getpixel((80, 42))
    # The line covers nine tenths of the pixel.
    assert np.abs(np.array(side) - (255, 122, 217)).max() < 30
    assert seen.getpixel((88, 42)) == COLOUR_OF[BLUE]
    page.close()
    assert watch.complaints == []
