"""Placement of one layer over the processes, as a recipe declares it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import TrainError

Kind = Literal["data", "column-parallel", "row-parallel", "model", "vocab-parallel", "fully-sharded"]
KINDS: tuple[Kind, ...] = ("data", "column-parallel", "row-parallel", "model", "vocab-parallel", "fully-sharded")
_TENSOR_PARALLEL = {"column-parallel", "row-parallel", "model", "vocab-parallel"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Placement of one layer over the processes.

    The tensor-parallel kinds are of linear layers and give each process an equal slice of the weights.

    Args:
        kind: One of
            `"data"`: every process has all weights and its rows of the batch.
            `"column-parallel"`: tensor parallel; each process computes its slice of the outputs for the whole batch. A
            `"row-parallel"` layer must follow, with only elementwise operations between.
            `"row-parallel"`: tensor parallel; takes those slices as inputs and reduce-scatters the outputs, so that
            each process has all outputs of its rows.
            `"model"`: tensor parallel; as column-parallel, followed by an all-to-all, so that each process has all
            outputs of its rows.
            `"vocab-parallel"`: the last layer; the loss must be a `CrossEntropy`, computed over slices of the classes.
            `"fully-sharded"`: any layer; each process keeps a slice of every weight and all-gathers them for use (FSDP,
            ZeRO-3).
        chunks: The number of chunks in which a batch is gathered or scattered, each overlapped with the product of the
            one before; tensor-parallel kinds only.
        activation_checkpointing: Recompute the layer in the backward pass instead of keeping its activations;
            `"fully-sharded"` only.

    Raises:
        TrainError: There is no such kind, or another field does not go with it.
    """

    kind: Kind
    chunks: int = 1
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrainError(f"a placement has kind {self.kind!r}; choose one of {', '.join(KINDS)}.")
        if self.chunks < 1 or (self.chunks > 1 and self.kind not in _TENSOR_PARALLEL):
            raise TrainError(
                f"a {self.kind} placement has chunks={self.chunks}; it must be at least 1, and only "
                f"{', '.join(sorted(_TENSOR_PARALLEL))} can have more."
            )
        if self.activation_checkpointing and self.kind != "fully-sharded":
            raise TrainError(f"a {self.kind} placement has activation_checkpointing=True; only fully-sharded can.")


Placements = Mapping[str, Placement]
