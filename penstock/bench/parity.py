"""Several processes against one: the loss and every gradient of a step, beside the same step in float64.

Dropout of several processes draws other masks than that of one, so the masks that were drawn are put together and
given to the one. Local batch norm is compared with one that takes the same groups of examples. Everything else has to
agree by itself.

    python -m penstock.bench.parity RANK SIZE PORT DEVICE CASE...   one process; the first one prints a line a case
"""

import copy
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from penstock.bench.together import said_by_first
from penstock.train.losses import CrossEntropy
from penstock.train.placements import Placement, Placements
from penstock.train.recipe import ArraySet, Data, Recipe
from penstock.train.state import whole_state
from penstock.train.trainer import Trainer
from penstock.train.world import Seat, World, joined, split_rows

# B examples, S side of a picture, T frames, F features, C classes

SIZES = (1, 2, 4)
LIMIT_S = 300.0
CLASSES = 12
SMOOTHING = 0.1


@final
class Pictures(nn.Module):
    """Convolutions with batch norm, then fully connected layers with dropout: Krizhevsky's shape, small."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # A bias before a batch norm has no gradient but rounding.
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 9, 3)
        )
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Linear(36, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.Tanh()
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pictures_B3SS: Tensor) -> Tensor:
        """Scores `[B, C]` of `[B, 3, 8, 8]`."""
        return self.head(self.classifier(self.features(pictures_B3SS).flatten(1)))


@final
class Frames(nn.Module):
    """Layers over frames, so that a linear layer sees each example several times."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(192, 24)
        self.narrow = nn.Linear(24, 8, bias=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pictures_B3SS: Tensor) -> Tensor:
        """Scores `[B, C]` of `[B, 3, 8, 8]`, taken as 5 frames of 192."""
        frames_BTF = torch.stack([pictures_B3SS.flatten(1).roll(shift, 1) for shift in range(5)], 1)
        return self.head(self.narrow(nn.functional.silu(self.wide(frames_BTF))).mean(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One way to take the step.

    Args:
        placements: The recipe's.
        batch: Examples of the step.
        dropout: The share of units that drop out.
        frames: Whether the network is `Frames`.
        changes: Other fields of the recipe.
    """

    placements: Placements | Literal["auto"] = field(default_factory=dict)
    batch: int = 16
    dropout: float = 0.0
    frames: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


def _pair(chunks: int = 1) -> dict[str, Placement]:
    return {
        "classifier.1": Placement(kind="columns", chunks=chunks),
        "classifier.4": Placement(kind="rows", chunks=chunks),
    }


_MODEL = {"classifier.1": Placement(kind="model", chunks=2), "head": Placement(kind="model")}
_CLASSES = {"head": Placement(kind="classes")}
_SHARDED = {"features": Placement(kind="sharded"), "classifier": Placement(kind="sharded")}
_RECOMPUTED = {name: Placement(kind="sharded", recompute=True) for name in ("features", "classifier", "head")}
_SYNCHRONISED = {"batch_norm": "synchronised"}

CASES: dict[str, Case] = {
    "data": Case(),
    "data, uneven": Case(batch=15, dropout=0.3),
    "data, accumulated": Case(changes={"accumulate": 4}, dropout=0.3),
    "data, clipped": Case(changes={"clip_norm": 0.01}),
    "data, batch norm synchronised": Case(changes=_SYNCHRONISED),
    "data, batch norm synchronised, uneven": Case(batch=15, changes=_SYNCHRONISED),
    "columns and rows": Case(placements=_pair()),
    "columns and rows, dropout": Case(placements=_pair(), dropout=0.3),
    "columns and rows, chunks": Case(placements=_pair(chunks=2), dropout=0.3),
    "columns and rows, uneven": Case(placements=_pair(), batch=15, dropout=0.3),
    "columns and rows, accumulated, clipped": Case(placements=_pair(), changes={"accumulate": 2, "clip_norm": 0.01}),
    "columns and rows, frames": Case(
        placements={"wide": Placement(kind="columns", chunks=2), "narrow": Placement(kind="rows")}, frames=True
    ),
    "columns and rows, frames, uneven": Case(
        placements={"wide": Placement(kind="columns"), "narrow": Placement(kind="rows")}, frames=True, batch=15
    ),
    "model": Case(placements=_MODEL, dropout=0.3),
    "model, uneven": Case(placements={name: Placement(kind="model") for name in _MODEL}, batch=15),
    "classes": Case(placements=_CLASSES),
    "classes, uneven": Case(placements=_CLASSES, batch=26, dropout=0.3),
    "classes, accumulated": Case(placements=_CLASSES, changes={"accumulate": 2}, dropout=0.3),
    "sharded": Case(placements=_SHARDED, dropout=0.3, changes=_SYNCHRONISED),
    "sharded, recomputed": Case(placements=_RECOMPUTED, dropout=0.3, changes={"clip_norm": 0.01, "accumulate": 2}),
    "all together": Case(
        placements={**_pair(), **_CLASSES, "features": Placement(kind="sharded")},
        dropout=0.3,
        changes={"clip_norm": 0.01, "accumulate": 2, **_SYNCHRONISED},
    ),
    "auto": Case(placements="auto", dropout=0.3),
}


# What rounds on purpose, for which the target is not meant.
ROUNDED: dict[str, Case] = {
    "gradients in bf16": Case(changes={"gradient_precision": "bf16"}),
    "all in bf16": Case(
        placements={**_pair(chunks=2), **_CLASSES, "features": Placement(kind="sharded")},
        changes={"gradient_precision": "bf16", "precision": "bf16", **_SYNCHRONISED},
    ),
    "model in bf16": Case(placements=_MODEL, changes={"precision": "bf16"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far several processes are from one in float64.

    Args:
        case: Of `CASES` or `ROUNDED`.
        processes: How many took the step.
        errors: By `"loss"` or parameter, the norm of the difference over the norm of what is right.
    """

    case: str
    processes: int
    errors: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors.values())


def agreements(processes: int, cases: Iterable[str] = CASES, device: str = "cpu") -> list[Agreement]:
    """Cases with so many processes on this machine.

    Args:
        processes: How many.
        cases: Their names.
        device: `"cpu"`, or `"cuda"` for a GPU each.

    Raises:
        BenchError: A process failed.
    """
    said = said_by_first("penstock.bench.parity", processes, [device, *cases], LIMIT_S)
    return [Agreement(**json.loads(line)) for line in said]


def worst() -> list[float]:
    """The largest error over all cases, with 1, 2 and 4 processes."""
    return [max(found.worst for processes in SIZES for found in agreements(processes))]


def compared(name: str, world: World) -> Agreement | None:
    """One case, in each process of a world; the first one knows the outcome."""
    case = (CASES | ROUNDED)[name]
    torch.manual_seed(0)
    module = Frames() if case.frames else Pictures(case.dropout)
    whole = copy.deepcopy(module).double().to(world.device)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(case.batch, 3, 8, 8)).astype(np.float32)
    labels = rng.integers(0, CLASSES, case.batch)
    trainer = Trainer(module, _recipe(case), 1, world, inputs=inputs)
    masks = _Masks(trainer)
    own = trainer.rows
    share = trainer.step((torch.from_numpy(inputs[own]), torch.from_numpy(labels[own])), 0)
    (loss,) = world.total(share)
    grads = {name: weight.grad for name, weight in trainer.module.named_parameters() if weight.grad is not None}
    found = whole_state(trainer.placed, world, grads)
    drawn = masks.whole(case)
    if not world.is_first:
        return None
    _as_one(whole, case, world.size, drawn)
    exact, wanted = torch.from_numpy(inputs).double().to(world.device), torch.from_numpy(labels).to(world.device)
    right = CrossEntropy(SMOOTHING)(whole(exact), wanted)
    right.backward()
    most = trainer.recipe.clip_norm
    if most is not None:
        nn.utils.clip_grad_norm_(whole.parameters(), most)
    errors = {"loss": abs(loss - right.item()) / abs(right.item())}
    for weight_name, weight in whole.named_parameters():
        assert weight.grad is not None, weight_name
        expected = weight.grad.cpu()
        errors[weight_name] = ((found.pop(weight_name).double() - expected).norm() / expected.norm()).item()
    assert not found, found.keys()
    return Agreement(case=name, processes=world.size, errors=errors)


