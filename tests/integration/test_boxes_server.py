"""Boxes at a real server: in the pixels of the picture that was sent, and drawn over it by the page."""

import io
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect

from penstock.core.source_files.find_application import find_application
from penstock.runtime.bundle_writer import Bundle
from penstock.runtime.load import load
from penstock.verify.backends import TrainingBackend
from penstock.verify.compare import difference_of
from penstock.verify.verify_inputs import Example
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

APPLICATION = '''
"""One box, whose score is the brightness of the picture."""

from penstock import Application, Boxes, Dim, Prepare, RawSpec, TensorSpec
from penstock.core.decode import decode_image

HEIGHT, WIDTH = 8, 16
objects = Dim("objects", max=2, min=0)


def network():
    import torch

    class Bright(torch.nn.Module):
        def forward(self, picture):
            score = picture.mean((1, 2, 3)) / 255
            boxes = torch.tensor([[2.0, 1.0, 6.0, 5.0], [9.0, 1.0, 13.0, 5.0]]).expand(len(picture), 2, 4)
            scores = torch.stack([score, score / 8], 1)
            classes = torch.tensor([1, 0]).expand(len(picture), 2)
            return {"boxes": boxes, "classes": classes, "scores": scores, "objects": (scores > 0.05).sum(1)}

    return Bright()


def frame():
    from penstock.nn.letterbox import Letterbox

    return Letterbox(HEIGHT, WIDTH)


app = Application(
    name="bright",
    input=TensorSpec(dtype="float32", shape=(3, HEIGHT, WIDTH), meaning="a picture", name="picture"),
    outputs={
        "boxes": TensorSpec(dtype="float32", shape=(objects, 4), meaning="a box", units="pixels of the frame"),
        "classes": TensorSpec(dtype="int64", shape=(objects,), meaning="its class"),
        "scores": TensorSpec(dtype="float32", shape=(objects,), meaning="its score"),
    },
    model=network,
    decode=lambda body, content_type: decode_image(body, mode="RGBA", max_pixels=1 << 20),
    accepts=("image/png",),
    prepare=Prepare(
        module=":frame",
        raw=RawSpec(dtype="uint8", shape=(None, None, 4), meaning="a picture", max_shape=(512, 512, 4)),
    ),
    shows=Boxes(labels=("car", "person"), frame=(HEIGHT, WIDTH)),
)
'''
# Twice as large as the frame.
WHITE = np.full((16, 32, 4), 255, np.uint8)
BLUE, WHITE_PIXEL = (77, 208, 225), (255, 255, 255)


def png(pixels: np.ndarray) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels[..., :3]).save(sink, "PNG")
    return sink.getvalue()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bright")
    (folder / "app.py").write_text(APPLICATION)
    found = find_application(str(folder / "app.py"))
    Bundle.write(found, found.model(), [WHITE, WHITE[:9] // 2], to=folder / "bundle")
    return folder / "bundle"


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[RunningServer]:
    with RunningServer(bundle) as server:
        yield server


def test_a_picture_is_answered_in_its_pixels_and_an_array_in_those_of_the_frame(
    server: RunningServer, bundle: Path
) -> None:
    status, _, reply = server.ask("POST", "/v1/apps/bright", png(WHITE), {"Content-Type": "image/png"})
    assert status == 200
    # The score of the other one is 1/8.
    assert reply == {"boxes": [[4, 2, 12, 10]], "classes": [1], "scores": [1]}
    numbers = orjson.dumps(np.full((3, 8, 16), 255).tolist())
    _, _, of_frame = server.ask("POST", "/v1/apps/bright", numbers, {"Content-Type": "application/json"})
    assert of_frame["boxes"] == [[2, 1, 6, 5], [9, 1, 13, 5]]
    _, _, black = server.ask("POST", "/v1/apps/bright", png(WHITE // 99), {"Content-Type": "image/png"})
    assert black == {"boxes": [], "classes": [], "scores": []}
    training, white = TrainingBackend(load(bundle)), Example(name="white", raw=WHITE, body=b"a PNG")
    assert difference_of(training.reply(training.answer(white), white), reply) == 0


def test_recorded_boxes_are_in_the_pixels_of_the_picture_as_the_answer_is(server: RunningServer) -> None:
    examples = server.ask("GET", "/v1/apps/bright/examples")[2]["examples"]
    assert sorted(len(example["outputs"]["boxes"]) for example in examples) == [0, 1]
    for example in examples:
        body, kind = b64decode(example["body"]), {"Content-Type": example["content_type"]}
        reply = server.ask("POST", "/v1/apps/bright", body, kind)[2]
        recorded = example["outputs"]
        assert set(recorded) == set(reply)
        for name, numbers in recorded.items():
            np.testing.assert_allclose(reply[name], numbers, rtol=1e-5)


@pytest.mark.thorough
def test_the_page_draws_the_boxes_over_the_picture(
    browser: Browser, server: RunningServer, watch: Watch, tmp_path: Path
) -> None:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    file = tmp_path / "white.png"
    large = WHITE.repeat(16, 0).repeat(16, 1)
    file.write_bytes(png(large))
    page.locator("#file").set_input_files(file)
    picture = page.locator("canvas.boxed")
    expect(picture).to_be_visible()
    expect(picture).to_have_attribute("aria-label", "The picture with boxes: person 1.00")

    # Read once: a browser complains of a canvas that is read again and again.
    url = picture.evaluate("canvas => canvas.toDataURL()")
    seen = Image.open(io.BytesIO(b64decode(url.partition(",")[2]))).convert("RGB")
    # The left side of the person's box, its inside, and the car's, whose score is below 0.3.
    places = (64, 150), (120, 130), (288, 100)
    assert [seen.getpixel(place) for place in places] == [BLUE, WHITE_PIXEL, WHITE_PIXEL]
    page.locator("#json").fill("[]")
    page.get_by_role("button", name="Send").click()
    expect(picture).to_be_hidden()
    page.close()
    assert all("status of 4" in complaint for complaint in watch.complaints)
