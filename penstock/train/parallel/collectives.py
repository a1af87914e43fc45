"""Differentiable collectives over the rows of a batch or the features of a layer.

The loss is the *sum* of the processes' losses. So the gradient of an all-gather is a reduce-scatter, and vice versa.

Every rank passes the same number of rows here; uneven batches are padded before and cut after (`pad_rows`,
`unpad_ranks`). Products can be split into chunks, so that one chunk is multiplied while the next is in flight: scheme
(c) of Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 4.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function

from penstock.core.errors import TrainError
from penstock.train.parallel.world import World

# R ranks, M rows of one rank, N = R * M rows of all, K chunks, I input features, O output features of one rank

# The names of torch 2.13, and the older ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor")  # noqa: B009
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor")  # noqa: B009
# With torch's annotation pyright refuses it on `Function.backward`.
once_differentiable: Any = torch.autograd.function.once_differentiable

Pending = Callable[[], Tensor]


def start_all_gather(world: World, name: str, own_M: Tensor, *, overlapped: bool = False) -> Pending:
    """Start to all-gather `[M, ...]`; calling the result waits and returns `[R, M, ...]`.

    Args:
        world: The processes.
        name: Of the operation, for errors.
        own_M: This rank's rows.
        overlapped: True if there is other work before the wait.
    """
    own_M = own_M.contiguous()
    whole_RM = own_M.new_empty((world.size, *own_M.shape))
    over_peer_memory = world.peer_memory and world.peer_memory.all_gather
    return _started(world, name, over_peer_memory, _all_gather, whole_RM, own_M, overlapped=overlapped)


def start_reduce_scatter(world: World, name: str, parts_RM: Tensor, *, overlapped: bool = False) -> Pending:
    """Start to reduce-scatter `[R, M, ...]`; calling the result waits and returns this rank's `[M, ...]`.

    Arguments as of `start_all_gather`.
    """
    parts_RM = parts_RM.contiguous()
    own_M = parts_RM.new_empty(parts_RM.shape[1:])
    over_peer_memory = world.peer_memory and world.peer_memory.reduce_scatter
    return _started(world, name, over_peer_memory, _reduce_scatter, own_M, parts_RM, overlapped=overlapped)


def _started(
    world: World,
    name: str,
    over_peer_memory: Callable[..., Callable[[], object] | None] | None,
    over_group: Any,
    output: Tensor,
    given: Tensor,
    *,
    overlapped: bool,
) -> Pending:
    with world.operation(name):
        wait = over_peer_memory(given, output, overlapped=overlapped) if over_peer_memory else None
        # Flat: the group collectives check shapes, and both shapes are the same in memory.
        wait = wait or over_group(output.view(-1), given.view(-1), group=world.group, async_op=True).wait

    def pending() -> Tensor:
        nonlocal wait
        if wait is not None:
            with world.operation(name):
                wait()
            # A collective that is kept would keep the process group, and gloo's threads.
            wait = None
        return output

    return pending


def all_to_all(world: World, name: str, parts_RM: Tensor) -> Tensor:
    """Send part r of `[R, M, ...]` to rank r, and return the parts received, `[R, M, ...]`."""
    parts_RM = parts_RM.contiguous()
    received_RM = torch.empty_like(parts_RM)
    with world.operation(name):
        dist.all_to_all_single(received_RM, parts_RM, group=world.group)
    return received_RM


def pad_rows(own_B: Tensor, rows: Sequence[int]) -> Tensor:
    """Pad this rank's rows with zeros to the largest number that a rank has."""
    missing = max(rows) - own_B.shape[0]
    return F.pad(own_B, [0, 0] * (own_B.ndim - 1) + [0, missing]) if missing else own_B


def unpad_rows(padded_B: Tensor, own: int) -> Tensor:
    """Remove the padding of `pad_rows`."""
    # A slice of everything would cost a zero-filled tensor in the backward pass.
    return padded_B if len(padded_B) == own else padded_B[:own]


