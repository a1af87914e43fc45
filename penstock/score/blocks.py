"""Blocks of rows, read from the units of an input."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.application import Application
from penstock.core.errors import InvalidInput, PenstockError, ScoreError, one_line
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.wording.json_fault import json_fault
from penstock.score.bodies import BodyReader
from penstock.score.chunks import Chunks, arrow_numbers, arrow_texts, check_chunks, empty_chunks
from penstock.score.files import InputFile, InputFolder
from penstock.score.plan import Kind, Plan, Sources, Unit, unreadable
from penstock.score.table_columns import column_chunks, is_text

# Files that are read at once; a line of JSONL that is longer is taken for damage.
FILES_A_BLOCK = 64
MAX_LINE_BYTES = 64 << 20
_READ_BYTES = 1 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RowBlock:
    """Some rows of a unit.

    Args:
        paths: The path of each row, or of all.
        rows: The number of each row in its file, as Arrow; of JSONL, the byte at which its line begins.
        kept: The columns that are kept.
        load: Makes the inputs; called by a thread of the network.
    """

    paths: str | Sequence[str]
    rows: Any
    kept: Sequence[Any]
    load: Callable[[], Chunks]

    def path_column(self) -> Any:
        """The paths as an Arrow array."""
        return arrow_texts([self.paths] * len(self.rows) if isinstance(self.paths, str) else self.paths)


def read_blocks(
    place: InputFolder, plan: Plan, unit: Unit, application: Application, bodies: BodyReader | None, block_rows: int
) -> Iterator[RowBlock]:
    """Read a unit in blocks.

    Args:
        place: The input.
        plan: The run.
        unit: The unit.
        application: The application.
        bodies: Decodes bodies; None if the application reads none.
        block_rows: The most rows of a block.

    Raises:
        ScoreError: A file is damaged, or has changed.
        StorageError: It cannot be read.
    """
    if plan.kind is Kind.PARQUET:
        yield from _row_group(place, plan, unit, application, bodies, block_rows)
    elif plan.kind is Kind.LINES:
        yield from _lines(place, plan, unit, application, bodies, block_rows)
    else:
        assert bodies is not None, plan.kind
        yield from _files(place, unit, bodies, min(block_rows, FILES_A_BLOCK))


def _row_group(
    place: InputFolder, plan: Plan, unit: Unit, application: Application, bodies: BodyReader | None, block_rows: int
) -> Iterator[RowBlock]:
    file, first = unit.files[0], unit.first_row
    names, keep = plan.sources.names(plan.options.keep), plan.options.keep
    source = place.source(file)
    try:
        with place.folder.translated("read", file.name):
            opened = pq.ParquetFile(source, metadata=plan.footers[file.name], pre_buffer=not place.folder.is_local)
            for batch in opened.iter_batches(block_rows, row_groups=[unit.begin], columns=names):
                rows = len(batch)
                yield RowBlock(
                    paths=file.name,
                    rows=arrow_numbers(np.arange(first, first + rows), pa.int64()),
                    kept=[batch.column(name) for name in keep],
                    load=lambda batch=batch: batch_chunks(batch, plan.sources, application, bodies),
                )
                first += rows
    except PenstockError as error:
        cause = error.__cause__
        if cause is not None and isinstance(cause, pa.ArrowException | OSError) and place.folder.is_local:
            place.check_unchanged([file])
            raise unreadable(file.name, cause) from None
        raise
    finally:
        if not isinstance(source, str):
            source.close()


def batch_chunks(batch: Any, sources: Sources, application: Application, bodies: BodyReader | None) -> Chunks:
    """Make the inputs of the rows of a record batch, whose columns were checked."""
    if sources.body is None:
        columns = {tensor: batch.column(column) for tensor, column in sources.tensors.items()}
        return column_chunks(columns, application.input, signal=application.live is not None)
    assert bodies is not None, application.name
    column = batch.column(sources.body)
    if pa.types.is_struct(column.type):
        # With the nulls of the structure.
        column = column.flatten()[column.type.get_field_index("bytes")]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        # Texts that are not UTF-8 are for the application to refuse.
        column = column.cast(pa.large_binary())
    return bodies.chunks(column.to_pylist())


def _files(place: InputFolder, unit: Unit, bodies: BodyReader, block_rows: int) -> Iterator[RowBlock]:
    for begin in range(0, len(unit.files), block_rows):
        files = unit.files[begin : begin + block_rows]
        names = [file.name for file in files]

        def load(files: Sequence[InputFile] = files, names: Sequence[str] = names) -> Chunks:
            return bodies.chunks(place.read_all(files), [bodies.type_of_name(name) for name in names])

        yield RowBlock(paths=names, rows=arrow_numbers(np.zeros(len(files), np.int64), pa.int64()), kept=[], load=load)


def _lines(
    place: InputFolder, plan: Plan, unit: Unit, application: Application, bodies: BodyReader | None, block_rows: int
) -> Iterator[RowBlock]:
    file = unit.files[0]
    if plan.sources.body is not None and bodies is None:
        raise ScoreError(f"application {application.name!r} has no decode for --body; leave it out.")
    lines = _read_lines(place, file, unit.begin, unit.end)
    for begin in range(0, len(lines), block_rows):
        some = lines[begin : begin + block_rows]
        parsed = [_parsed(line) for _, line in some]
        yield RowBlock(
            paths=file.name,
            rows=arrow_numbers(np.array([at for at, _ in some], np.int64), pa.int64()),
            kept=[_json_texts(parsed, name) for name in plan.options.keep],
            load=lambda parsed=parsed: _line_chunks(parsed, plan.sources, application.input, bodies),
        )


def _read_lines(place: InputFolder, file: InputFile, begin: int, end: int) -> list[tuple[int, bytes]]:
    """The lines that begin in a range of bytes, each with where it begins; empty lines are left out."""
    at = max(begin - 1, 0)
    with place.open(file) as opened, place.folder.translated("read", file.name):
        opened.seek(at)
        data = bytearray(opened.read(end - at))
        looked = 0
        # The last line may end in the next range.
        while not data.endswith(b"\n") and (more := opened.read(_READ_BYTES)):
            cut = more.find(b"\n")
            data += more if cut < 0 else more[: cut + 1]
            looked += len(more)
            if looked > MAX_LINE_BYTES:
                raise ScoreError(
                    f"{file.name} has a line of more than {MAX_LINE_BYTES:,} bytes after byte {begin:,}; is it JSONL?"
                )
    first = data.find(b"\n") + 1 if begin else len(BOM_UTF8) * data.startswith(BOM_UTF8)
    if begin and not 0 < first < end - at:
        return []
    lines: list[tuple[int, bytes]] = []
    where = at + first
    for line in bytes(data[first:]).split(b"\n"):
        if line.strip():
            lines.append((where, line))
        where += len(line) + 1
        if where >= end:
            break
    return lines


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return InvalidInput(f"the line is not JSON ({json_fault(error)}).")


def _json_texts(parsed: list[Any], name: str) -> Any:
    """A value of each line as JSON text; a line for which there is none gets an error in place of its object."""
    texts: list[bytes | None] = [None] * len(parsed)
    for row, given in enumerate(parsed):
        try:
            texts[row] = orjson.dumps(given[name]) if isinstance(given, dict) and name in given else None
        except orjson.JSONEncodeError as error:
            # It reads deeper lists than it writes.
            parsed[row] = InvalidInput(f"{name!r} cannot be kept ({one_line(error)}).")
    return arrow_texts(texts)


def _line_chunks(parsed: Sequence[Any], sources: Sources, spec: ChunkSpec, bodies: BodyReader | None) -> Chunks:
    if sources.body is not None:
        assert bodies is not None
        found = [row.get(sources.body) if isinstance(row, dict) else None for row in parsed]
        chunks = bodies.chunks([each.encode() if isinstance(each, str) else None for each in found])
        for row, each in enumerate(found):
            if isinstance(parsed[row], InvalidInput):
                chunks.errors[row] = str(parsed[row])
            elif not isinstance(each, str):
                chunks.errors[row] = f"the line has no text {sources.body!r}."
        return chunks
    array = empty_chunks(spec, len(parsed))
    chunks = Chunks(array=array)
    for row, given in enumerate(parsed):
        try:
            array[row] = _from_line(given, sources.tensors, spec)
        except InvalidInput as error:
            chunks.errors[row] = str(error)
    check_chunks(spec, chunks)
    return chunks


def _from_line(given: Any, tensors: Mapping[str, str], spec: ChunkSpec) -> Any:
    if isinstance(given, InvalidInput):
        raise given
    if not isinstance(given, dict):
        raise InvalidInput(f"the line holds no object; give {', '.join(map(repr, tensors.values()))} by name.")
    named = {tensor: given[column] for tensor, column in tensors.items() if column in given}
    if isinstance(spec, RecordSpec):
        return spec.from_numbers(named)
    if spec.name not in named:
        raise InvalidInput(f"the line has no {tensors[spec.name]!r}.")
    return spec.from_numbers(named[spec.name])
