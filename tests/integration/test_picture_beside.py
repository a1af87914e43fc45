"""A picture's file beside other tensors: as a form, in JSON, alone, through a chain, and on the page."""

import io
import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, expect
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from penstock import Bundle
from penstock.core.source_files.find_application import find_application
from tests.support.generating import examples as generating_examples
from tests.support.page import Watch, url_of
from tests.support.serving import RunningServer

pytestmark = pytest.mark.thorough

APPLICATION = """
import torch
from torch import nn

from penstock import Application, PictureFile, TensorSpec


class Skin(nn.Module):
    def forward(self, picture, age, left):
        return torch.stack([picture.float().mean((1, 2, 3)), age, left.float()], -1)


app = Application(
    name="{name}",
    inputs={{
        "picture": TensorSpec(dtype="uint8", shape=(8, 8, 3), meaning="a picture"),
        "age": TensorSpec(dtype="float32", shape=(), meaning="age", limits=(0, 120){default}),
        "left": TensorSpec(dtype="int64", shape=(), meaning="left side", limits=(0, 1), default=0),
    }},
    output=TensorSpec(dtype="float32", shape=(3,), meaning="what was seen", name="seen"),
    decode=PictureFile(mode="RGB", size=(8, 8), max_pixels=1 << 20, tensor="picture"),
    accepts=("image/png",),
    model=Skin,
)
"""
CHAIN = """
from penstock import Chain, ChainStep, TensorSpec

chain = Chain(
    name="twice",
    steps=(ChainStep(part="skin"), ChainStep(run=lambda results, given: 2 * results["skin"], name="double")),
    output=TensorSpec(dtype="float32", shape=(3,), meaning="twice", name="double"),
)
"""
COUNTER = "from tests.support.generating import SERVED as app\n"
TELL = """
import numpy as np
from penstock import Chain, ChainStep


def digits(results, given):
    return {"digits": np.array([3, 1 + int(results["skin"][2])])}


chain = Chain(name="tell", steps=(ChainStep(part="skin"), ChainStep(part="counter", feed=digits)))
"""
JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "multipart/form-data; boundary=x"}


def png(value: int, side: int = 20) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(sink, "PNG")
    return sink.getvalue()


def form(**parts: tuple[str, bytes]) -> bytes:
    made = b""
    for name, (kind, content) in parts.items():
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\nContent-Type: {kind}\r\n\r\n'
        made += head.encode() + content + b"\r\n"
    return made + b"--x--\r\n"


def in_json(**given: Any) -> bytes:
    named = {name: b64encode(each).decode() if isinstance(each, bytes) else each for name, each in given.items()}
    return json.dumps(named).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("skin")
    rng, paths = np.random.default_rng(0), [folder / "chain.py"]
    examples = [{"picture": rng.integers(0, 255, (8, 8, 3), np.uint8), "age": np.float32(age)} for age in (20, 60)]
    for name, default in (("skin", ""), ("free", ", default=7")):
        (folder / f"{name}.py").write_text(APPLICATION.format(name=name, default=default))
        found = find_application(str(folder / f"{name}.py"))
        Bundle.write(found, found.model(), examples, to=folder / name)
        paths.append(folder / name)
    paths[0].write_text(CHAIN)
    (folder / "tell.py").write_text(TELL)
    (folder / "counter_app.py").write_text(COUNTER)
    found = find_application(str(folder / "counter_app.py"))
    Bundle.write(found, found.model(), generating_examples(), to=folder / "counter")
    paths += [folder / "counter", folder / "tell.py"]
    with RunningServer(None, *map(str, paths), "--frontends", "0") as server:
        yield server


def post(server: RunningServer, body: bytes, headers: dict[str, str], app: str = "skin") -> tuple[int, Any]:
    status, _, reply = server.ask("POST", f"/v1/apps/{app}", body, headers)
    return status, reply


NUMBER, PNG, RAW = "application/json", "image/png", "application/octet-stream"


