"""Collectives with gradients: what each process has of a batch or of a layer becomes what another one needs.

All follow one convention: the loss is the *sum* over processes of what each computes. So the gradient of what was
gathered for all is the sum of what all did with it (a reduce-scatter), and that of a sum over all is everybody's (a
gather).

Every process has equally many rows here; uneven batches are filled up before and cut behind (`padded`, `whole_batch`).
Products are cut into chunks on request, so that a chunk is multiplied while the next one is on its way: scheme (c) of
Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from penstock.core.errors import TrainError
from penstock.train.world import World

# R ranks, M rows of one rank, N = R * M rows of all, K chunks, I input features, O output features of one rank

# Their names of torch 2.13, and those of before.
_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
# The types of torch's do not let a method take the place of another.
once_differentiable: Any = torch.autograd.function.once_differentiable

Waited = Callable[[], Tensor]


def start_gather(world: World, name: str, own_M: Tensor, *, beside: bool = False) -> Waited:
    """Begin to gather `[M, ...]` of every rank; what is returned waits for `[R, M, ...]`.

    Args:
        world: The ranks.
        name: What it is called where it fails.
        own_M: This rank's.
        beside: Whether something else is computed before it is waited for.
    """
    own_M = own_M.contiguous()
    whole_RM = own_M.new_empty((world.size, *own_M.shape))
    over_memory = world.memory and world.memory.gather
    return _started(world, name, over_memory, _gather, whole_RM, own_M, beside=beside)


def start_scatter(world: World, name: str, parts_RM: Tensor, *, beside: bool = False) -> Waited:
    """Begin to sum `[R, M, ...]` over the ranks; what is returned waits for this rank's `[M, ...]` of it.

    Arguments as of `start_gather`.
    """
    parts_RM = parts_RM.contiguous()
    own_M = parts_RM.new_empty(parts_RM.shape[1:])
    over_memory = world.memory and world.memory.scatter
    return _started(world, name, over_memory, _scatter, own_M, parts_RM, beside=beside)


def _started(
    world: World,
    name: str,
    over_memory: Callable[..., Callable[[], object] | None] | None,
    by_group: Any,
    output: Tensor,
    given: Tensor,
    *,
    beside: bool,
) -> Waited:
    with world.operation(name):
        wait = over_memory(given, output, beside=beside) if over_memory else None
        # Flat: how the parts lie in memory is the same for both, and their shapes are no matter of the collective's.
        wait = wait or by_group(output.view(-1), given.view(-1), group=world.group, async_op=True).wait

    def waited() -> Tensor:
        with world.operation(name):
            wait()
        return output

    return waited


def exchanged(world: World, name: str, parts_RM: Tensor) -> Tensor:
    """Part r of `[R, M, ...]` goes to rank r; what comes is `[R, M, ...]`, a part of each rank."""
    parts_RM = parts_RM.contiguous()
    come_RM = torch.empty_like(parts_RM)
    with world.operation(name):
        dist.all_to_all_single(come_RM, parts_RM, group=world.group)
    return come_RM


def padded(own_B: Tensor, rows: Sequence[int]) -> Tensor:
    """This rank's rows and as many zeros behind them as make them the most that a rank has."""
    more = max(rows) - own_B.shape[0]
    return F.pad(own_B, [0, 0] * (own_B.ndim - 1) + [0, more]) if more else own_B


def own_rows(padded_B: Tensor, own: int) -> Tensor:
    """A rank's rows without what filled them up."""
    # A slice of all is one more tensor to be filled with zeros in the backward pass.
    return padded_B if len(padded_B) == own else padded_B[:own]


def whole_batch(padded_N: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of all ranks, without what filled them up."""
    most = max(rows)
    if min(rows) == most:
        return padded_N
    return torch.cat([part[:count] for part, count in zip(padded_N.split(most), rows, strict=True)])


def padded_batch(whole_N: Tensor, rows: Sequence[int]) -> Tensor:
    """The rows of all ranks, each rank's filled up to the most that a rank has."""
    most = max(rows)
    if min(rows) == most:
        return whole_N
    return torch.cat([padded(part, [most]) for part in whole_N.split(list(rows))])


@final
class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, own_M: Tensor) -> Tensor:
        ctx.world, ctx.name = world, name
        return start_gather(world, f"the gather of {name}", own_M)().flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        world: World = ctx.world
        grad_RM = grad_N.unflatten(0, (world.size, -1))
        return None, None, start_scatter(world, f"the scatter of {ctx.name}'s gradients", grad_RM)()


def gather_rows(world: World, name: str, own_M: Tensor) -> Tensor:
    """`[M, ...]` of every rank as `[N, ...]`, in the order of the ranks."""
    return cast(Tensor, _GatherRows.apply(world, name, own_M))


@final
class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, features_NO: Tensor) -> Tensor:
        ctx.world, ctx.name = world, name
        come_RMO = exchanged(world, f"the exchange of {name}", features_NO.unflatten(0, (world.size, -1)))
        return come_RMO.movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> Any:
        world: World = ctx.world
        grad_RMO = grad_M.unflatten(-1, (world.size, -1)).movedim(-2, 0)
        return None, None, exchanged(world, f"the exchange of {ctx.name}'s gradients", grad_RMO).flatten(0, 1)


def to_rows(world: World, name: str, features_NO: Tensor) -> Tensor:
    """This rank's features of all rows, `[N, ..., O]`, become all features of its rows, `[M, ..., R * O]`."""
    return cast(Tensor, _ToRows.apply(world, name, features_NO))


