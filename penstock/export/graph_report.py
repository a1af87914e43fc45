"""The report of the exporter process on a pack's graph."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.agreement import RowSets
from penstock.core.generate import Generate, whole_answer
from penstock.core.packs.pack import Kind
from penstock.core.packs.pack_live import PackLive
from penstock.core.packs.pack_tensors import PackTensors
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, chunk_spec
from penstock.core.spec import TensorSpec
from penstock.export.pack_session import PackedNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """A graph that agrees with its bundle.

    Args:
        raw: The input of any size, without a batch dimension; None without a `prepare`.
        inputs: The inputs, without batch dimensions; empty with a `raw`.
        outputs: The outputs, without batch dimensions.
        answers: The number of outputs that are the application's.
        live: Inputs and outputs of a live graph.
        generate: The state of an answer that takes steps, whose outputs are those of one step.
        prepare_nodes: Names of the nodes of `prepare`, which must not be quantized.
        sets: Rows of the outputs that are compared as sets; None without a `finish`.
        difference: Largest difference from the bundle's answers.
    """

    raw: RawSpec | None = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...]
    answers: int = 1
    live: PackLive | None = None
    generate: Generate | None = None
    prepare_nodes: tuple[str, ...] = ()
    sets: RowSets | None = None
    difference: float = 0.0

    @property
    def tensors(self) -> PackTensors:
        """The inputs, and the outputs of one run or step."""
        given = chunk_spec(self.inputs) if self.raw is None else self.raw
        return PackTensors(input=given, outputs=self.outputs, answers=self.answers)

    @property
    def kind(self) -> Kind:
        """The kind of the pack."""
        if self.live is not None:
            return "live"
        return "oneshot" if self.generate is None else "generate"

    @property
    def answer(self) -> ChunkSpec:
        """One whole answer."""
        return self.tensors.output if self.generate is None else whole_answer(self.outputs, self.generate.max_steps)

    def network(self, graph: Path) -> PackedNetwork:
        """Open the graph, or another one of the same inputs and outputs."""
        return PackedNetwork(graph, self.tensors, live=self.live, generate=self.generate)
