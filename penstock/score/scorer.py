"""`penstock.scorer`: a bundle as a function of Arrow record batches, for Spark's `DataFrame.mapInArrow`."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import pyarrow as pa

from penstock.core.bundles.bundle import Manifest, read_manifest
from penstock.core.errors import ScoreError
from penstock.core.remote.cache_variables import expanded_cache
from penstock.core.remote.remote_copy import DEFAULT_CACHE, local_bundle
from penstock.core.storage.remote_folder import url_of
from penstock.score.answers import ERROR, REPLY, error_column, output_columns, output_fields, reply_column
from penstock.score.blocks import batch_chunks
from penstock.score.bodies import BodyReader, body_reader
from penstock.score.network import BATCH, HowToRun, LoadedNetwork
from penstock.score.plan import ScoreOptions, check_columns, column_sources, free_name

_SPARK_TYPES = {
    "bool": "boolean",
    "int8": "tinyint",
    "int16": "smallint",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "large_string": "string",
    "binary": "binary",
    "large_binary": "binary",
    "date32[day]": "date",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Scores iterators of record batches; made by `scorer`. It can be pickled, and loads the bundle once a process.

    Args:
        bundle: The bundle's folder or URL.
        content_hash: The hash of the bundle's content when the scorer was made.
        schema: The Arrow schema of the record batches that it gives.
        options: What is read and written.
        kept: The Arrow types of the columns that are kept.
        how: How the bundle is run.
    """

    bundle: str
    content_hash: str
    schema: Any
    options: ScoreOptions
    kept: Mapping[str, Any]
    how: HowToRun

    @property
    def ddl(self) -> str:
        """The schema in the words of Spark, for `mapInArrow`: ```id` bigint, `scores` array<float>``."""
        return ", ".join(f"`{one.name.replace('`', '``')}` {_spark_type(one.name, one.type)}" for one in self.schema)

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Score the rows of some record batches.

        Args:
            batches: `pyarrow.RecordBatch`es with a column for each input tensor, or one of encoded bodies.

        Yields:
            A record batch of `schema` for each, with its rows in their order.

        Raises:
            ScoreError: The columns do not fit, or a row has no answer.
            BundleError: The bundle is damaged, or another one than when the scorer was made.
        """
        network, bodies = _loaded(self.bundle, self.content_hash, self.how, self.options.content_type)
        checked: Any = None
        for batch in batches:
            if checked is None or not batch.schema.equals(checked[0]):
                sources = column_sources(batch.schema, network.application, self.options, bodies, "the input")
                check_columns(batch.schema, sources, network.application, self.options, "the input")
                checked = batch.schema, sources
            yield from self._scored(batch, checked[1], network, bodies)

    def _scored(self, batch: Any, sources: Any, network: LoadedNetwork, bodies: BodyReader | None) -> Iterator[Any]:
        # A block has room for its longest tensors.
        for begin in range(0, len(batch), network.block_rows):
            yield self._block(batch.slice(begin, network.block_rows), sources, network, bodies)

    def _block(self, batch: Any, sources: Any, network: LoadedNetwork, bodies: BodyReader | None) -> Any:
        application, options = network.application, self.options
        chunks = batch_chunks(batch, sources, application, bodies)
        answers = network.answers(chunks)
        replies = [reply_column(application, answers, chunks)] if options.reply else []
        if chunks.errors and options.on_error == "fail":
            row = min(chunks.errors)
            raise ScoreError(
                f"row {row:,} of a batch: {chunks.errors[row].rstrip('.')}. Mend it, or keep such rows with "
                f"on_error='null'."
            )
        kept = [self._kept(batch, name, kind) for name, kind in self.kept.items()]
        fields = [self.schema.field(spec.name) for spec in application.answer.tensors]
        columns = [*kept, *output_columns(application, answers, chunks, fields), *replies]
        if options.on_error == "null":
            columns.append(error_column(chunks))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _kept(self, batch: Any, name: str, kind: Any) -> Any:
        column = batch.column(name)
        if _same_instants(column.type, kind):
            # Spark names the time zone of its session; the instants are the same.
            return column.cast(kind)
        if column.type != kind:
            raise ScoreError(f"column {name!r} is {column.type}, and keep says {kind}; give its own type.")
        return column


def scorer(
    bundle: str | Path,
    *,
    keep: Mapping[str, Any] | None = None,
    columns: Mapping[str, str] | None = None,
    body: str | None = None,
    content_type: str | None = None,
    reply: bool = False,
    on_error: str = "fail",
    app: str | None = None,
    accept_changed: bool = False,
    device: str = "cpu",
    precision: str = "fp32",
    executor: str = "auto",
    batch: int = BATCH,
    threads: int = 1,
    cache: str | Path | None = None,
) -> Scorer:
    """Make a function of record batches, for `df.mapInArrow(score, score.ddl)` of Spark.

    Args:
        bundle: The bundle, `RUN/bundle`, or its URL; every machine reads it there.
        keep: Arrow types of the columns that are given back beside the answers, by name.
        columns: The column of an input tensor that has another name than it.
        body: The column of encoded bodies, such as JPEG; by default the only binary one, where there are no columns of
            the tensors.
        content_type: The type of all bodies; by default found for each.
        reply: Give the application's `reply` as JSON in a column `reply`.
        on_error: `"fail"`, or `"null"` to give null for a row without an answer, and why in a column `error`.
        app: The application, if it moved: a name, an import path or an app.py.
        accept_changed: Accept an application whose sources changed.
        device: `"cpu"`, `"cuda"`, `"cuda:N"` or `"auto"`.
        precision: `"fp32"`; on a GPU also `"tf32"`, `"bf16"` or `"fp16"`.
        executor: On a CPU `"onnx"` or `"torch"`; `"auto"` is ONNX Runtime where it can run the network.
        batch: Rows of a batch of the network.
        threads: CPU threads of the network in each process; Spark runs a task on each core.
        cache: The folder of downloads and exported networks; `~/.cache/penstock` by default.

    Returns:
        The function, with its `schema` and `ddl`.

    Raises:
        BundleError: There is no bundle.
        ScoreError: An option does not fit the bundle.
    """
    if on_error not in ("fail", "null"):
        raise ScoreError(f"on_error is {on_error!r}; choose 'fail' or 'null'.")
    place = url_of(bundle) or str(Path(bundle).expanduser().absolute())
    root = expanded_cache(cache or DEFAULT_CACHE)
    manifest = read_manifest(local_bundle(place, root))
    kept = dict(keep or {})
    if reply and manifest.rate_hz is not None:
        raise ScoreError(f"application {manifest.name!r} is live, so it has no reply; leave reply out.")
    options = ScoreOptions(
        columns=dict(columns or {}),
        body=body,
        content_type=content_type,
        keep=tuple(kept),
        reply=reply,
        on_error=on_error,
    )
    how = HowToRun(
        cache=root,
        app=app,
        accept_changed=accept_changed,
        device=device,
        precision=precision,
        executor=executor,
        batch=batch,
        threads=threads,
    )
    return Scorer(
        bundle=place,
        content_hash=manifest.content_hash,
        schema=_schema(manifest, kept, options),
        options=options,
        kept=kept,
        how=how,
    )


def _schema(manifest: Manifest, kept: Mapping[str, Any], options: ScoreOptions) -> Any:
    outputs = output_fields(manifest.answer.tensors, live=manifest.rate_hz is not None, spark=True)
    after = [REPLY] * options.reply + [ERROR] * (options.on_error == "null")
    fields = [*(pa.field(name, kind) for name, kind in kept.items()), *outputs]
    fields += [pa.field(free_name(name, {one.name for one in outputs}), pa.string()) for name in after]
    names = [one.name for one in fields]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ScoreError(f"the column {twice[0]!r} would be there twice; rename it in the input, and keep that.")
    return pa.schema(fields)


@lru_cache(maxsize=2)
def _loaded(
    bundle: str, content_hash: str, how: HowToRun, content_type: str | None
) -> tuple[LoadedNetwork, BodyReader | None]:
    folder = local_bundle(bundle, how.cache)
    found = read_manifest(folder).content_hash
    if found != content_hash:
        raise ScoreError(
            f"{bundle} is another bundle ({found[:12]}) than when the scorer was made ({content_hash[:12]}); make it "
            f"again."
        )
    network = LoadedNetwork(folder, how)
    return network, body_reader(network.application, network.prepare, content_type=content_type, body=None)


def _same_instants(found: Any, kind: Any) -> bool:
    both = pa.types.is_timestamp(found) and pa.types.is_timestamp(kind)
    return both and found.unit == kind.unit and bool(found.tz) and bool(kind.tz)


def _spark_type(name: str, kind: Any) -> str:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"array<{_spark_type(name, kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if str(kind) not in _SPARK_TYPES:
        raise ScoreError(f"column {name!r} is {kind}, for which the DDL has no word; give Spark a schema of your own.")
    return _SPARK_TYPES[str(kind)]
