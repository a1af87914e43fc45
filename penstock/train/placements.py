"""How each layer is laid over the processes: what may be said, what `"auto"` says, and what is refused.

Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": layers with many activations and few
weights share the batch, layers with many weights and few activations share the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from torch import nn

from penstock.core.errors import TrainError
from penstock.train.flow import OUTPUT, LinearSeen
from penstock.train.losses import CrossEntropy

Kind = Literal["data", "columns", "rows", "model", "classes", "sharded"]
KINDS: tuple[Kind, ...] = ("data", "columns", "rows", "model", "classes", "sharded")
# These gather the inputs of the whole batch, and have a part of the weights.
_OF_LINEAR = {"columns", "rows", "model", "classes"}
_WILDCARDS = set("*?[")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How one layer is laid over the processes.

    Args:
        kind: `"data"`: every process has all weights, and its part of the batch. Of a linear layer, each process
            having an equal part of the weights: `"columns"`: its own outputs of the whole batch, for a layer by
            `"rows"` with only elementwise operations between; `"rows"`: takes those as inputs and gives each process
            all outputs of its part of the batch; `"model"`: its own outputs of the whole batch, exchanged for all
            outputs of its part of the batch; `"classes"`: the last layer, whose loss is a `CrossEntropy` over classes
            that no process has all of. Of any layer: `"sharded"`: each process keeps a part of every weight, and
            gathers the others' for as long as they are used.
        chunks: In how many parts a batch is gathered or scattered while the part before is multiplied.
        recompute: `"sharded"` only: compute the layer again in the backward pass instead of keeping its activations.

    Raises:
        TrainError: There is no such kind, or another field does not go with it.
    """

    kind: Kind
    chunks: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise TrainError(f"a placement has kind {self.kind!r}; choose one of {', '.join(KINDS)}.")
        if self.chunks < 1 or (self.chunks > 1 and self.kind not in _OF_LINEAR):
            raise TrainError(
                f"a placement by {self.kind!r} has chunks={self.chunks}; it must be at least 1, and only "
                f"{', '.join(sorted(_OF_LINEAR))} can have more."
            )
        if self.recompute and self.kind != "sharded":
            raise TrainError(f"a placement by {self.kind!r} has recompute=True; only 'sharded' can.")


Placements = Mapping[str, Placement]


