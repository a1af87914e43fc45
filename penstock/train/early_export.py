"""A trial export of the untrained network, beside the first steps of a long run.

A network that cannot be exported is served by torch, often slower on a CPU, and cannot be carried to devices; a
`prepare` that cannot be exported leaves the run without a bundle. Either is known before the weights are.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self, final

from penstock.core.errors import PenstockError, one_line
from penstock.core.machine.cores import available_cores
from penstock.runtime.bundle_writer import CheckedNetwork
from penstock.runtime.onnx.exporter_process import BackgroundExports, run_exporter
from penstock.runtime.onnx.prepare_session import exported_prepare

log = logging.getLogger(__name__)

# Shorter runs end with their bundle soon enough.
WAIT_S = 20.0
# On one core an export would hold up the steps.
MIN_CORES = 2
# The weights of larger networks would be held and written once more.
MAX_BYTES = 1 << 30


@final
class TrialExport:
    """Exports a network in processes of low priority while the context is open, and reports what fails.

    Args:
        network: The untrained network; None for none.
        notify: Called with a sentence for the user, in another thread.
        wait_s: Seconds before the export starts.
    """

    def __init__(
        self, network: CheckedNetwork | None, notify: Callable[[str], object], *, wait_s: float = WAIT_S
    ) -> None:
        # Another process has to find the application.
        fits = network is not None and network.found.reference and network.nbytes <= MAX_BYTES
        self._network = network if fits and available_cores() >= MIN_CORES else None
        self._notify, self._wait_s = notify, wait_s
        self._ends = threading.Event()
        self._exports = BackgroundExports()
        self._thread = threading.Thread(target=self._run, name="trial-export", daemon=True)

    def __enter__(self) -> Self:
        if self._network is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ends.set()
        self._exports.end()
        if self._network is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._ends.wait(self._wait_s):
            return
        assert self._network is not None
        try:
            note = _failure(self._network, self._exports)
        except (OSError, PenstockError) as error:
            # A full temporary folder, for example, says nothing of the network.
            log.info("no trial export: %s", error)
            return
        # What was ended failed because of that.
        if note is not None and not self._exports.is_ended:
            self._notify(note)


def _failure(network: CheckedNetwork, exports: BackgroundExports) -> str | None:
    application = network.found.application
    prepare = None
    if application.prepare is not None:
        try:
            prepare = exported_prepare(network.found, exports)
        except PenstockError as error:
            return f"Note: this run cannot end with a bundle: {one_line(error)}"
    with TemporaryDirectory(prefix="penstock-trial-") as folder:
        bundle = network.write(Path(folder) / "bundle", prepare).folder
        options = ["--app", network.found.reference]
        failure = run_exporter(
            "penstock.runtime.onnx.trial_export", bundle, Path(folder) / "graph.onnx", options, background=exports
        )
    # Anything else, such as a lack of memory or sources edited meanwhile, says nothing of the network.
    if failure is None or not failure.not_exportable:
        return None
    return (
        f"Note: the network of {application.name!r} cannot be exported to ONNX ({failure.reason.rstrip('.')}). torch "
        f"will serve it, often slower on a CPU, and 'penstock export' will refuse it. Mend the network, or go on."
    )
