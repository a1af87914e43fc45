"""Tracing of outputs and weights through a network, by a forward pass of a few examples.

If the outputs of a layer pass through elementwise operations alone, these can be computed on a slice of the features.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.train.data.trees import Tree, leaves, mapped

OUTPUT = "the network's output"
OUTPUTS = "a tuple or mapping of the network's outputs"
# Calls a network with the inputs of a batch.
Call = Callable[[Callable[..., Any], Tree], Any]

# Elementwise as well, though not tagged so.
_CARRIES = {"_to_copy", "detach", "alias", "lift_fresh", "native_dropout", "hardswish", "hardswish_", "hardsigmoid"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearUse:
    """The use of one linear layer in a network.

    Args:
        inputs: Input features.
        outputs: Output features.
        rows: Rows for each example.
        comes_from: The linear layers whose outputs reach it through elementwise operations alone; empty if any other
            tensor does too.
        goes_to: The users of its output behind elementwise operations: names of linear layers, names of torch's
            operations, or `OUTPUT`.
    """

    inputs: int
    outputs: int
    rows: float
    comes_from: frozenset[str]
    goes_to: frozenset[str]


def plain_call(network: Callable[..., Any], inputs_B: Tree) -> Any:
    """Call a network of one input."""
    return network(inputs_B)


def first_rows(examples_B: Tree, count: int, device: torch.device) -> Tree:
    """Return the first few examples of a batch, on a device."""
    return mapped(lambda tensor: tensor[:count].to(device), examples_B)


def linear_uses(module: nn.Module, examples_B: Tree, call: Call = plain_call) -> dict[str, LinearUse]:
    """Trace the use of every linear layer, in the order of the calls.

    Args:
        module: The network; run in evaluation mode, which is restored.
        examples_B: A few raw inputs, `[B, ...]`, on the network's device.
        call: Calls the network with them.
    """
    watch = _Watch()
    with evaluating(module), watch.hooked(module), watch:
        outputs = call(module, examples_B)
    watch.meets(OUTPUT if isinstance(outputs, Tensor) else OUTPUTS, leaves(outputs))
    return watch.seen(len(leaves(examples_B)[0]))


def uses_of_weights(module: nn.Module, examples_B: Tree, call: Call = plain_call) -> dict[int, set[str]]:
    """Collect the names of torch's functions that take each parameter, by the parameter's `id`.

    Names of calls outside of autocast end in "without autocast".

    Args:
        module: The network; run in evaluation mode, which is restored.
        examples_B: A few raw inputs, `[B, ...]`, on the network's device.
        call: Calls the network with them.
    """
    watch = _Uses((id(weight) for weight in module.parameters()), leaves(examples_B)[0].device.type)
    with evaluating(module), watch:
        call(module, examples_B)
    return watch.seen


@contextmanager
def evaluating(module: nn.Module) -> Generator[None]:
    """Put a network into evaluation mode without gradients; restore the modes of its modules at the end."""
    before = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in before.items():
            part.training = training


@final
class _Watch(TorchDispatchMode):
    """Marks every tensor with the linear layers that it depends on through elementwise operations alone."""

    def __init__(self) -> None:
        super().__init__()
        # The tensors are kept alive, because an id may be reused.
        self._marks: dict[int, tuple[Tensor, frozenset[str]]] = {}
        self._names: dict[nn.Module, str] = {}
        self._layers: dict[str, nn.Linear] = {}
        self._rows: dict[str, int] = {}
        self._comes: dict[str, frozenset[str]] = {}
        self._goes: dict[str, set[str]] = {}
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._inside:
            return made
        name = func.overloadpacket.__name__
        given = _tensors_of((args, kwargs))
        marks = frozenset[str]().union(*(self._marks_of(tensor) for tensor in given))
        if not marks:
            return made
        # A tensor of many numbers that comes from elsewhere has all features, or those of other examples.
        alone = all(self._marks_of(tensor) or tensor.numel() == 1 for tensor in given)
        if not alone:
            name = f"{name} with another tensor"
        if alone and (torch.Tag.pointwise in func.tags or name in _CARRIES):
            for tensor in _tensors_of(made):
                self._marks[id(tensor)] = (tensor, marks)
        else:
            self.meets(name, given)
        return made

    @contextmanager
    def hooked(self, module: nn.Module) -> Generator[None]:
        with ExitStack() as hooks:
            for name, layer in module.named_modules():
                if isinstance(layer, nn.Linear):
                    self._layers[name], self._names[layer] = layer, name
                    hooks.enter_context(layer.register_forward_pre_hook(self._before))
                    hooks.enter_context(layer.register_forward_hook(self._after))
            yield

    def meets(self, name: str, given: Any) -> None:
        """Record that an operation needs all features of some tensors."""
        for tensor in _tensors_of(given):
            for layer in self._marks_of(tensor):
                self._goes[layer].add(name)

    def seen(self, examples: int) -> dict[str, LinearUse]:
        return {
            name: LinearUse(
                inputs=self._layers[name].in_features,
                outputs=self._layers[name].out_features,
                rows=rows / examples,
                comes_from=self._comes[name],
                goes_to=frozenset(self._goes[name]),
            )
            for name, rows in self._rows.items()
        }

    def _marks_of(self, tensor: Tensor) -> frozenset[str]:
        return self._marks.get(id(tensor), (None, frozenset[str]()))[1]

    def _before(self, layer: nn.Module, given: tuple[Any, ...]) -> None:
        (inputs,), name = given, self._names[layer]
        self.meets(name, given)
        self._goes.setdefault(name, set())
        marks = self._marks_of(inputs)
        # Called twice, with different inputs: only what both have in common can be relied on.
        self._comes[name] = self._comes.get(name, marks) & marks
        self._rows[name] = self._rows.get(name, 0) + inputs.shape[:-1].numel()
        self._inside = True

    def _after(self, layer: nn.Module, given: Any, made: Tensor) -> None:
        self._inside = False
        self._marks[id(made)] = (made, frozenset({self._names[layer]}))


@final
class _Uses(TorchFunctionMode):
    """Records the functions that take some tensors; access to a property (`shape`, `T`) has the property's name."""

    def __init__(self, watched: Iterable[int], device: str) -> None:
        super().__init__()
        self._device = device
        self.seen: dict[int, set[str]] = {each: set() for each in watched}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)
        if not torch.is_autocast_enabled(self._device):
            name = f"{name} without autocast"
        for tensor in _tensors_of((args, kwargs)):
            if id(tensor) in self.seen:
                self.seen[id(tensor)].add(name)
        return func(*args, **(kwargs or {}))


def _tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors_of(tuple(cast(dict[Any, Any], value).values()))
    if isinstance(value, list | tuple):
        return [tensor for item in cast(list[Any], value) for tensor in _tensors_of(item)]
    return []
