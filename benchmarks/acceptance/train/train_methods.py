"""Methods of taking a training step: Penstock's trainer, and torch's DistributedDataParallel as experts tune it.

DDP uses everything that it can: bf16 autocast, channels_last, torch.compile before the wrapping, gradients as views of
buckets, all-reduce in bf16, a static graph, a fused optimizer. "captured ddp" also captures the whole step as a CUDA
graph, as in NVIDIA's documentation of CUDA graphs in PyTorch and torch's notes on "DDP and CUDA graphs": created on a
side stream, eleven steps before the capture, NCCL's error handling off.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from benchmarks.acceptance.train.train_case import MODELS, TrainingCase
from penstock.core.spec import Array
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World
from penstock.train.recipe import Data, Parallel, Recipe, StepExecution
from penstock.train.trainer import Trainer

RATE, MOMENTUM, DECAY = 0.01, 0.9, 5e-4
WARM_UP = 11
Step = Callable[[Tensor, Tensor], Tensor]


def make_step(case: TrainingCase, world: World, inputs: Array) -> Step:
    """Return a function that takes a step with this rank's raw inputs and labels and returns the loss on the device.

    Args:
        case: Network and method.
        world: The ranks.
        inputs: Some raw inputs.
    """
    torch.manual_seed(0)
    if case.method == "penstock":
        return _penstock(case, world, inputs)
    return _captured(case, world) if case.method == "captured ddp" else _eager(case, world)


def recipe_of(case: TrainingCase) -> Recipe:
    """Return Penstock's recipe of a case."""
    return Recipe(
        data=cast(Callable[[], Data], _no_data),
        loss=CrossEntropy(),
        optimizer=lambda parameters: SGD(parameters, lr=RATE, momentum=MOMENTUM, weight_decay=DECAY),
        batch_size=case.batch,
        steps=1,
        precision=case.changes.get("precision", "bf16"),
        execution=StepExecution(
            master_weights=bool(case.changes.get("master_weights", True)),
            deterministic=bool(case.changes.get("deterministic", False)),
            compile=case.compiled,
            graph=bool(case.changes.get("graph", True)),
        ),
        parallel=Parallel(
            gradient_precision="bf16",
            peer_memory=bool(case.changes.get("peer_memory", True)),
            placements=case.layer_placements(),
        ),
    )


def _no_data() -> None:
    raise AssertionError("a measurement makes its own batches")


def trainer_of(case: TrainingCase, world: World, inputs: Array) -> Trainer:
    """Return Penstock's trainer of a case."""
    return Trainer(MODELS[case.model].make(), recipe_of(case), 1_000_000, world, inputs=inputs)


def _penstock(case: TrainingCase, world: World, inputs: Array) -> Step:
    trainer = trainer_of(case, world, inputs)
    trainer.notify = print
    taken = iter(range(1 << 62))

    def step(inputs_B: Tensor, labels_B: Tensor) -> Tensor:
        # A share of the global mean; DDP returns the rank's own mean.
        return trainer.step((inputs_B, labels_B), next(taken)) * world.size

    return step


def _wrapped(case: TrainingCase, world: World, *, hook: bool) -> tuple[nn.Module, Optimizer]:
    module = MODELS[case.model].make().to(world.device)
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        module = module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    outside = bool(case.changes.get("outside", False)) and world.size > 1
    inside = case.compiled and not outside
    network = cast(nn.Module, torch.compile(module, dynamic=False)) if inside else module
    if world.size > 1:
        wrapped = DistributedDataParallel(
            network,
            process_group=_plain_group(),
            device_ids=[world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,
            static_graph=True,
            broadcast_buffers=False,
        )
        # The hook needs a GPU.
        if hook and on_gpu:
            wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
        network = cast(nn.Module, torch.compile(wrapped, dynamic=False)) if case.compiled and outside else wrapped
    optimizer = SGD(module.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, fused=True)
    return network, optimizer


@cache
def _plain_group() -> dist.ProcessGroup:
    """A default process group: Penstock's have high priority, which makes a captured DDP slower."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def _plain(network: nn.Module, optimizer: Optimizer, device: torch.device) -> Step:
    def step(inputs_B: Tensor, labels_B: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(network(inputs_B), labels_B)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(case: TrainingCase, world: World) -> Step:
    return _plain(*_wrapped(case, world, hook=bool(case.changes.get("hook", True))), world.device)


def _captured(case: TrainingCase, world: World) -> Step:
    hook = bool(case.changes.get("hook", False))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        network, optimizer = _wrapped(case, world, hook=hook)
    plain = _plain(network, optimizer, world.device)
    graph = torch.cuda.CUDAGraph()
    buffers: list[Tensor] = []

    def capture(inputs_B: Tensor, labels_B: Tensor) -> None:
        own_inputs, own_labels = inputs_B.clone(), labels_B.clone()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                plain(own_inputs, own_labels)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            loss = plain(own_inputs, own_labels)
        buffers.extend((own_inputs, own_labels, loss))

    def step(inputs_B: Tensor, labels_B: Tensor) -> Tensor:
        if not buffers:
            capture(inputs_B, labels_B)
        buffers[0].copy_(inputs_B)
        buffers[1].copy_(labels_B)
        graph.replay()
        return buffers[2]

    return step


def numeric_settings(case: TrainingCase) -> Any:
    """Return the context of global torch settings: from the recipe for Penstock, fastest for DDP."""
    if case.method == "penstock":
        from penstock.train.numerics import numerics

        return numerics(recipe_of(case))
    torch.backends.cudnn.benchmark = True
    return nullcontext()
