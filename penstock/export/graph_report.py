"""The report of the exporter process on a pack's graph."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

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
    live: PackLive | None
    prepare_nodes: tuple[str, ...]
    difference: float

    def network(self, graph: Path) -> PackedNetwork:
        """Open the graph, or another one of the same inputs and outputs."""
        return PackedNetwork(graph, self.input_name, varies=None in self.input.shape, live=self.live)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Read what `to_json` wrote."""
        return cls(
            input=RawSpec.from_json(fields["input"]),
            input_name=fields["input_name"],
            outputs=tuple(map(TensorSpec.from_json, fields["outputs"])),
            live=None if fields["live"] is None else PackLive.from_json(fields["live"]),
            prepare_nodes=tuple(fields["prepare_nodes"]),
            difference=fields["difference"],
        )
