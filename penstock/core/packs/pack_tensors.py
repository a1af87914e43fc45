"""Named tensors of a one-shot pack's graph: feeds of one input, and the answer of one run.

The graph takes a batch of one of each input tensor, and the length of each `Dim` of the inputs under its name, int64
`[1]`. It gives a batch of one of each output, and the length of each `Dim` that no input has. A raw array of any size
has no batch dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from penstock.core.dim import Dim
from penstock.core.named_arrays import chunks_of, feeds_of
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec, Lengths, RecordSpec, chunk_spec
from penstock.core.spec import Array, TensorSpec

# N examples


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PackTensors:
    """The inputs and outputs of a graph.

    Args:
        input: One input: a raw array, one tensor, or a record.
        outputs: The outputs, without batch dimensions.
        answers: The number of outputs that are the network's answer; an embedding may follow them.

    Attributes:
        output: One answer.
        names: Names of the graph's outputs: those of `outputs`, then the dimensions that no input has.
        any_size: Whether a size varies from input to input.
        is_plain: Whether there is one array in and one out, both without varying lengths; a raw array counts as one.
    """

    input: RawSpec | ChunkSpec
    outputs: tuple[TensorSpec, ...]
    answers: int
    output: ChunkSpec = field(init=False)
    names: list[str] = field(init=False)
    any_size: bool = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        output = chunk_spec(self.outputs[: self.answers])
        given, made = dims_of(self.input), dims_of(output)
        object.__setattr__(self, "output", output)
        object.__setattr__(
            self, "names", [spec.name for spec in self.outputs] + [dim for dim in made if dim not in given]
        )
        records = isinstance(self.input, RecordSpec) or isinstance(output, RecordSpec)
        object.__setattr__(self, "is_plain", not records)
        object.__setattr__(self, "any_size", isinstance(self.input, RawSpec) or bool(given) or bool(made))

    def feeds(self, given: Array) -> tuple[dict[str, Array], dict[str, Lengths]]:
        """Return the graph's inputs for one input without a batch dimension, and the lengths `[1]` among them."""
        if isinstance(self.input, RawSpec):
            return {self.input.name: given}, {}
        feeds, lengths = feeds_of(self.input, given[None])
        return feeds | lengths, lengths

    def answer(self, results: Sequence[Array], lengths: dict[str, Lengths]) -> list[Array]:
        """Return the answer, an array or a record of no dimensions, and the embedding if there is one.

        Args:
            results: The graph's outputs, in the order of `names`.
            lengths: The lengths of the input's dimensions.

        Raises:
            ApplicationError: A result does not have its declared type or shape.
        """
        named = dict(zip(self.names, results, strict=True))
        chunks = chunks_of(self.output, named, lengths)
        return [chunks[:1].reshape(chunks.shape[1:]), *(named[spec.name][0] for spec in self.outputs[self.answers :])]


def dims_of(spec: RawSpec | ChunkSpec) -> dict[str, Dim]:
    """Return the dimensions of a record whose length varies, by name."""
    return spec.dims if isinstance(spec, RecordSpec) else {}


def rows_of(chunks: Array) -> tuple[Array, ...]:
    """Return the chunks of `[N, ...]`, as views; records as arrays of no dimensions."""
    return tuple(chunks[row, ...] for row in range(len(chunks)))


def by_name(spec: ChunkSpec, chunk: Array) -> dict[str, Array]:
    """Return the tensors of one chunk by name, without padding."""
    return spec.unpack(chunk) if isinstance(spec, RecordSpec) else {spec.name: chunk}
