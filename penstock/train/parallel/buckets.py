"""Gradient buckets: gradients in flat memory, all-reduced bucket by bucket while the backward pass runs."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from penstock.kernels.common import PRECISIONS
from penstock.kernels.multi_tensor_copy import Copies
from penstock.train.parallel.world import World

BUCKET_BYTES = 25_000_000
# Small networks get smaller buckets, so that the all-reduce overlaps with the backward pass.
MIN_BUCKETS = 4
# Below this size peer memory is faster than NCCL and occupies fewer multiprocessors.
MAX_PEER_MEMORY_BYTES = 1 << 20

# Elements to which the gradients of a bucket are aligned, for vectorized loads.
ALIGNMENT = 64

Precision = Literal["fp32", "bf16"]
Ready = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    """Gradients of some parameters.

    Args:
        parameters: In the order in which the backward pass produces their gradients.
        produced: The number of gradients produced so far.
        started: True once its all-reduce or its optimizer step has started.
        after: Buckets that must fill first, so that it does not contend with model-parallel collectives for links and
            memory bandwidth.
    """

    parameters: list[nn.Parameter]
    produced: int = 0
    started: bool = False
    after: list["_Bucket"] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.produced >= len(self.parameters)

    @property
    def is_due(self) -> bool:
        return self.is_full and not self.started and all(bucket.is_full for bucket in self.after)

    @property
    def gradients(self) -> list[Tensor]:
        return [cast(Tensor, parameter.grad) for parameter in self.parameters]


@final
class _ReducedBucket(_Bucket):
    """A bucket that is all-reduced.

    Args:
        parameters: As of `_Bucket`.
        world: The processes. Their peer memory is used if the bucket is small.
        name: Of the all-reduce, for errors.
        precision: As of `GradientBuckets`.
        keep_comm_dtype: Return sums in the dtype of the all-reduce instead of storing them as the parameters' `grad`.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        world: World,
        name: str,
        precision: Precision,
        *,
        keep_comm_dtype: bool,
    ) -> None:
        super().__init__(parameters=parameters)
        first = parameters[0].detach()
        exact = torch.float32 if keep_comm_dtype else first.dtype
        comm_dtype = torch.bfloat16 if precision == "bf16" else exact
        self._world, self._name, self._keep_comm_dtype = world, name, keep_comm_dtype
        self._comm_buffer = first.new_zeros(sum(map(_aligned_numel, parameters)), dtype=comm_dtype)
        same = keep_comm_dtype or comm_dtype == first.dtype
        self._flat = self._comm_buffer if same else torch.zeros_like(self._comm_buffer, dtype=first.dtype)
        self._comm_views, self._sums = _views(parameters, self._comm_buffer), _views(parameters, self._flat)
        self._copies: dict[tuple[int, ...], Copies] = {}
        self._wait: Callable[[], object] | None = None
        small = self.nbytes <= MAX_PEER_MEMORY_BYTES and comm_dtype in PRECISIONS
        self._peer_memory = world.gradient_peer_memory if small else None

    @property
    def nbytes(self) -> int:
        return self._comm_buffer.numel() * self._comm_buffer.element_size()

    @property
    def gradients(self) -> list[Tensor]:
        return self._sums

    @torch.no_grad()
    def start(self, *, waits: bool) -> None:
        """Copy the gradients into flat memory and start the all-reduce.

        Args:
            waits: True if `wait` follows at once: over peer memory the all-reduce then runs in the waiting stream.
        """
        by_dtype: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._comm_views[index].zero_()
            else:
                by_dtype[parameter.grad.dtype][index] = parameter.grad
            parameter.grad = None if self._keep_comm_dtype else self._sums[index]
        for grads in by_dtype.values():
            indices = tuple(grads)
            if indices not in self._copies:
                self._copies[indices] = Copies([self._comm_views[index] for index in indices])
            self._copies[indices].fill(list(grads.values()))
        self._wait = None
        with self._world.operation(self._name):
            if self._peer_memory is None:
                work: Any = dist.all_reduce(self._comm_buffer, group=self._world.gradient_group, async_op=True)
                self._wait = work.wait
            elif not waits:
                self._wait = self._peer_memory.all_reduce(self._comm_buffer, overlapped=True)

    def finish_capture(self) -> None:
        for copies in self._copies.values():
            copies.finish_capture()

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the sums; on a GPU the current stream waits, not the host."""
        with self._world.operation(self._name):
            # A collective that is kept would keep the process group, and gloo's threads.
            wait, self._wait = self._wait, None
            if wait is None and self._peer_memory is not None:
                wait = self._peer_memory.all_reduce(self._comm_buffer)
            assert wait is not None, f"{self.nbytes} bytes of {self._comm_buffer.dtype} do not fit"
            wait()
        if self._comm_buffer is not self._flat:
            self._flat.copy_(self._comm_buffer)


@final
class GradientBuckets:
    """The gradients of one step, all-reduced over the processes.

    Each process computes the gradient of its share of the global batch's mean loss, so the *sum* over processes is the
    gradient of that loss. Weight slices get their sums in their layers' backward pass; buckets hold the other
    parameters. The backward pass allocates each gradient, which is copied into the bucket once; accumulating into
    zeroed buckets would read and write it twice more.

    Args:
        parameters: By name.
        sliced: Names of the parameters that are weight slices.
        world: The processes.
        precision: The dtype of the all-reduce.
        bucket_bytes: The size of a bucket.
        ready: Called with parameters and their gradients as soon as these are final, on a GPU in a second stream while
            the backward pass goes on. None if all are wanted at once, after `finish`.
        keep_comm_dtype: Pass gradients to `ready` in the dtype of the backward pass or of the all-reduce, and leave the
            parameters' `grad` None.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        sliced: Sequence[str],
        world: World,
        *,
        precision: Precision = "fp32",
        bucket_bytes: int | None = None,
        ready: Ready | None = None,
        keep_comm_dtype: bool = False,
    ) -> None:
        assert ready or not keep_comm_dtype, "without `ready` gradients are the parameters' own"
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._world, self._ready = world, ready
        self._sliced = [parameter for name, parameter in trained.items() if name in sliced]
        self._replicated = [parameter for name, parameter in trained.items() if name not in sliced]
        reduced, self._local = (
            (self._replicated, self._sliced) if world.size > 1 else ([], [*self._replicated, *self._sliced])
        )
        self._reduced_buckets = [
            _ReducedBucket(
                part, world, f"the all-reduce of gradient bucket {index}", precision, keep_comm_dtype=keep_comm_dtype
            )
            for index, part in enumerate(_parts(reduced, bucket_bytes, mixed=keep_comm_dtype))
        ]
        # Layers that are not adjacent get buckets of their own: the first would wait for the last.
        runs = _runs(list(trained.values()), self._local) if ready else []
        parts = [part for run in runs for part in _parts(run, bucket_bytes, mixed=keep_comm_dtype)]
        self._local_buckets = [_Bucket(parameters=part) for part in parts]
        if world.size > 1:
            _order([*reversed(trained.values())], self._reduced_buckets, self._local_buckets)
        self._started = 0
        self._in_last_backward = False
        self._stream = torch.cuda.Stream(world.device) if ready and world.device.type == "cuda" else None
        self._hooks: list[Any] = []
        for bucket in (*self._reduced_buckets, *self._local_buckets):
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._produced(bucket)))

    def close(self) -> None:
        """Remove the hooks and the gradients."""
        for hook in self._hooks:
            hook.remove()
        self._clear()

    @property
    def tensors(self) -> list[Tensor]:
        """This process's gradients, after `finish`."""
        found = [parameter.grad for parameter in (*self._replicated, *self._sliced)]
        assert all(grad is not None for grad in found), "gradients are read before they are finished"
        return cast(list[Tensor], found)

    @property
    def bucket_boundaries(self) -> list[nn.Parameter]:
        """The parameter of each all-reduced bucket that the forward pass uses first, without the last bucket's."""
        return [bucket.parameters[-1] for bucket in self._reduced_buckets[:-1]]

    @property
    def all_reduce_bytes(self) -> int:
        """The number of bytes that a step all-reduces."""
        return sum(bucket.nbytes for bucket in self._reduced_buckets)

    def start(self) -> None:
        """Forget the gradients of the step before."""
        self._clear()
        for bucket in (*self._reduced_buckets, *self._local_buckets):
            bucket.produced, bucket.started = 0, False
        self._started, self._in_last_backward = 0, False

    def begin_last_backward(self) -> None:
        """All-reduce each bucket, and pass it to `ready`, once the next backward pass, the last, has filled it."""
        self._in_last_backward = True

    def finish(self) -> None:
        """All-reduce buckets that no backward pass has filled, and wait for all; on a GPU the current stream waits."""
        while self._started < len(self._reduced_buckets):
            self._start_next()
        for parameter in self._local:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self._local_buckets:
            if not bucket.started:
                self._step(bucket)
        if self._ready is None:
            for bucket in self._reduced_buckets:
                bucket.wait()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def finish_capture(self) -> None:
        """Complete what a CUDA graph's capture left open."""
        for bucket in self._reduced_buckets:
            bucket.finish_capture()

    def norm(self) -> Tensor:
        """Compute the Euclidean norm of the whole gradient over all processes."""
        replicated, sliced = (_square(part, self._world.device) for part in (self._replicated, self._sliced))
        if self._sliced:
            sliced = self._world.all_reduce(sliced, "the norm of the gradients")
        return (replicated + sliced).sqrt()

    def clip(self, max_norm: float) -> None:
        """Scale the whole gradient down to a norm, where it is longer."""
        clip_grads_with_norm_([*self._replicated, *self._sliced], max_norm, self.norm())

    def _clear(self) -> None:
        for parameter in (*self._replicated, *self._sliced):
            parameter.grad = None

    def _produced(self, bucket: _Bucket) -> Any:
        def hook(parameter: nn.Parameter) -> None:
            if not self._in_last_backward:
                return
            assert not bucket.started, "a gradient was produced again after its all-reduce had started"
            bucket.produced += 1
            # In one order on all ranks, whatever the order of the hooks: collectives pair up by their order.
            while self._started < len(self._reduced_buckets) and self._reduced_buckets[self._started].is_due:
                self._start_next()
            for local in self._local_buckets:
                if local.is_due:
                    self._step(local)

        return hook

    def _start_next(self) -> None:
        bucket = self._reduced_buckets[self._started]
        bucket.start(waits=self._ready is not None)
        self._started += 1
        if self._ready is None:
            bucket.started = True
            return
        # The last bucket overlaps with nothing: switching streams takes as long as a small all-reduce.
        is_last = self._started == len(self._reduced_buckets) and all(local.is_full for local in self._local_buckets)
        with nullcontext() if is_last else self._second_stream():
            bucket.wait()
            self._call_ready(bucket)

    def _step(self, bucket: _Bucket) -> None:
        with self._second_stream():
            self._call_ready(bucket)

    def _call_ready(self, bucket: _Bucket) -> None:
        bucket.started = True
        assert self._ready is not None
        self._ready(bucket.parameters, bucket.gradients)

    @contextmanager
    def _second_stream(self) -> Generator[None]:
        if self._stream is None:
            yield
            return
        if torch.cuda.current_stream() != self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield


