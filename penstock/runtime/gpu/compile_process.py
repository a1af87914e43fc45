"""Compile a bundle's network for batch sizes: `python -m penstock.runtime.gpu.compile_process BUNDLE PLACE ...`.

A process of its own, because the compiler takes gigabytes and holds Python's lock for seconds, while the network is
already served. It prints each batch size once it is compiled.
"""

import argparse
import json
import logging
import os
import sys
import threading
import warnings
from pathlib import Path

import torch

from penstock.core.errors import PenstockError
from penstock.runtime.exporter_process import NOT_EXPORTABLE, end_with_parent, first_cause
from penstock.runtime.gpu.compiled_files import compiled_file
from penstock.runtime.gpu.compiled_network import compile_network, on_device
from penstock.runtime.gpu.gpu_network import gpu_network, with_folded_norms
from penstock.runtime.gpu.precision import GpuWay
from penstock.runtime.load import load

# The compiler gives way to the server's own processes.
NICE = 10


def main() -> None:
    """Compile, or report the reason on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("place", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--way", type=json.loads, required=True)
    parser.add_argument("--rows", required=True)
    parser.add_argument("--app")
    parser.add_argument("--accept-changed-app", action="store_true")
    given = parser.parse_args()
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.nice(NICE)
    # What the application prints goes to standard error: the server reads sizes from standard output.
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        predictor = load(given.bundle, app=given.app, accept_changed=given.accept_changed_app)
    except PenstockError as error:
        sys.exit(str(error))
    way = GpuWay.from_json(given.way)
    application = predictor.application
    module = with_folded_norms(predictor).module
    network = gpu_network(module, application.input, application.output, way, given.device)
    example = torch.from_numpy(predictor.files.golden.inputs[:1])
    for rows in map(int, given.rows.split(",")):
        # A copy, because the compiler asks for aligned memory.
        chunk_B = example.repeat(rows, *[1] * (example.ndim - 1)).to(given.device)
        try:
            with on_device(given.device):
                compile_network(network, [chunk_B], compiled_file(given.place, way, rows))
        except torch.cuda.OutOfMemoryError as error:
            sys.exit(first_cause(error))
        except OSError as error:
            sys.exit(f"{given.place} cannot be written ({error.strerror or error})")
        except Exception as error:  # noqa: BLE001 - the compiler raises anything; this is the top of the process
            print(first_cause(error), file=sys.stderr)
            sys.exit(NOT_EXPORTABLE)
        print(rows, file=report, flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
