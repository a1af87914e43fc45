"""Export of a network before an engine loads it: `python -m penstock.runtime.onnx.export_ahead ORDER`.

A process of its own, so that a server can end it with its exporter, also while it waits for the lock of the graph.
"""

import logging
import os
import sys
import threading
from pathlib import Path

from penstock.core.bundles.bundle import BundleFiles, read_golden, read_manifest
from penstock.core.errors import PenstockError
from penstock.core.machine.priority import lower_priority
from penstock.runtime.executor_choice import resolved_device
from penstock.runtime.loading_steps import LoadingSteps
from penstock.runtime.onnx.export_order import ExportOrder, ExportWord
from penstock.runtime.onnx.exporter_process import end_with_parent
from penstock.runtime.onnx.onnx_cache import cached_graph, exporter_options


def export_ahead(order: ExportOrder, progress: LoadingSteps) -> ExportWord:
    """Export a network into the cache, unless no engine runs it by its graph; returns the last word."""
    if not any(resolved_device(device, order.choice) == "cpu" for device in order.devices):
        return ExportWord(on_cpu=False)
    folder = Path(order.bundle)
    try:
        manifest = read_manifest(folder)
        # Not the weights: the exporter reads them.
        files = BundleFiles(folder=folder, manifest=manifest, golden=read_golden(folder, manifest))
        options = exporter_options(order.app, accept_changed=order.accept_changed)
        cached_graph(files, Path(order.cache), options, progress, stall_s=order.stall_s)
    except PenstockError as error:
        return ExportWord(failure=str(error))
    return ExportWord()


def main(text: str) -> None:
    """Run the process; its standard output has a line for each step, and the last one the result.

    Args:
        text: The order in JSON.
    """
    order = ExportOrder.from_json(text)
    # Models that are served go first.
    lower_priority()
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.basicConfig(format="penstock: %(message)s", level=logging.WARNING)

    def write(word: ExportWord) -> None:
        os.write(output, word.to_line())

    write(export_ahead(order, LoadingSteps(lambda activity: write(ExportWord(activity=activity)), Path(order.cache))))


if __name__ == "__main__":
    main(sys.argv[1])
