"""Parity of several ranks with one process: loss and gradients of a step, compared with the same step in float64.

Dropout draws other masks on several ranks, so the reference gets the masks of all ranks. Local batch norm is compared
with one over the same groups of examples. Everything else must agree by itself.

    python -m benchmarks.acceptance.train.parity RANK SIZE PORT DEVICE CASE...   one rank; rank 0 prints a line a case
"""

import copy
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.acceptance.train.rank_processes import own_world, rank0_lines
from penstock.train.checkpoint.state import full_state
from penstock.train.overrides import with_overrides
from penstock.train.parallel.losses import CrossEntropy
from penstock.train.parallel.world import World, split_rows
from penstock.train.placement import Placement, Placements
from penstock.train.recipe import ArraySet, Data, Parallel, Recipe
from penstock.train.trainer import Trainer

# B examples, S side of a picture, T frames, F features, C classes

SIZES = (1, 2, 4)
LIMIT_S = 300.0
CLASSES = 12
SMOOTHING = 0.1


@final
class SmallConvNet(nn.Module):
    """Convolutions with batch norm, then fully connected layers with dropout, as in AlexNet."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        # The gradient of a bias before a batch norm is rounding noise.
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
class FrameNet(nn.Module):
    """Layers over frames: a linear layer is applied several times to each example."""

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
class ParityCase:
    """One configuration of the step.

    Args:
        placements: Placements of the recipe.
        batch: Examples of the step.
        dropout: Dropout probability.
        frames: Use `FrameNet`.
        changes: Other fields of the recipe.
    """

    placements: Placements | Literal["auto"] = field(default_factory=dict)
    batch: int = 16
    dropout: float = 0.0
    frames: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)


def _pair(chunks: int = 1) -> dict[str, Placement]:
    return {
        "classifier.1": Placement(kind="column-parallel", chunks=chunks),
        "classifier.4": Placement(kind="row-parallel", chunks=chunks),
    }


_MODEL = {"classifier.1": Placement(kind="model", chunks=2), "head": Placement(kind="model")}
_VOCAB_PARALLEL = {"head": Placement(kind="vocab-parallel")}
_FULLY_SHARDED = {"features": Placement(kind="fully-sharded"), "classifier": Placement(kind="fully-sharded")}
_CHECKPOINTED = {
    name: Placement(kind="fully-sharded", activation_checkpointing=True) for name in ("features", "classifier", "head")
}
_SYNCHRONIZED = {"parallel.batch_norm": "synchronized"}
_IN_TWO_PARTS = {"execution.accumulation_steps": 2}

CASES: dict[str, ParityCase] = {
    "data": ParityCase(),
    "data, uneven": ParityCase(batch=15, dropout=0.3),
    "data, accumulated": ParityCase(changes={"execution.accumulation_steps": 4}, dropout=0.3),
    "data, clipped": ParityCase(changes={"clip_norm": 0.01}),
    "data, batch norm synchronized": ParityCase(changes=_SYNCHRONIZED),
    "data, batch norm synchronized, uneven": ParityCase(batch=15, changes=_SYNCHRONIZED),
    "tensor-parallel": ParityCase(placements=_pair()),
    "tensor-parallel, dropout": ParityCase(placements=_pair(), dropout=0.3),
    "tensor-parallel, chunks": ParityCase(placements=_pair(chunks=2), dropout=0.3),
    "tensor-parallel, uneven": ParityCase(placements=_pair(), batch=15, dropout=0.3),
    "tensor-parallel, accumulated, clipped": ParityCase(
        placements=_pair(), changes={**_IN_TWO_PARTS, "clip_norm": 0.01}
    ),
    "tensor-parallel, frames": ParityCase(
        placements={"wide": Placement(kind="column-parallel", chunks=2), "narrow": Placement(kind="row-parallel")},
        frames=True,
    ),
    "tensor-parallel, frames, uneven": ParityCase(
        placements={"wide": Placement(kind="column-parallel"), "narrow": Placement(kind="row-parallel")},
        frames=True,
        batch=15,
    ),
    "model": ParityCase(placements=_MODEL, dropout=0.3),
    "model, uneven": ParityCase(placements={name: Placement(kind="model") for name in _MODEL}, batch=15),
    "vocab-parallel": ParityCase(placements=_VOCAB_PARALLEL),
    "vocab-parallel, uneven": ParityCase(placements=_VOCAB_PARALLEL, batch=26, dropout=0.3),
    "vocab-parallel, accumulated": ParityCase(placements=_VOCAB_PARALLEL, changes=_IN_TWO_PARTS, dropout=0.3),
    "fully-sharded": ParityCase(placements=_FULLY_SHARDED, dropout=0.3, changes=_SYNCHRONIZED),
    "fully-sharded, checkpointed": ParityCase(
        placements=_CHECKPOINTED, dropout=0.3, changes={"clip_norm": 0.01, **_IN_TWO_PARTS}
    ),
    "all together": ParityCase(
        placements={**_pair(), **_VOCAB_PARALLEL, "features": Placement(kind="fully-sharded")},
        dropout=0.3,
        changes={"clip_norm": 0.01, **_IN_TWO_PARTS, **_SYNCHRONIZED},
    ),
    "auto": ParityCase(placements="auto", dropout=0.3),
}
CASE_COUNT = len(CASES)

# Cases that round on purpose; the target does not cover them.
ROUNDED: dict[str, ParityCase] = {
    "gradients in bf16": ParityCase(changes={"parallel.gradient_precision": "bf16"}),
    "all in bf16": ParityCase(
        placements={**_pair(chunks=2), **_VOCAB_PARALLEL, "features": Placement(kind="fully-sharded")},
        changes={"parallel.gradient_precision": "bf16", "precision": "bf16", **_SYNCHRONIZED},
    ),
    "model in bf16": ParityCase(placements=_MODEL, changes={"precision": "bf16"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityErrors:
    """Relative errors of several ranks against one process in float64.

    Args:
        case: A key of `CASES` or `ROUNDED`.
        processes: Number of ranks.
        errors: By `"loss"` or parameter, the norm of the difference over the norm of the reference.
    """

    case: str
    processes: int
    errors: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest error."""
        return max(self.errors.values())


