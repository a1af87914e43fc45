"""What a server prints once it has started."""

from pathlib import Path

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


def test_a_server_does_not_need_its_output(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lifecycle, "url_of", lambda listener, encrypted: "http://here/")
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        lifecycle.announce(["a"], ["slow"], object(), NetworkSettings())  # pyright: ignore[reportArgumentType]
    (record,) = caplog.records
    said = "what is served cannot be printed (No space left on device): Serving a at http://here/; Note: slow"
    assert record.getMessage() == said
