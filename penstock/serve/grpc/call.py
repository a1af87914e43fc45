"""One inference request over gRPC, in the loop of the models."""

import logging
import time
from collections.abc import Callable

from penstock.core.errors import InvalidInput, RequestError
from penstock.core.record import ChunkSpec
from penstock.core.spec import Array
from penstock.serve.batch_loop import BatchLoop
from penstock.serve.exchange.response import internal_error
from penstock.serve.grpc import oip_v2_pb2 as pb
from penstock.serve.grpc.conversion import infer_response, parse_infer
from penstock.serve.oip.inference import HIGHEST, Infer, submit, terms_of
from penstock.serve.oip.shared_memory import Lookup, no_regions
from penstock.serve.registry.chain_request import Observe
from penstock.serve.registry.generated import ENDED
from penstock.serve.registry.model_registry import ModelRegistry
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.served_model import ServedModel
from penstock.serve.registry.whole_answer import GOOD, Ends, ended_by, ends_text
from penstock.serve.table.slots import ANSWERED

log = logging.getLogger(__name__)

Done = Callable[[pb.ModelInferResponse | RequestError], object]
Stepped = Callable[[pb.ModelInferResponse], object]


def submit_call(
    models: ModelRegistry,
    batch_loop: BatchLoop,
    request: pb.ModelInferRequest,
    left_s: float | None,
    owner: str,
    done: Done,
    stepped: Stepped | None = None,
    lookup: Lookup = no_regions,
    address: str = "",
    observe: Observe | None = None,
) -> Callable[[], None] | None:
    """Submit an inference request.

    Args:
        models: The models of the server.
        batch_loop: Runs the batches.
        request: The message.
        left_s: Seconds until the deadline of the RPC; None if it has none.
        owner: Owner of the client's key.
        done: Called once with the response or the error, at once if it is rejected.
        stepped: Called with the response of each step but the last, where the answer takes steps; None for one response
            with all steps.
        lookup: Finds tensors in shared memory.
        address: The client's address; empty if it is not known.
        observe: Called after each step of a chain that answers at once.

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
    try:
        row, output, max_rows, count = terms_of(served)
        if stepped is not None and isinstance(served, ServedChain) and (last := served.generating_part) is not None:
            infer = _one_row(request, row, last.output, max_rows, left_s, lookup)
            return _submit_chain(served, last.output, infer, batch_loop.arrival_ns(now_ns), done, stepped)
        if stepped is not None and isinstance(served, ServedModel) and served.application.generate is not None:
            infer = _one_row(request, row, served.application.output, max_rows, left_s, lookup)
            return _submit_steps(served, infer, batch_loop.arrival_ns(now_ns), done, stepped)
        infer, ends = parse_infer(request, row, output, max_rows, left_s, count, lookup), Ends()

        def finished(result: Array | RequestError) -> None:
            if isinstance(result, RequestError):
                done(result)
                return
            try:
                response = infer_response(infer, result, served.name, served.version, output)
            except RequestError as error:
                done(error)
                return
            if ends:
                response.parameters[ENDED].string_param = ends_text(ends)
            done(response)

        return submit(
            served,
            infer,
            finished,
            arrival_ns=batch_loop.arrival_ns(now_ns),
            owner=owner,
            address=address,
            budget_ns=infer.budget_ns,
            observe=observe,
            ends=ends,
        )
    except RequestError as error:
        served.count_rejection(error)
        done(error)
    except Exception:
        log.exception("a request of %r failed", served.name)
        done(internal_error())
    return None


def _one_row(
    request: pb.ModelInferRequest,
    row: ChunkSpec,
    output: ChunkSpec,
    max_rows: int,
    left_s: float | None,
    lookup: Lookup,
) -> Infer:
    """Parse a request whose answer takes steps; `output` is that of one step."""
    infer = parse_infer(request, row, output, max_rows, left_s, lookup=lookup)
    if infer.shared:
        raise InvalidInput("A stream of steps sends each output; ask for it without shared memory.")
    if len(infer.chunks) != 1:
        raise InvalidInput(f"The request has {len(infer.chunks)} rows; a stream of steps takes one row a request.")
    return infer


def _submit_steps(
    served: ServedModel, infer: Infer, arrival_ns: int, done: Done, stepped: Stepped
) -> Callable[[], None]:
    output_spec = served.application.output

    def on_result(status: int, output: Array, last: bool) -> None:
        if status not in GOOD:
            error = served.error_of(status, infer.budget_ns)
            served.count_rejection(error)
            done(error)
            return
        response = _step_response(infer, served, output_spec, output)
        if not last:
            stepped(response)
            return
        served.counts[ANSWERED] += 1
        response.parameters[ENDED].string_param = ended_by(status)
        done(response)

    low_priority = infer.priority > HIGHEST
    handle = served.submit(infer.chunks[0, ...], on_result, arrival_ns, infer.budget_ns, low_priority)
    return handle.cancel


def _submit_chain(
    served: ServedChain, output_spec: ChunkSpec, infer: Infer, arrival_ns: int, done: Done, stepped: Stepped
) -> Callable[[], None]:
    """Submit one row to a chain whose last part generates; the steps are those of this part."""
    final: pb.ModelInferResponse | None = None

    def on_output(part: ServedModel, status: int, output: Array, last: bool) -> None:
        nonlocal final
        response = _step_response(infer, served, output_spec, output)
        if not last:
            stepped(response)
            return
        response.parameters[ENDED].string_param = ended_by(status)
        final = response

    def finished(result: Array | RequestError) -> None:
        if isinstance(result, RequestError):
            done(result)
            return
        assert final is not None, served.name
        done(final)

    # It counts the outcome itself, with the step that it came from.
    low_priority = infer.priority > HIGHEST
    return served.submit_rows(infer.chunks, finished, arrival_ns, infer.budget_ns, low_priority, stream=on_output)


def _step_response(infer: Infer, served: Served, spec: ChunkSpec, output: Array) -> pb.ModelInferResponse:
    return infer_response(infer, output.reshape(1, *spec.shape), served.name, served.version, spec)
