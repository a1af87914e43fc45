"""One inference request over gRPC, in the loop of the models."""

import logging
import time
from collections.abc import Callable

from penstock.core.errors import RequestError
from penstock.core.spec import Array
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.response import internal_error
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.conversion import infer_response, parse_infer
from penstock.serve.oip.inference import submit, terms_of
from penstock.serve.registry.model_registry import ModelRegistry

log = logging.getLogger(__name__)

Done = Callable[[pb.ModelInferResponse | RequestError], object]


def submit_call(
    models: ModelRegistry,
    batch_loop: BatchLoop,
    request: pb.ModelInferRequest,
    left_s: float | None,
    owner: str,
    done: Done,
) -> Callable[[], None] | None:
    """Submit an inference request.

    Args:
        models: The models of the server.
        batch_loop: Runs the batches.
        request: The message.
        left_s: Seconds until the deadline of the RPC; None if it has none.
        owner: Owner of the client's key.
        done: Called once with the response or the error, at once if it is rejected.

    Returns:
        A function that cancels the request; None if it was rejected.
    """
    now_ns = time.monotonic_ns()
    batch_loop.run_if_overdue(now_ns)
    try:
        served = models.named(request.model_name, request.model_version)
    except RequestError as error:
        done(error)
        return None
    row, output, max_rows, count = terms_of(served)
    try:
        infer = parse_infer(request, row, output, max_rows, left_s, count)

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                done(result)
            else:
                done(infer_response(infer, result, served.name, served.version, output))

        arrival_ns = batch_loop.arrival_ns(now_ns)
        return submit(served, infer, finished, arrival_ns=arrival_ns, owner=owner, budget_ns=infer.budget_ns)
    except RequestError as error:
        served.count_rejection(error)
        done(error)
    except Exception:
        log.exception("a request of %r failed", served.name)
        done(internal_error())
    return None
