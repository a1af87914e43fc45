"""`penstock.scorer` in `DataFrame.mapInArrow` of a real Spark cluster."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.acceptance.fleet.clusters import Cluster, NotInstalled, cluster
from penstock.score.network import LoadedNetwork
from tests.support.scored import fixed_lists, how_to_run, numbers, run, table_of, write_parquet
from tests.support.serving import write_doubler

LIMIT_S = 600
ROWS = 1000
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(LIMIT_S)]
# Reads Parquet, scores it in the executors, and writes Parquet; prints the types and the processes that ran it.
JOB = """
import json, sys
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession
import penstock

master, bundle, source, to, cache = sys.argv[1:]
score = penstock.scorer(
    bundle, keep={"id": pa.int64(), "taken": pa.timestamp("us", "UTC")}, executor="torch", cache=cache,
    reply=True, on_error="null", batch=16,
)
spark = SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
frame = spark.read.parquet(source)
scored = frame.mapInArrow(score, score.ddl)
scored.write.parquet(to)
print(json.dumps({"partitions": frame.rdd.getNumPartitions(), "types": dict(scored.dtypes)}))
failing = penstock.scorer(bundle, executor="torch", cache=cache, batch=16)
try:
    frame.mapInArrow(failing, failing.ddl).count()
except Exception as error:
    print(json.dumps({"failed": str(error)}))
"""


@pytest.fixture
def spark() -> Generator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", f"{sys.prefix}/bin/python")
        try:
            with cluster("spark") as found:
                yield found
        except NotInstalled as error:
            pytest.skip(str(error))


def test_the_scores_of_spark_are_those_of_one_machine(spark: Cluster, tmp_path: Path) -> None:
    bundle, given = write_doubler(tmp_path), numbers(2 * ROWS)
    given[7] = 13
    for at in (0, 1):
        rows = slice(at * ROWS, (at + 1) * ROWS)
        columns = {
            "id": pa.array(range(at * ROWS, (at + 1) * ROWS)),
            "taken": pa.array(range(at * ROWS, (at + 1) * ROWS), pa.timestamp("us", "UTC")),
            "numbers": fixed_lists(given[rows]),
        }
        write_parquet(tmp_path / "in" / f"{at}.parquet", columns, rows=ROWS)
    how = how_to_run(tmp_path / "cache")
    network = LoadedNetwork(bundle, how)
    run(network, tmp_path / "in", tmp_path / "local", how, keep=("id", "taken"), reply=True, on_error="null")
    (tmp_path / "job.py").write_text(JOB)
    places = [spark.on, str(bundle), str(tmp_path / "in"), str(tmp_path / "spark"), str(tmp_path / "cache")]
    done = subprocess.run(
        [spark.python, tmp_path / "job.py", *places],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S / 2,
        env={**os.environ, **spark.environment, "PYTHONPATH": str(Path(__file__).parents[2])}
        | {"PYSPARK_PYTHON": str(spark.python)},
    )
    assert done.returncode == 0, done.stderr[-1000:]
    said, failed = map(json.loads, done.stdout.splitlines()[-2:])
    assert said["types"]["doubles"] == "array<float>"
    assert said["partitions"] == 2
    mine = table_of(tmp_path / "local").sort_by("id")
    theirs = pa.concat_tables([pq.read_table(file) for file in (tmp_path / "spark").glob("*.parquet")])
    theirs = theirs.sort_by("id")
    for name in ("id", "reply", "error"):
        assert theirs[name].to_pylist() == mine[name].to_pylist(), name
    assert theirs["taken"].cast(pa.timestamp("us", "UTC")).to_pylist() == mine["taken"].to_pylist()
    # Bit for bit, and null in the same row.
    assert theirs["doubles"].null_count == 1
    assert theirs["doubles"].to_pylist() == mine["doubles"].to_pylist()
    good = np.arange(2 * ROWS) != 7
    np.testing.assert_array_equal(np.array(theirs.filter(pa.array(good))["doubles"].to_pylist()), 2 * given[good])
    assert "row 7 of a batch: the network raised ValueError: thirteen" in failed["failed"]
