"""One inference request over gRPC, in the loop of the models."""

import logging
import time
from collections.abc import Callable
from typing import final

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.spec import Array
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.conversion import infer_response, parse_infer
from penstock.serve.oip.inference import submit, terms_of
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_model import ServedModel

log = logging.getLogger(__name__)


@final
class GrpcInference:
    """One inference request.

    Args:
        models: The models of the server.
        batch_loop: Runs the batches.
        request: The message.
        left_s: Seconds until the deadline of the RPC; None if it has none.
        owner: Owner of the client's key.
        done: Called once with the response or the error, unless the request is cancelled.
    """

    def __init__(
        self,
        models: ModelRegistry,
        batch_loop: BatchLoop,
        request: pb.ModelInferRequest,
        left_s: float | None,
        owner: str,
        done: Callable[[pb.ModelInferResponse | RequestError], object],
    ) -> None:
        self._models, self._request, self._left_s, self._owner, self._done = models, request, left_s, owner, done
        self._batch_loop = batch_loop
        self._cancel: Callable[[], None] | None = None

    def submit(self) -> None:
        """Submit the request; call `done` at once if it is rejected."""
        now_ns = time.monotonic_ns()
        self._batch_loop.run_if_overdue(now_ns)
        try:
            served = self._models.named(self._request.model_name, self._request.model_version)
        except RequestError as error:
            self._done(error)
            return
        try:
            self._ask(served, self._batch_loop.arrival_ns(now_ns))
        except RequestError as error:
            served.count_rejection(error)
            self._done(error)
        except Exception:
            log.exception("a request of %r failed", served.name)
            self._done(internal_error())

    def cancel(self) -> None:
        """Cancel the request: the client is gone."""
        if self._cancel is not None:
            self._cancel()

    def _ask(self, served: ServedModel, arrival_ns: int) -> None:
        row, output, max_rows, count = terms_of(served)
        infer = parse_infer(self._request, row, output, max_rows, self._left_s, count)

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                self._done(result)
            else:
                self._done(infer_response(infer, result, served.name, served.version, output))

        self._cancel = submit(
            served, infer, finished, arrival_ns=arrival_ns, owner=self._owner, budget_ns=infer.budget_ns
        )


def internal_error() -> ComputeFailed:
    """The error of a request on which the server itself failed."""
    return ComputeFailed("The server failed on this request; its log says how.")
