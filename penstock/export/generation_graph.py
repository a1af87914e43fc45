"""The two graphs of a network whose answer takes steps: `begin` and `step`, see `penstock.core.packs.pack_loop`."""

from pathlib import Path
from typing import Any, final

import onnx
import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.named_arrays import feeds_of
from penstock.core.packs.pack_loop import DONE, NEXT, STATE
from penstock.core.spec import Array
from penstock.core.state_layout import StateLayout
from penstock.export.graph_file import Shapes, keep_outputs, save_graph
from penstock.runtime.generation.generating_network import GeneratingNetwork
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.runtime.generation.generation_state import with_room
from penstock.runtime.load import Predictor
from penstock.runtime.onnx.onnx_export import VARYING, dynamic_dims, exported_program

# The exporter takes sizes of 0 and 1 for constants.
TRACED_SIZE = 5


@final
class _Begin(nn.Module):
    """The `begin` of a network for one row, with its tensors in order."""

    def __init__(self, module: nn.Module, network: GeneratingNetwork) -> None:
        super().__init__()
        # The exporter looks for weights in submodules.
        self.module = module
        self._network = network

    def forward(self, *given: Tensor) -> list[Tensor]:
        state = self._network.begin(dict(zip(self._network.arguments, given, strict=True)), 1)
        return [tensor.clone() for tensor in state.values()]


@final
class _Step(nn.Module):
    """The `step` of a network for one row, with its tensors in order."""

    def __init__(self, module: nn.Module, network: GeneratingNetwork, names: list[str]) -> None:
        super().__init__()
        self.module = module
        self._network = network
        self._names = names

    def forward(self, state: list[Tensor]) -> list[Tensor]:
        # Copies in and out: a network may write in place, and give one tensor under two names.
        given = {name: tensor.clone() for name, tensor in zip(self._names, state, strict=True)}
        step = self._network.step(given)
        return [tensor.clone() for tensor in (*step.outputs, step.done_B, *step.state.values())]


@final
class GenerationGraphs:
    """The graphs of a bundle's network.

    Args:
        predictor: The bundle's network.
        chunk_B: One input, `[1, ...]`, whose lengths differ from one another.
    """

    def __init__(self, predictor: Predictor, chunk_B: Array) -> None:
        application: Application = predictor.application
        assert application.generate is not None, application.name
        assert isinstance(predictor.executor, GenerationExecutor), predictor.executor
        self._application, self._module, self._executor = application, predictor.module, predictor.executor
        self._chunk_B = chunk_B
        self._layout = StateLayout(application.generate, application.input)
        self._network = GeneratingNetwork(predictor.module, application, self._layout)

    def begin_program(self) -> tuple[Any, Shapes]:
        """Export `begin`; returns the exporter's program, and its outputs."""
        arguments = self._network.arguments
        feeds, lengths_B = feeds_of(self._application.input, self._chunk_B)
        given = {name: torch.from_numpy(array) for name, array in (feeds | lengths_B).items()}
        dynamic = {spec.name: dynamic_dims(spec) for spec in self._application.inputs.values()}
        made = self._shapes(NEXT, self._layout.names)
        program = exported_program(
            _Begin(self._module, self._network),
            tuple(given[name] for name in arguments),
            arguments,
            list(made),
            (tuple(dynamic.get(name, {}) for name in arguments),),
        )
        return program, made

    def write_step(self, file: Path) -> None:
        """Export `step`.

        Raises:
            PackError: Its inputs or outputs differ from the declared ones.
        """
        names = self._layout.given
        given = self._shapes(STATE, names)
        made: Shapes = {spec.name: (spec.dtype, (1, *spec.shape)) for spec in self._application.outputs.values()}
        made |= {DONE: ("bool", (1,))} | self._shapes(NEXT, self._layout.names)
        state = self._traced_state()
        axes = self._layout.axes
        program = exported_program(
            _Step(self._module, self._network, names),
            ([state[name] for name in names],),
            list(given),
            list(made),
            ([dict.fromkeys((axis for axis, _ in axes.get(name, ())), VARYING) for name in names],),
        )
        save_graph(program, file, given, made)
        keep_outputs(file, made.keys() - _unchanged(file))

    def _shapes(self, prefix: str, names: list[str]) -> Shapes:
        state = self._layout.generate.state
        lengths = ("int64", (1,))
        return {
            prefix + name: (state[name].dtype, (1, *state[name].shape)) if name in state else lengths for name in names
        }

    def _traced_state(self) -> dict[str, Tensor]:
        """A state before the first step, whose dimensions differ from one another."""
        state, layout = self._executor.begin(self._chunk_B), self._layout
        room = {
            name: min(max(int(state.lengths[name][0]) + 1, TRACED_SIZE + 2 * at), int(dim))
            for at, (name, dim) in enumerate(layout.dims.items())
        }
        return with_room(layout, state, room).named()


def _unchanged(file: Path) -> set[str]:
    """Outputs of a step's graph that are the state as it was given, which need not be copied out and in again."""
    graph = onnx.load(file).graph
    copied = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Identity"}

    def source(name: str) -> str:
        while name in copied:
            name = copied[name]
        return name

    names = {value.name for value in graph.output if value.name.startswith(NEXT)}
    return {name for name in names if source(name) == STATE + name.removeprefix(NEXT)}
