"""Gradients in flat memory, summed over the processes a bucket at a time, as soon as the backward pass filled it."""

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
from penstock.kernels.copy_many import Copies
from penstock.kernels.peer_memory import PeerMemory
from penstock.train.world import World

# A bucket's worth of gradients; of small networks less, so that the first ones travel while the last ones are made.
BUCKET_BYTES = 25_000_000
LEAST_BUCKETS = 4
# Less than this is sooner summed over the GPUs' own memory than by NCCL, and keeps few multiprocessors for it.
BY_MEMORY_BYTES = 1 << 20

# Numbers after which the next gradient of a bucket begins, so that whole vectors of them can be read.
ALIGNED = 64

Ready = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]


@dataclass(kw_only=True, slots=True, eq=False)
class _Bucket:
    """Some parameters' gradients, and how many of them the backward pass has made.

    Args:
        parameters: Whose, in the order in which the backward pass makes them.
        made: How many it has made.
        begun: Whether what comes when all are made has begun.
        after: What must be full before: while the backward pass is among layers that wait for other processes, nothing
            else takes their links and their memory.
    """

    parameters: list[nn.Parameter]
    made: int = 0
    begun: bool = False
    after: list["_Bucket"] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """Whether the backward pass has made all."""
        return self.made >= len(self.parameters)

    @property
    def is_due(self) -> bool:
        """Whether what comes then may begin."""
        return self.is_full and not self.begun and all(bucket.is_full for bucket in self.after)

    @property
    def gradients(self) -> list[Tensor]:
        """Those of the parameters, when they are done."""
        return [cast(Tensor, parameter.grad) for parameter in self.parameters]


