"""Requests for every server: the golden examples of its bundle, each checked once before the measurement."""

import http.client
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.servers import ComparedServer
from penstock.bench.load.golden_target import request_bytes
from penstock.bench.load.sender import Target
from penstock.core.bundle import read_bundle
from penstock.core.errors import BenchError

HOST = "127.0.0.1"
RAW = "application/octet-stream"
READY_S = 120.0


def checked_target(server: ComparedServer, model: str, bundle: Path, port: int) -> Target:
    """Return the golden examples as requests, after checking the server's answer to each.

    Raises:
        BenchError: It does not answer in time, or its answers are not the golden ones.
    """
    files = read_bundle(bundle)
    path = server.path.format(model=model)
    golden = files.golden
    bodies = [chunk.tobytes() for chunk in golden.inputs]
    answers = [_answer(server, port, path, body) for body in bodies]
    preamble_nbytes = _preamble_nbytes(server, answers, golden.outputs[0].nbytes)
    given = np.stack([np.frombuffer(answer[preamble_nbytes:], golden.outputs.dtype) for answer in answers])
    difference = float(np.abs(given - golden.outputs.reshape(given.shape)).max())
    if not difference <= golden.tolerance:
        raise BenchError(
            f"{server.label} answers the golden examples with a difference of {difference:.3g} where "
            f"{golden.tolerance:.3g} is allowed; a wrong answer has no speed."
        )
    return Target(
        host=HOST,
        port=port,
        requests=tuple(request_bytes(HOST, port, path, body, RAW, server.headers) for body in bodies),
        answers=golden.outputs,
        tolerance=golden.tolerance,
        preamble_nbytes=preamble_nbytes,
    )


def _preamble_nbytes(server: ComparedServer, answers: Sequence[bytes], reply_nbytes: int) -> int:
    lengths = {len(answer) for answer in answers}
    if len(lengths) != 1 or min(lengths) < reply_nbytes:
        raise BenchError(
            f"{server.label} answers with bodies of {sorted(lengths)} bytes; the raw output has {reply_nbytes}."
        )
    return lengths.pop() - reply_nbytes


def _answer(server: ComparedServer, port: int, path: str, body: bytes) -> bytes:
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


def _ask(server: ComparedServer, port: int, path: str, body: bytes) -> tuple[int, bytes]:
    headers = dict(line.split(": ", 1) for line in server.headers.split("\r\n") if line)
    headers |= {"Content-Type": RAW, "Accept": RAW}
    connection = http.client.HTTPConnection(HOST, port, timeout=10)
    try:
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
