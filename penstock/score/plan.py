"""The plan of a run: what it reads, in units of work, and what it writes, decided before the first row is read."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.application import Application
from penstock.core.errors import PenstockError, ScoreError, one_line
from penstock.core.json_record import json_bytes
from penstock.score.answers import ERROR, REPLY, output_fields
from penstock.score.bodies import BodyReader
from penstock.score.files import InputFile, InputFolder
from penstock.score.table_columns import check_column, is_bytes, is_text

SCHEMA_VERSION = 1
PATH, ROW = "path", "row"
FILES_A_UNIT = 256
LINE_BYTES_A_UNIT = 32 << 20
# Footers are read at the same time, because a bucket takes long to answer.
_FOOTERS = 16
_PARQUET = (".parquet", ".pq")
_LINES = (".jsonl", ".ndjson")


class Kind(StrEnum):
    """The content of the files of an input."""

    PARQUET = "Parquet"
    LINES = "JSONL"
    BODIES = "encoded files"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """Choices of what is read of each row and written for it.

    Args:
        columns: The column of an input tensor that has another name than it.
        body: The column of encoded bodies; by default the only binary one, where there are no columns of the tensors.
        content_type: The type of all bodies; by default found for each.
        keep: Columns of the input that are written beside the answers.
        reply: Whether the application's `reply` is written as JSON.
        on_error: `"fail"`, or `"null"` to write null for a row without an answer, and why.

    Raises:
        ScoreError: `on_error` is something else.
    """

    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    body: str | None = None
    content_type: str | None = None
    keep: tuple[str, ...] = ()
    reply: bool = False
    on_error: str = "fail"

    def __post_init__(self) -> None:
        if self.on_error not in ("fail", "null"):
            raise ScoreError(f"--on-error is {self.on_error!r}; choose fail or null.")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The columns that rows are read from.

    Args:
        tensors: The column of each tensor; empty where bodies are decoded.
        body: The column of bodies; None for tensors and for files.
    """

    tensors: Mapping[str, str]
    body: str | None

    def names(self, keep: Sequence[str]) -> list[str]:
        """All columns that are read."""
        body = [] if self.body is None else [self.body]
        return list(dict.fromkeys([*self.tensors.values(), *body, *keep]))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A unit of work: a row group, a range of bytes, or some files.

    Args:
        files: Its file or files.
        begin: The row group, the first byte, or 0.
        end: One more than the last.
        first_row: The number of its first row in the file.
        weight: Rows, bytes or files, for progress.
    """

    files: tuple[InputFile, ...]
    begin: int
    end: int
    first_row: int = 0
    weight: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A run.

    Args:
        kind: What the files hold.
        units: The units in the order of the input.
        sources: The columns of the rows.
        options: What is read and written.
        schema: The Arrow schema of the output.
        kept: The fields of the columns that are kept.
        outputs: The fields of the output tensors.
        files: The files that are scored.
        left_out: Names of files that hold something else.
        footers: The footer of each Parquet file by its name.
    """

    kind: Kind
    units: Sequence[Unit]
    sources: Sources
    options: ScoreOptions
    schema: Any
    kept: Sequence[Any]
    outputs: Sequence[Any]
    files: Sequence[InputFile]
    left_out: Sequence[str]
    footers: Mapping[str, Any]


def make_plan(
    place: InputFolder,
    application: Application,
    options: ScoreOptions,
    bodies: BodyReader | None,
    *,
    files_a_unit: int = FILES_A_UNIT,
    line_bytes_a_unit: int = LINE_BYTES_A_UNIT,
) -> Plan:
    """List the units of an input, and check its columns against the inputs of an application.

    Args:
        place: The input.
        application: The application.
        options: What is read and written.
        bodies: Decodes bodies; None if the application reads none.
        files_a_unit: Encoded files of a unit.
        line_bytes_a_unit: Bytes of JSONL of a unit.

    Raises:
        ScoreError: The input does not fit the application or the options, or a file is damaged.
    """
    if options.reply and application.live is not None:
        raise ScoreError(f"application {application.name!r} is live, so it has no reply; leave --reply out.")
    kind, files, left_out = _kind_of(place, bodies)
    footers: dict[str, Any] = {}
    if kind is Kind.PARQUET:
        footers = read_footers(place, files)
        schemas = {file.name: _schema(footers[file.name]) for file in files}
        sources = column_sources(schemas[files[0].name], application, options, bodies, files[0].name)
        for file in files:
            check_columns(schemas[file.name], sources, application, options, file.name)
        kept = _kept(schemas, options.keep)
        units = [unit for file in files for unit in _row_groups(file, footers[file.name])]
    elif kind is Kind.LINES:
        if application.live is not None:
            raise ScoreError(
                f"{place} holds JSONL, and application {application.name!r} takes whole signals; give sound files, or "
                f"lists in Parquet."
            )
        sources = _line_sources(application, options)
        kept = [pa.field(name, pa.string()) for name in options.keep]
        units = [
            Unit(files=(file,), begin=begin, end=end, weight=end - begin)
            for file in files
            for begin, end in _ranges(file.size, line_bytes_a_unit)
        ]
    else:
        if options.keep or options.columns or options.body is not None:
            raise ScoreError(f"{place} holds files without columns; leave --keep, --input and --body out.")
        sources, kept = Sources(tensors={}, body=None), list[Any]()
        units = [
            Unit(files=tuple(files[begin:end]), begin=0, end=end - begin, weight=end - begin)
            for begin, end in _ranges(len(files), files_a_unit)
        ]
    outputs = output_fields(application.answer.tensors, live=application.live is not None, spark=False)
    return Plan(
        kind=kind,
        units=units,
        sources=sources,
        options=options,
        schema=_output_schema(application, kept, outputs, options),
        kept=kept,
        outputs=outputs,
        files=files,
        left_out=left_out,
        footers=footers,
    )