@final
class _Travelling(_Bucket):
    """A bucket that is summed over the processes.

    Args:
        parameters: Whose.
        wire_type: In which numbers travel.
        memory: Over which they travel if they are few.
        as_sent: Whether the sums are wanted as they travelled, and not as the parameters' `grad`.
    """

    def __init__(
        self, parameters: list[nn.Parameter], wire_type: torch.dtype, memory: PeerMemory | None, *, as_sent: bool
    ) -> None:
        super().__init__(parameters=parameters)
        first = parameters[0].detach()
        own_type = wire_type if as_sent else first.dtype
        self._wire = first.new_zeros(sum(map(_room, parameters)), dtype=wire_type)
        self._flat = self._wire if wire_type == own_type else torch.zeros_like(self._wire, dtype=own_type)
        self._as_sent = as_sent
        self._wire_views, self._sums = _views(parameters, self._wire), _views(parameters, self._flat)
        self._copies: dict[tuple[int, ...], Copies] = {}
        self._wait: Callable[[], object] | None = None
        small = self.nbytes <= BY_MEMORY_BYTES and wire_type in PRECISIONS
        self._memory = memory if small else None

    @property
    def nbytes(self) -> int:
        """As it travels."""
        return self._wire.numel() * self._wire.element_size()

    @property
    def gradients(self) -> list[Tensor]:
        """The sums."""
        return self._sums

    @torch.no_grad()
    def send(self, world: World, name: str, *, waits: bool) -> None:
        """Lay out what travels, and begin to sum it over the processes.

        Args:
            world: The processes.
            name: What it is called where it fails.
            waits: Whether it is waited for at once: what is so small then begins there, in the stream that waits.
        """
        alike: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                self._wire_views[place].zero_()
            else:
                alike[parameter.grad.dtype][place] = parameter.grad
            parameter.grad = None if self._as_sent else self._sums[place]
        for grads in alike.values():
            places = tuple(grads)
            if places not in self._copies:
                self._copies[places] = Copies([self._wire_views[place] for place in places])
            self._copies[places].fill(list(grads.values()))
        self._wait = None
        with world.operation(name):
            if self._memory is None:
                work: Any = dist.all_reduce(self._wire, group=world.beside, async_op=True)
                self._wait = work.wait
            elif not waits:
                self._wait = self._memory.total(self._wire, beside=True)

    def settle(self) -> None:
        """It was sent while a CUDA graph was captured."""
        for copies in self._copies.values():
            copies.settle()

    @torch.no_grad()
    def wait(self, world: World, name: str) -> None:
        """Wait (on a GPU: let this stream wait) until they are summed."""
        with world.operation(name):
            wait = self._wait
            if wait is None and self._memory is not None:
                wait = self._memory.total(self._wire)
            assert wait is not None, f"{self.nbytes} bytes of {self._wire.dtype} do not fit"
            wait()
        if self._wire is not self._flat:
            self._flat.copy_(self._wire)


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
        ready: Called with parameters and their gradients as soon as these are done, on a GPU in a stream beside that of
            the backward pass, which goes on meanwhile. None where all are wanted together, after `finish`.
        as_sent: Give `ready` the gradients as they were made or travelled, whatever the parameters' type; then they are
            not the parameters' `grad`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cut: Sequence[str],
        world: World,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        bucket_bytes: int | None = None,
        ready: Ready | None = None,
        as_sent: bool = False,
    ) -> None:
        assert ready or not as_sent, "what is not given to anybody is wanted as the parameters' own"
        learned = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._world, self._ready = world, ready
        self._own = [parameter for name, parameter in learned.items() if name in cut]
        self._common = [parameter for name, parameter in learned.items() if name not in cut]
        travel, self._stay = (self._common, self._own) if world.size > 1 else ([], [*self._common, *self._own])
        self._travelling = [
            _Travelling(part, _wire_type(part[0], precision, as_sent=as_sent), world.memory_beside, as_sent=as_sent)
            for part in _parts(travel, bucket_bytes, mixed=as_sent)
        ]
        # Layers that lie apart are not put together: one would wait for the other.
        runs = _runs(list(learned.values()), self._stay) if ready else []
        apart = [part for run in runs for part in _parts(run, bucket_bytes, mixed=as_sent)]
        self._staying = [_Bucket(parameters=part) for part in apart]
        if world.size > 1:
            _hold([*reversed(learned.values())], self._travelling, self._staying)
        self._sent = 0
        self._is_last = False
        self._beside = torch.cuda.Stream(world.device) if ready and world.device.type == "cuda" else None
        self._hooks: list[Any] = []
        for bucket in (*self._travelling, *self._staying):
            for parameter in bucket.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._made(bucket)))

    def close(self) -> None:
        """Leave the parameters as if nothing had been learned of them."""
        for hook in self._hooks:
            hook.remove()
        for parameter in (*self._common, *self._own):
            parameter.grad = None

    @property
    def tensors(self) -> list[Tensor]:
        """This process's gradients, after `finish`."""
        found = [parameter.grad for parameter in (*self._common, *self._own)]
        assert all(grad is not None for grad in found), "gradients are asked for before they are finished"
        return cast(list[Tensor], found)

    @property
    def first_of_buckets(self) -> list[nn.Parameter]:
        """What the forward pass meets first of each bucket that travels, but for the one that is the last to travel."""
        return [bucket.parameters[-1] for bucket in self._travelling[:-1]]

    @property
    def travel_bytes(self) -> int:
        """What a step sums over the processes, as it travels."""
        return sum(bucket.nbytes for bucket in self._travelling)

    def start(self) -> None:
        """Forget the step before's."""
        for parameter in (*self._common, *self._own):
            parameter.grad = None
        for bucket in (*self._travelling, *self._staying):
            bucket.made, bucket.begun = 0, False
        self._sent, self._is_last = 0, False

    def travel(self) -> None:
        """The next backward pass is the step's last: what it has filled is summed over the processes at once."""
        self._is_last = True

    def finish(self) -> None:
        """Sum what no backward pass has filled, and wait (on a GPU: let what comes next wait) for all."""
        while self._sent < len(self._travelling):
            self._send()
        for parameter in self._stay:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in self._staying:
            if not bucket.begun:
                self._done(bucket)
        if self._ready is None:
            for index, bucket in enumerate(self._travelling):
                bucket.wait(self._world, f"the sum of gradients, bucket {index}")
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def settle(self) -> None:
        """A step was captured in a CUDA graph."""
        for bucket in self._travelling:
            bucket.settle()

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
            if not self._is_last:
                return
            assert not bucket.begun, "a gradient was made again after it had been sent"
            bucket.made += 1
            # In one order everywhere, whatever the order in which they are made: collectives pair up by their order.
            while self._sent < len(self._travelling) and self._travelling[self._sent].is_due:
                self._send()
            for waiting in self._staying:
                if waiting.is_due:
                    self._done(waiting)

        return hook

    def _send(self) -> None:
        bucket, name = self._travelling[self._sent], f"the sum of gradients, bucket {self._sent}"
        bucket.send(self._world, name, waits=self._ready is not None)
        self._sent += 1
        if self._ready is None:
            bucket.begun = True
            return
        # Where nothing is left to do beside it: to go aside and come back takes as long as a small sum.
        is_last = self._sent == len(self._travelling) and all(bucket.is_full for bucket in self._staying)
        with nullcontext() if is_last else self._aside():
            bucket.wait(self._world, name)
            self._step(bucket)

    def _done(self, bucket: _Bucket) -> None:
        with self._aside():
            self._step(bucket)

    def _step(self, bucket: _Bucket) -> None:
        bucket.begun = True
        assert self._ready is not None
        self._ready(bucket.parameters, bucket.gradients)

    @contextmanager
    def _aside(self) -> Generator[None]:
        """What is done inside comes after all that was done so far, and beside what comes next."""
        if self._beside is None:
            yield
            return
        if torch.cuda.current_stream() != self._beside:
            self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            yield


