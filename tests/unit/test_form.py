"""Bodies of multipart/form-data: parts by name, strict bounds, and any bytes at all."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Dim, TensorSpec
from penstock.core.errors import InvalidInput, RequestError, UnsupportedContent
from penstock.core.record import RecordSpec
from penstock.serve.exchange.form import boundary_of, chunk_of_parts, only_file, parts_of, raw_chunk
from tests.support.small import FOUR

TOKENS = Dim("tokens", max=4)
RECORD = RecordSpec(
    (
        TensorSpec(name="ids", dtype="int32", shape=(TOKENS,), meaning="ids", limits=(0, 9)),
        TensorSpec(name="places", dtype="float32", shape=(TOKENS, 2), meaning="places"),
        TensorSpec(name="scale", dtype="float32", shape=(), meaning="scale"),
    )
)
NAMES = tuple(RECORD.by_name)
TABLE = RecordSpec((TensorSpec(name="t", dtype="uint8", shape=(Dim("r", max=3), Dim("c", max=3)), meaning="a table"),))
RAW = "application/octet-stream"


def form(*parts: tuple[str, str, bytes], more: str = "", boundary: str = "b") -> bytes:
    body = b""
    for name, kind, content in parts:
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n'
        head += f"Content-Type: {kind}\r\n" if kind else ""
        body += head.encode() + b"\r\n" + content + b"\r\n"
    return body + f"--{boundary}--\r\n".encode()


def fitting(tokens: int, raw: tuple[str, ...] = ()) -> list[tuple[str, str, bytes]]:
    arrays: dict[str, Any] = {
        "ids": np.arange(tokens, dtype=np.int32),
        "places": np.ones((tokens, 2), np.float32),
        "scale": np.float32(0.5),
    }
    return [
        (name, RAW, each.tobytes()) if name in raw else (name, "", json.dumps(each.tolist()).encode())
        for name, each in arrays.items()
    ]


@pytest.mark.parametrize("raw", [(), ("ids",), ("places", "scale"), NAMES])
@pytest.mark.parametrize("tokens", [1, 4])
def test_json_and_bytes_are_the_same_record(raw: tuple[str, ...], tokens: int) -> None:
    made = chunk_of_parts(RECORD, parts_of(form(*fitting(tokens, raw)), "b", NAMES))
    expected = RECORD.from_numbers({name: json.loads(content) for name, _, content in fitting(tokens)})
    assert made.tobytes() == expected.tobytes()


def test_one_tensor_of_fixed_size_is_a_part_too() -> None:
    for kind, content in (("", b"[1, 2, 3, 4]"), (RAW, np.arange(1, 5, dtype=np.float32).tobytes())):
        made = chunk_of_parts(FOUR, parts_of(form(("input", kind, content)), "b", ("input",)))
        assert made.tolist() == [1, 2, 3, 4]


def test_the_only_part_for_the_only_input_may_have_any_name() -> None:
    parts = parts_of(form(("file", "image/png", b"\x89PNG")), "b", ("picture",))
    assert [(name, part.name) for name, part in parts.items()] == [("picture", "picture")]
    assert only_file(parts, ("image/png",)) is not None
    with pytest.raises(InvalidInput, match=r"There is no input 'file'; there is 'picture'\."):
        parts_of(form(("picture", "", b"[1]"), ("file", "", b"[1]")), "b", ("picture",))
    with pytest.raises(InvalidInput, match=r"The input 'picture' is missing"):
        parts_of(form(), "b", ("picture",))


def test_a_file_that_is_sent_as_bytes_is_told_its_type() -> None:
    picture = TensorSpec(name="picture", dtype="uint8", shape=(2, 2), meaning="a picture")
    accepts = ("image/png", "image/jpeg", "application/json")
    parts = parts_of(form(("picture", RAW, b"a;b;c")), "b", ("picture",))
    said = r"takes exactly 4 raw bytes; send a file with its own Content-Type, image/png or image/jpeg\.$"
    for make in (lambda: chunk_of_parts(picture, parts, accepts), lambda: raw_chunk(picture, b"a;b;c", accepts)):
        with pytest.raises(InvalidInput, match=said):
            make()
    with pytest.raises(InvalidInput, match=r"takes exactly 4 raw bytes\.$"):
        raw_chunk(picture, b"a;b;c", ())


def test_a_file_without_a_type_is_bytes() -> None:
    body = form(("input", "", np.zeros(4, np.float32).tobytes()), more='; filename="x.bin"')
    assert chunk_of_parts(FOUR, parts_of(body, "b", ("input",))).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        (fitting(2)[:2], "The input 'scale' is missing; send 'ids', 'places', 'scale'."),
        ([*fitting(2), ("more", "", b"1")], "There is no input 'more'; there is 'ids', 'places', 'scale'."),
        ([*fitting(2)[:2], fitting(2)[0]], "The body has the input 'ids' twice; send each of"),
        ([*fitting(2), fitting(2)[0]], "The body has the input 'ids' twice; send each of"),
        ([*fitting(2), *fitting(2)], "twice"),
        ([("ids", RAW, b"abc"), *fitting(2)[1:]], "has 3 bytes, which are no int32[tokens<=4]"),
        ([("ids", RAW, bytes(20)), *fitting(2)[1:]], "ids has 5 tokens; it must have from 1 to 4."),
        ([("ids", RAW, b""), *fitting(2)[1:]], "ids has 0 tokens; it must have from 1 to 4."),
        ([("ids", RAW, bytes(4)), *fitting(2)[1:]], "send both equally long"),
        ([("ids", RAW, b"\xff" * 8), *fitting(2)[1:]], "holds -1; it must be from 0 to 9"),
        ([("ids", "", b"[1"), *fitting(2)[1:]], "The part 'ids' is not JSON that can be read"),
        ([("scale", RAW, bytes(5)), *fitting(2)[:2]], "The part 'scale' has 5 bytes"),
        ([("scale", RAW, b"\0\0\xc0\x7f"), *fitting(2)[:2]], "NaN"),
    ],
)
def test_what_does_not_fit_is_one_sentence(parts: list[tuple[str, str, bytes]], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        chunk_of_parts(RECORD, parts_of(form(*parts), "b", NAMES))
    assert sentence in str(caught.value)


def test_bytes_of_two_lengths_are_sent_as_json() -> None:
    with pytest.raises(InvalidInput, match="bytes have no lengths, so send it as JSON"):
        chunk_of_parts(TABLE, parts_of(form(("t", RAW, bytes(4))), "b", ("t",)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b--",
        b"{}",
        form(*fitting(1))[:-6],
        form(*fitting(1), boundary="c"),
    ],
)
def test_no_whole_form_is_one_sentence(body: bytes) -> None:
    with pytest.raises(InvalidInput) as caught:
        parts_of(body, "b", NAMES)
    assert "\n" not in str(caught.value)


def test_an_encoded_part_is_refused() -> None:
    body = form(("input", "text/plain\r\nContent-Transfer-Encoding: base64", b"WzFd"))
    with pytest.raises(InvalidInput, match="is encoded as 'base64'; send its bytes as they are"):
        parts_of(body, "b", ("input",))


@pytest.mark.parametrize("parameters", ["", '; boundary=""', f"; boundary={'x' * 71}"])
def test_a_boundary_is_needed(parameters: str) -> None:
    with pytest.raises(InvalidInput, match="names no boundary of 1 to 70 characters"):
        boundary_of(f"multipart/form-data{parameters}")


def test_a_part_of_a_type_that_is_not_read_is_refused_with_the_list() -> None:
    parts = parts_of(form(("input", "image/png", b"\x89PNG")), "b", ("input",))
    with pytest.raises(
        UnsupportedContent, match=r"'image/png', which is not taken; send text/plain, application/json, "
    ):
        chunk_of_parts(FOUR, parts)
    with pytest.raises(UnsupportedContent, match="send image/jpeg, text/plain, application/json, application/octet"):
        chunk_of_parts(FOUR, parts, ("image/jpeg",))
    for kind in ("", "text/plain", "application/json"):
        made = chunk_of_parts(FOUR, parts_of(form(("input", kind, b"[1, 2, 3, 4]")), "b", ("input",)))
        assert made.tolist() == [1, 2, 3, 4]


def test_a_boundary_may_be_quoted() -> None:
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == "a b"


def test_the_only_part_of_a_type_that_is_decoded_is_a_file() -> None:
    def file(*parts: tuple[str, str, bytes]) -> Any:
        return only_file(parts_of(form(*parts), "b", ("ids", "places")[: len(parts)]), ("image/png", "text/plain"))

    assert file(("ids", "Image/PNG; x=y", b"p")).content == b"p"
    assert file(("ids", "", b"text")).content == b"text"
    assert file(("ids", "image/gif", b"g")) is None
    assert file(("ids", "image/png", b"p"), ("places", "image/png", b"p")) is None


CONTENTS = st.binary(max_size=40) | st.sampled_from([b"[1]", b"[[1, 2]]", b"0.5"])
PARTS = st.lists(st.tuples(st.sampled_from([*NAMES, "x"]), st.sampled_from(["", RAW, "a/b"]), CONTENTS))


@given(st.binary(max_size=300) | PARTS.map(lambda parts: form(*parts)))
def test_any_body_is_a_record_or_one_sentence(body: bytes) -> None:
    try:
        made = chunk_of_parts(RECORD, parts_of(body, "b", NAMES))
    except RequestError as error:
        said = str(error)
    else:
        said = ""
        RECORD.check_numbers(made[None])
    assert "\n" not in said


@given(st.data())
def test_a_form_with_bytes_changed_is_a_record_or_one_sentence(data: st.DataObject) -> None:
    body = bytearray(form(*fitting(2, ("ids",))))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        made = chunk_of_parts(RECORD, parts_of(bytes(body), "b", NAMES))
    except RequestError as error:
        said = str(error)
    else:
        said = ""
        RECORD.check_numbers(made[None])
    assert "\n" not in said


@pytest.mark.parametrize("kind", ["", RAW])
def test_a_tensor_with_a_default_may_be_left_out(kind: str) -> None:
    with_default = RecordSpec(
        (
            TensorSpec(name="ids", dtype="int32", shape=(TOKENS,), meaning="ids"),
            TensorSpec(name="seed", dtype="int32", shape=(), meaning="a seed", default=7),
        )
    )
    content = np.arange(3, dtype=np.int32).tobytes() if kind == RAW else b"[0, 1, 2]"
    parts = parts_of(form(("ids", kind, content)), "b", ("ids", "seed"), ("seed",))
    assert chunk_of_parts(with_default, parts).tobytes() == with_default.from_numbers({"ids": [0, 1, 2]}).tobytes()
