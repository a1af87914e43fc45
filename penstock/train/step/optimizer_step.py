"""The optimizer's part of a training step: loss scaling, clipping, and the step itself."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.kernels.common import HAS_TRITON, NO_TRITON
from penstock.train.data.trees import Tree
from penstock.train.parallel.buckets import GradientBuckets
from penstock.train.parallel.dataflow import Call, first_rows, plain_call
from penstock.train.parallel.layout import TRACED_EXAMPLES, cast_of
from penstock.train.parallel.world import World
from penstock.train.recipe import Recipe
from penstock.train.step.capturable_optimizer import CapturableOptimizer
from penstock.train.step.cuda_graph import launched_steps
from penstock.train.step.loss_scale import LossScale
from penstock.train.step.master_weights import MasterWeights, why_no_master_weights


@final
class OptimizerStep:
    """The optimizer of a network: in the backward pass where the recipe permits, otherwise after it.

    Optimizer in backward: where each parameter's step depends on its own gradient alone, `ready` steps the parameters
    of a gradient bucket while the backward pass goes on. Clipping and loss scaling need all gradients: then `finish`
    steps all parameters.

    Args:
        module: The network, placed, on its device.
        optimizer: The optimizer of its parameters.
        recipe: The training recipe.
        world: The processes.
        examples_B: A few raw inputs, `[B, ...]`, to find what uses the weights.
        call: Calls the network with them.

    Attributes:
        capturable: The optimizer, whose steps a CUDA graph can capture.
        leaves: The parameters that a backward pass computes gradients of, by name: bf16 compute copies where there are
            master weights.
        steps_in_backward: True for the optimizer in backward: `ready` steps the parameters.
        loss_scale: The fp16 loss scale; None in other precisions.
        notices: Remarks for the user.

    Raises:
        TrainError: The optimizer does not support the precision.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe,
        world: World,
        examples_B: Tree,
        call: Call = plain_call,
    ) -> None:
        self._clip_norm = recipe.clip_norm
        self.loss_scale = LossScale(world) if recipe.precision == "fp16" else None
        skips, sparse = self.loss_scale is not None, _has_sparse_gradients(module)
        self.capturable = CapturableOptimizer(optimizer, world.device, skips=skips, sparse=sparse)
        self.notices: list[str] = []
        if recipe.execution.graph and self.capturable.why_eager is not None:
            self.notices.append(launched_steps(self.capturable.why_eager))
        if world.device.type == "cuda" and not HAS_TRITON:
            self.notices.append(f"Torch updates and copies the weights, which is slower: {NO_TRITON}.")
        self._master: MasterWeights | None = None
        if recipe.execution.master_weights:
            self._master = self._master_weights(
                module, recipe, world, first_rows(examples_B, TRACED_EXAMPLES, world.device), call
            )
        self.leaves = dict(module.named_parameters()) if self._master is None else self._master.leaves
        needs_all = skips or recipe.clip_norm is not None
        apart = world.device.type == "cuda" and self.capturable.steps_apart and not needs_all
        self.steps_in_backward = apart or self._master is not None

    def _master_weights(
        self, module: nn.Module, recipe: Recipe, world: World, examples_B: Tree, call: Call
    ) -> MasterWeights | None:
        why = why_no_master_weights(recipe, self.capturable.optimizer)
        if why is not None:
            self.notices.append(f"Weights are cast to bf16 in every step: {why}.")
            return None
        with cast_of(recipe, world.device):
            master = MasterWeights(module, self.capturable.optimizer, self.capturable.rate_of, examples_B, call)
        self.notices.append(master.describe())
        return master

    @property
    def has_compute_copies(self) -> bool:
        """True if `ready` accepts gradients in any precision, for bf16 copies of the weights."""
        return self._master is not None

    def weight_of(self, leaf: nn.Parameter) -> nn.Parameter:
        """Return the network's parameter that a leaf belongs to."""
        return leaf if self._master is None else self._master.weight_of(leaf)

    def compute_weights(self) -> AbstractContextManager[None]:
        """Let the network compute with its bf16 copies, where it has any, while the context is open."""
        return nullcontext() if self._master is None else self._master.entered()

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss, scaled in fp16."""
        (loss if self.loss_scale is None else self.loss_scale.scaled(loss)).backward()

    def ready(self, leaves: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a bucket whose gradients are final. Called only if `steps_in_backward`."""
        if self._master is None:
            self.capturable.step(only=leaves)
        else:
            self._master.step(leaves, gradients)

    def finish(self, gradients: GradientBuckets) -> None:
        """Complete the step after the backward pass.

        Raises:
            TrainError: The network uses a weight that has a copy in another way than its layer does.
        """
        if self._master is not None:
            self._master.check()
            # No parameter is left, but a schedule expects one call of the optimizer's step.
            self.capturable.step(only=())
        if self.steps_in_backward:
            return
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients.tensors)
        if self._clip_norm is not None:
            gradients.clip(self._clip_norm)
        self.capturable.step(None if self.loss_scale is None else self.loss_scale.found_inf)
        if self.loss_scale is not None:
            self.loss_scale.update()

    def finish_capture(self) -> None:
        """Finish a capture in a CUDA graph, before its first replay."""
        if self._master is not None:
            self._master.finish_capture()

    def restored(self) -> None:
        """Follow weights and optimizer state that a checkpoint replaced."""
        self.capturable.match_strides()
        if self._master is not None:
            self._master.refresh()


def _has_sparse_gradients(module: nn.Module) -> bool:
    return any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse for layer in module.modules())