def part_name(description: Mapping[str, Any], unit: Unit) -> str:
    """The name of a unit's output: a hash of the run's description, the unit's files and its range."""
    files = [[file.name, file.size, file.stamp] for file in unit.files]
    content = json_bytes({"run": description, "files": files, "begin": unit.begin, "end": unit.end})
    return f"{hashlib.sha256(content).hexdigest()[:32]}.parquet"


def _ranges(size: int, step: int) -> Iterable[tuple[int, int]]:
    return ((begin, min(begin + step, size)) for begin in range(0, size, step))


def _kind_of(place: InputFolder, bodies: BodyReader | None) -> tuple[Kind, list[InputFile], list[str]]:
    found: dict[Kind, list[InputFile]] = {kind: [] for kind in Kind}
    left_out: list[str] = []
    for file in place.files:
        name = file.name.lower()
        if name.endswith(_PARQUET):
            found[Kind.PARQUET].append(file)
        elif name.endswith(_LINES):
            found[Kind.LINES].append(file)
        elif bodies is not None and bodies.takes(file.name):
            found[Kind.BODIES].append(file)
        else:
            left_out.append(file.name)
    there = {kind: files for kind, files in found.items() if files}
    if len(there) > 1:
        shown = ", ".join(f"{files[0].name} ({kind})" for kind, files in there.items())
        raise ScoreError(f"{place} holds files of several kinds: {shown}; put those of one kind into a folder.")
    if not there:
        wanted = " or ".join([*_PARQUET[:1], *_LINES[:1], *(bodies.accepts if bodies is not None else ())])
        raise ScoreError(f"{place} holds {left_out[0]} and nothing that can be scored; give files of {wanted}.")
    kind, files = next(iter(there.items()))
    return kind, files, left_out


def read_footers(place: InputFolder, files: Sequence[InputFile]) -> dict[str, Any]:
    """Read the footers of Parquet files, by name.

    Raises:
        ScoreError: A file is damaged.
        StorageError: A file cannot be read.
    """

    def read(file: InputFile) -> Any:
        try:
            with place.folder.translated("read", file.name):
                return read_footer(place.source(file))
        except PenstockError as error:
            cause = error.__cause__
            if cause is not None and isinstance(cause, pa.ArrowException):
                raise unreadable(file.name, cause) from None
            raise

    with ThreadPoolExecutor(_FOOTERS) as pool:
        return dict(zip((file.name for file in files), pool.map(read, files), strict=True))


def read_footer(source: Any) -> Any:
    """Read the footer of a Parquet file from a path or an open file, which is closed."""
    try:
        return pq.read_metadata(source)
    finally:
        if not isinstance(source, str):
            source.close()


def unreadable(name: str, error: BaseException) -> ScoreError:
    """The error for a file of Parquet that is damaged."""
    return ScoreError(f"{name} is no whole Parquet file ({one_line(error, 120)}); write or copy it again.")


def _schema(footer: Any) -> Any:
    return footer.schema.to_arrow_schema()


def _row_groups(file: InputFile, footer: Any) -> Iterable[Unit]:
    first_row = 0
    for group in range(footer.num_row_groups):
        rows = footer.row_group(group).num_rows
        if rows:
            yield Unit(files=(file,), begin=group, end=group + 1, first_row=first_row, weight=rows)
        first_row += rows