def named_layers(module: nn.Module, wanted: Placements) -> dict[str, Placement]:
    """The layers that patterns name; of `sharded` ones, the outermost of those with weights.

    Raises:
        TrainError: A pattern names no layer, or two name the same one.
    """
    found: dict[str, Placement] = {}
    named_by: dict[str, str] = {}
    for pattern, placement in wanted.items():
        names = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
        if placement.kind == "sharded":
            if _WILDCARDS & set(pattern):
                # A pattern that means all of a stack means what lies between its layers too.
                names = [name for name in names if next(module.get_submodule(name).parameters(), None) is not None]
            names = [name for name in names if not any(name.startswith(f"{above}.") for above in names)]
        if not names:
            layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
            raise TrainError(
                f"the placement {pattern!r} names no layer of the network; its linear layers are {', '.join(layers)}."
            )
        for name in names:
            if name in named_by:
                raise TrainError(f"the placements {named_by[name]!r} and {pattern!r} both name {name!r}; leave one.")
            named_by[name] = pattern
            found[name] = placement
    return {name: placement for name, placement in found.items() if placement.kind != "data"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What `"auto"` chose.

    Args:
        placements: By layer, what is not `data`.
        reasons: A sentence for each linear layer.
    """

    placements: dict[str, Placement]
    reasons: list[str]


def choose(seen: Mapping[str, LinearSeen], batch: int, processes: int, loss: object) -> Choice:
    """Lay out linear layers by a simple rule: where weights outweigh activations, the activations travel.

    Args:
        seen: The linear layers, in the order in which they are called.
        batch: Examples of all processes that are computed at once.
        processes: How many there are.
        loss: The recipe's; a `CrossEntropy` can be computed over parts of the classes.
    """
    heavy: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, layer in seen.items():
        weights = layer.inputs * layer.outputs
        activations = round(batch * layer.rows) * (layer.inputs + layer.outputs)
        weighed = f"{weights:,} weights beside {activations:,} activations of the global batch"
        if weights <= activations:
            reasons[name] = f"{name}: data, {weighed}."
        elif layer.outputs % processes:
            reasons[name] = f"{name}: data, {weighed}, but its {layer.outputs} outputs do not divide by {processes}."
        else:
            heavy[name] = weighed
    placements: dict[str, Placement] = {}
    for name, weighed in heavy.items():
        if name in placements:
            continue
        after = _pair_of(name, seen, heavy, processes)
        if after is not None:
            placements[name], placements[after] = Placement(kind="columns"), Placement(kind="rows")
            reasons[name] = f"{name}: columns, {weighed}; {after} takes its outputs as they are."
            reasons[after] = f"{after}: rows, {heavy[after]}; its inputs come from {name}."
            continue
        kind: Kind = "classes" if _can_be_head(seen[name], loss) else "model"
        placements[name] = Placement(kind=kind)
        reasons[name] = f"{name}: {kind}, {weighed}."
    return Choice(placements=placements, reasons=[reasons[name] for name in seen])


def _pair_of(name: str, seen: Mapping[str, LinearSeen], heavy: Mapping[str, str], processes: int) -> str | None:
    """The layer that can take another one's outputs feature by feature, or None."""
    if len(seen[name].goes_to) != 1:
        return None
    (after,) = seen[name].goes_to
    fits = after in heavy and seen[after].comes_from == frozenset({name}) and seen[after].inputs % processes == 0
    return after if fits else None


def _can_be_head(layer: LinearSeen, loss: object) -> bool:
    return isinstance(loss, CrossEntropy) and layer.goes_to == frozenset({OUTPUT}) and layer.rows == 1


def check(
    module: nn.Module,
    placements: Mapping[str, Placement],
    seen: Mapping[str, LinearSeen],
    rows: Sequence[int],
    loss: object,
) -> None:
    """See that every placement fits its layer.

    Args:
        module: The network, not laid out yet.
        placements: By the layers' names.
        seen: What goes where in it.
        rows: How many examples each process computes at once.
        loss: The recipe's.

    Raises:
        TrainError: One does not.
    """
    layers = dict(module.named_modules())
    for name, placement in placements.items():
        _check_tied(module, name)
        if placement.kind == "sharded":
            _check_sharded(name, layers[name], placements)
            continue
        if type(layers[name]) is not nn.Linear:
            raise TrainError(
                f"{name!r} is a {type(layers[name]).__name__} and cannot be placed by {placement.kind}; only linear "
                f"layers can. Leave it out, or place it by 'sharded'."
            )
        if name not in seen:
            raise TrainError(f"{name!r} is placed by {placement.kind}, but the network does not call it.")
        _check_features(name, placement, seen[name], len(rows))
        if len(rows) > 1:
            _check_chunks(name, placement, seen[name], rows)
        _check_neighbours(name, placement, seen[name], placements)
        if placement.kind == "classes":
            _check_head(name, seen[name], loss)


def _check_features(name: str, placement: Placement, layer: LinearSeen, processes: int) -> None:
    what, count = ("inputs", layer.inputs) if placement.kind == "rows" else ("outputs", layer.outputs)
    if count % processes:
        raise TrainError(
            f"{name!r} has {count:,} {what}, which do not divide by {processes} processes; place it by 'data', or "
            f"choose another number."
        )


def _check_chunks(name: str, placement: Placement, layer: LinearSeen, rows: Sequence[int]) -> None:
    if placement.chunks > 1 and (min(rows) != max(rows) or (layer.rows * rows[0]) % placement.chunks):
        raise TrainError(
            f"{name!r} has chunks={placement.chunks}, and the processes have {min(rows):,} to {max(rows):,} examples; "
            f"chunks need equally many that divide by them. Change the batch size or the chunks."
        )


def _check_neighbours(name: str, placement: Placement, layer: LinearSeen, placements: Mapping[str, Placement]) -> None:
    def kind_of(other: str) -> str:
        return placements[other].kind if other in placements else "data"

    if placement.kind == "columns":
        strange = [other for other in sorted(layer.goes_to) if kind_of(other) != "rows"]
        if strange or not layer.goes_to:
            raise TrainError(
                f"{name!r} is placed by columns, so that each process has a part of its outputs, but they go to "
                f"{strange[0] if strange else 'nothing'}; a linear layer placed by rows must come next, with only "
                f"elementwise operations between. Place {name!r} by 'model' otherwise."
            )
    if placement.kind == "rows":
        strange = [other for other in sorted(layer.comes_from) if kind_of(other) != "columns"]
        if strange or not layer.comes_from:
            raise TrainError(
                f"{name!r} is placed by rows, but its inputs come from {strange[0] if strange else 'elsewhere'}; they "
                f"must come from a linear layer placed by columns, through elementwise operations alone."
            )


def _check_head(name: str, layer: LinearSeen, loss: object) -> None:
    if not isinstance(loss, CrossEntropy):
        raise TrainError(
            f"{name!r} is placed by classes, which needs the recipe's loss to be a penstock.train.losses.CrossEntropy; "
            f"it is {loss!r}."
        )
    if layer.goes_to != frozenset({OUTPUT}) or layer.rows != 1:
        raise TrainError(
            f"{name!r} is placed by classes, but it is not the network's last layer, or has several rows of an example "
            f"(its outputs go to {', '.join(sorted(layer.goes_to))}); place it by 'model'."
        )


def _check_sharded(name: str, layer: nn.Module, placements: Mapping[str, Placement]) -> None:
    inside = [other for other in placements if other.startswith(f"{name}.")]
    if inside:
        raise TrainError(f"{name!r} is placed by sharded, and {inside[0]!r} in it by another way; choose one of them.")
    if next(layer.parameters(), None) is None:
        raise TrainError(f"{name!r} is placed by sharded, but has no weights.")
    named: dict[int, str] = {}
    for own, weight in layer.named_parameters(remove_duplicate=False):
        first = named.setdefault(id(weight), own)
        if first != own:
            raise TrainError(
                f"{name!r} has one weight by two names, {first!r} and {own!r}, and cannot be placed by sharded; leave "
                f"it as data, or place the layers in it that share nothing."
            )


def _check_tied(module: nn.Module, name: str) -> None:
    own = {id(weight) for weight in module.get_submodule(name).parameters()}
    for other, weight in module.named_parameters(remove_duplicate=False):
        if id(weight) in own and not other.startswith(f"{name}."):
            raise TrainError(f"{name!r} shares a weight with {other!r}, and cannot be placed alone; leave it as data.")
