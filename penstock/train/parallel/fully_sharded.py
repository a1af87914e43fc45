"""Fully sharded layers: weight slices that are all-gathered for the forward and again for the backward pass."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from penstock.train.parallel.collectives import (
    once_differentiable,
    pad_ranks,
    pad_rows,
    start_all_gather,
    start_reduce_scatter,
    unpad_ranks,
)
from penstock.train.parallel.world import World, split_rows

# P padded elements of one process's slices; R ranks


@final
class FullyShardedLayer(nn.Module):
    """A layer whose weights are all-gathered in the forward and again in the backward pass.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.

    Args:
        layer: The whole layer, with the same weights in every process. Its parameters become slices along their first
            dimension; parameters with fewer rows than there are processes stay whole.
        world: The processes.
        name: Of the layer, for errors.
        activation_checkpointing: Recompute the layer in the backward pass instead of keeping its activations.

    Attributes:
        sizes: The rows of each process's slice, by the name of each sliced parameter.
    """

    INNER: ClassVar[str] = "inner"

    def __init__(self, layer: nn.Module, world: World, name: str, *, activation_checkpointing: bool) -> None:
        super().__init__()
        self.inner = layer
        self.world = world
        self.name = name
        self.activation_checkpointing = activation_checkpointing
        self.sizes: dict[str, tuple[int, ...]] = {}
        for own, parameter in list(layer.named_parameters()) if world.size > 1 else []:
            if parameter.ndim == 0 or parameter.shape[0] < world.size:
                continue
            self.sizes[own] = split_rows(parameter.shape[0], world.size)
            first = sum(self.sizes[own][: world.rank])
            part = parameter.detach()[first : first + self.sizes[own][world.rank]].clone()
            above, _, last = own.rpartition(".")
            setattr(layer.get_submodule(above), last, nn.Parameter(part, parameter.requires_grad))

    def forward(self, *given: Any, **named: Any) -> Any:
        """Call the layer with whole weights."""
        if self.activation_checkpointing and self.training:

            def contexts() -> Any:
                return nullcontext(), _buffers_kept(self.inner)

            return checkpoint(self._run, *given, use_reentrant=False, context_fn=contexts, **named)
        return self._run(*given, **named)

    def _run(self, *given: Any, **named: Any) -> Any:
        own = dict(self.inner.named_parameters())
        parts = {name: _autocast(own[name]) for name in self.sizes}
        whole: dict[str, Tensor] = {}
        # One all-gather for all weights of a dtype; apart for frozen ones, whose gradients are not reduce-scattered.
        kinds = {name: (part.dtype, part.requires_grad) for name, part in parts.items()}
        for kind in dict.fromkeys(kinds.values()):
            names = [name for name, own_kind in kinds.items() if own_kind == kind]
            slices = _WeightSlices(world=self.world, name=self.name, sizes=tuple(self.sizes[name] for name in names))
            gathered = cast(Any, _GatherWeights.apply(slices, *(parts[name] for name in names)))
            whole |= dict(zip(names, gathered, strict=True))
        if self.activation_checkpointing:
            return functional_call(self.inner, whole, given, named, tie_weights=False)
        with _regathered(self, whole, parts):
            return functional_call(self.inner, whole, given, named, tie_weights=False)


def _autocast(part: Tensor) -> Tensor:
    """Cast weights that autocast would cast anyway, so that the all-gather moves half the bytes; not those of norms."""
    device = part.device.type
    half = torch.is_autocast_enabled(device) and part.ndim > 1 and part.dtype == torch.float32
    return part.to(torch.get_autocast_dtype(device)) if half else part


@dataclass(frozen=True, kw_only=True, slots=True)
class _WeightSlices:
    """Slices of several weights of one layer, along their first dimension."""

    world: World
    name: str
    sizes: tuple[tuple[int, ...], ...]

    def gathered(self, what: str, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """All-gather whole weights from this process's slices."""
        padded = [pad_rows(part, sizes) for part, sizes in zip(parts, self.sizes, strict=True)]
        flat_P = torch.cat([part.reshape(-1) for part in padded])
        flat_RP = start_all_gather(self.world, f"the all-gather of {self.name}'s {what}", flat_P)()
        whole: list[Tensor] = []
        for part_RP, part, sizes in zip(self._split(flat_RP, padded), padded, self.sizes, strict=True):
            whole.append(unpad_ranks(part_RP.reshape(-1, *part.shape[1:]), sizes).contiguous())
        return tuple(whole)

    def scattered(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Reduce-scatter whole gradients to this process's slices."""
        rank, ranks = self.world.rank, self.world.size
        padded = [pad_ranks(grad, sizes) for grad, sizes in zip(grads, self.sizes, strict=True)]
        flat_RP = torch.cat([grad.reshape(ranks, -1) for grad in padded], 1)
        own_P = start_reduce_scatter(self.world, f"the reduce-scatter of {self.name}'s gradients", flat_RP)()
        parts = [grad.unflatten(0, (ranks, -1))[0] for grad in padded]
        return tuple(
            own.view(part.shape)[: sizes[rank]]
            for own, part, sizes in zip(self._split(own_P, parts), parts, self.sizes, strict=True)
        )

    def _split(self, flat: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return flat.split([part.numel() for part in parts], -1)


@final
class _GatherWeights(Function):
    @staticmethod
    def forward(ctx: Any, slices: _WeightSlices, *parts: Tensor) -> Any:
        ctx.slices = slices
        return slices.gathered("weights", parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.slices.scattered(grads)


@contextmanager
def _buffers_kept(layer: nn.Module) -> Generator[None]:
    """Undo changes of buffers: recomputation must not update running statistics again."""
    before = [buffer.clone() for buffer in layer.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(layer.buffers(), before, strict=True):
                buffer.copy_(value)


@contextmanager
def _regathered(layer: FullyShardedLayer, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Generator[None]:
    """Save a reference instead of a gathered weight for the backward pass, and gather the weight again there."""
    by_memory = {tensor.untyped_storage().data_ptr(): own for own, tensor in whole.items()}

    def packed(kept: Tensor) -> Any:
        own = by_memory.get(kept.untyped_storage().data_ptr())
        # With its strides: often the transposed weight is saved.
        return kept if own is None else (own, kept.shape, kept.stride(), kept.storage_offset())

    def unpacked(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, shape, stride, offset = kept
        slices = _WeightSlices(world=layer.world, name=layer.name, sizes=(layer.sizes[own],))
        return slices.gathered("weights again", [parts[own].detach()])[0].as_strided(shape, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        yield