def _parts(parameters: Sequence[nn.Parameter], max_bytes: int | None, *, mixed: bool) -> list[list[nn.Parameter]]:
    """Split parameters into buckets of about one size, last first, as the backward pass produces their gradients."""
    if max_bytes is None:
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        max_bytes = min(BUCKET_BYTES, whole // MIN_BUCKETS)
    parts: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        same_dtype = bool(parts) and (mixed or parts[-1][0].dtype == parameter.dtype)
        if not same_dtype or parts[-1][0].device != parameter.device or size >= max_bytes:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return parts


def _runs(parameters: Sequence[nn.Parameter], chosen: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group chosen parameters that are adjacent in the network, last group first."""
    wanted = {id(parameter) for parameter in chosen}
    runs = [list(run) for is_chosen, run in itertools.groupby(parameters, lambda own: id(own) in wanted) if is_chosen]
    return runs[::-1]


def _order(produced: Sequence[nn.Parameter], reduced: Sequence[_Bucket], local: Sequence[_Bucket]) -> None:
    """Let buckets wait for the model-parallel layers between them and the next bucket.

    Args:
        produced: All parameters, in the order in which the backward pass produces their gradients.
        reduced: Buckets that are all-reduced.
        local: Buckets of weight slices, whose layers wait for other processes.
    """
    position = {id(parameter): index for index, parameter in enumerate(produced)}
    for bucket, following in itertools.pairwise(reduced):
        first, last = (position[id(each.parameters[-1])] for each in (bucket, following))
        bucket.after = [each for each in local if first < position[id(each.parameters[0])] < last]
    for bucket, following in itertools.pairwise(local):
        bucket.after = [following]


def _aligned_numel(parameter: nn.Parameter) -> int:
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


def _views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = flat.split([_aligned_numel(parameter) for parameter in parameters])
    return [_like(parameter, part[: parameter.numel()]) for parameter, part in zip(parameters, parts, strict=True)]


def _like(parameter: nn.Parameter, flat: Tensor) -> Tensor:
    """View flat memory with the strides of a parameter (channels_last, for example)."""
    order = sorted(range(parameter.ndim), key=lambda dim: (-parameter.stride(dim), dim))
    shaped = flat.view([parameter.shape[dim] for dim in order])
    return shaped.permute([order.index(dim) for dim in range(parameter.ndim)])


def _square(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return torch.zeros((), device=device)
    return get_total_norm(grads).square()