@final
class _GatheredLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, name: str, chunks: int, own_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        gather = f"the gather of {name}"
        waited = [start_gather(world, gather, chunk, beside=chunks > 1) for chunk in own_MI.chunk(chunks)]
        # To the shorter type of what travels, while it does.
        ctx.types = weight_OI.dtype, None if bias_O is None else bias_O.dtype
        weight_OI, bias_O = weight_OI.to(own_MI.dtype), None if bias_O is None else bias_O.to(own_MI.dtype)
        whole_K: list[Tensor] = []
        made: list[Tensor] = []
        for wait in waited:
            whole_K.append(wait())
            made.append(F.linear(whole_K[-1], weight_OI, bias_O))
        ctx.world, ctx.name = world, name
        ctx.save_for_backward(weight_OI, *whole_K)
        return _joined(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        world: World = ctx.world
        weight_OI, *whole_K = ctx.saved_tensors
        grad_K = _parted(grad_NO, world.size, len(whole_K))
        waited: list[Waited] = []
        if ctx.needs_input_grad[3]:
            name = f"the scatter of {ctx.name}'s gradients"
            waited = [start_scatter(world, name, grad_RMO @ weight_OI, beside=True) for grad_RMO in grad_K]
        # The product of the weights' gradients runs while the inputs' gradients are on their way.
        weight_type, bias_type = ctx.types
        weight_grad = _weight_grad(grad_K, whole_K).to(weight_type)
        bias_grad = None if bias_type is None else grad_NO.flatten(0, -2).sum(0).to(bias_type)
        own_grad = _one([wait() for wait in waited]) if waited else None
        return None, None, None, own_grad, weight_grad, bias_grad


def gathered_linear(
    world: World, name: str, chunks: int, own_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> Tensor:
    """`linear(gather_rows(own_MI), weight_OI, bias_O)`, `[N, ..., O]`, in the type of `own_MI`, overlapped."""
    return cast(Tensor, _GatheredLinear.apply(world, name, chunks, own_MI, weight_OI, bias_O))


@final
class _ScatteredLinear(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, chunks: int, whole_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.world, ctx.name, ctx.chunks, ctx.weight_type = world, name, chunks, weight_OI.dtype
        weight_OI = weight_OI.to(whole_NI.dtype)
        ctx.save_for_backward(whole_NI, weight_OI)
        waited = [
            start_scatter(world, f"the scatter of {name}", F.linear(whole_RMI, weight_OI), beside=chunks > 1)
            for whole_RMI in _parted(whole_NI, world.size, chunks)
        ]
        return _one([wait() for wait in waited])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> Any:
        world: World = ctx.world
        whole_NI, weight_OI = ctx.saved_tensors
        name = f"the gather of {ctx.name}'s gradients"
        waited = [start_gather(world, name, chunk, beside=ctx.chunks > 1) for chunk in grad_MO.chunk(ctx.chunks)]
        grad_K: list[Tensor] = []
        inputs_K: list[Tensor] = []
        for wait in waited:
            grad_K.append(wait())
            inputs_K.append(grad_K[-1] @ weight_OI)
        weight_grad = _weight_grad(grad_K, _parted(whole_NI, world.size, ctx.chunks))
        return None, None, None, _joined(inputs_K), weight_grad.to(ctx.weight_type)


def scattered_linear(world: World, name: str, chunks: int, whole_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """The sum over ranks of `linear(whole_NI, weight_OI)`, this rank's rows of it, `[M, ..., O]`, overlapped.

    It is computed in the type of `whole_NI`.
    """
    return cast(Tensor, _ScatteredLinear.apply(world, name, chunks, whole_NI, weight_OI))


def _one(parts_K: list[Tensor]) -> Tensor:
    return parts_K[0] if len(parts_K) == 1 else torch.cat(parts_K)


def _joined(parts_K: list[Tensor]) -> Tensor:
    """Chunks `[R, M / K, ...]` as `[N, ...]` in the order of the ranks."""
    return (parts_K[0] if len(parts_K) == 1 else torch.cat(parts_K, 1)).flatten(0, 1)


def _parted(whole_N: Tensor, ranks: int, chunks: int) -> list[Tensor]:
    """`[N, ...]` as chunks `[R, M / K, ...]`."""
    return list(whole_N.unflatten(0, (ranks, -1)).chunk(chunks, 1))


def _weight_grad(grad_K: list[Tensor], inputs_K: list[Tensor]) -> Tensor:
    made: Tensor | None = None
    for grad, inputs in zip(grad_K, inputs_K, strict=True):
        grad_ON, inputs_NI = grad.flatten(0, -2).t(), inputs.flatten(0, -2)
        made = grad_ON @ inputs_NI if made is None else torch.addmm(made, grad_ON, inputs_NI)
    assert made is not None
    return made


def own_count(rows: Sequence[int], rank: int, given: int, name: str) -> tuple[int, ...]:
    """How many rows each rank gives a layer, of which this one gives so many.

    A layer may see each example several times, as frames of a signal say: then all ranks do, equally often.

    Raises:
        TrainError: It is no multiple of this rank's examples.
    """
    times, left = divmod(given, rows[rank])
    if left:
        raise TrainError(
            f"{name} is given {given:,} rows for {rows[rank]:,} examples of rank {rank}; a layer over several "
            f"processes needs the same number of rows for each example."
        )
    return tuple(count * times for count in rows)
