"""Which media types the header Accept names."""

import pytest

from penstock.serve.exchange.accept import accepts
from penstock.serve.exchange.request import Head

EVENTS = "text/event-stream"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (EVENTS, True),
        ("Text/Event-Stream", True),
        ("application/json, text/event-stream ; q=0.5", True),
        ("text/event-stream;q=0.001", True),
        ("text/event-stream;q=1;level=1", True),
        ("text/event-stream;q=0, application/json", False),
        ("text/event-stream; Q=0.000", False),
        ("text/event-stream-x", False),
        ("x-text/event-stream", False),
        ("application/json;profile=text/event-stream", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_a_type_is_accepted_where_it_is_named_and_not_refused(accept: str, expected: bool) -> None:
    assert accepts(Head("POST", "/", {"accept": accept}), EVENTS) is expected
    assert not accepts(Head("POST", "/", {}), EVENTS)
