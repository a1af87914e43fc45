"""Networks with named tensors: how `forward` takes them, and how its outputs are read.

A network takes its inputs as it was written: one tensor, keyword arguments (`model(input_ids=..., attention_mask=...)`)
or one mapping. A parameter with the name of a `Dim` gets the lengths `[B]`. It gives one tensor, or several as a tuple
in the declared order, a mapping, or an object with attributes.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.record import ChunkSpec, RecordSpec

# B rows of a batch


@final
class NamedCall:
    """The way in which a network takes its inputs: by position, by keyword, or as one mapping.

    Args:
        function: The network, or its function that is called.
        input: One raw input chunk.

    Attributes:
        arguments: Names of the arguments: tensors, then dimensions whose lengths the network takes.

    Raises:
        ApplicationError: The network does not take tensors of these names.
    """

    def __init__(self, function: Callable[..., Any], input: ChunkSpec) -> None:
        self._positional, self._keywords = _arguments(function, input)
        self._by_mapping = self._positional is None and not self._keywords
        if self._by_mapping:
            self.arguments = [*(spec.name for spec in input.tensors), *_dims(input)]
        else:
            self.arguments = [*([] if self._positional is None else [self._positional]), *self._keywords]

    def __call__(self, function: Callable[..., Any], named: Mapping[str, Tensor]) -> Any:
        """Call the function, or another one with the same parameters, with tensors and lengths by name."""
        given = {name: named[name] for name in self.arguments}
        if self._by_mapping:
            return function(given)
        if self._positional is None:
            return function(**given)
        return function(given.pop(self._positional), **given)


@final
class NamedNetwork(nn.Module):
    """A network whose tensors are in a declared order: positional arguments in, a tuple out.

    Args:
        module: The network.
        input: One raw input chunk.
        output: One output chunk.

    Attributes:
        arguments: Names of the arguments: tensors, then dimensions whose lengths the network takes.
        results: Names of the results: tensors, then the lengths `[B]` of the dimensions that no input has.

    Raises:
        ApplicationError: The network does not take tensors of these names.
    """

    def __init__(self, module: nn.Module, input: ChunkSpec, output: ChunkSpec) -> None:
        super().__init__()
        self.module = module
        self._call = NamedCall(served_function(module), input)
        self.arguments = self._call.arguments
        self.tensors = [spec.name for spec in output.tensors]
        # Where each dimension that no input has is found: tensor and dim.
        self._own_dims = {
            size.name: (index, dim)
            for index, spec in enumerate(output.tensors)
            for dim, size in enumerate(spec.shape, start=1)
            if isinstance(size, Dim) and size.name not in _dims(input)
        }
        self.results = [*self.tensors, *self._own_dims]

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Run the network with the tensors of `arguments`; returns those of `results`."""
        # Not kept as an attribute: torch would count the network twice among its submodules.
        found = self._call(served_function(self.module), dict(zip(self.arguments, given, strict=True)))
        results = by_name(found, self.tensors)
        for name, (index, dim) in self._own_dims.items():
            lengths_B = _found(found, name)
            if lengths_B is None:
                # Without lengths, all that the network gives is valid.
                lengths_B = torch.full((results[index].shape[0],), results[index].shape[dim])
            results.append(lengths_B)
        return tuple(results)