def parity_errors(processes: int, cases: Iterable[str] = CASES, device: str = "cpu") -> list[ParityErrors]:
    """Run cases on several ranks on this machine.

    Args:
        processes: Number of ranks.
        cases: Names of the cases.
        device: `"cpu"`, or `"cuda"` for a GPU each.

    Raises:
        BenchError: A process failed.
    """
    lines = rank0_lines("benchmarks.acceptance.train.parity", processes, [device, *cases], LIMIT_S)
    return [ParityErrors(**json.loads(line)) for line in lines]


def worst() -> list[float]:
    """Return the largest error over all cases with 1, 2 and 4 ranks."""
    return [max(found.worst for processes in SIZES for found in parity_errors(processes))]


def compare(name: str, world: World) -> ParityErrors | None:
    """Run one case on each rank; rank 0 returns the errors."""
    case = (CASES | ROUNDED)[name]
    torch.manual_seed(0)
    module = FrameNet() if case.frames else SmallConvNet(case.dropout)
    whole = copy.deepcopy(module).double().to(world.device)
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(case.batch, 3, 8, 8)).astype(np.float32)
    labels = rng.integers(0, CLASSES, case.batch)
    trainer = Trainer(module, _recipe(case), 1, world, inputs=inputs)
    masks = _Masks(trainer)
    own = trainer.rows
    share = trainer.step((torch.from_numpy(inputs[own]), torch.from_numpy(labels[own])), 0)
    (loss,) = world.sum_on_host(share)
    grads = {name: weight.grad for name, weight in trainer.module.named_parameters() if weight.grad is not None}
    found = full_state(trainer.parallel_model, world, grads)
    drawn = masks.whole(case)
    if not world.is_rank_zero:
        return None
    _as_one(whole, case, world.size, drawn)
    exact, wanted = torch.from_numpy(inputs).double().to(world.device), torch.from_numpy(labels).to(world.device)
    right = CrossEntropy(SMOOTHING)(whole(exact), wanted)
    right.backward()
    if trainer.recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(whole.parameters(), trainer.recipe.clip_norm)
    errors = {"loss": abs(loss - right.item()) / abs(right.item())}
    for weight_name, weight in whole.named_parameters():
        assert weight.grad is not None, weight_name
        expected = weight.grad.cpu()
        errors[weight_name] = ((found.pop(weight_name).double() - expected).norm() / expected.norm()).item()
    assert not found, found.keys()
    return ParityErrors(case=name, processes=world.size, errors=errors)


