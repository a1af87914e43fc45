"""The report of the exporter process on a pack's graph."""

from dataclasses import dataclass
from pathlib import Path

from penstock.core.pack import PackLive
from penstock.core.prepare import RawSpec
from penstock.core.spec import TensorSpec
from penstock.export.pack_session import PackedNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """A graph that agrees with its bundle.

    Args:
        input: The input; a dimension of any size is None, and then there is no batch dimension.
        input_name: Its name in the graph.
        outputs: The outputs, without batch dimensions.
        live: Inputs and outputs of a live graph.
        prepare_nodes: Names of the nodes of `prepare`, which must not be quantized.
        difference: Largest difference from the bundle's answers.
    """

    input: RawSpec
    input_name: str
    outputs: tuple[TensorSpec, ...]
    live: PackLive | None = None
    prepare_nodes: tuple[str, ...] = ()
    difference: float = 0.0

    def network(self, graph: Path) -> PackedNetwork:
        """Open the graph, or another one of the same inputs and outputs."""
        return PackedNetwork(graph, self.input_name, varies=None in self.input.shape, live=self.live)
