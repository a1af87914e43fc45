"""One inference request that came by gRPC, in the loop of the models."""

import logging
from collections.abc import Callable
from typing import final

from penstock.core.errors import ComputeFailed, RequestError
from penstock.core.spec import Array
from penstock.serve.models import Models
from penstock.serve.protocols import grpc_v2_pb2 as pb
from penstock.serve.protocols.grpc_messages import infer_response, parse_infer
from penstock.serve.protocols.infer import ask, terms_of
from penstock.serve.served import Served
from penstock.serve.slots import ANSWERED

log = logging.getLogger(__name__)


@final
class Asked:
    """One inference request.

    Args:
        models: What is served.
        request: The message.
        left_s: What the deadline of the RPC leaves, in seconds; None where it has none.
        owner: Whose key the client has.
        done: Called once, unless the request is taken back.
    """

    def __init__(
        self,
        models: Models,
        request: pb.ModelInferRequest,
        left_s: float | None,
        owner: str,
        done: Callable[[pb.ModelInferResponse | RequestError], object],
    ) -> None:
        self._models, self._request, self._left_s, self._owner, self._done = models, request, left_s, owner, done
        self._cancel: Callable[[], None] | None = None

    def put_in(self) -> None:
        """Put it in, or be done with it at once."""
        try:
            served = self._models.named(self._request.model_name, self._request.model_version)
        except RequestError as error:
            self._done(error)
            return
        try:
            self._ask(served)
        except RequestError as error:
            served.count_refusal(error)
            self._done(error)
        except Exception:
            log.exception("a request of %r failed", served.name)
            self._done(own_fault())

    def take_back(self) -> None:
        """Nobody waits for the answer any more."""
        if self._cancel is not None:
            self._cancel()

    def _ask(self, served: Served) -> None:
        row, output, most_rows, count = terms_of(served)
        infer = parse_infer(self._request, row, output, most_rows, self._left_s, count)

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                served.count_refusal(result)
                self._done(result)
                return
            served.counts[ANSWERED] += 1
            self._done(infer_response(infer, result, served.name, served.version, output))

        self._cancel = ask(served, infer, finished, owner=self._owner, budget_ns=infer.budget_ns)


def own_fault() -> ComputeFailed:
    """What is said where the server itself failed."""
    return ComputeFailed("The server failed on this request; its log says how.")
