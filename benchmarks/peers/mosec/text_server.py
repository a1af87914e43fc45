"""Mosec for texts of any length: batches are padded to the longest text, the network is Penstock's own executor.

A body is the token ids as int64, an answer the scores as float32.
"""

import os
import sys
from typing import Any, final

import numpy as np
from mosec import Server, Worker

from benchmarks.peers.bundle_network import peer_arguments
from benchmarks.peers.text_network import TextNetwork
from penstock.core.spec import Array


@final
class Predict(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        # The worker's process is a fresh one that was started with the same command line.
        self._network = TextNetwork(peer_arguments().bundle)

    def deserialize(self, data: bytes) -> Array:
        return np.frombuffer(data, np.int64)

    def forward(self, data: list[Array]) -> list[bytes]:
        return self._network.answer(data)

    def serialize(self, data: Any) -> bytes:
        return data


if __name__ == "__main__":
    given = peer_arguments()
    # On the command line they would be in the way of the worker's own arguments.
    os.environ |= {"MOSEC_ADDRESS": "127.0.0.1", "MOSEC_CAPACITY": str(given.max_queue)}
    server = Server()
    server.append_worker(
        Predict, num=1, max_batch_size=given.max_batch, max_wait_time=round(given.max_wait_ms), route="/predict"
    )
    sys.exit(server.run())
