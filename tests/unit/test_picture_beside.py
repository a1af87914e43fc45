"""Which bodies may have a picture's file, and so are read in a thread."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.core.errors import InvalidInput
from penstock.core.picture_file import PictureFile
from penstock.serve.exchange.form import JSON
from penstock.serve.http.plain_body import URL_ENCODED, PlainTerms, chunk_of_message, may_have_file

PICTURE = PictureFile(mode="RGB", size=(8, 8), tensor="picture")
FILES = [b'{"picture": "iVBO"}', b' {"age": 1, "picture"\t:\n"iVBO"}', b'{"\\u0070icture": "iVBO"}']


def terms(content_type: str, boundary: str | None = None) -> PlainTerms:
    return PlainTerms(
        content_type=content_type,
        boundary=boundary,
        budget_ns=None,
        low_priority=False,
        timed=False,
        raw_reply=False,
        events=False,
    )


@pytest.mark.parametrize("body", FILES)
@pytest.mark.parametrize("content_type", [JSON, "", URL_ENCODED])
def test_a_file_in_json_is_found(content_type: str, body: bytes) -> None:
    assert may_have_file(terms(content_type), body, PICTURE)


def test_numbers_and_plain_files_are_read_in_the_loop() -> None:
    assert not may_have_file(terms(JSON), b'{"picture": [[1, 2]], "age": 1}', PICTURE)
    assert not may_have_file(terms(""), b"\x89PNG \\", PICTURE)
    assert not may_have_file(terms("image/png"), FILES[0], PICTURE)
    assert may_have_file(terms("multipart/form-data", "x"), b"", PICTURE)


@pytest.mark.parametrize("body", FILES)
def test_a_websocket_message_with_a_file_is_refused(body: bytes) -> None:
    served = SimpleNamespace(name="skin", application=SimpleNamespace(decode=PICTURE))
    with pytest.raises(InvalidInput, match="takes 'picture' as nested lists of numbers"):
        chunk_of_message(cast(Any, served), body)
