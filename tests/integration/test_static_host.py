"""A static host that is stopped while a request is in progress."""

import threading
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path

import pytest

from benchmarks.acceptance.device.counting_host import CountingHost
from penstock.export import static_host


class Held:
    """Holds the threads of a host that answer requests before they do, until it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        self.came, self.open = threading.Event(), threading.Event()
        real = getattr(static_host._Handler, method)

        def held(handler: object) -> None:
            self.came.set()
            self.open.wait(30)
            real(handler)

        monkeypatch.setattr(static_host._Handler, method, held)


def asked(host: CountingHost) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", host.port, timeout=30)
    connection.request("GET", "/file")
    return connection


def test_a_stopped_host_has_answered_the_requests_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    held = Held(monkeypatch, "_answer")
    with CountingHost(tmp_path) as host:
        connection = asked(host)
        assert held.came.wait(30)
        threading.Timer(0.1, held.open.set).start()
        host.stop()
        assert host.sent == [("/file", 7)]
    assert connection.getresponse().read() == b"content"
    connection.close()


def test_a_stopped_host_answers_nothing_that_it_came_to_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("content")
    held = Held(monkeypatch, "do_GET")
    with CountingHost(tmp_path) as host:
        connection = asked(host)
        assert held.came.wait(30)
        host.stop()
        held.open.set()
        with pytest.raises(RemoteDisconnected):
            connection.getresponse()
        assert host.sent == []
    connection.close()
