"""The steps of a chain as a generator: it yields the next work to run, and takes the results. No threads, no clocks.

The server and `penstock.load_chain` drive the same generator, so that both give the same answer.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import numpy as np

from penstock.core.application import Application, unpacked
from penstock.core.chains.chain import Chain, ChainStep, StepFunction
from penstock.core.chains.chain_fit import renamed
from penstock.core.errors import ApplicationError, ComputeFailed, InvalidInput, RequestError
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array


class Row(NamedTuple):
    """One input of a part.

    Args:
        array: A chunk of the part's input, or a raw array for its `prepare`.
        is_raw: Whether it is a raw array.
    """

    array: Array
    is_raw: bool


class PartRows(NamedTuple):
    """Rows for a part to run. The generator takes a list with one result each: a chunk
    of the part's answer, or None if rejected.

    Args:
        step: Index of the step.
        rows: Inputs; none where `each` gave an empty list.
    """

    step: int
    rows: list[Row]


class FunctionCall(NamedTuple):
    """A function to run; the generator takes its value.

    Args:
        step: Index of the step.
        function: Without arguments. It raises `RequestError` only.
    """

    step: int
    function: Callable[[], Any]


Progress = Generator[PartRows | FunctionCall, Any, Array]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ChainPlan:
    """A chain and the applications that are its parts.

    Args:
        chain: The chain; of one with segments, its `later`.
        parts: Its applications by name; others are left out of account.

    Attributes:
        application: The chain as an application, see `Chain.declare`.

    Raises:
        ApplicationError: The parts do not fit the chain.
    """

    chain: Chain
    parts: Mapping[str, Application]
    application: Application = field(init=False)
    _takes_raw: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.chain.segments is None, self.chain
        self.chain.check_parts(self.parts)
        object.__setattr__(self, "application", self.chain.declare(self.parts))
        object.__setattr__(self, "_takes_raw", self.chain.takes_raw(self.parts))

    def steps(self, chunk: Array) -> Progress:
        """Go through the steps for one input.

        Args:
            chunk: One chunk of `application.input`, checked. Its memory must not change meanwhile.

        Returns:
            A generator of the work to run next, which returns one chunk of `application.output`.

        Raises:
            RequestError: A function of the chain failed, or gave something else than what fits.
        """
        given = self._given(chunk)
        results: dict[str, Any] = {}
        value: Any = given
        for index, step in enumerate(self.chain.steps):
            if step.run is not None:
                value = yield FunctionCall(index, self._caller(step, "run", step.run, results, given))
            else:
                rows = self._rows(step, results, given, value)
                outputs: Sequence[Array | None] = yield PartRows(index, rows)
                part = self.parts[step.part_name]
                found = [None if output is None else unpacked(part, output) for output in outputs]
                value = found if step.each is not None else found[0]
            results[step.name] = value
        join = self.chain.join
        if join is not None:
            value = self._call(None, "join", join, results, given)
        return self._checked(self.application.output, value, "join" if join is not None else "last step")

    @property
    def generates(self) -> bool:
        """True if the last part generates and its answer is the chain's."""
        last = self._last_part
        return last is not None and last.generate is not None

    @property
    def _last_part(self) -> Application | None:
        """The part whose answer is the chain's; None where a function makes it."""
        return None if self.chain.join is not None else self.parts.get(self.chain.steps[-1].part_name)

    def unpacked(self, answer: Array) -> Any:
        """Return one answer as `reply` takes it: an array, or several tensors as a dictionary of arrays by name."""
        last = self._last_part
        return unpacked(self.application if last is None else last, answer)

    def _given(self, chunk: Array) -> Any:
        spec = self.application.input
        named = spec.unpack(chunk) if isinstance(spec, RecordSpec) else chunk
        return next(iter(named.values())) if self._takes_raw and isinstance(named, dict) else named

    def _rows(self, step: ChainStep, results: Mapping[str, Any], given: Any, value: Any) -> list[Row]:
        part = self.parts[step.part_name]
        if step.each is not None:
            found = self._call(step, "each", step.each, results, given)
            if not isinstance(found, Sequence) and not isinstance(found, np.ndarray):
                raise self._failed(step, "each", f"gives a {type(found).__name__}, not a list")
            return [self._row(step, part, one, "each", f" at index {index}") for index, one in enumerate(found)]
        if step.feed is not None:
            return [self._row(step, part, self._call(step, "feed", step.feed, results, given), "feed")]
        return [self._row(step, part, value, "input")]

    def _row(self, step: ChainStep, part: Application, value: Any, of: str, at: str = "") -> Row:
        raw = None if part.prepare is None else part.prepare.raw
        if raw is not None and isinstance(value, np.ndarray) and _is_raw(raw, part.input, value):
            try:
                return Row(np.ascontiguousarray(raw.check(value)), True)
            except RequestError as error:
                raise self._wrong(step, of, at, error) from None
        try:
            value = _by_position(part.input, value) if of == "input" else value
            return Row(as_chunk(part.input, value), False)
        except RequestError as error:
            raise self._wrong(step, of, at, error) from None

    def _wrong(self, step: ChainStep, of: str, at: str, error: RequestError) -> RequestError:
        # The chain's own input comes from the client; the results of its steps do not.
        if of == "input":
            index = next(at for at, each in enumerate(self.chain.steps) if each is step)
            if not index:
                return error
            before = self.chain.steps[index - 1].name
            return ComputeFailed(
                f"Chain {self.chain.name!r} feeds {step.name!r} with the output of {before!r}, which does not fit for "
                f"this request: {str(error).rstrip('.')}; give the step a feed that makes it fit."
            )
        return self._failed(step, of, f"gives no input of {step.part_name!r}{at}: {error}")

    def _checked(self, spec: ChunkSpec, value: Any, of: str) -> Array:
        try:
            return as_chunk(spec, value)
        except RequestError as error:
            raise ComputeFailed(f"The {of} of chain {self.chain.name!r} gives no answer: {error}") from None

    def _caller(
        self, step: ChainStep, field: str, function: StepFunction, results: Mapping[str, Any], given: Any
    ) -> Callable[[], Any]:
        # A copy: the dictionary grows while a thread may read it.
        known = dict(results)
        return lambda: self._call(step, field, function, known, given)

    def _call(
        self, step: ChainStep | None, field: str, function: StepFunction, results: Mapping[str, Any], given: Any
    ) -> Any:
        try:
            return function(results, given)
        except RequestError:
            raise
        # Code of the application: its sys.exit must not end the server.
        except (Exception, SystemExit) as error:
            raise self._failed(step, field, "failed on this input; the server's log says how") from error

    def _failed(self, step: ChainStep | None, field: str, problem: str) -> ComputeFailed:
        of = "" if step is None else f" of step {step.name!r}"
        return ComputeFailed(f"The {field}{of} of chain {self.chain.name!r} {problem.rstrip('.')}.")


