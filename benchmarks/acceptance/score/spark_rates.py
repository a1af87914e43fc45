"""Scoring in a real Spark: `penstock.scorer` in `mapInArrow` and a hand-written pandas_udf, over the same rows.

`python -m benchmarks.acceptance.score.spark_rates MASTER BUNDLE IN CACHE RUNS` prints the seconds of each as JSON.
"""

# pyspark is installed for the tests of `make fleet` alone.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUntypedFunctionDecorator=false

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

import penstock
from benchmarks.acceptance.score.null_network import BYTES
from penstock.core.errors import BenchError
from penstock.score.network import BATCH


def main(arguments: list[str]) -> None:
    """Measure both in turn, and print what it took."""
    from pyspark.sql import SparkSession

    master, bundle, source, cache, runs = arguments
    session = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    frame = session.read.parquet(source)
    score = penstock.scorer(bundle, cache=cache)
    ours = frame.mapInArrow(score, score.ddl)
    theirs = frame.select(_pandas_udf(bundle, cache)("pixels").alias("first"))
    _check_same(ours, theirs)
    found = [[_seconds(ours), _seconds(theirs)] for _ in range(int(runs))]
    sys.stdout.write(f"{json.dumps(found)}\n")


def _pandas_udf(bundle: str, cache: str) -> Callable[[str], Any]:
    """Make what a user writes by hand: rows joined to an array, batches through the network, a list of each answer."""
    from pyspark.sql.functions import pandas_udf

    # By name, so that its cache outlives a task, as that of `penstock.scorer` does.
    from benchmarks.acceptance.score.null_network import loaded_network

    def first(parts: Iterator[pd.Series]) -> Iterator[pd.Series]:
        network = loaded_network(bundle, cache)
        for part in parts:
            # Half the time of a stack of single rows, or less.
            rows = np.frombuffer(b"".join(part), np.uint8).reshape(len(part), BYTES)
            answers = [network.run_batch(rows[begin : begin + BATCH]) for begin in range(0, len(rows), BATCH)]
            yield pd.Series(list(np.concatenate(answers)))

    return pandas_udf(first, "array<float>")


def _check_same(ours: Any, theirs: Any) -> None:
    mine, other = (sorted(map(tuple, (row.first for row in frame.collect()))) for frame in (ours, theirs))
    if mine != other or len(mine[0]) >= BYTES:
        raise BenchError("the two give different answers, so no figure is given.")


def _seconds(frame: Any) -> float:
    begin_s = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - begin_s


if __name__ == "__main__":
    main(sys.argv[1:])
