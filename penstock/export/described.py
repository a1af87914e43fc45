"""What the process that makes a pack's graph says of it, to the one that asked for it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from penstock.core.pack import PackLive
from penstock.core.prepare import RawSpec
from penstock.core.spec import TensorSpec
from penstock.export.packed import PackedNetwork


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A graph that was shown to answer as its bundle does.

    Args:
        input: What goes into it; any size where a dimension is None, and then without a batch dimension.
        input_name: What that is called in the graph.
        outputs: What comes of it, without batch dimensions.
        live: Of streams, how they go through it.
        prepared_by: The names of its nodes that stand for `prepare`, which 8 bits would spoil.
        difference: The largest difference from the bundle's answers.
    """

    input: RawSpec
    input_name: str
    outputs: tuple[TensorSpec, ...]
    live: PackLive | None
    prepared_by: tuple[str, ...]
    difference: float

    def network(self, graph: Path) -> PackedNetwork:
        """What runs it, or another graph of the same inputs and outputs."""
        return PackedNetwork(graph, self.input_name, varies=None in self.input.shape, live=self.live)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """What `to_json` gave."""
        return cls(
            input=RawSpec.from_json(fields["input"]),
            input_name=fields["input_name"],
            outputs=tuple(map(TensorSpec.from_json, fields["outputs"])),
            live=None if fields["live"] is None else PackLive.from_json(fields["live"]),
            prepared_by=tuple(fields["prepared_by"]),
            difference=fields["difference"],
        )
