"""A training step as one CUDA graph: one launch for forward and backward pass, collectives and optimizer.

The host only copies the batch in, so a step takes as long as its arithmetic and not as its hundreds of launches.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.train.data.trees import Tree, leaves, mapped
from penstock.train.parallel.world import World

# Warm-up: libraries choose algorithms and allocate buffers, optimizers make their state, NCCL its connections.
EAGER_STEPS = 3
# Priority of the captured stream: above the optimizer's side stream, equal to the collectives'.
PRIORITY = -1
# Steps that the host may launch ahead of the device; their batches occupy device memory.
STEPS_AHEAD = 2

Compute = Callable[[Tree, Tree], Tensor]


@final
class Steps:
    """Run steps: a few eagerly, then by replaying a captured one.

    Args:
        compute: Runs a step on inputs and targets on the device and returns a scalar there. All values that change
            between steps must be in device memory, and the host must not read any.
        world: The processes; all of them replay, or none.
        why_eager: The reason that no step can be captured, or None.
        notify: Called with a sentence if steps are not captured.
        after_capture: Called after a capture, before the first replay.
    """

    def __init__(
        self,
        compute: Compute,
        world: World,
        why_eager: str | None,
        notify: Callable[[str], object],
        after_capture: Callable[[], object] = lambda: None,
    ) -> None:
        self._compute, self._world, self._notify, self._after_capture = compute, world, notify, after_capture
        self._on_gpu = world.device.type == "cuda"
        self._eager_left = EAGER_STEPS
        self._graph: _Graph | None = None
        self._step_ends: deque[torch.cuda.Event] = deque()
        self._captures = self._on_gpu and why_eager is None
        self.why_eager = why_eager
        world.on_leave(self.restart)

    @property
    def captures(self) -> bool:
        """True if steps are captured, now or after the first ones: every batch then needs the same shape."""
        return self._captures

    @property
    def is_captured(self) -> bool:
        """True if steps are replayed."""
        return self._graph is not None

    def take(self, inputs_B: Tree, targets_B: Tree, constants: list[Any]) -> Tensor:
        """Take a step.

        Args:
            inputs_B: A tensor or a tree of tensors, on the device.
            targets_B: Likewise.
            constants: All other numbers that the step uses; a captured step keeps their values.

        Returns:
            A copy of the result of `compute`.
        """
        if not self._on_gpu:
            return self._compute(inputs_B, targets_B)
        result = self._take(inputs_B, targets_B, constants)
        end = torch.cuda.Event(blocking=True)
        end.record()
        self._step_ends.append(end)
        if len(self._step_ends) > STEPS_AHEAD:
            self._step_ends.popleft().synchronize()
        return result

    def _take(self, inputs_B: Tree, targets_B: Tree, constants: list[Any]) -> Tensor:
        if self._captures and self._graph is None and self._eager_left == 0:
            self._capture(inputs_B, targets_B, constants)
        if self._graph is not None:
            why = self._graph.mismatch(inputs_B, targets_B, constants)
            if why is None:
                return self._graph.replay(inputs_B, targets_B)
            self._run_eagerly(why)
        self._eager_left = max(0, self._eager_left - 1)
        return self._compute(inputs_B, targets_B).clone()

    def _capture(self, inputs_B: Tree, targets_B: Tree, constants: list[Any]) -> None:
        why = ""
        stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        try:
            self._graph = _Graph(self._compute, inputs_B, targets_B, constants, pool)
            self._after_capture()
        except _HostRNGError as error:
            why = str(error)
        except RuntimeError as error:
            why = " ".join(str(error).split())[:300]
            _leave_capture(self._world.device, stream, pool)
        # If only some processes replayed, their collectives would wait for ever.
        (failed,) = self._world.sum_on_host(bool(why))
        if failed:
            self._run_eagerly(why or "another process could not capture it")

    def restart(self) -> None:
        """Discard the captured step, because its tensors are replaced or freed."""
        self._graph, self._eager_left = None, EAGER_STEPS

    def _run_eagerly(self, why: str) -> None:
        self._graph, self._captures, self.why_eager = None, False, why
        self._notify(launched_steps(why))


def launched_steps(why: str) -> str:
    """Return the sentence on steps that no CUDA graph holds."""
    return f"Steps are launched operation by operation, which is slower than one CUDA graph: {why}."


def index_of(device: torch.device) -> int:
    """Return the GPU's index; that of the current GPU if the device has none."""
    return torch.cuda.current_device() if device == torch.device("cuda") else device.index


def generator_of(device: torch.device) -> torch.Generator:
    """Return torch's default generator of a GPU."""
    return torch.cuda.default_generators[index_of(device)]


def _leave_capture(device: torch.device, stream: torch.cuda.Stream, pool: Any) -> None:
    """Restore the state that torch leaves in capture mode after a failed capture.

    Args:
        device: The GPU; its generator is still registered with the capture.
        stream: The current stream before the capture.
        pool: The memory pool of the capture; allocations still go to it.
    """
    torch.cuda.set_stream(stream)
    generator_of(device).graphsafe_set_state(torch.Generator(device).graphsafe_get_state())
    index = index_of(device)
    # Torch has no public function for this.
    ended, released = (getattr(torch._C, name) for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"))  # pyright: ignore[reportPrivateUsage]
    try:
        ended(index, pool)
    except RuntimeError:
        # The capture itself ended well and released the pool; the error came from torch or the network.
        return
    released(index, pool)


class _HostRNGError(RuntimeError):
    """The step draws random numbers on the host, which a replay would not repeat."""


def _host_rng_states() -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [torch.default_generator.get_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2:]]


@final
class _Graph:
    """One captured step.

    Raises:
        RuntimeError: The step has an operation that cannot be captured.
    """

    def __init__(self, compute: Compute, inputs_B: Tree, targets_B: Tree, constants: list[Any], pool: Any) -> None:
        inputs, targets = mapped(Tensor.clone, inputs_B), mapped(Tensor.clone, targets_B)
        self._static, self._constants = leaves((inputs, targets)), constants
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        before = _host_rng_states()
        # Other threads, such as NCCL's watchdog, may query the device during the capture.
        stream = torch.cuda.Stream(priority=PRIORITY)
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._result = compute(inputs, targets)
        if _host_rng_states() != before:
            raise _HostRNGError(
                "the network or the loss draws random numbers on the host, which would be the same in every step"
            )

    def mismatch(self, inputs_B: Tree, targets_B: Tree, constants: list[Any]) -> str | None:
        """Return the reason that this graph cannot compute the step, or None if it can."""
        given = leaves((inputs_B, targets_B))
        if len(given) != len(self._static):
            return f"a batch is {len(given)} tensors after one of {len(self._static)}"
        for own, new in zip(self._static, given, strict=True):
            if (own.shape, own.dtype) != (new.shape, new.dtype):
                return f"a batch is {new.dtype} {list(new.shape)} after one of {own.dtype} {list(own.shape)}"
        return None if constants == self._constants else "the schedule changes more than learning rates"

    def replay(self, inputs_B: Tree, targets_B: Tree) -> Tensor:
        for own, new in zip(self._static, leaves((inputs_B, targets_B)), strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._result.clone()
