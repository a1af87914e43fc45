"""BentoML: its HTTP worker with adaptive batching around the network."""

import os
import shlex
import sys
from typing import Annotated, Any, final

import bentoml
from bentoml.validators import ContentType
from pydantic import BeforeValidator, WithJsonSchema

from benchmarks.peers.bundle_network import Network, peer_arguments

# The worker imports this file without its command line, but inherits the environment.
ARGUMENTS = "PEER_ARGUMENTS"
given = peer_arguments(shlex.split(os.environ.setdefault(ARGUMENTS, shlex.join(sys.argv[1:]))))


def as_batch(body: Any) -> Any:
    return body if isinstance(body, list) else [body]


def only_row(answer: Any) -> Any:
    return answer[0] if isinstance(answer, list) else answer


# A body that is a string in JSON's schema is passed on as it came; a batchable method takes and gives lists.
Body = Annotated[list[bytes], BeforeValidator(as_batch), WithJsonSchema({"type": "string"})]
Answer = Annotated[
    bytes, BeforeValidator(only_row), WithJsonSchema({"type": "string"}), ContentType("application/octet-stream")
]


@bentoml.service(
    workers=1,
    threads=1,
    traffic={"timeout": 60},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
@final
class Predict:
    def __init__(self) -> None:
        self._network = Network(given.bundle)

    @bentoml.api(batchable=True, max_batch_size=given.max_batch, max_latency_ms=round(given.max_wait_ms))
    def predict(self, bodies: Body, /) -> Answer:
        return self._network.answer(bodies)


if __name__ == "__main__":
    Predict.serve_http(host="127.0.0.1", port=given.port)
