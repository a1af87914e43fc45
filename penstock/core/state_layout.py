"""Sizes of the state of an answer that takes steps: which dimensions vary, and how much room they have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

from penstock.core.dim import Dim
from penstock.core.generate import Generate
from penstock.core.record import ChunkSpec, Lengths, RecordSpec

# B rows in progress

# Entries by which the room of a dimension grows.
PAGE = 16


@final
@dataclass(frozen=True)
class StateLayout:
    """The declared state of one row.

    Args:
        generate: Its declaration.
        input: One raw input chunk.
        padding: What new room for floats is filled with; tests poison it.
        page: Entries by which the room of a dimension grows.
    """

    generate: Generate
    input: ChunkSpec
    padding: float = 0.0
    page: int = PAGE

    @cached_property
    def dims(self) -> dict[str, Dim]:
        """Every dimension of the state whose length varies, by name."""
        return self.generate.dims

    @cached_property
    def growing(self) -> dict[str, Dim]:
        """Those that grow from step to step."""
        return self.generate.growing(self.input)

    @cached_property
    def names(self) -> list[str]:
        """Names of what `begin` and `step` give: the tensors, then the lengths of the dimensions that grow."""
        return [*self.generate.state, *self.growing]

    @cached_property
    def given(self) -> list[str]:
        """Names of what `step` is given: `names`, then the lengths of the inputs' dimensions."""
        return [*self.names, *(self.input.dims if isinstance(self.input, RecordSpec) else ())]

    @cached_property
    def axes(self) -> dict[str, list[tuple[int, str]]]:
        """For each tensor, its axes that vary and the names of their dimensions; rows are axis 0."""
        return {
            name: [(axis, size.name) for axis, size in enumerate(spec.shape, start=1) if isinstance(size, Dim)]
            for name, spec in self.generate.state.items()
        }

    def room(self, lengths: Mapping[str, Lengths]) -> dict[str, int]:
        """The room that rows of these lengths need, in whole pages; a dimension that grows has one entry more."""
        longest = {name: int(lengths[name].max(initial=0)) for name in self.dims}
        more = {name: each + (name in self.growing) for name, each in longest.items()}
        return {name: max(1, min(-(-more[name] // self.page) * self.page, int(dim))) for name, dim in self.dims.items()}
