"""Networks whose answers take steps: calls of `begin` and `step`, and checks of their results."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from penstock.core.application import Application
from penstock.core.errors import ApplicationError
from penstock.core.generate import Generate
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.state_layout import StateLayout
from penstock.runtime.named_network import NamedCall, by_name

# B rows of a batch


class NetworkStep(NamedTuple):
    """Results of one step of a network: outputs in the declared order, the state, and which rows are done, `[B]`."""

    outputs: list[Tensor]
    state: dict[str, Tensor]
    done_B: Tensor


@final
class GeneratingNetwork:
    """A network with `begin` and `step`, whose results are checked against the declaration.

    Args:
        module: The network, in evaluation mode.
        application: Its application, which has `generate`.
        layout: The state of a row.

    Raises:
        ApplicationError: The network has no `begin` or no `step`, or `begin` does not take the inputs.
    """

    def __init__(self, module: nn.Module, application: Application, layout: StateLayout) -> None:
        self._begin, self._step = (_method(module, name) for name in ("begin", "step"))
        self._call = NamedCall(self._begin, _wanted(self._begin, application))
        self._layout = layout
        self._outputs = application.outputs
        self._generate: Generate = layout.generate
        self._input_dims = list(application.input.dims) if isinstance(application.input, RecordSpec) else []

    @property
    def arguments(self) -> list[str]:
        """Names of the arguments of `begin`: tensors, then dimensions whose lengths it takes."""
        return self._call.arguments

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs of `step`, in the declared order."""
        return list(self._outputs)

    def begin(self, given: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
        """Make the state `[B, ...]` of inputs by name; the lengths of dimensions that grow are in it.

        Raises:
            ApplicationError: It is not as declared.
        """
        state = self._named(self._call(self._begin, given), "begin")
        for name, spec in self._generate.state.items():
            tensor = state[name]
            varying = {axis for axis, _ in self._layout.axes[name]}
            fits = tensor.ndim == 1 + len(spec.shape) and all(
                axis in varying or found == size
                for axis, (found, size) in enumerate(zip(tensor.shape, (rows, *spec.shape), strict=True))
            )
            self._check("begin", name, tensor, fits, f"{spec.describe()} for each of the {rows} rows")
        for name in self._layout.growing:
            of_beams = f"; if the network is a Beam, name {name!r} in its shared" if state[name].ndim > 1 else ""
            fits, wanted = state[name].shape == (rows,), f"int64[{rows}], lengths{of_beams}"
            self._check("begin", name, state[name], fits, wanted)
        return state

    def step(self, state: dict[str, Tensor]) -> NetworkStep:
        """Run one step for rows `[B, ...]`.

        Raises:
            ApplicationError: Its results are not as declared.
        """
        shapes = {name: tensor.shape for name, tensor in state.items()}
        found = self._step(dict(state))
        if not isinstance(found, tuple) or len(cast(Any, found)) != 3:
            raise ApplicationError(
                f"the network's step gives {_described(found)}; it must give a tuple of three: outputs, state, done."
            )
        output, after, done_B = cast(tuple[Any, Any, Any], found)
        named = self._named(after, "step")
        for name, tensor in named.items():
            dtype, room = _name_of(state[name].dtype), self._room_in_words(name, shapes[name], tensor.shape)
            wanted = f"{dtype}{list(shapes[name])}, as it was given{room}"
            self._check("step", name, tensor, tensor.shape == shapes[name], wanted)
        self._check_apart(named)
        rows = next(iter(shapes.values()))[0]
        if not isinstance(done_B, Tensor) or done_B.dtype != torch.bool or done_B.shape != (rows,):
            raise ApplicationError(
                f"the network's step gives {_described(done_B)} as done; it must be a bool tensor [{rows}], one for "
                f"each row."
            )
        outputs = by_name(output, list(self._outputs))
        for tensor, spec in zip(outputs, self._outputs.values(), strict=True):
            if tensor.shape != (rows, *spec.shape) or not _is_of(tensor, getattr(torch, spec.dtype)):
                raise ApplicationError(
                    f"the network's step gives the output {spec.name!r} as {_described(tensor)}; it must be "
                    f"{spec.describe()} for each of the {rows} rows."
                )
        return NetworkStep(outputs, named, done_B)

    def _named(self, found: Any, of: str) -> dict[str, Tensor]:
        names = self._layout.names
        if not isinstance(found, Mapping):
            raise ApplicationError(
                f"the network's {of} gives {_described(found)} as state; it must be a dictionary of tensors by name."
            )
        state = cast(Mapping[str, Any], found)
        if missing := [name for name in names if not isinstance(state.get(name), Tensor)]:
            what = "the lengths" if missing[0] in self._layout.growing else "the tensor"
            raise ApplicationError(
                f"the network's {of} gives a state without {what} {missing[0]!r}; it must give "
                f"{', '.join(map(repr, names))}."
            )
        if unknown := [name for name in state if name not in names and name not in self._input_dims]:
            raise ApplicationError(
                f"the network's {of} gives a state with {unknown[0]!r}, which is not declared; declare it in the "
                f"application's Generate(state=...), or leave it out."
            )
        return {name: state[name] for name in names}

    def _room_in_words(self, name: str, given: torch.Size, found: torch.Size) -> str:
        """Say where a step writes, if it gives another size where a tensor grows; otherwise empty."""
        if found == given or len(found) != len(given):
            return ""
        for axis, dim in self._layout.axes.get(name, ()):
            if dim in self._layout.growing and found[axis] != given[axis]:
                return f"; there is room already: write this step's entry at the index that {dim!r} has"
        return ""

    def _check_apart(self, named: Mapping[str, Tensor]) -> None:
        """Check that no two tensors that grow are one: what the next step writes into one would be in both."""
        seen: dict[int, str] = {}
        for name, axes in self._layout.axes.items():
            if not any(dim in self._layout.growing for _, dim in axes):
                continue
            if (other := seen.setdefault(id(named[name]), name)) != name:
                raise ApplicationError(
                    f"the network's step gives one tensor as {other!r} and as {name!r} of the state, and the next step "
                    f"writes into both; give a copy, {name!r}: tensor.clone()."
                )

    def _check(self, of: str, name: str, tensor: Tensor, fits: bool, wanted: str) -> None:
        spec = self._generate.state.get(name)
        dtype = torch.int64 if spec is None else getattr(torch, spec.dtype)
        if not (fits and _is_of(tensor, dtype)):
            raise ApplicationError(
                f"the network's {of} gives {name!r} of the state as {_described(tensor)}; it must be {wanted}."
            )


def _wanted(begin: Any, application: Application) -> ChunkSpec:
    """Return the inputs for `begin`; the maximum of steps is for the engine, and `begin` need not take it."""
    generate, spec = application.generate, application.input
    limit = None if generate is None else generate.max_steps_input
    if not isinstance(spec, RecordSpec) or limit in (None, *inspect.signature(begin).parameters):
        return spec
    return RecordSpec(tuple(each for each in spec.tensors if each.name != limit))


def _method(module: nn.Module, name: str) -> Any:
    method = getattr(module, name, None)
    if not callable(method):
        raise ApplicationError(
            f"the application generates, but its network, a {type(module).__name__}, has no {name}; give it "
            f"begin(**inputs) -> state and step(state) -> (output, state, done)."
        )
    return method


def _is_of(tensor: Tensor, dtype: torch.dtype) -> bool:
    # A network of lower precision keeps its floats in that precision.
    return tensor.dtype == dtype or (tensor.is_floating_point() and dtype.is_floating_point)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"{_name_of(found.dtype)}{list(found.shape)}"
    if isinstance(found, tuple | list):
        return f"{len(cast(list[Any], found))} values"
    return f"a {type(found).__name__}"
