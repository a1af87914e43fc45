"""Exports a bundle's network as an ONNX graph: `python -m penstock.runtime.export_graph BUNDLE FILE`.

A process of its own: the exporter takes seconds and hundreds of megabytes that a server should not keep, and a second
export in one process was seen to freeze a dimension without a word.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from penstock.core.errors import PenstockError
from penstock.core.spec import TensorSpec
from penstock.nn.streaming import Streaming, leaves, map_state
from penstock.runtime.exported_step import (
    CHUNK,
    COUNTS,
    GIVEN,
    LAST,
    LENGTH,
    OUTPUT,
    OUTPUT_LENGTH,
    next_name,
    state_name,
)
from penstock.runtime.graph import NOT_EXPORTABLE
from penstock.runtime.load import Predictor, load, streaming_of
from penstock.runtime.onnx_executor import steady_graph
from penstock.runtime.torch_executor import served_function

# Two, because a batch of one is a constant to the exporter.
EXAMPLES = 2
# After so many whole chunks as much waits in every layer as before, or never.
STEPS_TO_STEADY = 64


@final
class _Served(nn.Module):
    """The function of a network that is served, as a module of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, chunk_B: Tensor) -> Tensor:
        return served_function(self.module)(chunk_B)


@final
class _Step(nn.Module):
    """One step of a streaming network, the leaves of its state one by one."""

    def __init__(self, network: Streaming) -> None:
        super().__init__()
        self.network = network
        self._state = network.initial_state(1)

    def forward(self, chunk_BT: Tensor, length_B: Tensor, last_B: Tensor, state: list[Tensor]) -> list[Tensor]:
        given = iter(state)
        step = self.network.step(chunk_BT, length_B, map_state(lambda _: next(given), self._state), last_B)
        return [step.output_BU, step.length_B, *leaves(step.state)]


@final
class _SteadyStep(nn.Module):
    """One step of whole chunks where the counts of the state are known; of it come the output and the other leaves."""

    def __init__(self, network: Streaming, frames: int, counts: dict[int, int]) -> None:
        super().__init__()
        self.network = network
        self._frames = frames
        self._counts = counts
        self._state = network.initial_state(1)

    def forward(self, chunk_BT: Tensor, state: list[Tensor]) -> list[Tensor]:
        others = iter(state)
        numbered = iter(range(len(leaves(self._state))))
        # An int where a layer expects its count, so that it can be looked at before there is a batch.
        known: Any = map_state(lambda _: self._leaf(next(numbered), others), self._state)
        step = self.network.step(chunk_BT, torch.full(chunk_BT.shape[:1], self._frames), known)
        return [step.output_BU, *(leaf for at, leaf in enumerate(leaves(step.state)) if at not in self._counts)]

    def _leaf(self, at: int, others: Iterator[Tensor]) -> Any:
        return self._counts[at] if at in self._counts else next(others)


def export_graph(predictor: Predictor, file: Path) -> None:
    """Write the network of a loaded bundle as an ONNX graph, its first dimension of any size."""
    application = predictor.application
    if application.live is None:
        _export_served(predictor, file)
    else:
        export_step(streaming_of(application, predictor.module), application.input, file)


def export_step(network: Streaming, input: TensorSpec, file: Path) -> None:
    """Write one step of a network in evaluation mode, as `penstock.runtime.exported_step` runs it.

    Args:
        network: On the CPU.
        input: One raw chunk, its frames first.
        file: The ONNX file. That of steady batches is put beside it, where there are such.
    """
    step_program(network, input).save(file)
    with torch.inference_mode():
        steady = _steady(network, input)
    if steady is not None:
        try:
            _export_steady_step(network, input, *steady, steady_graph(file))
        except Exception as error:  # noqa: BLE001 - a layer that is not ours may want its counts as tensors
            print(f"without a graph for steady batches: {first_cause(error)}", file=sys.stderr)


