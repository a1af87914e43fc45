"""What a server prints once it has started."""

import pytest

from penstock.serve.control import lifecycle
from penstock.serve.settings import NetworkSettings


def test_a_server_without_models_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "url_of", lambda listener, encrypted: "http://here/")
    lifecycle.announce([], [], object(), NetworkSettings())  # pyright: ignore[reportArgumentType]
    lifecycle.announce(["a", "b", "a"], ["slow"], object(), NetworkSettings())  # pyright: ignore[reportArgumentType]
    assert capsys.readouterr().out.splitlines() == [
        "Serving no model at http://here/",
        "Serving a, b at http://here/",
        "Note: slow",
    ]