def unpad_ranks(padded_N: Tensor, rows: Sequence[int]) -> Tensor:
    """Remove the padding from the rows of all ranks."""
    largest = max(rows)
    if min(rows) == largest:
        return padded_N
    return torch.cat([part[:count] for part, count in zip(padded_N.split(largest), rows, strict=True)])


def pad_ranks(whole_N: Tensor, rows: Sequence[int]) -> Tensor:
    """Pad the rows of each rank to the largest number that a rank has."""
    largest = max(rows)
    if min(rows) == largest:
        return whole_N
    return torch.cat([pad_rows(part, [largest]) for part in whole_N.split(list(rows))])


@final
class _AllGatherRows(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, own_M: Tensor) -> Tensor:
        ctx.world, ctx.name = world, name
        return start_all_gather(world, f"the all-gather of {name}", own_M)().flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> Any:
        world: World = ctx.world
        grad_RM = grad_N.unflatten(0, (world.size, -1))
        return None, None, start_reduce_scatter(world, f"the reduce-scatter of {ctx.name}'s gradients", grad_RM)()


def all_gather_rows(world: World, name: str, own_M: Tensor) -> Tensor:
    """All-gather `[M, ...]` of every rank into `[N, ...]`, in the order of the ranks."""
    return cast(Tensor, _AllGatherRows.apply(world, name, own_M))


@final
class _AllToAllRows(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, features_NO: Tensor) -> Tensor:
        ctx.world, ctx.name = world, name
        received_RMO = all_to_all(world, f"the all-to-all of {name}", features_NO.unflatten(0, (world.size, -1)))
        return received_RMO.movedim(0, -2).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: Tensor) -> Any:
        world: World = ctx.world
        grad_RMO = grad_M.unflatten(-1, (world.size, -1)).movedim(-2, 0)
        return None, None, all_to_all(world, f"the all-to-all of {ctx.name}'s gradients", grad_RMO).flatten(0, 1)


def all_to_all_rows(world: World, name: str, features_NO: Tensor) -> Tensor:
    """Exchange this rank's features of all rows, `[N, ..., O]`, for all features of its rows, `[M, ..., R * O]`."""
    return cast(Tensor, _AllToAllRows.apply(world, name, features_NO))


@final
class _AllGatherLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, world: World, name: str, chunks: int, own_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
    ) -> Tensor:
        operation = f"the all-gather of {name}"
        pending = [start_all_gather(world, operation, chunk, overlapped=chunks > 1) for chunk in own_MI.chunk(chunks)]
        # The casts of the weights overlap with the all-gather.
        ctx.types = weight_OI.dtype, None if bias_O is None else bias_O.dtype
        weight_OI, bias_O = weight_OI.to(own_MI.dtype), None if bias_O is None else bias_O.to(own_MI.dtype)
        whole_K: list[Tensor] = []
        outputs_K: list[Tensor] = []
        for wait in pending:
            whole_K.append(wait())
            outputs_K.append(F.linear(whole_K[-1], weight_OI, bias_O))
        ctx.world, ctx.name = world, name
        ctx.save_for_backward(weight_OI, *whole_K)
        return _rank_major(outputs_K)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NO: Tensor) -> Any:
        world: World = ctx.world
        weight_OI, *whole_K = ctx.saved_tensors
        grad_K = _chunked(grad_NO, world.size, len(whole_K))
        pending: list[Pending] = []
        if ctx.needs_input_grad[3]:
            name = f"the reduce-scatter of {ctx.name}'s gradients"
            pending = [start_reduce_scatter(world, name, grad_RMO @ weight_OI, overlapped=True) for grad_RMO in grad_K]
        # Overlaps with the reduce-scatter of the inputs' gradients.
        weight_type, bias_type = ctx.types
        # None for frozen weights.
        _, _, _, _, needs_weight, needs_bias = ctx.needs_input_grad
        weight_grad = _weight_grad(grad_K, whole_K).to(weight_type) if needs_weight else None
        bias_grad = grad_NO.flatten(0, -2).sum(0).to(bias_type) if needs_bias else None
        own_grad = _concatenated([wait() for wait in pending]) if pending else None
        return None, None, None, own_grad, weight_grad, bias_grad


