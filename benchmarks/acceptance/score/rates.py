"""Own time of scoring a row, and its rate beside the bundle's own and beside a hand-written pandas_udf."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.acceptance.fleet.cluster_runs import finished
from benchmarks.acceptance.fleet.clusters import cluster
from benchmarks.acceptance.score.null_network import BYTES, OUTPUTS, as_column, rows, write_bundle, write_rows
from penstock.core.errors import BenchError
from penstock.core.spec import Array
from penstock.runtime.execution import Execution
from penstock.runtime.executor_choice import make_runnable
from penstock.score.files import InputFolder, OutputFolder
from penstock.score.network import BATCH, HowToRun, LoadedNetwork
from penstock.score.plan import ScoreOptions
from penstock.score.score_run import score

ROWS, ROW_GROUP = 200_000, 50_000
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


def vs_pandas_udf() -> list[float]:
    """Rows a second of `penstock.scorer` in Spark over those of a hand-written pandas_udf that runs the same network.

    Raises:
        BenchError: Spark is not installed, or a run failed.
    """
    with TemporaryDirectory(prefix="penstock-score-") as folder, cluster("spark") as running:
        root = Path(folder)
        bundle = write_bundle(root / "bundle")
        pixels = as_column(rows(ROWS)).flatten().to_numpy().tobytes()
        column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(BYTES), ROWS, [None, pa.py_buffer(pixels)])
        (root / "in").mkdir()
        # A file for each of the two executors.
        for at in (0, 1):
            half = pa.table({"pixels": column[at * ROWS // 2 : (at + 1) * ROWS // 2].cast(pa.binary())})
            pq.write_table(half, root / "in" / f"{at}.parquet", use_dictionary=False, compression="none")
        arguments = [running.on, bundle, root / "in", root / "cache", RUNS + WARM]
        said = finished(
            [str(running.python), "-m", "benchmarks.acceptance.score.spark_rates", *map(str, arguments)],
            {**running.environment, "PYSPARK_PYTHON": str(running.python)},
        )
        return [theirs / ours for ours, theirs in json.loads(said.splitlines()[-1])][WARM:]


def vs_own_rate() -> list[float]:
    """Rows a second of scoring the digits' inputs over those of the bundle's own executor in one thread, in memory."""
    return _over_own_rate(lambda given: pa.FixedSizeListArray.from_arrays(pa.array(given.reshape(-1)), given[0].size))


def vs_own_rate_bytes() -> list[float]:
    """The same of inputs whose column holds raw bytes, which Arrow reads without a look at each number."""
    return _over_own_rate(
        lambda given: pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(given[0].nbytes), len(given), [None, pa.py_buffer(given.tobytes())]
        )
    )


def _over_own_rate(as_column: Callable[[Array], Any]) -> list[float]:
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
        (root / "in").mkdir()
        pq.write_table(pa.table({spec.name: as_column(given)}), root / "in" / "a.parquet", row_group_size=10_000)
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
    from penstock.core.source_files.find_application import find_application

    found = find_application("digits")
    spec = found.application.input_tensor
    examples = np.zeros((2, *spec.shape), spec.numpy_dtype)
    Bundle.write(found, found.model(), examples, to=folder)
    return folder
