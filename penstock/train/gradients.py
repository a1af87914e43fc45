"""Gradients in flat memory, summed over the processes a bucket at a time, as soon as the backward pass filled it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from penstock.train.world import World

BUCKET_BYTES = 25_000_000


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    """Some parameters' gradients behind one another, and how many of them the backward pass has made.

    Args:
        parameters: Whose.
        flat: All of them, in the parameters' own type.
        views: Each parameter's part of `flat`, laid out as the parameter is.
        wire: What travels: `flat` itself, or its numbers in a shorter type.
        wire_views: Each parameter's part of `wire`.
    """

    parameters: list[nn.Parameter]
    flat: Tensor
    views: list[Tensor]
    wire: Tensor
    wire_views: list[Tensor]
    made: int = 0
    work: Any = None


@final
class Gradients:
    """Every parameter's gradient, made anew by each step: of several processes the sum over all.

    Each process's gradients are those of its share of the global batch's mean loss, so that their *sum* over processes
    is the gradient. Parameters that are cut are summed where they are used; all others here. The backward pass makes
    each gradient in memory of its own, which is copied once, into what travels: to add into memory that was set to zero
    would read and write it twice more.

    Args:
        parameters: By name.
        cut: The names of those of which each process has its own part.
        world: The processes.
        precision: In which gradients travel.
        bucket_bytes: How many bytes of gradients travel together.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cut: Sequence[str],
        world: World,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        learned = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._world = world
        self._own = [parameter for name, parameter in learned.items() if name in cut]
        self._common = [parameter for name, parameter in learned.items() if name not in cut]
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._travel = False
        if world.size == 1:
            return
        # The backward pass makes the last layer's gradients first.
        for part in _parts(self._common[::-1], bucket_bytes):
            bucket = _bucket_of(part, torch.bfloat16 if precision == "bf16" else None)
            self._buckets.append(bucket)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._made(bucket))

    @property
    def tensors(self) -> list[Tensor]:
        """This process's gradients, after `finish`."""
        found = [parameter.grad for parameter in (*self._common, *self._own)]
        assert all(grad is not None for grad in found), "gradients are asked for before they are finished"
        return cast(list[Tensor], found)

    def start(self) -> None:
        """Forget the step before's."""
        for parameter in (*self._common, *self._own):
            parameter.grad = None
        for bucket in self._buckets:
            bucket.made, bucket.work = 0, None
        self._next, self._travel = 0, False

    def travel(self) -> None:
        """The next backward pass is the step's last: what it has filled is summed over the processes at once."""
        self._travel = self._world.size > 1

    def finish(self) -> None:
        """Sum what no backward pass has filled, and wait (on a GPU: let what comes next wait) for all."""
        while self._travel and self._next < len(self._buckets):
            self._send()
        for index, bucket in enumerate(self._buckets if self._travel else []):
            with self._world.operation(f"the sum of gradients, bucket {index}"):
                bucket.work.wait()
            if bucket.wire is not bucket.flat:
                bucket.flat.copy_(bucket.wire)
        for parameter in (*self._common, *self._own):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def norm(self) -> Tensor:
        """The Euclidean norm of the whole gradient: what every process has counted once, all parts of what is cut."""
        common, own = (_square(part, self._world.device) for part in (self._common, self._own))
        if self._world.size > 1 and self._own:
            with self._world.operation("the norm of the gradients"):
                dist.all_reduce(own, group=self._world.group)
        return (common + own).sqrt()

    def clip(self, most: float) -> None:
        """Scale the whole gradient down to a norm, where it is longer."""
        clip_grads_with_norm_([*self._common, *self._own], most, self.norm())

    def _made(self, bucket: _Bucket) -> Any:
        def hook(parameter: nn.Parameter) -> None:
            if not self._travel:
                return
            assert bucket.work is None, "a gradient was made again after it had been sent"
            bucket.made += 1
            # In one order everywhere, whatever the order in which they are made: collectives pair up by their order.
            while self._next < len(self._buckets) and self._full(self._buckets[self._next]):
                self._send()

        return hook

    def _full(self, bucket: _Bucket) -> bool:
        return bucket.made >= len(bucket.parameters)

    @torch.no_grad()
    def _send(self) -> None:
        bucket = self._buckets[self._next]
        unused = [view for view, own in zip(bucket.wire_views, bucket.parameters, strict=True) if own.grad is None]
        made = [
            (view, own.grad)
            for view, own in zip(bucket.wire_views, bucket.parameters, strict=True)
            if own.grad is not None
        ]
        for view in unused:
            view.zero_()
        if made:
            # All in one kernel.
            cast(Any, torch)._foreach_copy_([view for view, _ in made], [grad for _, grad in made])
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            parameter.grad = view
        with self._world.operation(f"the sum of gradients, bucket {self._next}"):
            bucket.work = dist.all_reduce(bucket.wire, group=self._world.group, async_op=True)
        self._next += 1


def _parts(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters of one type in order, in parts of some size; a larger one is a part of its own."""
    parts: list[list[nn.Parameter]] = []
    size = 0
    for parameter in parameters:
        bytes_ = parameter.numel() * parameter.element_size()
        alike = bool(parts) and (parts[-1][0].dtype, parts[-1][0].device) == (parameter.dtype, parameter.device)
        if not alike or size + bytes_ > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += bytes_
    return parts


def _bucket_of(parameters: list[nn.Parameter], wire_type: torch.dtype | None) -> _Bucket:
    first = parameters[0]
    flat = first.detach().new_zeros(sum(parameter.numel() for parameter in parameters))
    wire = flat if wire_type is None else torch.zeros_like(flat, dtype=wire_type)
    return _Bucket(
        parameters=parameters,
        flat=flat,
        views=_views(parameters, flat),
        wire=wire,
        wire_views=_views(parameters, wire),
    )


def _views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [_like(parameter, part) for parameter, part in zip(parameters, parts, strict=True)]


def _like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """A view of flat memory that lies as the parameter does (channels_last, say), so that sums need no other order."""
    order = sorted(range(parameter.ndim), key=lambda dim: (-parameter.stride(dim), dim))
    shaped = flat.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.ndim)])


def _square(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    return get_total_norm(grads).square()