def column_sources(
    schema: Any, application: Application, options: ScoreOptions, bodies: BodyReader | None, where: str
) -> Sources:
    """Find the columns of the input tensors, or the one of encoded bodies.

    Raises:
        ScoreError: There are neither.
    """
    wanted = {spec.name: spec for spec in application.input.tensors}
    if unknown := [name for name in options.columns if name not in wanted]:
        raise ScoreError(f"--input names {unknown[0]!r}, and there is no such input; there is {', '.join(wanted)}.")
    columns = {name: options.columns.get(name, name) for name in wanted}
    there = [name for name, column in columns.items() if column in schema.names]
    required = [name for name, spec in wanted.items() if spec.default is None]
    if options.body is None and set(required) <= set(there):
        return Sources(tensors={name: columns[name] for name in there}, body=None)
    binary = [one.name for one in schema if body_type(one.type) is not None]
    if bodies is not None and (options.body is not None or (not there and len(binary) == 1)):
        return Sources(tensors={}, body=options.body or binary[0])
    if options.body is not None:
        raise ScoreError(f"--body is {options.body!r}, and {application.name!r} reads no bodies; leave it out.")
    missing = next(name for name in required if name not in there)
    hint = " or the column of encoded bodies with --body COLUMN" if bodies is not None else ""
    raise ScoreError(
        f"{where} has no column {columns[missing]!r} for the input {missing!r}; it has {', '.join(schema.names)}. Name "
        f"the column with --input {missing}=COLUMN{hint}."
    )


def body_type(type: Any) -> Any:
    """The binary type in a column of bodies, which may be a structure with `bytes`, as of Hugging Face's datasets."""
    if pa.types.is_struct(type):
        return next((one.type for one in type if one.name == "bytes" and _holds_bytes(one.type)), None)
    return type if _holds_bytes(type) else None


def _holds_bytes(type: Any) -> bool:
    return is_bytes(type) or pa.types.is_binary_view(type)


def check_columns(schema: Any, sources: Sources, application: Application, options: ScoreOptions, where: str) -> None:
    """Check that the columns of a file are there, and of the right types.

    Raises:
        ScoreError: One is not.
    """
    for name in sources.names(options.keep):
        if schema.names.count(name) != 1:
            found = "no column" if name not in schema.names else "several columns"
            raise ScoreError(f"{where} has {found} {name!r}; it has {', '.join(schema.names)}.")
    specs = {spec.name: spec for spec in application.input.tensors}
    for tensor, column in sources.tensors.items():
        kind = schema.field(column).type
        try:
            check_column(column, kind, specs[tensor], signal=application.live is not None)
        except ScoreError as error:
            raise ScoreError(f"{where}: {error}") from None
    if sources.body is not None:
        kind = schema.field(sources.body).type
        each = kind.value_type if pa.types.is_dictionary(kind) else kind
        if body_type(each) is None and not is_text(each):
            raise ScoreError(f"{where}: column {sources.body!r} is {kind}; bodies are binary, or text.")


def _kept(schemas: Mapping[str, Any], keep: Sequence[str]) -> list[Any]:
    first, fields = next(iter(schemas)), list[Any]()
    for name in keep:
        kind = schemas[first].field(name).type
        for file, schema in schemas.items():
            if schema.field(name).type != kind:
                raise ScoreError(
                    f"column {name!r} is {kind} in {first} and {schema.field(name).type} in {file}; leave it out of "
                    f"--keep, or write it with one type."
                )
        fields.append(pa.field(name, kind))
    return fields


def _line_sources(application: Application, options: ScoreOptions) -> Sources:
    names = [spec.name for spec in application.input.tensors]
    if unknown := [name for name in options.columns if name not in names]:
        raise ScoreError(f"--input names {unknown[0]!r}, and there is no such input; there is {', '.join(names)}.")
    if options.body is not None:
        return Sources(tensors={}, body=options.body)
    return Sources(tensors={name: options.columns.get(name, name) for name in names}, body=None)


def _output_schema(application: Application, kept: Sequence[Any], outputs: Sequence[Any], options: ScoreOptions) -> Any:
    names = {one.name for one in outputs}
    key = [pa.field(free_name(PATH, names), pa.string(), False), pa.field(free_name(ROW, names), pa.int64(), False)]
    after = [REPLY] * options.reply + [ERROR] * (options.on_error == "null")
    fields = [*key, *kept, *outputs, *(pa.field(free_name(name, names), pa.string()) for name in after)]
    if taken := [one.name for one in kept if [other.name for other in fields].count(one.name) > 1]:
        raise ScoreError(
            f"--keep names {taken[0]!r}, which is also a column of the output of {application.name!r}; rename it in "
            f"the input."
        )
    return pa.schema(fields)


def free_name(name: str, taken: set[str]) -> str:
    """A name of ours, with `_` after it where an output tensor has the same."""
    return free_name(f"{name}_", taken) if name in taken else name
