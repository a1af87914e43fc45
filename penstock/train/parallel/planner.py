"""Choice of a placement for each layer (`"auto"`), and the check of placements against the network and the batch.

Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": layers with many activations and few
weights are data-parallel, layers with many weights and few activations are model-parallel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from penstock.core.errors import TrainError
from penstock.train.parallel.dataflow import OUTPUT, LinearUse
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.placement import Kind, Placement, Placements

_WILDCARDS = set("*?[")


def named_layers(module: nn.Module, wanted: Placements) -> dict[str, Placement]:
    """Layers matched by patterns of their names; of nested fully-sharded ones the outermost with weights.

    Raises:
        TrainError: A pattern names no layer, or two name the same one.
    """
    found: dict[str, Placement] = {}
    named_by: dict[str, str] = {}
    for pattern, placement in wanted.items():
        names = [name for name, _ in module.named_modules() if name and fnmatchcase(name, pattern)]
        if placement.kind == "fully-sharded":
            if _WILDCARDS & set(pattern):
                # A pattern over a whole stack also matches its activations, which have no weights.
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
class PlacementChoice:
    """Placements that `"auto"` chose.

    Args:
        placements: By layer name; layers left out are data-parallel.
        reasons: A sentence for each linear layer.
    """

    placements: dict[str, Placement]
    reasons: list[str]


def choose(layers: Mapping[str, LinearUse], batch: int, processes: int, loss: object) -> PlacementChoice:
    """Make linear layers tensor-parallel where their weights outnumber their activations.

    Args:
        layers: The linear layers, in the order in which they are called.
        batch: Examples that all processes together compute at once.
        processes: The number of processes.
        loss: The recipe's loss; a `CrossEntropy` allows a vocab-parallel last layer.
    """
    heavy: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, layer in layers.items():
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
        after = _pair_of(name, layers, heavy, processes)
        if after is not None:
            placements[name], placements[after] = Placement(kind="column-parallel"), Placement(kind="row-parallel")
            reasons[name] = f"{name}: column-parallel, {weighed}; {after} takes its outputs as they are."
            reasons[after] = f"{after}: row-parallel, {heavy[after]}; its inputs come from {name}."
            continue
        kind: Kind = "vocab-parallel" if _can_be_vocab_parallel(layers[name], loss) else "model"
        placements[name] = Placement(kind=kind)
        reasons[name] = f"{name}: {kind}, {weighed}."
    return PlacementChoice(placements=placements, reasons=[reasons[name] for name in layers])


def _pair_of(name: str, layers: Mapping[str, LinearUse], heavy: Mapping[str, str], processes: int) -> str | None:
    """The row-parallel layer that can follow a column-parallel one, or None."""
    if len(layers[name].goes_to) != 1:
        return None
    (after,) = layers[name].goes_to
    fits = after in heavy and layers[after].comes_from == frozenset({name}) and layers[after].inputs % processes == 0
    return after if fits else None


def _can_be_vocab_parallel(layer: LinearUse, loss: object) -> bool:
    return isinstance(loss, CrossEntropy) and layer.goes_to == frozenset({OUTPUT}) and layer.rows == 1


def check(
    module: nn.Module,
    placements: Mapping[str, Placement],
    uses: Mapping[str, LinearUse],
    rows: Sequence[int],
    loss: object,
) -> None:
    """Check that every placement fits its layer.

    Args:
        module: The network before it is laid out.
        placements: By layer name.
        uses: The use of each linear layer in the network.
        rows: Examples that each process computes at once.
        loss: The recipe's loss.

    Raises:
        TrainError: A placement does not fit.
    """
    layers = dict(module.named_modules())
    for name, placement in placements.items():
        _check_tied(module, name)
        if placement.kind == "fully-sharded":
            _check_fully_sharded(name, layers[name], placements)
            continue
        if type(layers[name]) is not nn.Linear:
            raise TrainError(
                f"{name!r} is a {type(layers[name]).__name__} and cannot be {placement.kind}; only linear layers can. "
                f"Leave it out, or make it fully-sharded."
            )
        if name not in uses:
            raise TrainError(f"{name!r} is {placement.kind}, but the network does not call it.")
        _check_features(name, placement, uses[name], len(rows))
        if len(rows) > 1:
            _check_chunks(name, placement, uses[name], rows)
        _check_neighbours(name, placement, uses[name], placements)
        if placement.kind == "vocab-parallel":
            _check_vocab_parallel(name, uses[name], loss)


def _check_features(name: str, placement: Placement, layer: LinearUse, processes: int) -> None:
    what, count = ("inputs", layer.inputs) if placement.kind == "row-parallel" else ("outputs", layer.outputs)
    if count % processes:
        raise TrainError(
            f"{name!r} has {count:,} {what}, which do not divide by {processes} processes; make its placement "
            f"'data', or change the number of processes."
        )


def _check_chunks(name: str, placement: Placement, layer: LinearUse, rows: Sequence[int]) -> None:
    if placement.chunks > 1 and (min(rows) != max(rows) or (layer.rows * rows[0]) % placement.chunks):
        raise TrainError(
            f"{name!r} has chunks={placement.chunks}, and the processes have {min(rows):,} to {max(rows):,} examples; "
            f"chunks need equally many that divide by them. Change the batch size or the chunks."
        )


def _check_neighbours(name: str, placement: Placement, layer: LinearUse, placements: Mapping[str, Placement]) -> None:
    def kind_of(other: str) -> str:
        return placements[other].kind if other in placements else "data"

    if placement.kind == "column-parallel":
        strange = [other for other in sorted(layer.goes_to) if kind_of(other) != "row-parallel"]
        if strange or not layer.goes_to:
            raise TrainError(
                f"{name!r} is column-parallel, so each process has a slice of its outputs, but they go to "
                f"{strange[0] if strange else 'nothing'}; a row-parallel linear layer must come next, with only "
                f"elementwise operations between. Make {name!r} 'model' otherwise."
            )
    if placement.kind == "row-parallel":
        strange = [other for other in sorted(layer.comes_from) if kind_of(other) != "column-parallel"]
        if strange or not layer.comes_from:
            raise TrainError(
                f"{name!r} is row-parallel, but its inputs come from {strange[0] if strange else 'elsewhere'}; they "
                f"must come from a column-parallel linear layer, through elementwise operations alone."
            )


def _check_vocab_parallel(name: str, layer: LinearUse, loss: object) -> None:
    if not isinstance(loss, CrossEntropy):
        raise TrainError(
            f"{name!r} is vocab-parallel, which needs the recipe's loss to be a "
            f"penstock.train.parallel.losses.CrossEntropy; it is {loss!r}."
        )
    if layer.goes_to != frozenset({OUTPUT}) or layer.rows != 1:
        raise TrainError(
            f"{name!r} is vocab-parallel, but it is not the network's last layer, or has several rows for each example "
            f"(its outputs go to {', '.join(sorted(layer.goes_to))}); make it 'model'."
        )


def _check_fully_sharded(name: str, layer: nn.Module, placements: Mapping[str, Placement]) -> None:
    inside = [other for other in placements if other.startswith(f"{name}.")]
    if inside:
        raise TrainError(f"{name!r} is fully-sharded, and {inside[0]!r} in it has another placement; keep one of them.")
    if next(layer.parameters(), None) is None:
        raise TrainError(f"{name!r} is fully-sharded, but has no weights; leave it out.")
    named: dict[int, str] = {}
    for own, weight in layer.named_parameters(remove_duplicate=False):
        first = named.setdefault(id(weight), own)
        if first != own:
            raise TrainError(
                f"{name!r} has one weight under two names, {first!r} and {own!r}, and cannot be fully-sharded; leave "
                f"it as 'data', or place the layers in it that share nothing."
            )


def _check_tied(module: nn.Module, name: str) -> None:
    own = {id(weight) for weight in module.get_submodule(name).parameters()}
    for other, weight in module.named_parameters(remove_duplicate=False):
        if id(weight) in own and not other.startswith(f"{name}."):
            raise TrainError(
                f"{name!r} shares a weight with {other!r}, and cannot be placed alone; leave it as 'data'."
            )
