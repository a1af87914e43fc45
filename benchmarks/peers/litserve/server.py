"""LitServe: FastAPI in one process, the network in another, batches collected from the queue between them."""

from typing import Annotated, Any, final

import litserve
from fastapi import Body, Response

from benchmarks.peers.bundle_network import load_network, peer_arguments


@final
class Predict(litserve.LitAPI):
    def setup(self, device: Any) -> None:
        self._network = load_network(peer_arguments())

    # With `Request` instead, LitServe would read the body as JSON.
    def decode_request(self, request: Annotated[bytes, Body(media_type="application/octet-stream")]) -> bytes:
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, inputs: list[bytes]) -> list[bytes]:
        return self._network.answer(inputs)

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output, media_type="application/octet-stream")


if __name__ == "__main__":
    given = peer_arguments()
    api = Predict(max_batch_size=given.max_batch, batch_timeout=given.max_wait_ms / 1000, api_path="/predict")
    server = litserve.LitServer(
        api,
        accelerator=given.device or "cpu",
        devices=1,
        workers_per_device=given.workers,
        timeout=given.timeout_ms / 1000,
        fast_queue=True,
    )
    server.run(
        host="127.0.0.1",
        port=given.port,
        num_api_servers=given.http,
        log_level="warning",
        access_log=False,
        generate_client_file=False,
    )
