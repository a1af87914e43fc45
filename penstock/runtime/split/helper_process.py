"""A process with a slice of a network, beside an engine: `python -m penstock.runtime.split.helper_process JOB`.

It runs each batch that the engine runs, and ends with it.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from penstock.core.bundles.bundle import read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import PenstockError
from penstock.runtime.gpu.devices import check_gpu
from penstock.runtime.gpu.precision import GpuWay, reduced
from penstock.runtime.load import finished, make_network
from penstock.runtime.load_weights import load_weights
from penstock.runtime.onnx.exporter_process import end_with_parent, first_cause
from penstock.runtime.split.split_executor import (
    COUNT_BYTES,
    FAILED,
    LOADED,
    HelperJob,
    SplitInputs,
    SplitPart,
    part_of,
)
from penstock.runtime.split.split_group import SplitGroup
from penstock.runtime.split.split_layers import split_network

log = logging.getLogger(__name__)


def main(job: HelperJob, engine: socket.socket, descriptor: int) -> None:
    """Load a slice of the network, then run batches until the engine is gone."""
    # The engine decides when it ends, by closing its standard input.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    group = SplitGroup(job.rank, job.size, job.device, _lost)
    try:
        part, inputs = _load(job, group, descriptor)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the application's code may raise anything
        text = str(error) if isinstance(error, PenstockError) else first_cause(error)
        engine.send(json.dumps([FAILED, f"on {job.device}: {text}"[:4000]]).encode())
        return
    engine.send(json.dumps([LOADED, ""]).encode())
    group.connect(Path(job.meeting))
    while message := engine.recv(COUNT_BYTES):
        # A copy: the next batch is written over this one when the engine has its answers.
        chunk_B = np.array(inputs.chunk_B[: int.from_bytes(message, "little")])
        engine.send(b"r")
        try:
            part.run(chunk_B)
        except torch.OutOfMemoryError:
            # The engine waits for this process in the middle of a batch.
            _lost(f"{job.device} has no memory left for a batch of {len(chunk_B)} rows; set --max-batch lower")
        except Exception:  # noqa: BLE001 - the application's code may raise anything
            # The network raises in the engine at the same place, where the request is told.
            log.debug("the network raised on %d rows", len(chunk_B))


def _load(job: HelperJob, group: SplitGroup, descriptor: int) -> tuple[SplitPart, SplitInputs]:
    if job.device != "cpu":
        check_gpu(job.device)
        torch.cuda.set_device(job.device)
    if job.threads:
        torch.set_num_threads(job.threads)
    files = read_bundle(Path(job.bundle))
    found = bundle_application(files, job.app, accept_changed=job.accept_changed)
    application = found.application
    module = make_network(found)
    load_weights(module, files.weights)
    module = reduced(finished(found, module), GpuWay(precision=job.precision))
    split_network(module, group)
    part = part_of(module, application.input, application.output, job.precision, job.device)
    return part, SplitInputs(application.input, job.rows, descriptor)


def _lost(reason: str) -> NoReturn:
    print(f"penstock: {reason}", file=sys.stderr, flush=True)
    # Not sys.exit: threads of the collectives would wait for the others.
    os._exit(1)


if __name__ == "__main__":
    given, to_engine, memory = json.loads(sys.argv[1])
    main(HelperJob(**given), socket.socket(fileno=to_engine), memory)
    os._exit(0)
