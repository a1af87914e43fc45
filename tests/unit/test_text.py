"""Text as bytes: the shared vectors, cuts between characters, and bodies that are none."""

import json
import subprocess
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Dim, TensorSpec
from penstock.core.errors import ApplicationError, InvalidInput, RequestError, TooLarge
from penstock.core.record import RecordSpec
from penstock.core.texts.text import ByteText
from penstock.serve.http.plain_body import chunk_of
from tests.support.small import small

ROOT = Path(__file__).parents[2]
VECTORS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/text.json").read_text())
SCRIPT = """
import { readFileSync } from "node:fs";
import { toBytes } from "%s";
for (const { text, max_bytes, cut } of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    console.log(JSON.stringify({ bytes: Array.from(toBytes(text, { max_bytes, cut })) }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
"""


def taker(max_bytes: int = 16, *, cut: bool = False) -> ByteText:
    return ByteText(tensor="text", max_bytes=max_bytes, cut=cut)


@pytest.mark.parametrize("vector", VECTORS, ids=range(len(VECTORS)))
def test_the_bytes_are_those_of_the_vectors(vector: dict[str, Any]) -> None:
    made = taker(vector["max_bytes"], cut=vector["cut"])
    if "error" in vector:
        with pytest.raises(RequestError) as caught:
            made.of_text(vector["text"])
        assert str(caught.value) == vector["error"]
    else:
        assert made.of_text(vector["text"]).tolist() == vector["bytes"]


def test_a_browser_makes_the_same_bytes(tmp_path: Path) -> None:
    # A copy, because Node.js takes a .js file for a module only with that ending or a package.json.
    node = which("node")
    if node is None:
        pytest.skip("there is no node here; tests/integration/test_app_text.py compares a browser's answers")
    (tmp_path / "text.mjs").write_text((ROOT / "penstock/device/web/text.js").read_text())
    script = tmp_path / "run.mjs"
    script.write_text(SCRIPT % "./text.mjs")
    done = subprocess.run([node, script], input=json.dumps(VECTORS), capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [{key: vector[key] for key in ("bytes", "error") if key in vector} for vector in VECTORS]


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.integers(4, 40))
def test_a_cut_text_is_the_beginning_of_the_whole_one(text: str, size: int) -> None:
    whole = taker(1 << 12).of_text(text).tobytes()
    short = taker(size, cut=True)(text.encode(), "text/plain")["text"]
    assert whole.startswith(short.tobytes())
    assert len(short) <= size
    assert short.tobytes().decode()
    # A character has up to 4 bytes: no more than that is given up.
    assert len(short) >= min(len(whole), size - 3)


@given(st.binary(max_size=200))
def test_any_body_is_bytes_or_one_sentence(body: bytes) -> None:
    for cut in (False, True):
        try:
            made = taker(8, cut=cut)(body, "text/plain")["text"]
        except (InvalidInput, TooLarge) as error:
            made, said = np.zeros(1, np.uint8), str(error)
        else:
            said = ""
        assert made.dtype == np.uint8
        assert 1 <= len(made) <= 8
        assert "\n" not in said


@pytest.mark.parametrize("fields", [{"tensor": "", "max_bytes": 8}, {"tensor": "text", "max_bytes": 3}])
def test_a_wrong_declaration_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApplicationError, match="ByteText has"):
        ByteText(**fields)


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(dtype="uint8", shape=(Dim("n", max=17),), meaning="another length"),
        TensorSpec(dtype="int64", shape=(Dim("n", max=16),), meaning="another type"),
        TensorSpec(dtype="uint8", shape=(16,), meaning="one length"),
    ],
)
def test_an_input_that_is_not_its_bytes_is_refused(spec: TensorSpec) -> None:
    fields = {"decode": taker(), "accepts": ("text/plain",)}
    with pytest.raises(ApplicationError, match="needs one input, uint8 of a Dim with max=16, named 'text'"):
        small(input=spec, **fields)
    fine = TensorSpec(dtype="uint8", shape=(Dim("n", max=16),), meaning="bytes", name="text")
    small(input=fine, **fields)


def test_text_in_json_is_told_to_be_sent_as_text() -> None:
    record = RecordSpec((TensorSpec(name="text", dtype="uint8", shape=(Dim("bytes", max=512),), meaning="a text"),))

    def chunk(body: bytes, *accepts: str) -> Any:
        decode = ByteText(tensor="text", max_bytes=512)
        application = SimpleNamespace(name="app", input=record, accepts=accepts, decode=decode)
        return chunk_of(cast(Any, SimpleNamespace(name="app", application=application)), "application/json", body)

    for body in (b'{"text": "hello"}', b'"hello"'):
        with pytest.raises(InvalidInput, match=r"or send it as text/plain\.$"):
            chunk(body, "text/plain")
        with pytest.raises(InvalidInput) as caught:
            chunk(body, "image/png")
        assert "text/plain" not in str(caught.value)
    with pytest.raises(InvalidInput, match=r"it must be uint8\[bytes<=512\]\.$"):
        chunk(b'{"text": 3}', "text/plain")
    assert bytes(record.unpack(chunk(b'{"text": [104, 105]}', "text/plain"))["text"]) == b"hi"
