"""Own time of scoring a row, and its rate beside the bundle's own and beside a hand-written pandas_udf."""

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.acceptance.score.null_network import OUTPUTS, as_column, rows, write_bundle, write_rows
from penstock.core.errors import BenchError
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import make_runnable
from penstock.score.files import InputFolder, OutputFolder
from penstock.score.network import BATCH, HowToRun, LoadedNetwork
from penstock.score.plan import ScoreOptions
from penstock.score.score_run import score
from penstock.score.scorer import scorer

ROWS, ROW_GROUP = 200_000, 50_000
# Rows of a record batch that Spark hands to Python by default.
SPARK_ROWS = 10_000
RUNS = 7
WARM = 2


def _cpu_s(run: Callable[[], object]) -> float:
    begin_s = time.process_time()
    run()
    return time.process_time() - begin_s


def own_us() -> list[float]:
    """Return the processor time of a row in us, without that of pyarrow and of the network for the same rows."""
    given = rows(ROWS)
    found: list[float] = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        how = HowToRun(cache=root / "cache", device="cpu", threads=1)
        network = LoadedNetwork(write_bundle(root / "bundle"), how)
        write_rows(root / "in" / "a.parquet", given, ROW_GROUP)
        batches = [given[start : start + BATCH] for start in range(0, ROWS, BATCH)]
        answer = pa.FixedSizeListArray.from_arrays(pa.array(given[:, :OUTPUTS].astype(np.float32).reshape(-1)), OUTPUTS)

        def pyarrow_alone() -> None:
            opened = pq.ParquetFile(root / "in" / "a.parquet")
            for group in range(opened.num_row_groups):
                for batch in opened.iter_batches(network.block_rows, row_groups=[group]):
                    batch.column(0)
                first = group * ROW_GROUP
                paths = pa.array(["a.parquet"] * 1).take(pa.array(np.zeros(ROW_GROUP, np.int32)))
                table = pa.table(
                    {
                        "path": paths,
                        "row": pa.array(np.arange(first, first + ROW_GROUP)),
                        "first": answer.slice(first, ROW_GROUP),
                    }
                )
                names: Any = ["path", "row"]
                pq.write_table(
                    table, root / f"{group}.parquet", ROW_GROUP, use_dictionary=names, write_statistics=names
                )

        for attempt in range(RUNS + WARM):
            to = root / f"out{attempt}"
            whole = _cpu_s(
                lambda to=to: score(network, InputFolder(root / "in"), OutputFolder(to), ScoreOptions(), how)
            )
            others = _cpu_s(pyarrow_alone)
            others += _cpu_s(lambda: [network.run_batch(batch) for batch in batches])
            found.append((whole - others) / ROWS * 1e6)
        _check(pq.read_table(root / "out0"), given)
    return found[WARM:]


def _check(table: Any, given: Array) -> None:
    order = np.argsort(table["row"].to_numpy())
    answers = np.stack(table["first"].to_numpy())[order]
    if len(answers) != len(given) or not np.array_equal(answers, given[:, :OUTPUTS]):
        raise BenchError("the scores are wrong, so no figure is given.")


def _batches(given: Array) -> list[Any]:
    parts = (given[start : start + SPARK_ROWS] for start in range(0, len(given), SPARK_ROWS))
    return [pa.RecordBatch.from_arrays([as_column(part)], names=["pixels"]) for part in parts]


def _pandas_udf(predict: Callable[[Array], Array], batches: list[Any]) -> Iterator[Any]:
    """Do what a pandas_udf over an iterator of series does in Arrow and pandas: series of arrays in, lists out."""
    for batch in batches:
        # As pyspark's ArrowStreamPandasSerializer converts a column, and its result back.
        series: Any = pa.Table.from_batches([batch]).column(0).to_pandas(date_as_object=True)
        stacked = np.stack(series.to_numpy())
        parts = [predict(stacked[start : start + BATCH]) for start in range(0, len(stacked), BATCH)]
        answers = pd.Series(list(np.concatenate(parts)))
        yield pa.RecordBatch.from_arrays([pa.Array.from_pandas(answers, type=pa.list_(pa.float32()))], names=["first"])


def vs_pandas_udf() -> list[float]:
    """Rows a second of `penstock.scorer` over those of a hand-written pandas_udf that runs the same network."""
    given = rows(ROWS)
    batches = _batches(given)
    ratios: list[float] = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        bundle = write_bundle(root / "bundle")
        made = scorer(bundle, cache=root / "cache")
        network = LoadedNetwork(bundle, HowToRun(cache=root / "cache", device="cpu", threads=1))
        for _ in range(RUNS + WARM):
            ours = _cpu_s(lambda: list(made(batches)))
            theirs = _cpu_s(lambda: list(_pandas_udf(network.run_batch, batches)))
            ratios.append(theirs / ours)
        mine, other = (
            pa.Table.from_batches(found) for found in (made(batches), _pandas_udf(network.run_batch, batches))
        )
        if not mine["first"].equals(other["first"].cast(mine["first"].type)) or len(mine) != len(given):
            raise BenchError("the two give different answers, so no figure is given.")
    return ratios[WARM:]


def vs_own_rate() -> list[float]:
    """Rows a second of scoring the digits' inputs over those of the bundle's own executor in one thread, in memory."""
    from penstock.apps.digits.app import app

    count = 40_000
    ratios: list[float] = []
    with TemporaryDirectory() as folder:
        root = Path(folder)
        bundle = _network_bundle(root / "bundle")
        how = HowToRun(cache=root / "cache", device="cpu", threads=1)
        network = LoadedNetwork(bundle, how)
        spec = network.application.input_tensor
        given = np.random.default_rng(0).integers(0, 256, (count, *spec.shape)).astype(spec.numpy_dtype)
        flat = pa.FixedSizeListArray.from_arrays(pa.array(given.reshape(-1)), spec.size)
        (root / "in").mkdir()
        pq.write_table(pa.table({spec.name: flat}), root / "in" / "a.parquet", row_group_size=10_000)
        execution = Execution(cache=root / "cache", cores=1)
        own: Any = make_runnable(bundle, execution, lambda application: BATCH).executor
        assert app.name == network.application.name
        for attempt in range(RUNS + WARM):
            to = root / f"out{attempt}"
            begin_s = time.perf_counter()
            for start in range(0, count, BATCH):
                own.predict(given[start : start + BATCH])
            own_s = time.perf_counter() - begin_s
            begin_s = time.perf_counter()
            score(network, InputFolder(root / "in"), OutputFolder(to), ScoreOptions(), how)
            ratios.append(own_s / (time.perf_counter() - begin_s))
        if abs(statistics.median(ratios)) > 2:
            raise BenchError(f"scoring took less than half of the network's own time ({ratios}); measure again.")
    return ratios[WARM:]


def _network_bundle(folder: Path) -> Path:
    from penstock import Bundle
    from penstock.core.find_application import find_application

    found = find_application("digits")
    spec = found.application.input_tensor
    examples = np.zeros((2, *spec.shape), spec.numpy_dtype)
    Bundle.write(found, found.model(), examples, to=folder)
    return folder
