"""Requests for every server: the golden examples of its bundle, each checked once before the measurement."""

import http.client
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from penstock.bench.load.golden_target import request_bytes
from penstock.bench.load.sender import Target
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError

HOST = "127.0.0.1"
RAW = "application/octet-stream"
READY_S = 120.0


class Addressed(Protocol):
    """A server whose requests differ in path and head only."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        ...

    @property
    def path(self) -> str:
        """URL path of a request; `{model}` is replaced by the model's name."""
        ...

    @property
    def headers(self) -> str:
        """More lines of a request's head, each ended by CRLF."""
        ...


def checked_target(server: Addressed, model: str, bundle: Path, port: int, relative: float = 0.0) -> Target:
    """Return the golden examples as requests, after checking the server's answer to each.

    Args:
        server: The server.
        model: Name of the model.
        bundle: Its bundle.
        port: The server's port.
        relative: Difference that a precision allows, as a share of the largest golden output.

    Raises:
        BenchError: It does not answer in time, or its answers are not the golden ones.
    """
    files = read_bundle(bundle)
    path = server.path.format(model=model)
    golden = files.golden
    tolerance = max(golden.tolerance, relative * float(np.abs(golden.outputs).max()))
    bodies = [chunk.tobytes() for chunk in golden.inputs]
    answers = [_answer(server, port, path, body) for body in bodies]
    preamble_nbytes = _preamble_nbytes(server, answers, golden.outputs[0].nbytes)
    given = np.stack([np.frombuffer(answer[preamble_nbytes:], golden.outputs.dtype) for answer in answers])
    difference = float(np.abs(given - golden.outputs.reshape(given.shape)).max())
    if not difference <= tolerance:
        raise BenchError(
            f"{server.label} answers the golden examples with a difference of {difference:.3g} where "
            f"{tolerance:.3g} is allowed; a wrong answer has no speed."
        )
    return Target(
        host=HOST,
        port=port,
        requests=tuple(request_bytes(HOST, port, path, body, RAW, server.headers) for body in bodies),
        answers=golden.outputs,
        tolerance=tolerance,
        preamble_nbytes=preamble_nbytes,
    )


def _preamble_nbytes(server: Addressed, answers: Sequence[bytes], reply_nbytes: int) -> int:
    lengths = {len(answer) for answer in answers}
    if len(lengths) != 1 or min(lengths) < reply_nbytes:
        raise BenchError(
            f"{server.label} answers with bodies of {sorted(lengths)} bytes; the raw output has {reply_nbytes}."
        )
    return lengths.pop() - reply_nbytes


def _answer(server: Addressed, port: int, path: str, body: bytes) -> bytes:
    """Repeat until the answer is 200: a server may listen before its network is loaded."""
    last = "nothing"
    given_up_s = time.monotonic() + READY_S
    while time.monotonic() < given_up_s:
        try:
            status, answer = _ask(server, port, path, body)
        except (OSError, http.client.HTTPException) as error:
            last = str(error)
        else:
            if status == 200:
                return answer
            last = f"status {status}, {answer[:200]!r}"
        time.sleep(0.2)
    raise BenchError(f"{server.label} did not answer within {READY_S:g} s; the last answer was {last}.")


def _ask(server: Addressed, port: int, path: str, body: bytes) -> tuple[int, bytes]:
    headers = dict(line.split(": ", 1) for line in server.headers.split("\r\n") if line)
    headers |= {"Content-Type": RAW, "Accept": RAW}
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
