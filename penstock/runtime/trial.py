"""The trial of a bundle in a disposable process: `python -m penstock.runtime.trial ORDER`.

It does what an engine and a front-end do with what others wrote: it reads the files, imports the application, opens the
graph of its `prepare`, and makes the network where the engine would. Code that never ends, or ends its process, meets
this one.
"""

import json
import logging
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

from penstock.core.bundles.bundle import BundleFiles, read_golden, read_manifest, read_prepare
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.errors import PenstockError
from penstock.core.machine.priority import lower_priority
from penstock.core.source_files.find_application import FoundApplication
from penstock.runtime.onnx.exporter_process import end_with_parent
from penstock.runtime.trial_order import MAX_VERDICT, TrialOrder


def try_bundle(order: TrialOrder) -> None:
    """Do with a bundle what an engine and a front-end do.

    Raises:
        PenstockError: It cannot be used.
    """
    folder = Path(order.bundle)
    manifest = read_manifest(folder)
    # Not the weights, which are only numbers, and may be many.
    files = BundleFiles(folder=folder, manifest=manifest, golden=read_golden(folder, manifest))
    found = bundle_application(files, order.app, accept_changed=order.accept_changed)
    if files.prepare is not None:
        # Imported here: most applications prepare nothing, and ONNX Runtime loads slowly.
        from penstock.runtime.onnx.prepare_session import open_prepare

        read_prepare(folder, manifest)
        open_prepare(files)
    if order.network:
        _make_network(found)


def _make_network(found: FoundApplication) -> None:
    import torch

    # Without memory for weights. Not every network can be made so, and the engine reports what it raises.
    with suppress(Exception), torch.device("meta"):
        found.model()


def main(text: str) -> None:
    """Run the trial, write the verdict to standard output, and end at once: no thread may delay the end.

    The verdict is a text in JSON, empty if the bundle passed.

    Args:
        text: The order in JSON.
    """
    order = TrialOrder.from_json(text)
    # Models that are served go first.
    lower_priority()
    # What the application prints is no verdict.
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    logging.disable(logging.CRITICAL)
    verdict = ""
    try:
        try_bundle(order)
    except PenstockError as error:
        verdict = str(error)
    except SystemExit as error:
        verdict = f"the application ends the process that imports it (SystemExit: {error.code})"
    except Exception as error:  # noqa: BLE001 - an application may raise anything; this is the top of the process
        verdict = f"{type(error).__name__}: {error}"
    os.write(output, json.dumps(verdict[:MAX_VERDICT]).encode())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
