"""Answers of a network as Arrow columns, by the names of its tensors."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.core.application import Application, reply_of, unpacked
from penstock.core.dim import Dim
from penstock.core.errors import ComputeFailed, ScoreError, one_line
from penstock.core.record import Lengths
from penstock.core.spec import Array, TensorSpec
from penstock.score.chunks import Chunks, arrow_numbers, arrow_texts, numpy_type

# n rows, U frames of an output

REPLY, ERROR = "reply", "error"
# Spark has no unsigned numbers and no halves: each becomes the smallest type that holds it.
_SPARK = {"uint8": "int16", "uint16": "int32", "uint32": "int64", "uint64": "float64", "float16": "float32"}


def output_fields(application_answer: tuple[TensorSpec, ...], *, live: bool, spark: bool) -> list[Any]:
    """The Arrow fields of the output tensors.

    Args:
        application_answer: The tensors of one answer.
        live: The answers are of whole signals, whose first dimension has any size.
        spark: Lists of any size, and only types that Spark has.
    """
    return [pa.field(spec.name, _type(spec, live=live, spark=spark)) for spec in application_answer]


def number_type(spec: TensorSpec, *, spark: bool) -> Any:
    """The Arrow type of one number.

    Raises:
        ScoreError: Spark has none that holds it.
    """
    dtype = _SPARK.get(spec.dtype, spec.dtype) if spark else spec.dtype
    if spark and spec.dtype == "uint64":
        raise ScoreError(f"the output {spec.name!r} is uint64, which Spark has no type for; use penstock score.")
    return pa.from_numpy_dtype(np.dtype(dtype))


def _type(spec: TensorSpec, *, live: bool, spark: bool) -> Any:
    kind = number_type(spec, spark=spark)
    for at in reversed(range(len(spec.shape))):
        size = spec.shape[at]
        any_size = isinstance(size, Dim) or spark or (live and at == 0)
        kind = pa.list_(kind) if any_size else pa.list_(kind, int(size))
    return kind


def output_columns(
    application: Application, answers: Array | list[Array], chunks: Chunks, fields: list[Any]
) -> list[Any]:
    """The Arrow arrays of the output tensors; rows with an error are null.

    Args:
        application: The application.
        answers: `[n, *answer.shape]`, or `[U, ...]` of each whole signal.
        chunks: Their inputs.
        fields: See `output_fields`.
    """
    spec = application.answer
    null = None
    if chunks.errors:
        null = np.zeros(len(chunks.array), np.bool_)
        null[sorted(chunks.errors)] = True
    if isinstance(answers, list):
        assert isinstance(spec, TensorSpec)
        lengths = np.array([len(each) for each in answers], np.int64)
        empty = np.zeros((0, *spec.shape[1:]), spec.numpy_dtype)
        flat = np.concatenate([empty, *answers])
        return [_nested(flat, [lengths, *spec.shape[1:]], fields[0].type, null)]
    if isinstance(spec, TensorSpec):
        return [_nested(answers, list(spec.shape), fields[0].type, null)]
    lengths = spec.lengths(answers)
    return [
        _tensor(answers[tensor.name], tensor, lengths, field.type, null)
        for tensor, field in zip(spec.tensors, fields, strict=True)
    ]


def _tensor(array: Array, spec: TensorSpec, lengths: Mapping[str, Lengths], kind: Any, null: Any) -> Any:
    """A tensor of records, whose array has room for the longest."""
    valid = np.ones(len(array), np.bool_)
    sizes: list[Any] = []
    for at, size in enumerate(spec.shape):
        if not isinstance(size, Dim):
            valid = np.repeat(valid[..., None], size, at + 1)
            sizes.append(int(size))
            continue
        # The length at each place that is valid so far, one for each list.
        rows = np.nonzero(valid)[0]
        sizes.append(lengths[size.name][rows])
        inside = np.arange(int(size)) < lengths[size.name][:, None]
        shape = (len(array), *(1,) * at, int(size))
        valid = valid[..., None] & inside.reshape(shape)
    if any(isinstance(size, Dim) for size in spec.shape):
        array = array[valid]
    return _nested(np.ascontiguousarray(array), sizes, kind, null)


def _nested(flat: Array, sizes: list[Any], kind: Any, null: Any) -> Any:
    """Nest numbers into lists: of one size, or of an array of sizes."""
    kinds = [kind]
    while kinds[-1].num_fields:
        kinds.append(kinds[-1].value_type)
    numbers = np.ascontiguousarray(flat).reshape(-1)
    wanted = numpy_type(kinds[-1])
    wide = numbers if numbers.dtype == wanted else numbers.astype(wanted)
    values = arrow_numbers(wide, kinds[-1], None if sizes else null)
    for at in reversed(range(len(sizes))):
        mask = None if at or null is None else arrow_numbers(null, pa.bool_())
        size = sizes[at]
        if pa.types.is_fixed_size_list(kinds[at]):
            values = pa.FixedSizeListArray.from_arrays(values, type=kinds[at], mask=mask)
            continue
        if isinstance(size, int):
            offsets = np.arange(0, len(values) + 1, size, dtype=np.int64) if size else np.zeros(1, np.int64)
        else:
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
        if offsets[-1] > np.iinfo(np.int32).max:
            raise ScoreError(f"a block of answers has {offsets[-1]:,} numbers, too many for lists; lower --batch.")
        values = pa.ListArray.from_arrays(
            arrow_numbers(offsets.astype(np.int32), pa.int32()), values, type=kinds[at], mask=mask
        )
    return values


def reply_column(application: Application, answers: Array | list[Array], chunks: Chunks) -> Any:
    """The application's `reply` to each row as JSON text; a row for which it raises gets an error."""
    reply, shows = reply_of(application), application.shows
    assert isinstance(answers, np.ndarray), "a live application has no reply"
    texts: list[bytes | None] = [None] * len(answers)
    for row in range(len(answers)):
        if row in chunks.errors:
            continue
        found: Any = unpacked(application, answers[row])
        if shows is not None and chunks.sizes is not None:
            height, width = chunks.sizes[row]
            found = shows.in_picture(found, height, width, application.outputs)
        try:
            texts[row] = _json(reply, found)
        except ComputeFailed as error:
            chunks.errors[row] = str(error)
    return arrow_texts(texts)


def _json(reply: Callable[[Any], Any], found: Any) -> bytes:
    try:
        return orjson.dumps(reply(found), option=orjson.OPT_SERIALIZE_NUMPY)
    except (Exception, SystemExit) as error:
        # The application's code may raise anything.
        raise ComputeFailed(f"the reply raised {type(error).__name__}: {one_line(error)}.") from error


def error_column(chunks: Chunks) -> Any:
    """The reasons why rows have no answer, null where they have one."""
    if not chunks.errors:
        return pa.nulls(len(chunks.array), pa.string())
    return arrow_texts([chunks.errors.get(row) for row in range(len(chunks.array))])
