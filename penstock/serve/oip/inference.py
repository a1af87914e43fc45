"""An inference request of the Open Inference Protocol, and the checks that HTTP and gRPC share."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np

from penstock.core.errors import InvalidInput, RequestError, TooLarge
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array, TensorSpec
from penstock.serve.exchange.budget import MAX_BUDGET_MS
from penstock.serve.exchange.timing import Timing
from penstock.serve.oip.shared_memory import SharedPart
from penstock.serve.registry.chain_request import Observe
from penstock.serve.registry.served_chain import Served, ServedChain
from penstock.serve.registry.whole_answer import Ends
from penstock.serve.streams.sequences import Finished, SequencePlace
from penstock.serve.table.slots import ANSWERED

# n rows of one request

_MAX_PRIORITY = (1 << 64) - 1
# Greater numbers are low priority.
HIGHEST = 1
# Triton has the same limit.
MAX_ID_CHARACTERS = 128
# A request may want an output so many times, though it is given once.
MAX_REPEATED = 16

# From name, datatype and shape of an input tensor: its number of rows, and whether it has a batch dimension.
Count = Callable[[Any, Any, tuple[int, ...], TensorSpec, int], tuple[int, bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Infer:
    """One inference request.

    Args:
        id: The client's id of the request, or None.
        chunks: `[n, *spec.shape]`; of a live signal, the n frames of one chunk.
        batched: Whether the request had the batch dimension; without it, neither has the response.
        wanted: Names of the outputs that the response has, each with whether it is wanted as raw bytes.
        budget_ns: Its latency budget, or None.
        priority: As in the protocol: 1 is the highest, 0 leaves it to the server.
        place: Place in a sequence; None without one.
        shared: The parts of shared memory that outputs are written to, by name.
    """

    id: str | None
    chunks: Array
    batched: bool
    wanted: dict[str, bool]
    budget_ns: int | None
    priority: int = 0
    place: SequencePlace | None = None
    shared: dict[str, SharedPart] = field(default_factory=dict[str, SharedPart])


class GivenTensor(NamedTuple):
    """One input tensor of a request.

    Args:
        name: Its name, as sent.
        datatype: Its datatype, as sent.
        shape: Its shape, as sent.
        read: Reads its rows, `[n, *spec.shape]`, given the spec and n.
    """

    name: Any
    datatype: Any
    shape: tuple[int, ...]
    read: Callable[[TensorSpec, int], Array]


def terms_of(served: Served) -> tuple[ChunkSpec, ChunkSpec, int, Count]:
    """Return the specs of a row and of the output, the maximum rows, and the function that counts rows.

    Raises:
        InvalidInput: The model is a chain whose first part is live.
    """
    if isinstance(served, ServedChain):
        served.reject_single()
    application, sequences = served.application, served.sequences
    if sequences is None:
        return application.input, application.answer, served.max_rows, rows_of
    return sequences.frame, application.output, sequences.max_frames, frames_of


def submit(
    served: Served,
    infer: Infer,
    finished: Finished,
    *,
    arrival_ns: int,
    owner: str,
    address: str = "",
    budget_ns: int | None,
    low_priority: bool = False,
    observe: Observe | None = None,
    timing: Timing | None = None,
    ends: Ends | None = None,
) -> Callable[[], None]:
    """Submit a request: its rows, or one chunk of a sequence. Its outcome is counted for the model.

    Args:
        served: The model.
        infer: The request.
        finished: Called once with the outputs `[n, ...]` or the error.
        arrival_ns: Arrival time of the request.
        owner: Name of the client, by its API key.
        address: The client's address, of a request that starts a sequence.
        budget_ns: Its latency budget, or None for the server's.
        low_priority: Whether it runs after the others, whatever its priority.
        observe: Called after each step of a chain.
        timing: Takes the times of the rows; not those of a chain, a sequence or an answer that takes steps.
        ends: Takes why each answer ended, where answers take steps.

    Returns:
        A function that cancels it.

    Raises:
        RequestError: It is rejected.
    """
    low_priority = low_priority or infer.priority > HIGHEST
    if isinstance(served, ServedChain):
        _reject_place(served.name, infer)
        # It counts the outcome itself, with the step that it came from.
        return served.submit_rows(infer.chunks, finished, arrival_ns, budget_ns, low_priority, observe, ends=ends)

    def counted(result: Array | RequestError) -> None:
        if isinstance(result, RequestError):
            served.count_rejection(result)
        else:
            served.counts[ANSWERED] += 1
        finished(result)

    if served.sequences is None:
        _reject_place(served.name, infer)
        handles = served.submit_rows(infer.chunks, counted, arrival_ns, budget_ns, low_priority, timing, ends)
        return lambda: served.cancel(handles)
    if infer.place is None:
        raise InvalidInput(
            f"{served.name!r} is sent a live signal chunk by chunk; name it by sequence_id, not 0, with sequence_start "
            f"on the first chunk and sequence_end on the last."
        )
    served.reject_lost()
    return served.sequences.put(
        infer.place,
        infer.chunks,
        counted,
        arrival_ns,
        owner=owner,
        address=address,
        budget_ns=budget_ns,
        low_priority=low_priority,
    )


def _reject_place(name: str, infer: Infer) -> None:
    if infer.place is not None:
        raise InvalidInput(
            f"{name!r} remembers nothing from one request to the next; leave sequence_id {infer.place.id!r} out."
        )


def place_of(parameters: Mapping[str, Any]) -> SequencePlace | None:
    """Parse the place of a request in a sequence from its parameters; None without a sequence.

    Raises:
        InvalidInput: The id or a flag is malformed.
    """
    name = parameters.get("sequence_id", 0)
    if type(name) not in (int, str) or len(str(name)) > MAX_ID_CHARACTERS:
        raise InvalidInput(
            f"The sequence_id is {shown(name)}; it must be a whole number or at most {MAX_ID_CHARACTERS} characters."
        )
    if name in (0, ""):
        return None
    start, end = parameters.get("sequence_start", False), parameters.get("sequence_end", False)
    if type(start) is not bool or type(end) is not bool:
        raise InvalidInput(f"sequence_start is {shown(start)} and sequence_end {shown(end)}; each must be a bool.")
    return SequencePlace(name, start, end)


def frames_of(name: Any, datatype: Any, shape: tuple[int, ...], frame: TensorSpec, most: int) -> tuple[int, bool]:
    """Count the frames of a chunk of a live signal, and find whether it has a batch dimension (of 1).

    Raises:
        InvalidInput: Its name, datatype or shape is not the spec's, or it is longer than a chunk.
    """
    _check_named(name, datatype, frame)
    batched = len(shape) == len(frame.shape) + 2 and shape[0] == 1
    chunk = shape[1:] if batched else shape
    if not chunk or chunk[1:] != frame.shape or not 0 <= chunk[0] <= most:
        raise InvalidInput(
            f"The shape is {shown(list(shape))}; {frame.name!r} takes {[1, 'frames', *frame.shape]} with 1 to {most:,} "
            f"frames."
        )
    return chunk[0], batched


def rows_of(name: Any, datatype: Any, shape: tuple[int, ...], spec: TensorSpec, max_rows: int) -> tuple[int, bool]:
    """Count the rows of an input tensor, and find whether it has a batch dimension.

    Raises:
        InvalidInput: Its name, datatype or shape is not the spec's.
        TooLarge: Too many rows.
    """
    _check_named(name, datatype, spec)
    if shape == spec.shape:
        return 1, False
    if not shape or shape[1:] != spec.shape or shape[0] < 1:
        raise InvalidInput(
            f"The shape is {shown(list(shape))}; {spec.name!r} takes {['n', *spec.shape]} with n from 1."
        )
    check_rows(shape[0], max_rows)
    return shape[0], True


def records_of(given: Iterable[GivenTensor], input: RecordSpec, max_rows: int) -> tuple[Array, bool]:
    """Read the rows of several input tensors, and find whether they have a batch dimension.

    Returns:
        Records `[n]`, and whether the tensors have a batch dimension.

    Raises:
        InvalidInput: A tensor is missing, unknown, given twice or not of its spec, or rows or lengths disagree.
        TooLarge: Too many rows.
    """
    tensors: dict[str, GivenTensor] = {}
    for tensor in given:
        known = isinstance(tensor.name, str)
        if not known or tensor.name in tensors:
            wrong = "is given twice" if known else "is no name"
            raise InvalidInput(f"The input {shown(tensor.name)} {wrong}.")
        tensors[tensor.name] = tensor
    named: dict[str, GivenTensor] = input.named(tensors)
    rows: dict[str, int | None] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in named.items():
        spec = input.by_name[name]
        _check_datatype(tensor.datatype, spec)
        dims = len(spec.shape)
        if len(tensor.shape) not in (dims, dims + 1):
            sizes = ", ".join(["rows", *map(str, spec.shape)])
            raise InvalidInput(
                f"{name} has shape {shown(list(tensor.shape))}; it must be {spec.describe()} for one "
                f"row, [{sizes}] for several."
            )
        batched = len(tensor.shape) == dims + 1
        rows[name] = tensor.shape[0] if batched else None
        shapes[name] = tensor.shape[1:] if batched else tensor.shape
    if len(set(rows.values())) > 1:
        of = ", ".join(f"{name!r} {shown(list(tensor.shape))}" for name, tensor in named.items())
        if without := [name for name, tensor in named.items() if len(tensor.shape) == len(input.by_name[name].shape)]:
            raise InvalidInput(
                f"The inputs have shapes {of}, and {without[0]!r} has no batch dimension; give all the same, or none."
            )
        raise InvalidInput(f"The inputs have different numbers of rows: {of}; give all the same batch dimension.")
    count = next(iter(rows.values()), None)
    if count is not None:
        check_rows(count, max_rows)
    lengths = input.lengths_of(shapes)
    n = 1 if count is None else count
    arrays = {name: tensor.read(input.by_name[name].at(lengths), n) for name, tensor in named.items()}
    arrays |= {name: np.repeat(filled[None], n, 0) for name, filled in input.defaults(arrays).items()}
    return input.records(arrays, {name: np.full(n, length) for name, length in lengths.items()}), count is not None


def check_rows(rows: int, max_rows: int) -> None:
    """Check the number of rows of a request.

    Raises:
        InvalidInput: None.
        TooLarge: Too many.
    """
    if rows < 1:
        raise InvalidInput(f"The request has {rows} rows; send at least one.")
    if rows > max_rows:
        raise TooLarge(f"The request has {rows:,} rows; at most {max_rows:,} are taken at once. Split it.")


def output_datatypes(input: ChunkSpec, output: ChunkSpec) -> dict[str, str]:
    """Return the datatype of each output by name.

    The length of a dimension that no input has, such as the number of boxes, is an output of its own, one for each row.
    """
    datatypes = {spec.name: spec.protocol_datatype for spec in output.tensors}
    if isinstance(output, RecordSpec):
        known = input.dims if isinstance(input, RecordSpec) else {}
        datatypes |= {name: "INT64" for name in output.dims if name not in known}
    return datatypes


def output_arrays(output: ChunkSpec, outputs: Array) -> dict[str, Array]:
    """Return output chunks `[n, ...]` as arrays by name; shorter rows are padded with zeros to the longest."""
    if not isinstance(output, RecordSpec):
        return {output.name: outputs}
    return output.batch(outputs) | output.lengths(outputs)


def _check_named(name: Any, datatype: Any, spec: TensorSpec) -> None:
    if name != spec.name:
        raise InvalidInput(f"The input is named {shown(name)}; this model's is {spec.name!r}.")
    _check_datatype(datatype, spec)


def _check_datatype(datatype: Any, spec: TensorSpec) -> None:
    if datatype != spec.protocol_datatype:
        raise InvalidInput(f"The datatype is {shown(datatype)}; {spec.name!r} is {spec.protocol_datatype}.")


def chunks_of(raw: bytes | memoryview, rows: int, spec: TensorSpec) -> Array:
    """Read chunks `[rows, *spec.shape]` from little-endian bytes.

    Raises:
        InvalidInput: A float is NaN or infinite, or a bool is neither 0 nor 1.
    """
    assert len(raw) == rows * spec.nbytes, (len(raw), rows, spec)
    if spec.takes_any_bytes or not len(raw):
        return np.frombuffer(raw, spec.numpy_dtype).reshape(rows, *spec.shape)
    return np.stack([spec.from_bytes(raw[row : row + spec.nbytes]) for row in range(0, len(raw), spec.nbytes)])


def shared_chunks(part: SharedPart, rows: int, spec: TensorSpec) -> Array:
    """Read chunks `[rows, *spec.shape]` from shared memory.

    Raises:
        InvalidInput: The part has another size, is gone, or see `chunks_of`.
    """
    expected = rows * spec.nbytes
    if part.nbytes != expected:
        raise InvalidInput(
            f"shared_memory_byte_size is {part.nbytes:,}; {rows} x {spec.describe()} has {expected:,} bytes."
        )
    return chunks_of(part.read(), rows, spec)


def check_output_count(count: int, names: Collection[str]) -> None:
    """Reject many more wanted outputs than there are: each of a thousand would be read.

    Raises:
        InvalidInput: There are more than a few times as many.
    """
    if count > MAX_REPEATED * len(names):
        raise InvalidInput(f"The request wants {count:,} outputs; this model has {', '.join(map(repr, names))}.")


def check_output(name: Any, parameters: Mapping[str, Any], names: Collection[str]) -> None:
    """Reject an unknown output, or an unsupported form of it.

    Raises:
        InvalidInput: Another name, or classification.
    """
    if not isinstance(name, str) or name not in names:
        raise InvalidInput(f"There is no output {shown(name)}; this model has {', '.join(map(repr, names))}.")
    if parameters.get("classification"):
        raise InvalidInput("Classification of outputs is not done here; take the numbers and choose the largest.")


def timeout_ns_of(parameters: Mapping[str, Any]) -> int | None:
    """Parse the parameter `timeout`, in microseconds, to a budget in nanoseconds; None without one.

    Raises:
        InvalidInput: Not a whole number, or longer than a budget may be.
    """
    timeout = parameters.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, float) and timeout.is_integer():
        timeout = int(timeout)  # in JSON, 5.0 is a whole number
    if type(timeout) is not int or not 0 <= timeout <= MAX_BUDGET_MS * 1_000:
        raise InvalidInput(
            f"The timeout is {shown(timeout)}; it must be a whole number of microseconds up to "
            f"{MAX_BUDGET_MS * 1_000:,}."
        )
    return timeout * 1_000 or None


def priority_of(parameters: Mapping[str, Any]) -> int:
    """Parse the parameter `priority`; 0 without one.

    Raises:
        InvalidInput: Not a whole number from 0.
    """
    priority = parameters.get("priority", 0)
    if type(priority) is not int or not 0 <= priority <= _MAX_PRIORITY:
        raise InvalidInput(f"The priority is {shown(priority)}; it must be a whole number, 1 for the highest.")
    return priority
