"""Connections that live long move to the front-end that has less to do, and their clients notice nothing."""

import http.client
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import final

import numpy as np
import pytest
from PIL import Image

from tests.support.live import CHUNK, new_live_bundle, sounds
from tests.support.processes import eventually, owner
from tests.support.serving import RunningServer, write_doubler

pytestmark = pytest.mark.thorough

CLIENTS, TRIED = 7, 60


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    live, doubler = new_live_bundle(tmp_path_factory), write_doubler(tmp_path_factory.mktemp("doubler"))
    with RunningServer(live, str(doubler), "--frontends", "2") as server:
        yield server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def picture() -> bytes:
    """A photograph of noise, which takes a front-end milliseconds to decode."""
    pixels = np.random.default_rng(1).integers(0, 256, (500, 375), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def owner_of(server: RunningServer, client: http.client.HTTPConnection) -> str:
    return owner(server, client.sock.getsockname()[1])


def clients_of_one(server: RunningServer, stack: ExitStack) -> list[http.client.HTTPConnection]:
    """Connections that one front-end has."""
    found = dict[str, list[http.client.HTTPConnection]]()
    for _ in range(TRIED):
        client = http.client.HTTPConnection(server.host, server.port, timeout=30)
        stack.callback(client.close)
        client.connect()
        # Some front-end accepts it.
        eventually(lambda client=client: bool(owner_of(server, client)), within_s=10)
        same = found.setdefault(owner_of(server, client), [])
        same.append(client)
        if len(same) == CLIENTS:
            return same
    raise AssertionError({name: len(clients) for name, clients in found.items()})


def chunk_request(*, first: bool) -> bytes:
    """A chunk of a live signal, as a request of the Open Inference Protocol."""
    data = sounds(1, CHUNK).tolist()
    sound = {"name": "sound", "datatype": "INT16", "shape": [1, CHUNK], "data": data}
    return json.dumps({"inputs": [sound], "parameters": {"sequence_id": 7, "sequence_start": first}}).encode()


@final
class Asking:
    """Clients that ask again and again, each over its own connection.

    Attributes:
        statuses: Of the answers.
        faults: What clients raised.
    """

    def __init__(self) -> None:
        self.statuses = Counter[int]()
        self.faults = list[Exception]()
        self._over = threading.Event()
        self._threads = list[threading.Thread]()

    def begin(self, client: http.client.HTTPConnection, path: str, body: bytes, content_type: str) -> None:
        thread = threading.Thread(target=self._ask, args=(client, path, body, content_type))
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: http.client.HTTPConnection, path: str, body: bytes, content_type: str) -> None:
        try:
            while not self._over.is_set():
                self.statuses[ask(client, path, body, content_type)] += 1
        except (OSError, http.client.HTTPException) as fault:
            self.faults.append(fault)


def ask(client: http.client.HTTPConnection, path: str, body: bytes, content_type: str) -> int:
    client.request("POST", path, body, {"Content-Type": content_type})
    answer = client.getresponse()
    answer.read()
    return answer.status


def are_spread(server: RunningServer, clients: list[http.client.HTTPConnection]) -> bool:
    time.sleep(0.5)  # to look takes time, which the server is to have
    return len({owner_of(server, client) for client in clients}) == 2


def test_busy_connections_move_and_one_with_a_sequence_stays(server: RunningServer, stack: ExitStack) -> None:
    sender, *clients = clients_of_one(server, stack)
    first = owner_of(server, sender)
    sequence = "/v2/models/hark/infer"
    assert ask(sender, sequence, chunk_request(first=True), "application/json") == 200
    asking = Asking()
    stack.callback(asking.end)
    asking.begin(sender, sequence, chunk_request(first=False), "application/json")
    for client in clients:
        asking.begin(client, "/v1/apps/doubler", picture(), "image/jpeg")
    eventually(lambda: are_spread(server, clients), within_s=60)
    asking.end()
    assert (asking.faults, set(asking.statuses)) == ([], {200})
    assert owner_of(server, sender) == first