def _recipe(case: Case) -> Recipe:
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(SMOOTHING),
        optimizer=cast(Any, _Still),
        batch_size=case.batch,
        steps=1,
        placements=case.placements,
    )
    return replace(recipe, **case.changes)


@final
class _Still:
    """Follows no gradients: they are looked at. torch's optimizers take seconds to import."""

    elementwise = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        """Nothing."""


@final
class _Masks:
    """What dropout drew in each process, and in each part that is accumulated."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._drawn: dict[str, list[Tensor]] = {}
        for name, layer in trainer.module.named_modules():
            if isinstance(layer, nn.Dropout) and layer.p > 0:
                layer.register_forward_hook(self._drawn_by(trainer.placed.whole_name(f"{name}.x")[:-2]))

    def _drawn_by(self, name: str) -> Any:
        def hook(layer: nn.Dropout, given: tuple[Tensor], made: Tensor) -> None:
            self._drawn.setdefault(name, []).append((made != 0).double() / (1 - layer.p))

        return hook

    def whole(self, case: Case) -> dict[str, Tensor]:
        """The masks of the whole batch, `[B, F]`, in the order of its examples."""
        world, rows = self._trainer.world, self._trainer.layout.rows
        groups = _groups(case, world.size)
        found: dict[str, Tensor] = {}
        for name, parts in self._drawn.items():
            # A layer that is computed again in the backward pass draws the same again.
            times = len(parts) // self._trainer.recipe.accumulate
            for part, drawn in enumerate(parts[::times]):
                own = torch.cat([groups[rank][part] for rank in range(world.size)])
                if len(drawn) == sum(rows):
                    # Some features of all examples.
                    drawn_NF = torch.cat(_of_all(world, drawn.t(), [drawn.shape[1]] * world.size)).t()
                else:
                    drawn_NF = torch.cat(_of_all(world, drawn, rows))
                masks_BF = found.setdefault(name, drawn_NF.new_zeros(case.batch, drawn_NF.shape[1]))
                masks_BF[own.to(masks_BF.device)] = drawn_NF
        return found


def _of_all(world: World, own: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Every process's rows, by sums: nothing here is what is tested."""
    whole = own.new_zeros(sum(rows), *own.shape[1:])
    first = sum(rows[: world.rank])
    whole[first : first + rows[world.rank]] = own
    if world.size > 1:
        torch.distributed.all_reduce(whole, group=world.group)
    return list(whole.split(list(rows)))