def _parts(parameters: Sequence[nn.Parameter], most_bytes: int | None, *, mixed: bool) -> list[list[nn.Parameter]]:
    """Parameters of one type, or of mixed ones, the last first as the backward pass makes them, of about one size."""
    if most_bytes is None:
        whole = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        most_bytes = min(BUCKET_BYTES, whole // LEAST_BUCKETS)
    parts: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        alike = bool(parts) and (mixed or parts[-1][0].dtype == parameter.dtype)
        if not alike or parts[-1][0].device != parameter.device or size >= most_bytes:
            parts.append([])
            size = 0
        parts[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return parts


def _runs(parameters: Sequence[nn.Parameter], chosen: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that are chosen, in runs between which others lie, the last first."""
    wanted = {id(parameter) for parameter in chosen}
    runs = [list(run) for is_chosen, run in itertools.groupby(parameters, lambda own: id(own) in wanted) if is_chosen]
    return runs[::-1]


def _hold(made: Sequence[nn.Parameter], travelling: Sequence[_Bucket], staying: Sequence[_Bucket]) -> None:
    """Let buckets wait for layers that lie between them and the next ones.

    Args:
        made: All parameters, in the order in which the backward pass makes them.
        travelling: What is summed when it is full.
        staying: Of layers that wait for other processes.
    """
    place = {id(parameter): index for index, parameter in enumerate(made)}
    for bucket, following in itertools.pairwise(travelling):
        first, last = (place[id(each.parameters[-1])] for each in (bucket, following))
        bucket.after = [each for each in staying if first < place[id(each.parameters[0])] < last]
    for bucket, following in itertools.pairwise(staying):
        bucket.after = [following]


def _wire_type(parameter: nn.Parameter, precision: Literal["fp32", "bf16"], *, as_sent: bool) -> torch.dtype:
    if precision == "bf16":
        return torch.bfloat16
    return torch.float32 if as_sent else parameter.dtype


def _room(parameter: nn.Parameter) -> int:
    """How many numbers of a bucket are a parameter's: whole vectors."""
    return -(-parameter.numel() // ALIGNED) * ALIGNED


def _views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    parts = flat.split([_room(parameter) for parameter in parameters])
    return [_like(parameter, part[: parameter.numel()]) for parameter, part in zip(parameters, parts, strict=True)]


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