@final
class FinishedNetwork(nn.Module):
    """A network and the `finish` behind it, as one network.

    Args:
        module: The network.
        finish: The application's `finish`.
        input: One raw input chunk.
        between: One chunk of the inputs of the finish.
        output: One output chunk.

    Raises:
        ApplicationError: The network or the finish does not take tensors of these names.
    """

    def __init__(
        self, module: nn.Module, finish: nn.Module, input: ChunkSpec, between: ChunkSpec, output: ChunkSpec
    ) -> None:
        super().__init__()
        self.network = NamedNetwork(module, input, between)
        self.finish = NamedNetwork(finish, between, output)

    def forward(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run both; takes tensors and lengths by name, and returns outputs and lengths by name."""
        results = self.network(*(given[name] for name in self.network.arguments))
        made = {**given, **dict(zip(self.network.results, results, strict=True))}
        finished = self.finish(*(made[name] for name in self.finish.arguments))
        return {**made, **dict(zip(self.finish.results, finished, strict=True))}


def served_function(module: nn.Module) -> Any:
    """Return the function to serve: `predict` where the network has one, else `forward`."""
    return getattr(module, "predict", module)


def _dims(spec: ChunkSpec) -> list[str]:
    return list(spec.dims) if isinstance(spec, RecordSpec) else []


def _arguments(function: Callable[..., Any], input: ChunkSpec) -> tuple[str | None, list[str]]:
    """Find how a network takes its inputs.

    Returns:
        The name of the tensor that is passed by position, or None; and the names that are passed by keyword. Neither:
        all in one mapping.
    """
    names = [spec.name for spec in input.tensors]
    if isinstance(function, FinishedNetwork):
        return None, []
    try:
        parameters = _signature(function).parameters.values()
    except (TypeError, ValueError):
        return (names[0], []) if len(names) == 1 else (None, [])
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    positional = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    takes_rest = any(each.kind is each.VAR_KEYWORD for each in parameters)
    takes_many = any(each.kind is each.VAR_POSITIONAL for each in parameters)
    known = {each.name for each in named}
    required = {each.name for each in parameters if each.default is each.empty and each.kind not in (2, 4)}
    lengths = [name for name in _dims(input) if name in known]
    by_keyword = names[0] in known and positional[:1] != names and required <= {*names, *lengths}
    if len(names) == 1 and not by_keyword:
        if (positional and required <= {positional[0], *lengths}) or (not positional and takes_many):
            return names[0], lengths
    elif required <= {*names, *lengths} and (takes_rest or set(names) <= known):
        return None, [*names, *lengths]
    elif len(names) > 1 and positional and required <= {positional[0]}:
        return None, []
    takes = ", ".join(each.name for each in parameters) or "nothing"
    dims = f" (and lengths {', '.join(map(repr, _dims(input)))})" if _dims(input) else ""
    raise ApplicationError(
        f"the network takes ({takes}), but the application's inputs are {', '.join(map(repr, names))}{dims}; give its "
        f"forward parameters of these names, or one parameter that is a mapping."
    )


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the parameters of a function, or of the `forward` of a network or of the one that it wraps."""
    if not isinstance(function, nn.Module):
        return inspect.signature(function)
    return getattr(function, "forward_signature", None) or inspect.signature(function.forward)


def by_name(found: Any, names: list[str]) -> list[Tensor]:
    """Return the tensors that a network gives, one tensor, a tuple, a mapping or an object, in the order of the names.

    Raises:
        ApplicationError: They are others.
    """
    if isinstance(found, Tensor):
        if len(names) == 1:
            return [found]
    elif isinstance(found, tuple | list) and not hasattr(cast(Any, found), "_fields"):
        parts = cast(list[Any], found)
        if len(parts) == len(names) and all(isinstance(part, Tensor) for part in parts):
            return list(parts)
    else:
        tensors = [_found(found, name) for name in names]
        if all(isinstance(tensor, Tensor) for tensor in tensors):
            return cast(list[Tensor], tensors)
    wanted = f"but the application's outputs are {', '.join(map(repr, names))}"
    given = cast(Mapping[str, Any], found) if isinstance(found, Mapping) else {}
    if others := [name for name in names if name in given and not isinstance(given[name], Tensor)]:
        kind = type(given[others[0]])
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        raise ApplicationError(f"the network gives {others[0]!r} as a {module}{kind.__name__}; give tensors of torch.")
    raise ApplicationError(
        f"the network gives {_described(found)}, {wanted}; give the outputs these names, or a tuple in this order."
    )


def _found(found: Any, name: str) -> Tensor | None:
    if isinstance(found, Mapping):
        return cast(Mapping[str, Any], found).get(name)
    return None if isinstance(found, Tensor) else getattr(found, name, None)


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"one tensor {list(found.shape)}"
    if isinstance(found, Mapping):
        return f"a mapping of {', '.join(map(repr, cast(Mapping[str, Any], found)))}"
    if isinstance(found, tuple | list):
        return f"{len(cast(list[Any], found))} values"
    return f"a {type(found).__name__}"
