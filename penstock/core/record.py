"""RecordSpec: several named tensors, or tensors of varying length, as one record.

A record is an element of a NumPy structured array. It has room for every tensor at its largest size, and a field for
the length of each `Dim`. So the inputs of one request are one entry of the slot table, of the golden examples and of a
training set, as a single tensor is. What lies beyond a length is padding: its content never changes an answer.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from keyword import iskeyword
from reprlib import repr as shown
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.random_arrays import random_chunks
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.counted import counted
from penstock.core.wording.json_fault import json_kind

# n records, B rows of a batch

Lengths = npt.NDArray[np.int64]

# Field of a length; the lengths come first, so that the tensors keep their alignment.
_LENGTH = "int64"


@final
@dataclass(frozen=True)
class RecordSpec:
    """The named tensors of one side of a network; some of their dimensions may vary in length.

    Args:
        tensors: Specs of the tensors, each with its name.

    Raises:
        ApplicationError: A name is not a Python identifier or is given twice, or one `Dim` has two meanings.
    """

    tensors: tuple[TensorSpec, ...]
    by_name: dict[str, TensorSpec] = field(init=False, repr=False, compare=False)
    dims: dict[str, Dim] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        dims = dims_of(self.tensors)
        for spec in self.tensors:
            if not spec.name.isidentifier() or iskeyword(spec.name):
                raise ApplicationError(
                    f"a tensor has name {spec.name!r}; where there are several tensors or lengths vary, each name is a "
                    f"Python identifier, such as 'token_ids'."
                )
        object.__setattr__(self, "by_name", {spec.name: spec for spec in self.tensors})
        object.__setattr__(self, "dims", dims)

    @cached_property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of one record, structured."""
        lengths = [(name, _LENGTH) for name in self.dims]
        return np.dtype([*lengths, *((spec.name, spec.numpy_dtype, spec.shape) for spec in self.tensors)], align=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record: none, because a record is one element."""
        return ()

    @property
    def size(self) -> int:
        """Elements of one record."""
        return 1

    @property
    def nbytes(self) -> int:
        """Bytes of one record."""
        return self.numpy_dtype.itemsize

    @property
    def takes_nan(self) -> bool:
        """True if a tensor is of floats, which must be checked for NaN and infinity."""
        return any(spec.takes_nan for spec in self.tensors)

    @property
    def takes_any_bytes(self) -> bool:
        """False: lengths are not valid by themselves."""
        return False

    @property
    def labels(self) -> tuple[str, ...]:
        """No labels: those are of single tensors."""
        return ()

    def describe(self) -> str:
        """`ids: int64[tokens<=512], mask: int64[tokens<=512]`, for messages."""
        return ", ".join(f"{spec.name}: {spec.describe()}" for spec in self.tensors)

    def is_batch(self, array: Array, *, any_frames: bool = False) -> bool:
        """True for one or more records, `[N]`."""
        return array.ndim == 1 and array.size > 0

    def empty(self, count: int) -> Array:
        """Allocate `[n]` records of zeros and lengths 0."""
        return np.zeros(count, self.numpy_dtype)

    def check(self, value: Any) -> Array:
        """Make one record of arrays by name; a record is checked and returned.

        Returns:
            An array of no dimensions.

        Raises:
            InvalidInput: A tensor is missing, unknown or not of its spec, or lengths disagree.
        """
        if isinstance(value, np.ndarray | np.void) and value.dtype == self.numpy_dtype and value.shape == ():
            self.check_numbers(np.asarray(value).reshape(1))
            return np.asarray(value)
        arrays = self.named(value)
        arrays |= self.defaults(arrays)
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray):
                raise InvalidInput(f"{name} is a {type(array).__name__}; it must be an array.")
        lengths = self.lengths_of({name: array.shape for name, array in arrays.items()})
        return self._record(
            {name: self.by_name[name].at(lengths).check(array) for name, array in arrays.items()}, lengths
        )

    def of_many(self, examples: Any) -> Array:
        """Make records `[n]` of a list of dictionaries of arrays, or of one dictionary of batches `[n, ...]`.

        Raises:
            InvalidInput: As `check`.
        """
        if isinstance(examples, np.ndarray) and examples.dtype == self.numpy_dtype:
            self.check_numbers(examples)
            return examples
        if isinstance(examples, Mapping):
            batches = {name: _array(name, batch) for name, batch in self.named(examples).items()}
            if single := [name for name, batch in batches.items() if not batch.ndim]:
                raise InvalidInput(f"{single[0]} is one number; give a batch, with one entry for each example.")
            counts = {len(batch) for batch in batches.values()}
            if len(counts) != 1:
                raise InvalidInput(f"The batches have {sorted(counts)} examples; give as many of each input.")
            examples = [{name: batch[row] for name, batch in batches.items()} for row in range(counts.pop())]
        if not isinstance(examples, Collection) or isinstance(examples, str | bytes | np.ndarray):
            raise InvalidInput(
                f"The examples are {json_kind(type(examples))}; give a list of dictionaries of arrays by name."
            )
        records = self.empty(len(examples))
        for row, example in enumerate(cast(Collection[Any], examples)):
            named = self.named(example).items()
            records[row] = self.check({name: self.by_name[name].cast(_array(name, given)) for name, given in named})
        return records

    def from_numbers(self, numbers: object) -> Array:
        """Make one record from nested lists of numbers by name, as in JSON; arrays are taken as they are.

        Raises:
            InvalidInput: A tensor is missing, unknown or not of its spec, or lengths disagree.
        """
        named = self.named(numbers)
        for name, given in named.items():
            if self.by_name[name].shape and (given is None or isinstance(given, str | Mapping)):
                kind = json_kind(type(cast(object, given)))
                raise InvalidInput(f"{name} is {kind}; it must be {self.by_name[name].describe()}.")
        lengths = self.lengths_of({name: _nested_shape(given, self.by_name[name]) for name, given in named.items()})
        arrays: dict[str, Array] = {}
        for name, given in named.items():
            spec = self.by_name[name].at(lengths)
            arrays[name] = spec.check(given) if isinstance(given, np.ndarray) else spec.from_numbers(given)
        return self._record(arrays | self.defaults(arrays), lengths)

    def from_bytes(self, body: bytes | memoryview) -> Array:
        """Refuse raw bytes, which have no lengths.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput(f"The input is {self.describe()}; send it as JSON by name, not as raw bytes.")

    def lengths_of(self, shapes: Mapping[str, tuple[int | None, ...]]) -> dict[str, int]:
        """Find the length of each dimension from the shapes of one example's tensors.

        A size of None is not known: another tensor decides, or it is the smallest.

        Raises:
            InvalidInput: A shape does not fit its spec, or two tensors disagree.
        """
        lengths: dict[str, int] = {}
        first: dict[str, str] = {}
        for name, shape in shapes.items():
            spec = self.by_name[name]
            if len(shape) != len(spec.shape):
                raise InvalidInput(
                    f"{name} has {counted(len(shape), 'dimension')}, {shown(list(shape))}; it must be "
                    f"{spec.describe()}."
                )
            for size, expected in zip(shape, spec.shape, strict=True):
                if size is None:
                    continue
                if not isinstance(expected, Dim):
                    if size != expected:
                        raise InvalidInput(f"{name} has shape {shown(list(shape))}; it must be {spec.describe()}.")
                    continue
                dim = expected.name
                if not expected.min <= size <= expected:
                    raise InvalidInput(
                        f"{name} has {size:,} {dim}; it must have from {expected.min:,} to {int(expected):,}."
                    )
                if lengths.setdefault(dim, size) != size:
                    raise InvalidInput(
                        f"{name} has {size:,} {dim} and {first[dim]} has {lengths[dim]:,}; send both equally long."
                    )
                first.setdefault(dim, name)
        return {name: dim.min for name, dim in self.dims.items()} | lengths

    def check_numbers(self, records: Array) -> None:
        """Check the lengths and the valid numbers of records `[n]`.

        Raises:
            InvalidInput: A length is out of range, a float is NaN or infinite, or a number is beyond its limits.
        """
        for name, dim in self.dims.items():
            lengths = records[name]
            if ((lengths < dim.min) | (lengths > int(dim))).any():
                raise InvalidInput(f"a record's {name} are not from {dim.min:,} to {int(dim):,}.")
        for name, array in self.batch(records).items():
            spec = self.by_name[name]
            if spec.limits is not None and not spec.limits[0] <= 0 <= spec.limits[1]:
                # Without padding, whose zeros are beyond the limits.
                valid = np.ones(array.shape, np.bool_)
                _clear_padding(valid, spec, self.lengths(records))
                array = array[valid]
            spec.check_numbers(array)

    def finite(self, records: Array) -> npt.NDArray[np.bool_]:
        """Find the records `[n]` whose valid numbers are all finite."""
        finite = np.ones(len(records), np.bool_)
        for name, array in self.batch(records).items():
            if self.by_name[name].takes_nan:
                finite &= np.isfinite(array.reshape(len(array), -1)).all(1)
        return finite

    def unpack(self, record: Array) -> dict[str, Array]:
        """Return one record's tensors by name, without padding: views of the record."""
        record = record.reshape(())
        return {
            # The dots keep a single number an array.
            spec.name: record[spec.name][(*(self._valid(record, size) for size in spec.shape), ...)]
            for spec in self.tensors
        }

    def to_numbers(self, record: Array) -> dict[str, Any]:
        """Return one record's tensors by name as nested lists."""
        return {name: array.tolist() for name, array in self.unpack(record).items()}

    def lengths(self, records: Array) -> dict[str, Lengths]:
        """Return the lengths `[n]` of each dimension of records `[n]`."""
        return {name: np.ascontiguousarray(records[name]) for name in self.dims}

    def batch(self, records: Array, room: Mapping[str, int] | None = None) -> dict[str, Array]:
        """Return the tensors of records `[B]` by name, contiguous, with zeros as padding.

        Args:
            records: The records, `[B]`.
            room: Length of each dimension in the batch; by default that of the longest record.

        Returns:
            `[B, ...]` of each tensor.
        """
        lengths = self.lengths(records)
        if room is None:
            room = {name: int(each.max(initial=0)) for name, each in lengths.items()}
        arrays: dict[str, Array] = {}
        for spec in self.tensors:
            sizes = tuple(room[size.name] if isinstance(size, Dim) else size for size in spec.shape)
            array = np.ascontiguousarray(records[spec.name][(slice(None), *(slice(size) for size in sizes))])
            _clear_padding(array, spec, lengths)
            arrays[spec.name] = array
        return arrays

    def gather(self, records: Array, entries: Lengths, into: Array) -> Array:
        """Copy some records into a buffer, each only up to the longest length of them all.

        Args:
            records: All records, `[E]`.
            entries: Those to copy, `[B]`.
            into: The buffer, `[B]` or more records. Beyond the longest length it keeps what it had.

        Returns:
            The first B records of the buffer.
        """
        gathered = into[: len(entries)]
        room: dict[str, int] = {}
        for name in self.dims:
            lengths = records[name][entries]
            gathered[name] = lengths
            room[name] = int(lengths.max(initial=0))
        for spec in self.tensors:
            part = tuple(slice(room[size.name]) if isinstance(size, Dim) else slice(None) for size in spec.shape)
            gathered[spec.name][(slice(None), *part)] = records[spec.name][(entries, *part)]
        return gathered

    def records(self, arrays: Mapping[str, Array], lengths: Mapping[str, Lengths]) -> Array:
        """Make records `[n]` from batches `[n, ...]` by name, as `batch` returns them, without their padding.

        Args:
            arrays: The tensors; those of varying length may have any room up to the largest.
            lengths: The lengths `[n]` of each dimension.
        """
        records = self.empty(len(next(iter(arrays.values()))))
        for name in self.dims:
            records[name] = lengths[name]
        for spec in self.tensors:
            array = arrays[spec.name]
            # The rest of the memory is zero already.
            room = records[spec.name][(slice(None), *(slice(size) for size in array.shape[1:]))]
            room[...] = array
            _clear_padding(room, spec, lengths)
        return records

    def random(self, rng: np.random.Generator, count: int) -> Array:
        """Make random valid records `[n]` of random lengths."""
        lengths = {name: rng.integers(dim.min, int(dim), count, endpoint=True) for name, dim in self.dims.items()}
        arrays = {spec.name: random_chunks(spec, count, rng) for spec in self.tensors}
        return self.records(arrays, lengths)

    def to_json(self) -> list[dict[str, Any]]:
        """The specs of the tensors as JSON values."""
        return [spec.to_json() for spec in self.tensors]

    def named(self, value: Any) -> dict[str, Any]:
        """Return what a mapping has for each tensor, in the declared order; those with a default may be missing.

        Raises:
            InvalidInput: It is no mapping, or a tensor is missing or unknown.
        """
        return given_by_name(self.by_name, value, [spec.name for spec in self.tensors if spec.default is not None])

    def defaults(self, given: Collection[str]) -> dict[str, Array]:
        """Return the tensors of one record that are not among the given names, filled with their defaults."""
        return {spec.name: spec.filled for spec in self.tensors if spec.default is not None and spec.name not in given}

    def _record(self, arrays: Mapping[str, Array], lengths: Mapping[str, int]) -> Array:
        one = {name: np.array([length]) for name, length in lengths.items()}
        return self.records({name: array[None] for name, array in arrays.items()}, one).reshape(())

    def _valid(self, record: Array, size: int) -> slice:
        return slice(int(record[size.name])) if isinstance(size, Dim) else slice(size)


ChunkSpec = TensorSpec | RecordSpec


def chunk_spec(tensors: Iterable[TensorSpec]) -> ChunkSpec:
    """Return the spec of one chunk: the tensor itself where it is one of fixed size, else a record."""
    tensors = tuple(tensors)
    return tensors[0] if len(tensors) == 1 and not tensors[0].dims else RecordSpec(tensors)


def dims_of(tensors: Sequence[TensorSpec]) -> dict[str, Dim]:
    """Return the dimensions of some tensors by name.

    Raises:
        ApplicationError: One `Dim` has two meanings, or a name is given twice.
    """
    dims: dict[str, Dim] = {}
    names = [spec.name for spec in tensors]
    for spec in tensors:
        for dim in spec.dims:
            if dims.setdefault(dim.name, dim) != dim:
                raise ApplicationError(
                    f"Dim {dim.name!r} is declared as {dims[dim.name]} and as {dim}; the same name is the same length."
                )
    names += dims
    for name in names:
        if not name or names.count(name) > 1:
            raise ApplicationError(f"a tensor or dimension has name {name!r}; give each a name of its own.")
    return dims


def given_by_name(names: Iterable[str], value: Any, optional: Collection[str] = ()) -> dict[str, Any]:
    """Return what a mapping has for each name, in the order of the names.

    Args:
        names: The names.
        value: The mapping.
        optional: Names that may be missing.

    Raises:
        InvalidInput: It is no mapping, or a name is missing or unknown.
    """
    names = list(names)
    if not isinstance(value, Mapping):
        raise InvalidInput(f"The input is {json_kind(type(value))}; it must have {_wanted(names, optional)} by name.")
    given = cast(Mapping[str, Any], value)
    if unknown := [name for name in given if name not in names]:
        raise InvalidInput(f"There is no input {unknown[0]!r:.80}; there is {_listed(names)}.")
    if missing := [name for name in names if name not in given and name not in optional]:
        raise InvalidInput(f"The input {missing[0]!r} is missing; send {_wanted(names, optional)}.")
    return {name: given[name] for name in names if name in given}


def _clear_padding(array: Array, spec: TensorSpec, lengths: Mapping[str, Lengths]) -> None:
    for axis, size in enumerate(spec.shape, start=1):
        if not isinstance(size, Dim):
            continue
        beyond = np.arange(array.shape[axis]) >= lengths[size.name][:, None]
        if beyond.any():
            where = beyond.reshape(len(array), *(array.shape[axis] if at == axis else 1 for at in range(1, array.ndim)))
            np.copyto(array, np.zeros((), array.dtype), where=where)


def _array(name: str, given: Any) -> Array:
    try:
        return np.asarray(given)
    except ValueError:
        raise InvalidInput(f"{name} has lists of different lengths; give nested lists of one shape.") from None


def _nested_shape(given: Any, spec: TensorSpec) -> tuple[int | None, ...]:
    if isinstance(given, np.ndarray):
        return given.shape
    shape: list[int] = []
    while isinstance(given, list | tuple):
        level = cast(list[Any], given)
        shape.append(len(level))
        if not level or len(shape) > len(spec.shape):
            break
        given = level[0]
    # An empty list has no inner sizes to look at.
    unknown = len(spec.shape) - len(shape) if shape and shape[-1] == 0 else 0
    return (*shape, *[None] * unknown)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _wanted(names: Iterable[str], optional: Collection[str]) -> str:
    required = _listed(name for name in names if name not in optional)
    options = _listed(name for name in names if name in optional)
    return f"{required} and, optionally, {options}" if required and options else required or options