def _recipe(case: ParityCase) -> Recipe:
    nothing = ArraySet(inputs=np.zeros(1), targets=np.zeros(1))
    recipe = Recipe(
        data=lambda: Data(train=nothing, validation=nothing),
        loss=CrossEntropy(SMOOTHING),
        optimizer=cast(Any, _Still),
        batch_size=case.batch,
        steps=1,
        parallel=Parallel(placements=case.placements),
    )
    return with_overrides(recipe, case.changes)


@final
class _Still:
    """An optimizer without updates. torch's optimizers take seconds to import."""

    elementwise = True

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}

    def step(self) -> None:
        """Do nothing."""


@final
class _Masks:
    """The dropout masks of each rank and of each accumulation step."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._drawn: dict[str, list[Tensor]] = {}
        for name, layer in trainer.module.named_modules():
            if isinstance(layer, nn.Dropout) and layer.p > 0:
                layer.register_forward_hook(self._drawn_by(trainer.parallel_model.full_name(f"{name}.x")[:-2]))

    def _drawn_by(self, name: str) -> Any:
        def hook(layer: nn.Dropout, given: tuple[Tensor], made: Tensor) -> None:
            self._drawn.setdefault(name, []).append((made != 0).double() / (1 - layer.p))

        return hook

    def whole(self, case: ParityCase) -> dict[str, Tensor]:
        """Return the masks of the global batch, `[B, F]`, in the order of its examples."""
        world, rows = self._trainer.world, self._trainer.layout.rows
        groups = _groups(case, world.size)
        found: dict[str, Tensor] = {}
        for name, parts in self._drawn.items():
            # A checkpointed layer draws the same mask again in the backward pass.
            times = len(parts) // self._trainer.recipe.execution.accumulation_steps
            for part, drawn in enumerate(parts[::times]):
                own = torch.cat([groups[rank][part] for rank in range(world.size)])
                # Each rank has some features of all examples, or all features of its own.
                dim = 1 if len(drawn) == sum(rows) else 0
                drawn_NF = torch.cat(world.all_gather_objects(drawn.cpu()), dim)
                found.setdefault(name, drawn_NF.new_zeros(case.batch, drawn_NF.shape[1]))[own] = drawn_NF
        return found


def _groups(case: ParityCase, processes: int) -> list[list[Tensor]]:
    """Indices of the examples computed at once, by rank and accumulation step."""
    own = torch.arange(case.batch).split(list(split_rows(case.batch, processes)))
    return [list(part.chunk(case.changes.get("execution.accumulation_steps", 1))) for part in own]


def _as_one(whole: nn.Module, case: ParityCase, processes: int, masks: Mapping[str, Tensor]) -> None:
    """Make the reference network use the ranks' dropout masks and batch-norm groups."""
    groups = [part for parts in _groups(case, processes) for part in parts]
    if case.changes.get("parallel.batch_norm") == "synchronized":
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
        return given_BF if self.mask_BF is None else given_BF * self.mask_BF.to(given_BF.device)


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


def _main(device: str, *cases: str) -> None:
    torch.set_num_threads(1)
    # Convolutions of a GPU else take fp32 for tf32.
    torch.backends.cudnn.allow_tf32 = False
    with own_world(LIMIT_S, device) as world:
        for name in cases:
            found = compare(name, world)
            if found is not None:
                sys.stdout.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[4:])