def test_every_form_of_a_request_has_the_same_answer(server: RunningServer) -> None:
    file = png(100)
    nested = np.full((8, 8, 3), 100).tolist()
    large = png(100, 900)
    for body, headers in (
        (form(picture=(PNG, file), age=(NUMBER, b"41"), left=(NUMBER, b"1")), FORM),
        (
            form(picture=(PNG, large), age=(RAW, np.float32(41).tobytes()), left=(NUMBER, b"1")),
            FORM,
        ),
        (
            form(picture=(RAW, bytes([100] * 192)), age=(NUMBER, b"41"), left=(NUMBER, b"1")),
            FORM,
        ),
        (in_json(picture=file, age=41, left=1), JSON),
        (in_json(left=1, age=41, picture="data:image/png;base64," + b64encode(large).decode()), JSON),
        (in_json(picture=nested, age=41, left=1), JSON),
    ):
        for app, factor in (("skin", 1), ("twice", 2)):
            assert post(server, body, headers, app) == (200, [factor * each for each in (100, 41, 1)])
    assert post(server, json.dumps([{"picture": nested, "age": 3}]).encode(), JSON) == (200, [[100, 3, 0]])
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)
    sink = io.BytesIO()
    Image.fromarray(noise).save(sink, "PNG")
    # More than what the event loop reads.
    assert len(sink.getvalue()) > 1 << 17
    status, reply = post(server, in_json(picture=sink.getvalue(), age=41), JSON)
    assert (status, reply[1]) == (200, 41)