def step_program(network: Streaming, input: TensorSpec, rows: int | None = None) -> Any:
    """One step of a network in evaluation mode, for a batch of so many rows or, by default, of any number.

    Returns:
        What the exporter made. Into it go the chunk, how many of its frames are valid, whose stream ends, and the
        leaves of the state in order; of it come the output, how many of its frames are valid, and the leaves after.
    """
    given = rows or EXAMPLES
    state = [leaf.clone() for leaf in leaves(network.initial_state(given))]
    length_B = torch.full((given,), input.shape[0])
    chunk_BT = _zeros(input, given)
    batch = {0: torch.export.Dim("batch")}
    any_batch = {"chunk_BT": batch, "length_B": batch, "last_B": batch, "state": [batch] * len(state)}
    program = torch.onnx.export(
        _Step(network).eval(),
        (chunk_BT, length_B, length_B == 0, state),
        input_names=[CHUNK, LENGTH, LAST, *map(state_name, range(len(state)))],
        output_names=[OUTPUT, OUTPUT_LENGTH, *map(next_name, range(len(state)))],
        dynamic_shapes=any_batch if rows is None else None,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    return program


def _export_steady_step(network: Streaming, input: TensorSpec, counts: dict[int, int], given: int, file: Path) -> None:
    others = {at: leaf.clone() for at, leaf in enumerate(leaves(network.initial_state(EXAMPLES))) if at not in counts}
    batch = {0: torch.export.Dim("batch")}
    program = torch.onnx.export(
        _SteadyStep(network, input.shape[0], counts).eval(),
        (_zeros(input, EXAMPLES), list(others.values())),
        input_names=[CHUNK, *map(state_name, others)],
        dynamic_shapes={"chunk_BT": batch, "state": [batch] * len(others)},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update({COUNTS: json.dumps(counts), GIVEN: str(given)})
    program.save(file)


def _steady(network: Streaming, input: TensorSpec) -> tuple[dict[int, int], int] | None:
    """The counts of the state that stay what they are where whole chunks come, and how many frames each gives."""
    chunk_BT, state = _zeros(input, 1), network.initial_state(1)
    length_B = torch.full((1,), input.shape[0])
    before: dict[int, int] = {}
    for _ in range(STEPS_TO_STEADY):
        step = network.step(chunk_BT, length_B, state)
        state = step.state
        counts = {
            at: int(leaf) for at, leaf in enumerate(leaves(state)) if leaf.dtype == torch.int64 and leaf.ndim == 1
        }
        if counts and counts == before:
            return counts, int(step.length_B)
        before = counts
    return None


def _zeros(input: TensorSpec, batch: int) -> Tensor:
    return torch.zeros(batch, *input.shape, dtype=getattr(torch, input.dtype))


def _export_served(predictor: Predictor, file: Path) -> None:
    golden = predictor.files.golden.inputs
    chunk_B = torch.from_numpy(golden[[0] * EXAMPLES].copy())
    program = torch.onnx.export(
        _Served(predictor.module).eval(),
        (chunk_B,),
        input_names=[predictor.application.input.name],
        output_names=[predictor.application.output.name],
        dynamic_shapes={"chunk_B": {0: torch.export.Dim("batch")}},
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.save(file)


def main() -> None:
    """Export, or say on standard error why not."""
    given = exporter_asked("python -m penstock.runtime.export_graph", __doc__)
    try:
        predictor = load(given.bundle, app=given.app, accept_changed=given.accept_changed_app)
    except PenstockError as error:
        sys.exit(str(error))
    try:
        export_graph(predictor, given.file)
    except Exception as error:  # noqa: BLE001 - the exporter raises whatever it meets; this is the process's top
        print(first_cause(error), file=sys.stderr)
        sys.exit(NOT_EXPORTABLE)


def exporter_asked(program: str, description: str | None) -> argparse.Namespace:
    """What an exporter's process is to do: of which bundle, to which file. It is quiet from now on."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--app")
    parser.add_argument("--accept-changed-app", action="store_true")
    given = parser.parse_args()
    # The exporter says much about itself; what counts is whether the graph gives the bundle's answers.
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    return given


def first_cause(error: BaseException) -> str:
    """What the exporter met first, in a line."""
    # The exporter wraps what it met in advice about itself.
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


if __name__ == "__main__":
    main()
