"""The record of one gRPC call, for the request log and the traces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from penstock.core.application import MAX_NAME
from penstock.core.errors import RequestError
from penstock.serve.exchange.response import Cancel
from penstock.serve.registry.chain_request import Observe

# Takes the response or the error of a request.
Done = Callable[[Any], object]
Submit = Callable[[Done], Cancel | None]


@final
@dataclass(slots=True, eq=False)
class CallRecord:
    """One call, which is filled in while it is answered.

    Args:
        path: Its path, such as `/inference.GRPCInferenceService/ModelInfer`.
        metadata: What its client sent beside the messages, without binary entries.
        counts: Whether the bytes of responses are counted.

    Attributes:
        model: The model that it asks for, see `name_model`; of a stream the first one. Empty for none.
        nbytes: Bytes of the responses.
        error: Why it was rejected; None if it was not.
        code: Number of its gRPC status.
        status: Name of its gRPC status.
        gone: Whether its client left before the end, or its deadline passed.
        observe_step: Called after each step of a chain; None if the call is not traced.
        around_submit: Submits the request to the model of this name, given a function that does so and one that takes
            the result; in the loop of the models. None if nothing is done around it.
    """

    path: str
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    counts: bool = False
    model: str = field(default="", init=False)
    nbytes: int = field(default=0, init=False)
    error: RequestError | None = field(default=None, init=False)
    code: int = field(default=0, init=False)
    status: str = field(default="OK", init=False)
    gone: bool = field(default=False, init=False)
    observe_step: Observe | None = field(default=None, init=False)
    around_submit: Callable[[str, Submit, Done], Cancel | None] | None = field(default=None, init=False)

    def name_model(self, name: str) -> None:
        """Note the model. A name that is too long is cut, so that a client cannot fill the log."""
        self.model = name[:MAX_NAME]

    def submit(self, name: str, submit: Submit, done: Done) -> Cancel | None:
        """Submit the request; returns a function that cancels it."""
        return submit(done) if self.around_submit is None else self.around_submit(name, submit, done)


# Called as a call begins; returns what is called once it has ended, or None.
CallObserver = Callable[[CallRecord], Callable[[], None] | None]
