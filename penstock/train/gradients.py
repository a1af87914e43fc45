"""Gradients in flat memory, summed over the processes a bucket at a time, as soon as the backward pass filled it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.train.world import World

BUCKET_BYTES = 25_000_000


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    """Some parameters' gradients behind one another, and how many of them the backward pass has made."""

    flat: Tensor
    parameters: list[nn.Parameter]
    wire: Tensor | None = None
    made: int = 0
    work: Any = None


@final
class Gradients:
    """Every parameter's gradient, a view of a flat bucket.

    Each process's gradients are those of its share of the global batch's mean loss, so that their *sum* over processes
    is the gradient. Parameters that are cut are summed where they are used; all others here.

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
        # The backward pass makes the last layer's gradients first.
        common = [parameter for name, parameter in reversed(learned.items()) if name not in cut]
        own = [parameter for name, parameter in learned.items() if name in cut]
        self._world = world
        self._buckets = [_bucket_of(part) for part in _parts(common, bucket_bytes)]
        self._own = [_bucket_of(part) for part in _parts(own, bucket_bytes)]
        self._next = 0
        self._travel = False
        if world.size == 1:
            return
        for bucket in self._buckets:
            if precision == "bf16":
                bucket.wire = torch.empty_like(bucket.flat, dtype=torch.bfloat16)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(self._made(bucket))

    def start(self) -> None:
        """Set them to zero, in their memory."""
        for bucket in (*self._buckets, *self._own):
            bucket.flat.zero_()
            bucket.made, bucket.work = 0, None
        self._next, self._travel = 0, False

    def travel(self) -> None:
        """The next backward pass is the step's last: what it has filled is summed over the processes at once."""
        self._travel = self._world.size > 1

    def finish(self) -> None:
        """Sum what no backward pass has filled, and wait (on a GPU: let what comes next wait) for all."""
        if not self._travel:
            return
        while self._next < len(self._buckets):
            self._send()
        for index, bucket in enumerate(self._buckets):
            with self._world.operation(f"the sum of gradients, bucket {index}"):
                bucket.work.wait()
            if bucket.wire is not None:
                bucket.flat.copy_(bucket.wire)

    def norm(self) -> Tensor:
        """The Euclidean norm of the whole gradient: what every process has counted once, all parts of what is cut."""
        common = _square([bucket.flat for bucket in self._buckets], self._world.device)
        own = _square([bucket.flat for bucket in self._own], self._world.device)
        if self._world.size > 1 and self._own:
            with self._world.operation("the norm of the gradients"):
                dist.all_reduce(own, group=self._world.group)
        return (common + own).sqrt()

    def clip(self, most: float) -> None:
        """Scale the whole gradient down to a norm, where it is longer."""
        scale = (most / (self.norm() + 1e-6)).clamp(max=1.0)
        for bucket in (*self._buckets, *self._own):
            bucket.flat.mul_(scale.to(bucket.flat.dtype))

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

    def _send(self) -> None:
        bucket = self._buckets[self._next]
        if bucket.wire is not None:
            bucket.wire.copy_(bucket.flat)
        travels = bucket.flat if bucket.wire is None else bucket.wire
        with self._world.operation(f"the sum of gradients, bucket {self._next}"):
            bucket.work = dist.all_reduce(travels, group=self._world.group, async_op=True)
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


def _bucket_of(parameters: list[nn.Parameter]) -> _Bucket:
    first = parameters[0]
    flat = first.new_zeros(sum(parameter.numel() for parameter in parameters))
    flat.requires_grad_(False)
    begin = 0
    for parameter in parameters:
        parameter.grad = _like(parameter, flat[begin : begin + parameter.numel()])
        begin += parameter.numel()
    return _Bucket(flat=flat, parameters=parameters)


def _like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """A view of flat memory that lies as the parameter does (channels_last, say), so that sums need no other order."""
    order = sorted(range(parameter.ndim), key=lambda dim: (-parameter.stride(dim), dim))
    shaped = flat.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.ndim)])


def _square(flats: Sequence[Tensor], device: torch.device) -> Tensor:
    squares = [torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32)) for flat in flats]
    if not squares:
        return torch.zeros((), device=device)
    return torch.stack(squares).square().sum()
