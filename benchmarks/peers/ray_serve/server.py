"""Ray Serve: an HTTP proxy and one replica that batches, each a process of a local Ray cluster."""

import signal
from typing import final

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.peers.bundle_network import Network, peer_arguments

LOGGING = {"enable_access_log": False, "log_level": "WARNING"}
given = peer_arguments()


@serve.deployment(
    num_replicas=1,
    max_ongoing_requests=given.max_queue,
    ray_actor_options={"num_cpus": 0},
    logging_config=LOGGING,
)
@final
class Predict:
    def __init__(self, bundle: str) -> None:
        self._network = Network(bundle)

    @serve.batch(max_batch_size=given.max_batch, batch_wait_timeout_s=given.max_wait_ms / 1000)
    async def _answer(self, bodies: list[bytes]) -> list[bytes]:
        return self._network.answer(bodies)

    async def __call__(self, request: Request) -> Response:
        return Response(await self._answer(await request.body()), media_type="application/octet-stream")


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": given.port}, logging_config=LOGGING)
    serve.run(Predict.bind(str(given.bundle.resolve())), route_prefix="/predict")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