@pytest.mark.parametrize("content_type", [JSON["Content-Type"], "", "application/x-www-form-urlencoded"])
@pytest.mark.parametrize("name", ["picture", "\\u0070icture", "pictur\\u0065"])
def test_json_of_any_content_type_may_have_escapes_in_its_names(
    server: RunningServer, content_type: str, name: str
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    file, nested = b64encode(png(100, 900)).decode(), json.dumps(np.full((8, 8, 3), 100).tolist())
    row = '{"%s": %s, "age": 41}'
    for app, factor in (("skin", 1), ("twice", 2)):
        seen = [factor * each for each in (100, 41, 0)]
        for picture in (f'"{file}"', f"  {nested}"):
            assert post(server, (row % (name, picture)).encode(), headers, app) == (200, seen)
        for field, answers in (("inputs", "outputs"), ("instances", "predictions")):
            rows = f'{{"{field}": [{row % (name, nested)}, {row % (name, nested)}]}}'
            assert post(server, rows.encode(), headers, app) == (200, {answers: [seen, seen]})
        status, reply = post(server, (row % (name, '"no base64!"')).encode(), headers, app)
        assert (status, "a text that is no base64" in reply["error"]) == (400, True), reply


def test_a_file_alone_is_taken_where_the_others_have_defaults(server: RunningServer) -> None:
    # Large enough for a thread, too.
    for side in (20, 900):
        assert post(server, png(100, side), {"Content-Type": PNG}, "free") == (200, [100, 7, 0])
    status, reply = post(server, png(100), {"Content-Type": PNG})
    assert (status, "'age'" in reply["error"]) == (400, True), reply


@pytest.mark.parametrize(
    ("body", "headers", "status", "sentence"),
    [
        (in_json(picture="no base64!", age=1), JSON, 400, "picture is a text that is no base64"),
        (in_json(picture=b"no picture", age=1), JSON, 400, "The file is not a picture that can be read"),
        (in_json(picture=png(1)[:60], age=1), JSON, 400, "The picture is cut short or damaged"),
        (in_json(picture=png(1, 1100), age=1), JSON, 413, "pixels"),
        (in_json(picture=png(1)), JSON, 400, "'age'"),
        (in_json(picture=png(1), age="old"), JSON, 400, "age"),
        (in_json(picture=png(1), age=130), JSON, 400, "age"),
        (in_json(picture=png(1), age=1, other=2), JSON, 400, "'other'"),
        (b'{"picture": "%s", "picture": "", "age": 1}' % b64encode(png(1)), JSON, 400, ""),
        (b'{"picture": "%s", "age": 1, "age": 2}' % b64encode(png(1)), JSON, 400, "the input 'age' twice"),
        (b'{"instances": [%s]}' % in_json(picture=png(1), age=1), JSON, 400, "A batch takes pictures as nested lists"),
        (form(picture=(PNG, png(1)[:60]), age=(NUMBER, b"1")), FORM, 400, "The picture is cut short or damaged"),
        (form(picture=(PNG, png(1))), FORM, 400, "'age'"),
        (form(picture=("image/tiff", png(1)), age=(NUMBER, b"1")), FORM, 415, "send image/png, text/plain"),
        (form(picture=(PNG, png(1)), age=(PNG, png(1))), FORM, 415, "The part 'age' has the Content-Type 'image/png'"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(
    server: RunningServer, body: bytes, headers: dict[str, str], status: int, sentence: str
) -> None:
    for app in ("skin", "twice"):
        found, reply = post(server, body, headers, app)
        assert (found, sentence in reply["error"]) == (status, True), reply


@pytest.mark.parametrize("name", ["picture", "\\u0070icture"])
def test_a_websocket_takes_numbers_and_refuses_a_file(server: RunningServer, name: str) -> None:
    nested = json.dumps(np.full((8, 8, 3), 100).tolist())
    url = f"ws://{server.host}:{server.port}/v1/apps/tell/stream"
    with connect(url) as socket:
        socket.send(f'{{"picture": {nested}, "age": 41, "left": 1}}')
        *steps, done = map(json.loads, socket)
    row = f'{{"{name}": "{b64encode(png(100)).decode()}", "age": 41, "left": 1}}'
    # As a request it has the same answer.
    status, reply = post(server, row.encode(), JSON, "tell")
    assert (status, reply["token"]) == (200, [step["token"] for step in steps])
    assert done["done"]["steps"] == len(steps) > 1
    with connect(url) as socket:
        socket.send(row)
        with pytest.raises(ConnectionClosedError, match=r"takes 'picture' as nested lists of .*POST a file"):
            socket.recv(20)


def test_the_page_sends_a_file_beside_the_other_inputs(
    browser: Browser, server: RunningServer, watch: Watch, tmp_path: Path
) -> None:
    page = browser.new_page()
    watch.look_at(page)
    page.goto(url_of(server))
    page.locator("#apps").select_option("skin")
    page.get_by_role("button", name="Example 1").click()
    expect(page.locator(".answer-time")).to_contain_text("round trip")
    page.locator("#json").fill('{"age": 41, "left": 1}')
    (tmp_path / "arm.png").write_bytes(png(100))
    page.locator("#file").set_input_files(tmp_path / "arm.png")
    expect(page.locator(".answer")).to_contain_text("100, 41, 1")
    page.locator("#json").fill('{"age": 42}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer")).to_contain_text("100, 42, 0")
    page.locator("#json").fill("{")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".message")).to_contain_text("The other inputs are not JSON")
    # A picture among what is typed is sent instead of the file.
    page.locator("#json").fill(json.dumps({"picture": np.full((8, 8, 3), 7).tolist(), "age": 43}))
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer")).to_contain_text("7, 43, 0")
    # A browser knows no type of this file. What is chosen replaces the picture that was typed.
    (tmp_path / "arm").write_bytes(png(90))
    page.locator("#file").set_input_files(tmp_path / "arm")
    expect(page.locator(".answer")).to_contain_text("90, 43, 0")
    expect(page.locator("#json")).to_have_value('{"age":43}')
    page.locator("#json").fill('{"age": 44}')
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".answer")).to_contain_text("90, 44, 0")
    page.close()
    assert watch.complaints == []
