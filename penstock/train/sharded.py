"""A layer whose weights are kept in parts, and gathered for as long as they are used."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from penstock.train.collectives import (
    once_differentiable,
    padded,
    padded_batch,
    start_gather,
    start_scatter,
    whole_batch,
)
from penstock.train.world import World, split_rows

# P numbers of one process's parts, filled up; R ranks


@final
class Sharded(nn.Module):
    """Keeps a part of each weight of a layer, and gathers them in the forward and again in the backward pass.

    Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.

    Args:
        layer: Whole, with the same weights in every process. Its parameters become this process's parts of them, cut
            along their first dimension; those with fewer rows than there are processes stay whole.
        world: The processes.
        name: The layer's.
        recompute: Compute the layer again in the backward pass instead of keeping its activations.

    Attributes:
        sizes: The rows of each process's part, for each parameter that is cut.
    """

    INNER: ClassVar[str] = "inner"

    def __init__(self, layer: nn.Module, world: World, name: str, *, recompute: bool) -> None:
        super().__init__()
        self.inner = layer
        self.world = world
        self.name = name
        self.recompute = recompute
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
        """As the layer's."""
        if self.recompute and self.training:

            def contexts() -> Any:
                return nullcontext(), _unchanged(self.inner)

            return checkpoint(self._run, *given, use_reentrant=False, context_fn=contexts, **named)
        return self._run(*given, **named)

    def _run(self, *given: Any, **named: Any) -> Any:
        own = dict(self.inner.named_parameters())
        parts = {name: self._computed(own[name]) for name in self.sizes}
        whole: dict[str, Tensor] = {}
        # One gather for all weights of one type: a buffer has one.
        for dtype in dict.fromkeys(part.dtype for part in parts.values()):
            names = [name for name, part in parts.items() if part.dtype == dtype]
            cut = _Cut(world=self.world, name=self.name, sizes=tuple(self.sizes[name] for name in names))
            made = cast(Any, _Gather.apply(cut, *(parts[name] for name in names)))
            whole |= dict(zip(names, made, strict=True))
        if self.recompute:
            return functional_call(self.inner, whole, given, named, tie_weights=False)
        with _forgotten(self, whole, parts):
            return functional_call(self.inner, whole, given, named, tie_weights=False)

    def _computed(self, part: Tensor) -> Tensor:
        # What autocast would turn into half precision anyway travels so; the weights of norms are not among it.
        device = part.device.type
        half = torch.is_autocast_enabled(device) and part.ndim > 1 and part.dtype == torch.float32
        return part.to(torch.get_autocast_dtype(device)) if half else part


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Weights of one layer, cut along their first dimension."""

    world: World
    name: str
    sizes: tuple[tuple[int, ...], ...]

    def gathered(self, what: str, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Whole weights from this process's parts."""
        filled = [padded(part, sizes) for part, sizes in zip(parts, self.sizes, strict=True)]
        flat_P = torch.cat([part.reshape(-1) for part in filled])
        flat_RP = start_gather(self.world, f"the gather of {self.name}'s {what}", flat_P)()
        made: list[Tensor] = []
        for part_RP, part, sizes in zip(self._split(flat_RP, filled), filled, self.sizes, strict=True):
            whole = whole_batch(part_RP.reshape(-1, *part.shape[1:]), sizes)
            made.append(whole.contiguous())
        return tuple(made)

    def scattered(self, grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """This process's parts of sums over all of whole gradients."""
        rank, ranks = self.world.rank, self.world.size
        filled = [padded_batch(grad, sizes) for grad, sizes in zip(grads, self.sizes, strict=True)]
        flat_RP = torch.cat([grad.reshape(ranks, -1) for grad in filled], 1)
        own_P = start_scatter(self.world, f"the scatter of {self.name}'s gradients", flat_RP)()
        parts = [grad.unflatten(0, (ranks, -1))[0] for grad in filled]
        return tuple(
            own.view(part.shape)[: sizes[rank]]
            for own, part, sizes in zip(self._split(own_P, parts), parts, self.sizes, strict=True)
        )

    def _split(self, flat: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return flat.split([part.numel() for part in parts], -1)


@final
class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, cut: _Cut, *parts: Tensor) -> Any:
        ctx.cut = cut
        return cut.gathered("weights", parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.cut.scattered(grads)


@contextmanager
def _unchanged(layer: nn.Module) -> Generator[None]:
    """What is computed again moves no running statistics again."""
    before = [buffer.clone() for buffer in layer.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(layer.buffers(), before, strict=True):
                buffer.copy_(value)


@contextmanager
def _forgotten(layer: Sharded, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> Generator[None]:
    """Gathered weights that are kept for the backward pass are let go, and gathered again when it comes to them."""
    by_memory = {tensor.untyped_storage().data_ptr(): own for own, tensor in whole.items()}

    def packed(kept: Tensor) -> Any:
        own = by_memory.get(kept.untyped_storage().data_ptr())
        # As it lies in the memory of the weight: often it is kept transposed.
        return kept if own is None else (own, kept.shape, kept.stride(), kept.storage_offset())

    def unpacked(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        own, shape, stride, offset = kept
        cut = _Cut(world=layer.world, name=layer.name, sizes=(layer.sizes[own],))
        return cut.gathered("weights again", [parts[own].detach()])[0].as_strided(shape, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        yield