def _groups(case: Case, processes: int) -> list[list[Tensor]]:
    """The examples that each process computes at once, by process and part."""
    own = torch.arange(case.batch).split(list(split_rows(case.batch, processes)))
    return [list(part.chunk(case.changes.get("accumulate", 1))) for part in own]


def _as_one(whole: nn.Module, case: Case, processes: int, masks: Mapping[str, Tensor]) -> None:
    """Make one process's network draw the masks of several, and norm the groups of examples that they do."""
    groups = [part for parts in _groups(case, processes) for part in parts]
    if case.changes.get("batch_norm") == "synchronised":
        groups = [torch.cat(parts) for parts in zip(*_groups(case, processes), strict=True)]
    for name, layer in list(whole.named_modules()):
        above, _, last = name.rpartition(".")
        if isinstance(layer, nn.Dropout):
            setattr(whole.get_submodule(above), last, _Masked(masks.get(name)))
        elif isinstance(layer, nn.BatchNorm2d):
            setattr(whole.get_submodule(above), last, _Grouped(layer, groups))


@final
class _Masked(nn.Module):
    def __init__(self, mask_BF: Tensor | None) -> None:
        super().__init__()
        self.mask_BF = mask_BF

    def forward(self, given_BF: Tensor) -> Tensor:
        return given_BF if self.mask_BF is None else given_BF * self.mask_BF


@final
class _Grouped(nn.Module):
    def __init__(self, norm: nn.BatchNorm2d, groups: list[Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.groups = groups

    def forward(self, given_B: Tensor) -> Tensor:
        made_B = torch.empty_like(given_B)
        for group in self.groups:
            normed = nn.functional.batch_norm(given_B[group], None, None, self.weight, self.bias, training=True)
            made_B = made_B.index_copy(0, group.to(made_B.device), normed)
        return made_B


def _main(rank: int, size: int, port: int, kind: str, cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    seat = Seat(rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1", port=port)
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    # Convolutions of a GPU else take fp32 for tf32.
    torch.backends.cudnn.allow_tf32 = False
    with joined(seat, device, LIMIT_S) as world:
        for name in cases:
            found = compared(name, world)
            if found is not None:
                fields = {"case": found.case, "processes": found.processes, "errors": found.errors}
                sys.stdout.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]), kind=sys.argv[4], cases=sys.argv[5:])
