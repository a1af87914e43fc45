"""Why a text is not JSON."""

import orjson
import pytest

from penstock.core.wording.json_fault import json_fault


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "it is empty"),
        (b"[1, NaN]", "it has NaN or infinity at character 5, and JSON has finite numbers alone"),
        (b"[-Infinity]", "it has NaN or infinity at character 3, and"),
        (b'{"x": nan}', "it has NaN or infinity at character 7, and"),
        (b"[1, 2", "unexpected end of data: line 1 column 6 (char 5)"),
        (b"[1, None]", "unexpected character, expected a JSON value: line 1 column 5 (char 4)"),
        (b"\xff", "str is not valid UTF-8"),
    ],
)
def test_the_reason_is_what_the_sender_can_change(text: bytes, says: str) -> None:
    with pytest.raises(orjson.JSONDecodeError) as caught:
        orjson.loads(text)
    assert json_fault(caught.value).startswith(says)
