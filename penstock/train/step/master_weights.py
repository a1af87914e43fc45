"""bf16 compute copies of fp32 master weights: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1.

Autocast casts weights to bf16 in every step and their gradients back to fp32, a third of the memory traffic of weights.
Here the optimizer's step reads the bf16 gradients of the backward pass, and writes the fp32 weights and the bf16 copies
that the next step computes with.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.core.errors import TrainError
from penstock.kernels import fused_optimizer as kernel
from penstock.kernels.pointer_table import is_traversable, is_traversable_with
from penstock.nn.entry import EntryConv2d
from penstock.train.data.trees import Tree
from penstock.train.parallel.dataflow import Call, plain_call, uses_of_weights
from penstock.train.parallel.tensor_parallel import ParallelLinear
from penstock.train.recipe import Recipe

# Layers that use their weights in one operation only, which autocast runs in bf16.
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, EntryConv2d)
_NAMES = ("weight", "bias")
# Those operations of torch. The entry convolution pads its weights with zeros first.
_USES = {"linear", "conv1d", "conv2d", "conv3d"}
_USES_OF_ENTRY = _USES | {"pad"}
# Options of an optimizer that the kernels do not implement.
_REFUSED = ("dampening", "maximize", "differentiable", "amsgrad")
_HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_HOOKS_OF_GRADIENTS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def why_no_master_weights(recipe: Recipe, optimizer: Optimizer) -> str | None:
    """Return the reason why a recipe cannot have master weights, or None if it can."""
    if recipe.precision != "bf16":
        return f"the precision is {recipe.precision}"
    if recipe.clip_norm is not None or recipe.execution.accumulation_steps > 1:
        return "gradients are clipped" if recipe.clip_norm is not None else "gradients are accumulated"
    if type(optimizer) not in (SGD, Adam, AdamW):
        return f"the optimizer is {type(optimizer).__name__}, and not SGD, Adam or AdamW"
    for name in _REFUSED:
        if any(group.get(name) for group in optimizer.param_groups):
            return f"the optimizer has {name}"
    if any(getattr(optimizer, name, None) for name in _HOOKS_OF_STEPS):
        return "the optimizer's steps have hooks"
    stepped = [weight for group in optimizer.param_groups for weight in group["params"]]
    return None if all(weight.dtype == torch.float32 for weight in stepped) else "not all weights are float32"


@final
class MasterWeights:
    """fp32 master weights of a network, their bf16 compute copies, and the optimizer's step over both.

    While `entered`, the copies are the parameters of the network's layers; otherwise, and in the optimizer, the fp32
    weights are.

    Args:
        module: The network, placed, on its device.
        optimizer: The optimizer of its parameters, accepted by `why_no_master_weights`. It keeps the state.
        rate_of: Returns the learning rate of a parameter group, by its index, on the device.
        examples_B: A few raw inputs, `[B, ...]`, on the device, to find what uses the weights.
        call: Calls the network with them.

    Attributes:
        leaves: The parameters that a backward pass computes gradients of, by name: the copy, or the weight where it has
            no copy.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        rate_of: Callable[[int], Tensor],
        examples_B: Tree,
        call: Call = plain_call,
    ) -> None:
        self._optimizer, self._rate_of = optimizer, rate_of
        self._owners = _owners(module, examples_B, call)
        self._copies = {weight: nn.Parameter(weight.detach().to(torch.bfloat16)) for weight in self._owners}
        self._names = {id(weight): name for name, weight in module.named_parameters()}
        self.leaves: dict[str, nn.Parameter] = {
            name: self._copies.get(weight, weight) for name, weight in module.named_parameters()
        }
        weight_of = {id(copy): weight for weight, copy in self._copies.items()}
        self._weight_of = {id(leaf): weight_of.get(id(leaf), leaf) for leaf in self.leaves.values()}
        self._group_of = {
            id(weight): index for index, group in enumerate(optimizer.param_groups) for weight in group["params"]
        }
        self._stepped: dict[tuple[int, ...], kernel.Weights] = {}
        # torch counts the writes to a tensor.
        self._versions: dict[int, int] = {}
        self.refresh()

    def describe(self) -> str:
        """Return a sentence for the user."""
        return f"The optimizer's steps write bf16 copies of {len(self._copies)} of {len(self.leaves)} weights."

    def weight_of(self, leaf: nn.Parameter) -> nn.Parameter:
        """Return the network's parameter that a leaf belongs to."""
        return self._weight_of[id(leaf)]

    @contextmanager
    def entered(self) -> Generator[None]:
        """Make the copies the parameters of the network's layers while the context is open."""
        self._put(self._copies)
        try:
            yield
        finally:
            self._put({weight: weight for weight in self._copies})

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights again, after they or the optimizer's state were replaced."""
        for weight, copy in self._copies.items():
            weight.grad = None
            copy.copy_(weight)
            self._versions[id(copy)] = copy._version
        self._stepped.clear()

    @torch.no_grad()
    def step(self, leaves: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> None:
        """Step the weights of some leaves.

        Args:
            leaves: The leaves.
            gradients: Their gradients, in any precision.

        Raises:
            TrainError: The network changed a copy, so that the change would be lost.
        """
        alike: defaultdict[tuple[int, torch.dtype, bool], list[int]] = defaultdict(list)
        for place, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
            weight = self.weight_of(leaf)
            group = self._group_of.get(id(weight))
            # The optimizer need not have all parameters.
            if group is not None:
                self._check_unchanged(weight, leaf)
                alike[group, gradient.dtype, is_traversable(weight)].append(place)
        for (group, _, _), places in alike.items():
            weights = [self.weight_of(leaves[place]) for place in places]
            given = [
                _in_memory_format_of(weight, gradients[place]) for weight, place in zip(weights, places, strict=True)
            ]
            self._step(weights, given, group)
        for leaf in leaves:
            self._versions[id(leaf)] = leaf._version

    def check(self) -> None:
        """Check, after a backward pass, that all gradients are gradients of the copies.

        Raises:
            TrainError: A gradient bypassed its copy.
        """
        for weight in self._copies:
            if weight.grad is not None:
                raise TrainError(
                    f"the network uses {self._names[id(weight)]!r} in another way than its layer does, so that its "
                    f"gradient is incomplete; train it with master_weights=False."
                )

    def finish_capture(self) -> None:
        """Finish a capture of steps in a CUDA graph."""
        for weights in self._stepped.values():
            weights.finish_capture()

    def _put(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for weight, parameter in parameters.items():
            for layer, name in self._owners[weight]:
                layer._parameters[name] = parameter  # pyright: ignore[reportPrivateUsage]

    def _check_unchanged(self, weight: nn.Parameter, leaf: nn.Parameter) -> None:
        if leaf is not weight and leaf._version != self._versions[id(leaf)]:
            raise TrainError(
                f"the network changes {self._names[id(weight)]!r} in its forward pass, which would be lost; train it "
                f"with master_weights=False."
            )

    def _step(self, weights: Sequence[nn.Parameter], gradients: Sequence[Tensor], group: int) -> None:
        key = tuple(map(id, weights))
        if key not in self._stepped:
            self._stepped[key] = kernel.Weights(weights, [self._copies.get(weight) for weight in weights])
        together, rate = self._stepped[key], self._rate_of(group)
        values: Mapping[str, Any] = self._optimizer.param_groups[group]
        decay = values["weight_decay"]
        if isinstance(self._optimizer, SGD):
            sgd = kernel.Sgd(momentum=values["momentum"], decay=decay, nesterov=values["nesterov"])
            # Zero before the first step, whose momentum is the gradient, as in torch.
            momenta = self._state("momentum_buffer", weights) if sgd.momentum else []
            together.step(sgd, gradients, rate, momenta)
            return
        decoupled = isinstance(self._optimizer, AdamW) or bool(values.get("decoupled_weight_decay"))
        adam = kernel.Adam(betas=values["betas"], eps=values["eps"], decay=decay, decoupled=decoupled)
        means, squares, steps = (self._state(name, weights) for name in ("exp_avg", "exp_avg_sq", "step"))
        cast(Any, torch)._foreach_add_(steps, 1)
        together.step(adam, gradients, rate, means, squares, steps)

    def _state(self, name: str, weights: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the optimizer's state of weights, by torch's name; zeros before the first step."""
        found: list[Tensor] = []
        for weight in weights:
            state = self._optimizer.state[weight]
            if state.get(name) is None:
                state[name] = weight.new_zeros(()) if name == "step" else torch.zeros_like(weight)
            found.append(state[name])
        return found


def _in_memory_format_of(weight: Tensor, gradient: Tensor) -> Tensor:
    if is_traversable_with(gradient, weight):
        return gradient
    return torch.empty_like(weight, dtype=gradient.dtype).copy_(gradient)


def _owners(module: nn.Module, examples_B: Tree, call: Call) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Find the weights that can have copies, and the layers and names that hold them."""
    uses = uses_of_weights(module, examples_B, call)
    found: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    kept: set[int] = set()
    for layer in module.modules():
        for name, weight in layer.named_parameters(recurse=False):
            # Other operations may run in fp32, and would get a less precise weight.
            used, may = uses[id(weight)], _USES_OF_ENTRY if isinstance(layer, EntryConv2d) else _USES
            known = isinstance(layer, ParallelLinear) or (type(layer) in _LAYERS and bool(used) and used <= may)
            # A hook of the layer may compute the weight; a hook of the weight expects its own gradient.
            hooked = bool(layer._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
            hooked = hooked or any(getattr(weight, kind, None) for kind in _HOOKS_OF_GRADIENTS)
            plain = name in _NAMES and weight.dtype == torch.float32 and weight.requires_grad
            if not known or hooked or not plain:
                kept.add(id(weight))
            found[weight].append((layer, name))
    return {weight: layers for weight, layers in found.items() if id(weight) not in kept}