def all_gather_linear(
    world: World, name: str, chunks: int, own_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None
) -> Tensor:
    """Compute `linear(all_gather_rows(own_MI), weight_OI, bias_O)`, `[N, ..., O]`, in `own_MI`'s dtype, overlapped."""
    return cast(Tensor, _AllGatherLinear.apply(world, name, chunks, own_MI, weight_OI, bias_O))


@final
class _LinearReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, world: World, name: str, chunks: int, whole_NI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.world, ctx.name, ctx.chunks, ctx.weight_type = world, name, chunks, weight_OI.dtype
        weight_OI = weight_OI.to(whole_NI.dtype)
        ctx.save_for_backward(whole_NI, weight_OI)
        operation = f"the reduce-scatter of {name}"
        pending = [
            start_reduce_scatter(world, operation, F.linear(whole_RMI, weight_OI), overlapped=chunks > 1)
            for whole_RMI in _chunked(whole_NI, world.size, chunks)
        ]
        return _concatenated([wait() for wait in pending])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MO: Tensor) -> Any:
        world: World = ctx.world
        whole_NI, weight_OI = ctx.saved_tensors
        name = f"the all-gather of {ctx.name}'s gradients"
        overlapped = ctx.chunks > 1
        pending = [start_all_gather(world, name, chunk, overlapped=overlapped) for chunk in grad_MO.chunk(ctx.chunks)]
        grad_K: list[Tensor] = []
        inputs_K: list[Tensor] = []
        for wait in pending:
            grad_K.append(wait())
            inputs_K.append(grad_K[-1] @ weight_OI)
        weight_grad = None
        if ctx.needs_input_grad[4]:
            weight_grad = _weight_grad(grad_K, _chunked(whole_NI, world.size, ctx.chunks)).to(ctx.weight_type)
        return None, None, None, _rank_major(inputs_K), weight_grad


def linear_reduce_scatter(world: World, name: str, chunks: int, whole_NI: Tensor, weight_OI: Tensor) -> Tensor:
    """Reduce-scatter `linear(whole_NI, weight_OI)`, in `whole_NI`'s dtype, to this rank's rows, `[M, ..., O]`."""
    return cast(Tensor, _LinearReduceScatter.apply(world, name, chunks, whole_NI, weight_OI))


def _concatenated(parts_K: list[Tensor]) -> Tensor:
    return parts_K[0] if len(parts_K) == 1 else torch.cat(parts_K)


def _rank_major(parts_K: list[Tensor]) -> Tensor:
    """Join chunks `[R, M / K, ...]` into `[N, ...]`, in the order of the ranks."""
    return (parts_K[0] if len(parts_K) == 1 else torch.cat(parts_K, 1)).flatten(0, 1)


def _chunked(whole_N: Tensor, ranks: int, chunks: int) -> list[Tensor]:
    """Split `[N, ...]` into chunks `[R, M / K, ...]`."""
    return list(whole_N.unflatten(0, (ranks, -1)).chunk(chunks, 1))


def _weight_grad(grad_K: list[Tensor], inputs_K: list[Tensor]) -> Tensor:
    total: Tensor | None = None
    for grad, inputs in zip(grad_K, inputs_K, strict=True):
        grad_ON, inputs_NI = grad.flatten(0, -2).t(), inputs.flatten(0, -2)
        total = grad_ON @ inputs_NI if total is None else torch.addmm(total, grad_ON, inputs_NI)
    assert total is not None
    return total


def rows_per_rank(rows: Sequence[int], rank: int, given: int, name: str) -> tuple[int, ...]:
    """Compute how many rows each rank passes to a layer from the rows that this one passes.

    A layer may get several rows of each example (the frames of a signal, for example), the same number on all ranks.

    Raises:
        TrainError: The number is no multiple of this rank's examples.
    """
    times, left = divmod(given, rows[rank])
    if left:
        raise TrainError(
            f"{name} gets {given:,} rows for {rows[rank]:,} examples of rank {rank}; a layer over several "
            f"processes needs the same number of rows for each example."
        )
    return tuple(count * times for count in rows)
