"""Bundles whose network is split over several devices: their processes, checked by the golden examples."""

import logging
import os
from contextlib import ExitStack
from typing import NoReturn

from penstock.core.bundles.bundle import BundleFiles
from penstock.core.errors import GoldenMismatch, ServeError
from penstock.core.source_files.find_application import FoundApplication
from penstock.runtime.execution import Execution
from penstock.runtime.gpu.devices import check_gpu
from penstock.runtime.gpu.precision import GpuWay, loosened, reduced
from penstock.runtime.load import make_predictor
from penstock.runtime.runnable import Runnable
from penstock.runtime.split.split_executor import Helper, HelperJob, SplitExecutor, SplitInputs, new_meeting, part_of
from penstock.runtime.split.split_group import SplitGroup
from penstock.runtime.split.split_layers import SplitWeights, split_network

log = logging.getLogger(__name__)

MAX_ROWS = 1024
MAX_INPUT_BYTES = 512 << 20
# Exit status of an engine that lost a process of its network, as of one whose GPU failed.
PROCESS_LOST = 70


def split_runnable(files: BundleFiles, found: FoundApplication, how: Execution) -> Runnable:
    """Check a bundle on the CPU, split its network over devices, and check it there.

    Args:
        files: The verified bundle.
        found: Its application.
        how: The devices, joined by `+`, and the precision; `auto` is fp32.

    Raises:
        BundleError: Its answers differ too much.
        ServeError: The network cannot be split, or a device cannot take its slice.
    """
    devices, application = how.device.split("+"), found.application
    precision = "fp32" if how.precision == "auto" else how.precision
    _check(devices, found, how, precision)
    rows = max(1, min(how.max_rows or MAX_ROWS, MAX_ROWS, MAX_INPUT_BYTES // max(1, application.input.nbytes)))
    rows = max(rows, len(files.golden.inputs))
    threads = max(1, how.cores // len(devices)) if devices[0] == "cpu" else 0
    with ExitStack() as on_failure:
        inputs = SplitInputs(application.input, rows)
        on_failure.callback(os.close, inputs.descriptor)
        folder, meeting = new_meeting()
        on_failure.callback(folder.cleanup)
        helpers: list[Helper] = []
        for rank, device in enumerate(devices[1:], 1):
            job = HelperJob(
                bundle=str(files.folder),
                app=how.app,
                accept_changed=how.accept_changed,
                device=device,
                rank=rank,
                size=len(devices),
                precision=precision,
                threads=threads,
                meeting=str(meeting),
                rows=rows,
            )
            helpers.append(Helper(job, inputs.descriptor, _end))
            on_failure.callback(helpers[-1].close)
        # Meanwhile the helpers load.
        predictor = make_predictor(files, found)
        group = SplitGroup(0, len(devices), devices[0], _end)
        module = reduced(predictor.module, GpuWay(precision=precision))
        split = split_network(module, group)
        if not split.layers:
            raise ServeError(
                f"the network of {application.name!r} has no linear layer whose outputs can be divided by "
                f"{len(devices)}; serve it on one device."
            )
        part = part_of(module, application.input, application.output, precision, devices[0])
        for helper in helpers:
            helper.wait_loaded()
        group.connect(meeting)
        executor = SplitExecutor(
            part, group, helpers, inputs, folder, input=application.input, output=application.output
        )
        executor.threads = threads or None
        try:
            difference = loosened(files.golden, precision).check(executor.predict)
        except GoldenMismatch as error:
            raise GoldenMismatch(f"split over {' and '.join(devices)}, {error}") from error
        on_failure.pop_all()
    said = _described(devices, precision, split)
    log.info("%s by %s: the golden examples differ by %.3g", application.name, said, difference)
    return Runnable(application=application, files=files, executor=executor, runs_by=said)


def _check(devices: list[str], found: FoundApplication, how: Execution, precision: str) -> None:
    application, together = found.application, how.device
    for device in devices:
        if device != "cpu":
            check_gpu(device)
    for wrong, reason in (
        (application.live is not None, "is live, and the states of streams are not split"),
        (application.generate is not None, "answers in steps, which are not split"),
        (how.exact, "would be served with --exact, which a split network is not"),
        (how.choice == "onnx", "would be run by ONNX Runtime, which splits no network"),
        (devices[0] == "cpu" and precision != "fp32", f"would be served in {precision}, and a CPU serves fp32 alone"),
    ):
        if wrong:
            raise ServeError(f"--device is {together}, but {application.name!r} {reason}; serve it on one device.")


def _described(devices: list[str], precision: str, split: SplitWeights) -> str:
    own, whole = split.own_bytes / 1e6, split.whole_bytes / 1e6
    graphs = "" if devices[0] == "cpu" else ", without CUDA graphs"
    return f"torch in {precision}, split over {'+'.join(devices)}: {own:.1f} of {whole:.1f} MB of weights each{graphs}"


def _end(reason: str) -> NoReturn:
    """End this engine, whose network is not whole any more; the supervisor starts another one."""
    log.critical("%s; the engine ends", reason)
    os._exit(PROCESS_LOST)
