"""Executors of a network on a CPU, side by side: eager torch, torch.compile and ONNX Runtime.

python -m benchmarks.executors [--model cnn|mlp] [--repeat 5] [--compile] [--record]

One thread on one core, with the batch sizes of a server. The runs are interleaved.
"""

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.acceptance.report.results import record_result
from benchmarks.models.write import ONE_SHOT, write_bundle
from penstock.bench.measurement import Comparison, make_measurement
from penstock.core.bundles.bundle import read_bundle
from penstock.core.errors import BenchError, PenstockError
from penstock.core.machine.onnx_session import onnx_errors
from penstock.core.spec import Array
from penstock.runtime.load import load
from penstock.runtime.named_network import served_function
from penstock.runtime.onnx.onnx_cache import cached_graph, onnx_executor

SIZES = (1, 8, 32, 64)
CORE = 0
SECONDS = 0.3
EAGER, ONNX = "eager torch", "ONNX Runtime"

Run = Callable[[Array], Array]


def runs_of(bundle: Path, cache: Path, *, compiled: bool) -> dict[str, Run]:
    """Return the executors of a bundle's network by name, after checking their golden outputs.

    Raises:
        BenchError: ONNX Runtime cannot run the network, or outputs differ.
    """
    predictor = load(bundle, threads=1)
    files = read_bundle(bundle)
    try:
        session = onnx_executor(files, cached_graph(files, cache, []), 1)
    except (PenstockError, *onnx_errors()) as error:
        raise BenchError(f"ONNX Runtime cannot run {bundle}: {error}.") from error
    runs: dict[str, Run] = {EAGER: predictor.executor.predict, ONNX: session.predict}
    if compiled:
        runs["torch.compile"] = _inferred(torch.compile(served_function(predictor.module), dynamic=True))
    for run in runs.values():
        files.golden.check(run)
    return runs


def _inferred(module: Callable[[torch.Tensor], torch.Tensor]) -> Run:
    def run(chunk_B: Array) -> Array:
        with torch.inference_mode():
            return module(torch.from_numpy(chunk_B)).numpy()

    return run


def rows_a_second(run: Run, chunk_B: Array) -> float:
    """Return the median over a fraction of a second."""
    run(chunk_B)
    times_s: list[float] = []
    end_s = time.perf_counter() + SECONDS
    while time.perf_counter() < end_s or len(times_s) < 3:
        start_s = time.perf_counter()
        run(chunk_B)
        times_s.append(time.perf_counter() - start_s)
    return len(chunk_B) / float(np.median(times_s))


def compare(model: str, bundle: Path, cache: Path, *, repeat: int, compiled: bool, record: bool) -> Table:
    """Measure a model at every size, and record ONNX Runtime beside eager torch."""
    runs = runs_of(bundle, cache, compiled=compiled)
    examples = np.resize(read_bundle(bundle).golden.inputs, (max(SIZES), *read_bundle(bundle).golden.inputs.shape[1:]))
    table = Table("rows", *runs, title=f"{model}: rows a second on one core")
    for size in SIZES:
        values: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeat):
            for name, run in runs.items():
                values[name].append(rows_a_second(run, examples[:size]))
        table.add_row(str(size), *(f"{np.median(each):,.0f}" for each in values.values()))
        if record:
            ours, theirs = float(np.median(values[ONNX])), float(np.median(values[EAGER]))
            line = make_measurement(
                values[ONNX],
                id=None,
                workload=f"the {model} of the benchmarks in batches of {size} by {ONNX}, one thread on one core",
                metric="rows a second",
                unit="rows/s",
                command=f"python -m benchmarks.executors --model {model}",
                peer=Comparison(name=EAGER, median=theirs, ratio=ours / theirs),
            )
            record_result(line, "server")
    return table


def main() -> None:
    """Read the command line, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.executors", description=__doc__)
    parser.add_argument("--model", choices=ONE_SHOT, action="append", help="both by default")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    parser.add_argument("--record", action="store_true", help="append the measurements to benchmarks/results")
    given = parser.parse_args()
    os.sched_setaffinity(0, {CORE})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for model in given.model or ONE_SHOT:
            bundle = write_bundle(model, Path(folder) / model).folder
            table = compare(
                model,
                bundle,
                Path(folder) / "cache",
                repeat=given.repeat,
                compiled=given.compile,
                record=given.record,
            )
            Console().print(table)


if __name__ == "__main__":
    main()
