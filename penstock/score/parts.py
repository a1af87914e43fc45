"""The output folder: one Parquet file for each unit, and a manifest when all are there.

_score.json      written first: the bundle, the input and the options that all parts were made with
HASH.parquet     the answers of a unit; a file of this name is whole, and no other content has its name
_manifest.json   written last: all parts in the order of the input
"""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.core.errors import ScoreError, StorageError
from penstock.core.json_record import json_bytes
from penstock.score.files import InputFolder, OutputFolder
from penstock.score.plan import Unit, read_footer

DESCRIPTION, MANIFEST = "_score.json", "_manifest.json"
# In the footer of each part.
_ERRORS = "penstock.errors"
# A row group is written when so many bytes have come.
ROW_GROUP_BYTES = 64 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredPart:
    """An output file that is there.

    Args:
        name: Its name.
        rows: Its rows.
        errors: Those without an answer.
    """

    name: str
    rows: int
    errors: int


@final
class PartWriter:
    """Writes the rows of one part, in the same row groups whenever it is written."""

    def __init__(self, writer: Any, translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._writer, self._translated = writer, translated
        self._waiting: list[Any] = []
        self._bytes = 0
        self.rows, self.errors = 0, 0

    def write(self, batch: Any, errors: int) -> None:
        """Write some rows.

        Args:
            batch: A record batch.
            errors: How many of them have no answer.
        """
        self._waiting.append(batch)
        self._bytes += batch.nbytes
        self.rows += len(batch)
        self.errors += errors
        if self._bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting, self._bytes = [], 0
        with self._translated():
            self._writer.write_table(table, row_group_size=len(table))

    def end(self) -> None:
        """Write what is left, and the footer."""
        self._flush()
        with self._translated():
            self._writer.add_key_value_metadata({_ERRORS: str(self.errors)})
            self._writer.close()


@final
class Parts:
    """The output of a run.

    Args:
        out: Where it goes.
        description: The bundle, the input and the options; see `describe_run`.
        joins: Another process has begun the output, and looks after it.

    Raises:
        ScoreError: The folder holds something else, or the scores of another bundle, input or other options.
    """

    def __init__(self, out: OutputFolder, description: Mapping[str, Any], *, joins: bool = False) -> None:
        self.out, self.description = out, description
        self.unreadable: set[str] = set()
        self._there: set[str] = set()
        if joins:
            self._check_description()
            return
        names = out.names()
        if DESCRIPTION in names:
            self._check_description()
        elif names:
            raise ScoreError(
                f"{out} holds {min(names)!r} and no {DESCRIPTION}, so it is not the output of penstock score; choose "
                f"another --out."
            )
        else:
            out.write(DESCRIPTION, json_bytes(description))
        out.remove_leftovers()
        self._there = names

    def _check_description(self) -> None:
        data = self.out.folder.read(DESCRIPTION)
        try:
            found = json.loads(data or b"")
        except ValueError:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("options"), dict):
            raise ScoreError(f"{self.out}/{DESCRIPTION} is not readable; choose another --out, or remove the folder.")
        if found == json.loads(json_bytes(self.description)):
            return
        names = {"bundle": "bundle", "application": "application", "input": "input"}
        differs = next((name for name in self.description if found.get(name) != self.description[name]), "version")
        if differs == "options":
            then, now = found["options"], self.description["options"]
            option = next((name for name in now if then.get(name) != now[name]), "options")
            raise ScoreError(
                f"{self.out} holds scores with {option} {then.get(option)!r}, and now it is {now[option]!r}; give the "
                f"same options, choose another --out, or remove the folder."
            )
        raise ScoreError(
            f"{self.out} holds the scores of another {names.get(differs, 'version of penstock')} "
            f"({str(found.get(differs))[:60]}, now {str(self.description.get(differs))[:60]}); choose another --out, "
            f"or remove the folder."
        )

    def found(self, name: str) -> ScoredPart | None:
        """A part of an earlier run; None where there is none, or a damaged one, which is written again."""
        return self._read(name) if name in self._there else None

    def found_now(self, name: str) -> ScoredPart | None:
        """The same, of a run that writes to the same folder at this time."""
        return self._read(name) if self.out.has(name) else None

    def _read(self, name: str) -> ScoredPart | None:
        try:
            footer = read_footer(self.out.source(name))
            errors = int((footer.metadata or {})[_ERRORS.encode()])
        except (pa.ArrowException, OSError, KeyError, ValueError, StorageError):
            self.unreadable.add(name)
            return None
        return ScoredPart(name=name, rows=footer.num_rows, errors=errors)

    @contextmanager
    def writing(self, name: str, schema: Any) -> Generator[PartWriter]:
        """Write a part; it gets its name at the end of the context.

        Raises:
            StorageError: It cannot be written.
        """
        # Numbers of answers seldom repeat; the other columns often do.
        repeating = [one.name for one in schema if not pa.types.is_nested(one.type)]
        options: dict[str, Any] = {"use_dictionary": repeating, "write_statistics": repeating, "compression": "snappy"}
        with self.out.written(name) as file:
            with self.out.folder.translated("written", name):
                writer = pq.ParquetWriter(file, schema, **options)
            part = PartWriter(writer, lambda: self.out.folder.translated("written", name))
            try:
                yield part
                part.end()
            except BaseException:
                # The file is removed; what closing it says does not matter.
                with suppress(Exception):
                    writer.close()
                raise

    def finish(self, place: InputFolder, units: Sequence[Unit], parts: Sequence[ScoredPart]) -> list[str]:
        """Write the manifest, and remove parts of an input that has changed since.

        Args:
            place: The input.
            units: All units.
            parts: Their parts.

        Returns:
            The names of the parts that were removed.

        Raises:
            ScoreError: A part is missing: another run has removed it.
        """
        self._check_description()
        names = self.out.names()
        if missing := [part.name for part in parts if part.name not in names]:
            raise ScoreError(
                f"{self.out}/{missing[0]} was removed while the others were written; run the same command again."
            )
        files = {file.name: {"path": file.name, "size": file.size, "stamp": file.stamp} for file in place.files}
        scored = {file.name for unit in units for file in unit.files}
        manifest = {
            "schema_version": self.description["schema_version"],
            "application": self.description["application"],
            "bundle": self.description["bundle"],
            "input": self.description["input"],
            "rows": sum(part.rows for part in parts),
            "errors": sum(part.errors for part in parts),
            "inputs": [files[name] | {"scored": name in scored} for name in sorted(files)],
            "parts": [
                {
                    "file": part.name,
                    "rows": part.rows,
                    "errors": part.errors,
                    "inputs": [file.name for file in unit.files],
                    "range": [unit.begin, unit.end],
                }
                for unit, part in zip(units, parts, strict=True)
            ],
        }
        self.out.write(MANIFEST, json_bytes(manifest))
        stale = sorted(names - {part.name for part in parts} - {DESCRIPTION, MANIFEST})
        # Only what was written by this command is removed.
        stale = [name for name in stale if _is_part(name)]
        for name in stale:
            self.out.folder.delete(name)
        return stale


def _is_part(name: str) -> bool:
    stem, _, suffix = name.partition(".")
    return suffix == "parquet" and len(stem) == 32 and all(c in "0123456789abcdef" for c in stem)
