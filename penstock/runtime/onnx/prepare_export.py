"""Export an application's `prepare` as an ONNX graph: `python -m penstock.runtime.onnx.prepare_export APP FILE`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.core.bundles.golden import Golden
from penstock.core.prepare import RawSpec
from penstock.core.source_files.find_application import FoundApplication, find_application
from penstock.runtime.load import make_prepare
from penstock.runtime.onnx.exporter_process import exporter_main
from penstock.runtime.onnx.onnx_export import strip_notes
from penstock.runtime.onnx.prepare_session import PREPARED, RAW, PrepareSession, random_raws

# Raw arrays to compare with torch; the first two are small, to show that no size of the example is baked in.
TRIALS = 6
EXAMPLE = 3


def export_prepare(found: FoundApplication, file: Path) -> None:
    """Export the `prepare` of an application as an ONNX graph for all sizes, and check it against torch.

    Raises:
        ApplicationError: It does not give the declared input, or the graph gives other numbers.
    """
    prepare = make_prepare(found)
    assert prepare is not None, found.reference
    raws = random_raws(prepare.raw, TRIALS)
    chunks = np.stack([prepare(raw) for raw in raws])
    graph = _exported(prepare.module, prepare.raw, raws[EXAMPLE])
    prepared = PrepareSession(graph, prepare.raw, prepare.input)
    Golden(inputs=chunks, outputs=chunks, tolerance=0.0, raws=tuple(raws)).check_prepared(prepared)
    file.write_bytes(graph)


def _exported(module: nn.Module, raw: RawSpec, example: Any) -> bytes:
    any_size = {
        dim: torch.export.Dim(f"size_{dim}", min=1, max=largest)
        for dim, (size, largest) in enumerate(zip(raw.shape, raw.max_shape, strict=True))
        if size is None
    }
    # Exported here because torch.onnx.export would try three strategies, one after the other.
    exported = torch.export.export(module, (torch.from_numpy(example),), dynamic_shapes=(any_size,), strict=False)
    program: Any = torch.onnx.export(exported, input_names=[RAW], output_names=[PREPARED], dynamo=True, verbose=False)
    model = program.model_proto
    strip_notes(model)
    return model.SerializeToString(deterministic=True)


def main() -> None:
    """Run the exporter process."""
    exporter_main(__doc__, lambda given: find_application(given.source), export_prepare)


if __name__ == "__main__":
    main()