def as_chunk(spec: ChunkSpec, value: Any) -> Array:
    """Make one chunk of a value: numbers of any dtype that fit the spec; several tensors by name, one without too.

    Raises:
        InvalidInput: It does not fit.
    """
    if isinstance(spec, RecordSpec):
        if isinstance(value, np.ndarray | np.void) and value.dtype == spec.numpy_dtype:
            return spec.check(value)
        required = [tensor.name for tensor in spec.tensors if tensor.default is None]
        if len(required) == 1 and not isinstance(value, Mapping):
            value = {required[0]: value}
        return spec.of_many([value])[0, ...]
    if isinstance(value, dict) and set(value) == {spec.name}:
        value = value[spec.name]
    try:
        array = np.asarray(value)
    except ValueError:
        raise InvalidInput(f"{spec.title} has lists of different lengths; it must be {spec.describe()}.") from None
    return np.ascontiguousarray(spec.check(spec.cast(array))).reshape(spec.shape)


def _by_position(spec: ChunkSpec, value: Any) -> Any:
    """Give the tensors of a result the names of an input, see `renamed`."""
    named: dict[str, Any] = value if isinstance(value, dict) else {"": value}
    taken = renamed(named, spec)
    return taken if isinstance(spec, RecordSpec) else taken[spec.name]


def _is_raw(raw: RawSpec, input: ChunkSpec, value: Array) -> bool:
    is_chunk = value.dtype == input.numpy_dtype and value.shape == input.shape
    return not is_chunk and value.dtype == raw.numpy_dtype and raw.accepts(value.shape)


def chain_hash(source_sha256: str, bundles: Mapping[str, str]) -> str:
    """Return the content hash of a chain: of the hash of its source and the content hashes of its parts' bundles."""
    return hashlib.sha256(json.dumps([source_sha256, sorted(bundles.items())]).encode()).hexdigest()


def check_weights(chain: Chain, weights: Mapping[str, str]) -> None:
    """Check that all parts of a chain are there, each with the weights that the chain needs.

    Args:
        chain: The chain.
        weights: SHA-256 of the weights of each application that is there, by its name.

    Raises:
        ApplicationError: A part is missing, or has other weights.
    """
    for step in chain.steps:
        name = step.part_name
        if name and name not in weights:
            there = ", ".join(map(repr, weights)) or "none"
            raise ApplicationError(
                f"Chain {chain.name!r} needs the application {name!r}, which is not there; there is {there}. Name its "
                f"bundle too."
            )
        if step.weights and weights[name] != step.weights:
            raise ApplicationError(
                f"Chain {chain.name!r} needs {name!r} with the weights {step.weights[:12]}, but those of its bundle "
                f"are {weights[name][:12]}; name another bundle, or make what the chain uses of this one again."
            )
