"""A step as one CUDA graph: a single launch for its forward and backward pass, its collectives and its optimizer.

The host then has nothing to do in a step but to hand over a batch, so that a step takes as long as its arithmetic and
not as its hundreds of launches.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.train.world import World

# Libraries choose their algorithms and make their buffers, optimizers their state, and NCCL its connections.
EAGER_STEPS = 3
# Of the stream that a step is captured on: before what is done beside it, the steps of weights, and with collectives.
PRIORITY = -1
# How many steps the host is before the device; what they are fed with is on the device meanwhile.
STEPS_AHEAD = 2

Compute = Callable[[Tensor, Tensor], Tensor]


@final
class Steps:
    """Takes steps: a few as they are written, then by replaying what one of them did.

    Args:
        compute: Takes a step with inputs and targets on the device and gives a scalar there. All that changes from
            step to step must lie in the device's memory, and nothing may be read by the host.
        world: The processes; all of them replay, or none.
        why_eager: Why no step can be captured, or None.
        say: Called with a sentence where steps are not captured.
        settle: Called when a step was captured, before it is replayed.
    """

    def __init__(
        self,
        compute: Compute,
        world: World,
        why_eager: str | None,
        say: Callable[[str], object],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        self._compute, self._world, self._say, self._settle = compute, world, say, settle
        self._on_gpu = world.device.type == "cuda"
        self._eager_left = EAGER_STEPS
        self._graph: _Graph | None = None
        self._ended: deque[torch.cuda.Event] = deque()
        self._captures = self._on_gpu and why_eager is None
        self.why_eager = why_eager
        world.hold(self.restart)

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed now."""
        return self._graph is not None

    def take(self, inputs_B: Tensor, targets_B: Tensor, constants: list[Any]) -> Tensor:
        """Take a step.

        Args:
            inputs_B: On the device.
            targets_B: On the device.
            constants: All numbers besides them that the step is computed with; a captured step has those for good.

        Returns:
            What `compute` gives, in memory of its own.
        """
        if not self._on_gpu:
            return self._compute(inputs_B, targets_B)
        made = self._take(inputs_B, targets_B, constants)
        ended = torch.cuda.Event(blocking=True)
        ended.record()
        self._ended.append(ended)
        if len(self._ended) > STEPS_AHEAD:
            self._ended.popleft().synchronize()
        return made

    def _take(self, inputs_B: Tensor, targets_B: Tensor, constants: list[Any]) -> Tensor:
        if self._captures and self._graph is None and self._eager_left == 0:
            self._capture(inputs_B, targets_B, constants)
        if self._graph is not None:
            why = self._graph.why_other(inputs_B, targets_B, constants)
            if why is None:
                return self._graph.replay(inputs_B, targets_B)
            self._turn_eager(why)
        self._eager_left = max(0, self._eager_left - 1)
        return self._compute(inputs_B, targets_B).clone()

    def _capture(self, inputs_B: Tensor, targets_B: Tensor, constants: list[Any]) -> None:
        why = ""
        stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        try:
            self._graph = _Graph(self._compute, inputs_B, targets_B, constants, pool)
            self._settle()
        except _OfTheHostError as error:
            why = str(error)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:300]
            _leave_capture(self._world.device, stream, pool)
        # A graph that waits for collectives of others that have none would wait for good.
        (failed,) = self._world.total(bool(why))
        if failed:
            self._turn_eager(why or "another process could not capture it")

    def restart(self) -> None:
        """Let go of the captured step: what it works on is replaced, or not there any more."""
        self._graph, self._eager_left = None, EAGER_STEPS

    def _turn_eager(self, why: str) -> None:
        self._graph, self._captures, self.why_eager = None, False, why
        self._say(f"Steps are launched operation by operation, which is slower than one CUDA graph: {why}.")


def index_of(device: torch.device) -> int:
    """Which GPU it is; the current one where it does not say."""
    return torch.cuda.current_device() if device == torch.device("cuda") else device.index


def generator_of(device: torch.device) -> torch.Generator:
    """From which torch draws on a GPU."""
    return torch.cuda.default_generators[index_of(device)]


def _leave_capture(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Put back what torch leaves as if it were still captured after a capture that failed.

    Args:
        device: Whose generator goes on as if it were captured.
        stream: Which was the current one before.
        pool: From which memory goes on being taken, and to which nothing is given back.
    """
    torch.cuda.set_stream(stream)
    generator_of(device).graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    index = index_of(device)
    # There is no other way to the allocator.
    ended, released = (getattr(torch._C, name) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))  # pyright: ignore[reportPrivateUsage]
    try:
        ended(index, pool)
    except RuntimeError:
        # The device captured all that it was given, and gave the pool back: it was torch or the network that refused.
        return
    released(index, pool)


class _OfTheHostError(RuntimeError):
    """The step was captured, but would not do again what it did."""


def _chance_of_host() -> list[Any]:
    """Where the host's generators are."""
    numpys: Any = np.random.get_state()
    return [torch.default_generator.get_state().tolist(), random.getstate(), numpys[1].tolist(), numpys[2:]]


@final
class _Graph:
    """One step, captured.

    Raises:
        RuntimeError: It does what cannot be captured.
    """

    def __init__(self, compute: Compute, inputs_B: Tensor, targets_B: Tensor, constants: list[Any], pool: Any) -> None:
        self._inputs, self._targets, self._constants = inputs_B.clone(), targets_B.clone(), constants
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        before = _chance_of_host()
        # Other threads, that of NCCL's watchdog say, may ask the device what they like meanwhile.
        stream = torch.cuda.Stream(priority=PRIORITY)
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._made = compute(self._inputs, self._targets)
        if _chance_of_host() != before:
            raise _OfTheHostError(
                "the network or the loss draws chance on the host, which would be the same in every step"
            )

    def why_other(self, inputs_B: Tensor, targets_B: Tensor, constants: list[Any]) -> str | None:
        """Why this is not the step for these, or None if it is."""
        for own, given in ((self._inputs, inputs_B), (self._targets, targets_B)):
            if (own.shape, own.dtype) != (given.shape, given.dtype):
                return f"a batch is {given.dtype} {list(given.shape)} after one of {own.dtype} {list(own.shape)}"
        return None if constants == self._constants else "the schedule changes more than learning rates"

    def replay(self, inputs_B: Tensor, targets_B: Tensor) -> Tensor:
        self._inputs.copy_(inputs_B)
        self._targets.copy_(targets_B)
        self._graph.replay()
        return self._made.clone()
