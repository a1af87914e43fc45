"""How a network is trained: one frozen record, which a function of the application's recipe module returns."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.augment import Augment
from penstock.train.examples import ArraySet as ArraySet
from penstock.train.examples import Examples
from penstock.train.placements import Placements
from penstock.train.reading import OnBad

Loss = Callable[[Tensor, Tensor], Tensor]
Metric = Callable[[Tensor, Tensor], float]


class Seen(NamedTuple):
    """What a network made of a whole set.

    Args:
        outputs: `[n, ...]`, on the CPU.
        targets: `[n]` or `[n, ...]`.
    """

    outputs: Tensor
    targets: Tensor


Finish = Callable[[Path, Seen, Seen], Mapping[str, Tensor]]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """The examples.

    Args:
        train: Learned from.
        validation: Held out to choose the best weights by.
        test: Held out from that choice too, and run once, at the end; None where there is none.
    """

    train: Examples
    validation: Examples
    test: Examples | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a network is trained. Vary one with `dataclasses.replace(recipe, batch_size=512)`.

    Args:
        data: Gives the examples.
        loss: `loss(network(inputs), targets)`, the mean over the batch.
        optimizer: Makes the optimizer of the parameters.
        schedule: Makes the learning-rate schedule of an optimizer and the count of steps; it moves once a step.
        metrics: By name, functions of the outputs and targets of the whole validation set.
        best: The metric by which the best weights are chosen; `"loss"` is there always.
        best_mode: Whether the larger (`"max"`) or the smaller (`"min"`) is better.
        batch_size: Examples a step, over all devices together.
        epochs: How often every example is seen; a fraction is allowed. Exactly one of `epochs` and `steps`.
        steps: How many steps are taken.
        augment: Changes a training batch at random; all its chance must come from the generator it is given.
        precision: `"fp32"`; `"tf32"`, in which a GPU multiplies with 10 bits of each fp32 number's fraction; or
            `"bf16"` or `"fp16"` for autocast with fp32 weights. With fp16 the loss is scaled, and a step with
            gradients that overflow is left out.
        seed: Of the weights, the order of the examples, the augmentation and dropout.
        threads: CPU threads of a step; None for torch's own choice. Small networks are nearly as fast with one, and
            much steadier on a machine that does other things. The parameters' last bits depend on it.
        validate_every_epochs: How often the validation set is run.
        checkpoint_every_s: Seconds between checkpoints.
        checkpoint_every_steps: Steps between checkpoints, instead of seconds.
        accumulate: In how many parts each process computes its share of a batch, one after the other.
        clip_norm: The Euclidean norm down to which a longer gradient is scaled; None for as it is.
        average_decay: Validate and keep a running mean of the weights, of which a step keeps this share (0.999, say);
            None for the weights themselves. It begins with the first weights, which are gone after some 5 / (1 - share)
            steps. So are the running statistics of batch norms; other buffers stay those of the weights themselves.
        average_warm_up: Keep less of that mean at first, (1 + n) / (10 + n) after n steps until that is the share: then
            the first weights are gone after a few steps.
        deterministic: Compute the same bits each time, so that a resumed run ends exactly as an undisturbed one. Some
            operations have no such algorithm on GPUs; False takes what there is.
        placements: How layers are laid over the processes, by patterns of their names, `{"classifier.1":
            Placement(kind="columns")}`; what is not named is data-parallel. `"auto"` chooses and says why.
        batch_norm: Of several processes, each by its own examples (`"local"`), or by those of all (`"synchronised"`).
        working_weights: With `precision="bf16"`, have the optimizer's step write the bf16 weights that the next step
            computes with, in place of turning all weights to bf16 and their gradients back in every step: the same
            numbers with two thirds of the bytes. For plain SGD, Adam and AdamW, and networks of which only the layers
            use their weights, while they are trained too; what is seen to be used otherwise is left as it is.
        gradient_precision: In which gradients travel between the processes: `"fp32"` (as they are) or `"bf16"`.
            The gradients of weights that are cut travel in the precision in which their layer is computed.
        peer_memory: Whether GPUs of one host, where they can, read and write each other's memory for what their layers
            exchange, and for small sums of gradients; else by NCCL.
        workers: Threads that read examples ahead of the steps; None for one for each core but one. What is learned does
            not depend on it.
        compile: Have torch compile the network: the first step takes minutes, all others are shorter where a network
            has many small operations. Layers that are not data-parallel stay as they are.
        graph: Capture the step in a CUDA graph, on a GPU, where it can be. Numbers that the network or the loss keeps
            in Python, and chance that is not torch's, then stay as they are in the fourth step.
        bad_examples: `"stop"` at an example that is damaged or missing, or `"skip"`: learn from another one in its
            place, name it, and count it in run.json.
        finish: Called once, at the end, in the first process: `finish(run, validation, test)` has the run's folder for
            what it writes, and what the best weights made of the validation set and of the test set (of the validation
            set again where there is none). It returns buffers of the network, by their names, that the bundle gets:
            `{"temperature": ...}`, fitted on the validation set.
        raw_examples: Of an application with a `prepare`: gives a few raw arrays of several sizes, as its `decode` does.
            They become the golden examples of the bundle, which of others are the first inputs to validate by.

    Raises:
        TrainError: A field is out of range or contradicts another.
    """

    data: Callable[[], Data]
    loss: Loss
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    best: str = "loss"
    best_mode: Literal["max", "min"] = "min"
    batch_size: int = 64
    epochs: float | None = None
    steps: int | None = None
    augment: Augment | None = None
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    seed: int = 0
    threads: int | None = None
    validate_every_epochs: float = 1.0
    checkpoint_every_s: float = 30.0
    checkpoint_every_steps: int | None = None
    accumulate: int = 1
    clip_norm: float | None = None
    average_decay: float | None = None
    average_warm_up: bool = False
    deterministic: bool = True
    placements: Placements | Literal["auto"] = field(default_factory=dict)
    batch_norm: Literal["local", "synchronised"] = "local"
    working_weights: bool = False
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    peer_memory: bool = True
    workers: int | None = None
    compile: bool = False
    graph: bool = True
    bad_examples: OnBad = "stop"
    finish: Finish | None = None
    raw_examples: Callable[[], Sequence[Array]] | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise TrainError(f"the recipe has epochs={self.epochs} and steps={self.steps}; give exactly one of them.")
        length = self.epochs if self.epochs is not None else self.steps
        for name, value in {
            "the length": length,
            "batch_size": self.batch_size,
            "threads": 1 if self.threads is None else self.threads,
            "validate_every_epochs": self.validate_every_epochs,
            "checkpoint_every_s": self.checkpoint_every_s,
            "checkpoint_every_steps": 1 if self.checkpoint_every_steps is None else self.checkpoint_every_steps,
            "accumulate": self.accumulate,
            "clip_norm": 1 if self.clip_norm is None else self.clip_norm,
            "workers": 1 if self.workers is None else self.workers,
        }.items():
            if not value or not 0 < value < math.inf:
                raise TrainError(f"the recipe has {name} {value}; it must be a number above 0.")
        for name in ("batch_size", "accumulate", "seed"):
            if not isinstance(getattr(self, name), int):
                raise TrainError(f"the recipe has {name} {getattr(self, name)!r}; it must be a whole number.")
        if not 0 <= self.seed < 1 << 63:
            raise TrainError(f"the recipe has seed {self.seed}; it must be from 0 to 2**63 - 1.")
        if self.precision not in PRECISIONS:
            raise TrainError(f"the recipe has precision {self.precision!r}; choose one of {', '.join(PRECISIONS)}.")
        if self.gradient_precision not in ("fp32", "bf16"):
            raise TrainError(f"the recipe has gradient_precision {self.gradient_precision!r}; choose 'fp32' or 'bf16'.")
        if self.average_decay is not None and not 0 <= self.average_decay < 1:
            raise TrainError(f"the recipe has average_decay {self.average_decay}; it must be from 0 to below 1.")
        if self.average_warm_up and self.average_decay is None:
            raise TrainError("the recipe has average_warm_up and no average_decay; give a decay (0.999, say) as well.")
        if self.batch_norm not in ("local", "synchronised"):
            raise TrainError(f"the recipe has batch_norm {self.batch_norm!r}; choose 'local' or 'synchronised'.")
        if self.placements != "auto" and not isinstance(self.placements, Mapping):
            raise TrainError(f"the recipe has placements {self.placements!r}; give 'auto', or placements by layer.")
        if self.bad_examples not in ("stop", "skip"):
            raise TrainError(f"the recipe has bad_examples {self.bad_examples!r}; choose 'stop' or 'skip'.")
        if self.best_mode not in ("max", "min"):
            raise TrainError(f"the recipe has best_mode {self.best_mode!r}; choose 'max' or 'min'.")
        if self.best != "loss" and self.best not in self.metrics:
            raise TrainError(f"the recipe chooses by {self.best!r}, which is not one of {['loss', *self.metrics]}.")

    def total_steps(self, examples: int) -> int:
        """How many steps are taken over a training set of so many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value of the choosing metric beats the best so far."""
        if math.isnan(value):
            raise TrainError(
                f"the metric {self.best!r}, by which the best weights are chosen, is NaN; mend the metric."
            )
        if than is None:
            return True
        return value > than if self.best_mode == "max" else value < than


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of rows whose largest output is at the target: outputs `[n, classes]`, targets `[n]` or one-hot."""
    labels = targets if targets.ndim == 1 else targets.argmax(1)
    return (outputs.argmax(1) == labels).double().mean().item()
