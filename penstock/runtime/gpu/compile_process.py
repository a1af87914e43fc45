"""Compile a bundle's network for batch sizes: `python -m penstock.runtime.gpu.compile_process BUNDLE PLACE ...`.

A process of its own, because the compiler takes gigabytes and holds Python's lock for seconds, while the network is
already served. It prints each batch size once it is compiled. Without `--rows`, it compiles the shapes that it reads
from standard input, one a line, such as `8x128`, and ends with its parent.
"""

import argparse
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Generator
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import PenstockError
from penstock.core.record import RecordSpec
from penstock.runtime.gpu.compiled_files import compiled_file, compiled_shape_file, shape_name
from penstock.runtime.gpu.compiled_network import compile_network, on_device
from penstock.runtime.gpu.gpu_network import GpuNetwork, gpu_network, with_folded_norms
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.gpu.shaped_inputs import clipped, inputs_of, repeated
from penstock.runtime.load import Predictor, unchecked_predictor
from penstock.runtime.onnx.exporter_process import NOT_EXPORTABLE, first_cause

# The compiler gives way to the server's own processes.
NICE = 10


def main() -> None:
    """Compile, or report the reason on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("place", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--way", type=json.loads, required=True)
    parser.add_argument("--rows")
    parser.add_argument("--app")
    parser.add_argument("--accept-changed-app", action="store_true")
    given = parser.parse_args()
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_parent, args=(lines,), daemon=True).start()
    os.nice(NICE)
    # What the application prints goes to standard error: the server reads sizes from standard output.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        files = read_bundle(given.bundle)
        found = bundle_application(files, given.app, accept_changed=given.accept_changed_app)
        # The server checked it, and checks what is compiled.
        predictor = unchecked_predictor(files, found)
    except PenstockError as error:
        sys.exit(str(error))
    way = GpuWay.from_json(given.way)
    application = predictor.application
    module = with_folded_norms(predictor, given.place).module
    network = gpu_network(module, application.input, application.output, way, given.device)
    wanted = _shapes(lines) if given.rows is None else ((int(rows),) for rows in given.rows.split(","))
    for shape in wanted:
        # Copies, because the compiler asks for aligned memory.
        example = [each.to(given.device, copy=True) for each in _example(predictor, network, shape)]
        name = compiled_file(given.place, way, shape[0])
        if given.rows is None:
            name = compiled_shape_file(given.place, way, shape)
        try:
            with on_device(given.device):
                compile_network(network, example, name)
        except torch.cuda.OutOfMemoryError as error:
            sys.exit(first_cause(error))
        except OSError as error:
            sys.exit(f"{given.place} cannot be written ({error.strerror or error})")
        except Exception as error:  # noqa: BLE001 - the compiler raises anything; this is the top of the process
            print(first_cause(error), file=sys.stderr)
            sys.exit(NOT_EXPORTABLE)
        print(shape_name(shape), file=report, flush=True)
        torch.cuda.empty_cache()


def _example(predictor: Predictor, network: GpuNetwork, shape: tuple[int, ...]) -> list[Tensor]:
    """Return inputs of a shape, made of the first golden example."""
    spec = predictor.application.input
    rooms = dict(zip(spec.dims if isinstance(spec, RecordSpec) else (), shape[1:], strict=True))
    chunks = repeated(predictor.files.golden.inputs[:1], shape[0])
    given = inputs_of(spec, clipped(spec, chunks, rooms), rooms)
    return [torch.from_numpy(given[name]) for name in network.arguments]


def _shapes(lines: "SimpleQueue[str]") -> Generator[tuple[int, ...]]:
    while True:
        yield tuple(map(int, lines.get().split("x")))


def _read_parent(lines: "SimpleQueue[str]") -> None:
    """Read the parent's lines; end this process when they end, as they do when the parent is killed."""
    # Not sys.stdin, whose lock the interpreter cannot take at its end while a thread reads.
    left = b""
    while part := os.read(0, 4096):
        *whole, left = (left + part).split(b"\n")
        for line in whole:
            lines.put(line.decode())
    os._exit(1)


if __name__ == "__main__":
    main()
