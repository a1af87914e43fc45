"""Exports an application's `prepare` as an ONNX graph: `python -m penstock.runtime.export_prepare APP FILE`.

A process of its own, as `penstock.runtime.export_graph` is.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from penstock.core.application import FoundApplication, find_application
from penstock.core.errors import PenstockError
from penstock.core.golden import Golden
from penstock.core.prepare import RawSpec
from penstock.runtime.export_graph import first_cause
from penstock.runtime.graph import NOT_EXPORTABLE
from penstock.runtime.load import preparing_of
from penstock.runtime.prepared import PREPARED, RAW, Prepared, random_raws

# Raw arrays that must be prepared to the same; the first two are small, and nothing of the example's sizes may be kept.
TRIED = 6
EXAMPLE = 3


def export_prepare(found: FoundApplication, file: Path) -> None:
    """Write the `prepare` of an application as an ONNX graph that takes every size, and check it against torch.

    Raises:
        ApplicationError: It does not give the declared input, or the graph gives other numbers.
    """
    prepare = preparing_of(found)
    assert prepare is not None, found.reference
    raws = random_raws(prepare.raw, TRIED)
    chunks = np.stack([prepare(raw) for raw in raws])
    graph = _without_notes(_exported(prepare.module, prepare.raw, raws[EXAMPLE]))
    prepared = Prepared(graph, prepare.raw, prepare.input)
    Golden(inputs=chunks, outputs=chunks, tolerance=0.0, raws=tuple(raws)).check_prepared(prepared)
    file.write_bytes(graph)


def _exported(module: nn.Module, raw: RawSpec, example: Any) -> bytes:
    any_size = {
        dim: torch.export.Dim(f"size_{dim}", min=1, max=most)
        for dim, (size, most) in enumerate(zip(raw.shape, raw.most, strict=True))
        if size is None
    }
    # Not by the exporter, which tries three ways one after the other where the first one fails.
    exported = torch.export.export(module, (torch.from_numpy(example),), dynamic_shapes=(any_size,), strict=False)
    program: Any = torch.onnx.export(exported, input_names=[RAW], output_names=[PREPARED], dynamo=True, verbose=False)
    return program.model_proto.SerializeToString()


def _without_notes(graph: bytes) -> bytes:
    """The graph without what the exporter wrote for people: the files and lines that each operation came from."""
    model = onnx.load_from_string(graph)
    del model.metadata_props[:]
    del model.graph.metadata_props[:]
    for entries in (model.graph.node, model.graph.value_info, model.graph.input, model.graph.output):
        for entry in entries:
            entry.doc_string = ""
            del entry.metadata_props[:]
    return model.SerializeToString(deterministic=True)


def main() -> None:
    """Export, or say on standard error why not."""
    parser = argparse.ArgumentParser(prog="python -m penstock.runtime.export_prepare", description=__doc__)
    parser.add_argument("application")
    parser.add_argument("file", type=Path)
    given = parser.parse_args()
    # The exporter says much about itself; what counts is whether the graph gives the same numbers.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    try:
        export_prepare(find_application(given.application), given.file)
    except PenstockError as error:
        sys.exit(str(error))
    except Exception as error:  # noqa: BLE001 - the exporter raises whatever it meets; this is the process's top
        print(first_cause(error), file=sys.stderr)
        sys.exit(NOT_EXPORTABLE)


if __name__ == "__main__":
    main()
