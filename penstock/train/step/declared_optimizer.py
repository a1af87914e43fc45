"""Optimizers declared by name and arguments, `Optimizer("sgd", lr=0.1)`."""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any, Self, cast, final

import torch.optim

from penstock.core.errors import TrainError
from penstock.train.declared import Declared, check_argument, nearest
from penstock.train.step.muon import Muon
from penstock.train.step.optimizers import LAMB, LARS
from penstock.train.step.parameter_groups import NamedParameters, parameter_groups, takes_names

_GROUPED = {"layer_decay": 1.0, "decay_vectors": True}


@cache
def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    base, several_losses = torch.optim.Optimizer, torch.optim.LBFGS
    # torch's Muon takes matrices alone.
    own: dict[str, type[torch.optim.Optimizer]] = {"lamb": LAMB, "lars": LARS, "muon": Muon}
    found: dict[str, type[torch.optim.Optimizer]] = {}
    for name, made in vars(torch.optim).items():
        if inspect.isclass(made) and issubclass(made, base) and made not in (base, several_losses):
            found[name.lower()] = made
    return dict(sorted((found | own).items()))


@final
class Optimizer(Declared):
    """An optimizer by its name and arguments, for `Recipe.optimizer`: `Optimizer("sgd", lr=0.1, momentum=0.9)`.

    Args:
        name: A class of `torch.optim`, such as `"sgd"`, `"adam"`, `"adamw"`, `"rmsprop"` or `"adagrad"`; or Penstock's
            `"lars"`, `"lamb"` or `"muon"`.
        layer_decay: Factor on the learning rate from each numbered layer to the one before, see `parameter_groups`; 1
            for one rate.
        decay_vectors: False for no weight decay of parameters of fewer than two dimensions, which are biases and the
            weights of norms.
        arguments: Arguments of that class, such as `lr` and `weight_decay`; others have its defaults.

    Raises:
        TrainError: There is no such optimizer, it has no such argument, or the argument has another type.
    """

    KIND = "optimizer"
    __slots__ = ()

    def __init__(self, name: str, *, layer_decay: float = 1.0, decay_vectors: bool = True, **arguments: Any) -> None:
        key = str(name).lower()
        if key not in _classes():
            raise TrainError(f"there is no optimizer {name!r}; {nearest(key, self.names())}.")
        parameters = _parameters(key)
        given = arguments | {"layer_decay": layer_decay, "decay_vectors": decay_vectors}
        defaults = {each.name: each.default for each in parameters.values() if each.default is not each.empty}
        defaults |= _GROUPED
        for own, value in given.items():
            if own not in parameters and own not in _GROUPED:
                raise TrainError(
                    f"the optimizer {key!r} has no argument {own!r}; {nearest(own, [*parameters, *_GROUPED])}."
                )
            check_argument(f"the optimizer {key!r}", own, value, defaults.get(own, 0.0))
        if not 0 < layer_decay <= 1:
            raise TrainError(f"the optimizer has layer_decay {layer_decay}; it must be above 0 and at most 1.")
        if missing := [own for own in parameters if own not in defaults and own not in given]:
            raise TrainError(f"the optimizer {key!r} needs {missing[0]}; give {missing[0]}=NUMBER.")
        super().__init__(key, defaults, {own: it for own, it in given.items() if it != _GROUPED.get(own)})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the names of optimizers."""
        return tuple(_classes())

    @classmethod
    def settings_of(cls, name: str) -> tuple[str, ...]:
        """List the arguments of an optimizer."""
        return (*_parameters(name), *_GROUPED)

    def __call__(self, named_parameters: NamedParameters) -> torch.optim.Optimizer:
        """Make the optimizer of some parameters.

        Args:
            named_parameters: Pairs of names and parameters.

        Raises:
            TrainError: An argument is out of range, or `layer_decay` does not fit the network.
        """
        arguments = {name: value for name, value in self.arguments.items() if name not in _GROUPED}
        named = list(named_parameters)
        kind = _classes()[self.name]
        given: Any = [weight for _, weight in named]
        if self.settings["layer_decay"] < 1 or not self.settings["decay_vectors"]:
            decay = self.settings.get("weight_decay")
            given = parameter_groups(
                named,
                lr=self.settings["lr"],
                weight_decay=decay or 0.0,
                layer_decay=self.settings["layer_decay"],
                decay_vectors=self.settings["decay_vectors"],
            )
            if decay is None:
                given = [{name: own for name, own in group.items() if name != "weight_decay"} for group in given]
        try:
            return cast(Any, kind)(_with_names(given, named) if takes_names(kind) else given, **arguments)
        except (ValueError, TypeError, RuntimeError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise TrainError(f"{self!r} cannot be made: {said}; change that argument.") from None

    @classmethod
    def _made(cls, name: Any, arguments: Mapping[str, Any]) -> Self:
        return cls(name, **arguments)


def _with_names(given: list[Any], named: list[tuple[str, torch.nn.Parameter]]) -> list[Any]:
    """Put the names beside parameters, or beside those of groups, as torch's optimizers take them."""
    if not (given and isinstance(given[0], dict)):
        return named
    names = {id(weight): name for name, weight in named}
    return [{**group, "params": [(names[id(each)], each) for each in group["params"]]} for group in given]


@cache
def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the arguments of an optimizer by name, without the parameters that it steps."""
    _, *own = inspect.signature(_classes()[name]).parameters.values()
    return {each.name: each for each in own}
