"""Export a bundle's network and check its graph: `python -m penstock.runtime.onnx.trial_export BUNDLE FILE`."""

from pathlib import Path

from penstock.core.errors import GoldenMismatch
from penstock.core.machine.onnx_session import onnx_errors
from penstock.runtime.load import Predictor
from penstock.runtime.onnx.exporter_process import exporter_main
from penstock.runtime.onnx.onnx_cache import onnx_executor
from penstock.runtime.onnx.onnx_export import export_graph, load_named_bundle


class UnusableGraph(Exception):
    """The graph does not run, or does not give the network's answers."""


def export_and_check(predictor: Predictor, file: Path) -> None:
    """Export a network, and compare the graph's answers with the recorded ones where both are of single requests.

    Raises:
        UnusableGraph: ONNX Runtime does not run the graph, or it gives other answers.
    """
    export_graph(predictor, file)
    # Nearly equal scores of an untrained network are no ground to choose between rows.
    if predictor.application.live is not None or predictor.files.golden.sets is not None:
        return
    try:
        onnx_executor(predictor.files, file, threads=1)
    except (GoldenMismatch, *onnx_errors()) as error:
        raise UnusableGraph(str(error)) from None


def main() -> None:
    """Run the exporter process."""
    exporter_main(__doc__, load_named_bundle, export_and_check)


if __name__ == "__main__":
    main()
