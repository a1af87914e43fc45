"""Batch norm over several processes: local or synchronized statistics."""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from penstock.core.errors import TrainError
from penstock.nn.normalisation import SequenceBatchNorm
from penstock.train.data.trees import Tree
from penstock.train.parallel.collectives import all_gather_rows
from penstock.train.parallel.dataflow import Call, evaluating, plain_call
from penstock.train.parallel.world import World

# B examples, C channels, R ranks


@final
class SynchronizedBatchNorm(nn.Module):
    """Batch norm with the statistics of the batch of all processes.

    Each gives its mean and the sum of squares about it; together they are those of all (Chan et al. 1979, "Updating
    formulae and a pairwise algorithm for computing sample variances").

    Args:
        norm: The batch norm to replace; its parameters and buffers are kept, under the same names.
        world: The processes.
        name: The name of the layer.
        rows: The number of examples of each process.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, norm: _BatchNorm, world: World, name: str, rows: Sequence[int]) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias = norm.bias
        for own in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(own, getattr(norm, own))
        self.eps = norm.eps
        self.momentum = 0.1 if norm.momentum is None else norm.momentum
        self.world = world
        self.name = name
        self.register_buffer(
            "share_R", torch.tensor(rows, dtype=torch.float64).div(sum(rows)).to(norm.running_mean), persistent=False
        )
        self.examples = sum(rows)

    share_R: Tensor

    def forward(self, given: Tensor) -> Tensor:
        """`[B, C, ...]` to the same shape."""
        if not self.training:
            return nn.functional.batch_norm(
                given, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        exact = given.to(torch.promote_types(given.dtype, torch.float32))
        others = [dim for dim in range(given.ndim) if dim != 1]
        variance_C, mean_C = torch.var_mean(exact, others, correction=0)
        both_R2C = all_gather_rows(self.world, f"{self.name}'s statistics", torch.stack([mean_C, variance_C])[None])
        mean_RC, variance_RC = both_R2C.unbind(1)
        share_R1 = self.share_R.to(mean_RC)[:, None]
        mean_C = (share_R1 * mean_RC).sum(0)
        variance_C = (share_R1 * (variance_RC + (mean_RC - mean_C).square())).sum(0)
        count = self.examples * given[0, 0].numel()
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean_C.to(self.running_mean), self.momentum)
            self.running_var.lerp_((variance_C * (count / max(count - 1, 1))).to(self.running_var), self.momentum)
        shape = [1, -1] + [1] * (given.ndim - 2)
        scale_C = torch.rsqrt(variance_C + self.eps) * self.weight
        shift_C = self.bias - mean_C * scale_C
        return (exact * scale_C.view(shape) + shift_C.view(shape)).to(given.dtype)


def synchronize(module: nn.Module, world: World, rows: Sequence[int]) -> None:
    """Replace a network's batch norms by synchronized ones.

    Raises:
        TrainError: A batch norm cannot be synchronized.
    """
    for name, norm in list(module.named_modules()):
        if isinstance(norm, SequenceBatchNorm):
            raise TrainError(f"{name!r} is a batch norm over sequences, which cannot be synchronized; choose 'local'.")
        if not isinstance(norm, _BatchNorm):
            continue
        if any(getattr(norm, part) is None for part in ("running_mean", "weight", "momentum")):
            raise TrainError(
                f"{name!r} is a batch norm without running statistics, weights or momentum, which cannot be "
                f"synchronized; choose 'local'."
            )
        above, _, last = name.rpartition(".")
        setattr(module.get_submodule(above), last, SynchronizedBatchNorm(norm, world, name, rows))


BATCH_NORMS = (_BatchNorm, SequenceBatchNorm, SynchronizedBatchNorm)


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if a network's outputs depend on the other examples of the batch."""
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())


def norm_of_single_numbers(
    module: nn.Module, example_B: Tree, call: Call = plain_call, frozen: Collection[str] = ()
) -> str | None:
    """Find the first batch norm that gets a single number for each channel of one example.

    Args:
        module: The network; run in evaluation mode, which is restored.
        example_B: One raw input, `[1, ...]`, on the network's device.
        call: Calls the network with it.
        frozen: Names of batch norms that use their running statistics.
    """
    names: dict[nn.Module, str] = {
        layer: name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm) and name not in frozen
    }
    lonely: list[str] = []

    def look(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        if given[0].numel() == given[0].shape[1]:
            lonely.append(names[layer])

    if not names:
        return None
    with ExitStack() as hooks, evaluating(module):
        for layer in names:
            hooks.enter_context(layer.register_forward_pre_hook(look))
        call(module, example_B)
    return lonely[0] if lonely else None


def running_statistics(
    module: nn.Module, kinds: tuple[type[nn.Module], ...] = BATCH_NORMS, *, without: Collection[nn.Module] = ()
) -> dict[str, Tensor]:
    """Collect the running means and variances of batch norms, by name.

    Args:
        module: The network.
        kinds: The classes of batch norms.
        without: Batch norms to leave out.
    """
    layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, kinds) and layer not in without
    ]
    return {
        f"{name}.{own}".removeprefix("."): tensor
        for name, layer in layers
        for own, tensor in layer.named_buffers(recurse=False)
        # Buffers outside of the state dict are constants.
        if tensor.is_floating_point() and own in layer.state_dict()
    }


@final
class RunningStatistics:
    """Running statistics of local batch norms, averaged over the processes after each step.

    A running mean is linear in its inputs, so this equals the running mean of the processes' averages.

    Args:
        module: The network.
        world: The processes.
        frozen: Batch norms whose statistics do not change.
    """

    def __init__(self, module: nn.Module, world: World, frozen: Collection[nn.Module] = ()) -> None:
        self._world = world
        # Synchronized ones are equal on all processes already.
        self._tensors = list(running_statistics(module, (_BatchNorm, SequenceBatchNorm), without=frozen).values())

    @torch.no_grad()
    def average(self) -> None:
        """Average over the processes."""
        if self._world.size == 1 or not self._tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in self._tensors])
        self._world.all_reduce(flat, "the mean of the batch norms' statistics")
        flat.div_(self._world.size)
        for tensor, mean in zip(self._tensors, flat.split([tensor.numel() for tensor in self._tensors]), strict=True):
            tensor.copy_(mean.view(tensor.shape))
