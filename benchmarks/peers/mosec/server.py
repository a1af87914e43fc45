"""Mosec: HTTP and batching in Rust, the network in one worker process behind a Unix socket."""

import os
import sys
from typing import Any, final

from mosec import Server, Worker

from benchmarks.peers.bundle_network import load_network, peer_arguments
from benchmarks.peers.text_network import TextNetwork
from penstock.core.bundles.bundle import read_manifest
from penstock.core.record import RecordSpec


@final
class Predict(Worker):
    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        # The worker's process is a fresh one that was started with the same command line.
        given = peer_arguments()
        texts = isinstance(read_manifest(given.bundle).input, RecordSpec)
        self._network = TextNetwork(given.bundle) if texts else load_network(given)

    def deserialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: list[bytes] | bytes) -> list[bytes] | bytes:
        # Mosec gives no list where the largest batch is one row.
        return self._network.answer(data) if isinstance(data, list) else self._network.answer([data])[0]

    def serialize(self, data: Any) -> bytes:
        return data


if __name__ == "__main__":
    given = peer_arguments()
    # On the command line they would be in the way of the worker's own arguments.
    os.environ |= {"MOSEC_ADDRESS": "127.0.0.1", "MOSEC_CAPACITY": str(given.max_queue)}
    server = Server()
    server.append_worker(
        Predict,
        num=given.workers,
        max_batch_size=given.max_batch,
        max_wait_time=round(given.max_wait_ms),
        route="/predict",
    )
    sys.exit(server.run())
