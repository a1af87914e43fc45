"""Training recipes: one frozen record, made by a function of the application's recipe module."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from penstock.core.errors import TrainError
from penstock.core.spec import Array
from penstock.train.callbacks.callback import Callback
from penstock.train.callbacks.early_stopping import EarlyStopping
from penstock.train.callbacks.named_callbacks import check_callbacks
from penstock.train.data.augment import Augment
from penstock.train.data.columns import IGNORED
from penstock.train.data.examples import ArraySet as ArraySet
from penstock.train.data.examples import Examples
from penstock.train.data.length_order import ExampleOrder as ExampleOrder
from penstock.train.data.readers import OnBad
from penstock.train.placement import Placements
from penstock.train.recipe_checks import (
    check_choice,
    check_functions,
    check_patterns,
    check_positive,
    check_records,
    check_whole,
)

# Outputs and targets are tensors, or trees of them as the network and the examples give them.
Loss = Callable[[Any, Any], Tensor | Mapping[str, Tensor]]
Metric = Callable[[Any, Any], float | Mapping[str, float]]


class Predictions(NamedTuple):
    """Predictions of a network for a whole set, with their targets.

    Args:
        outputs: `[n, ...]`, on the CPU; a tree of such tensors if the network gives several. Outputs of different
            lengths are padded with zeros to the longest.
        targets: `[n]` or `[n, ...]`, or a tree. Those of different lengths are padded: floats with 0, whole numbers
            with -100.
    """

    outputs: Any
    targets: Any


Calibrate = Callable[[Path, Predictions, Predictions], Mapping[str, Tensor]]

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Training, validation and test examples.

    Args:
        train: Examples to train on.
        validation: Held out, to select the best weights.
        test: Held out from that selection too, and evaluated once, at the end; None for no test set.

    Raises:
        TrainError: A set is not `Examples`.
    """

    train: Examples
    validation: Examples
    test: Examples | None = None

    def __post_init__(self) -> None:
        for name, part in (("train", self.train), ("validation", self.validation), ("test", self.test)):
            # Without a validation set the last weights are the best.
            if not isinstance(part, Examples) and (name == "train" or part is not None):
                raise TrainError(
                    f"the {name} data is a {type(part).__name__}; give Examples, such as ArraySet(inputs=X, targets=y)."
                )

    def prefetch(self) -> None:
        """Begin to fetch what the training will read, see `Examples.prefetch`."""
        for examples in (self.train, self.validation, self.test):
            if examples is not None:
                examples.prefetch()


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Validation, and selection of the best weights.

    Args:
        metric: Name of the metric to select by; `"loss"` always exists. One value of a metric that gives a mapping is
            `"name.key"`.
        mode: `"max"` if a larger value is better, else `"min"`.
        every_epochs: Epochs between validations.

    Raises:
        TrainError: A field is out of range.
    """

    metric: str = "loss"
    mode: Literal["max", "min"] = "min"
    every_epochs: float = 1.0

    def __post_init__(self) -> None:
        check_choice("selection.mode", self.mode, ("max", "min"))
        check_positive("selection.every_epochs", self.every_epochs)

    def is_better(self, value: float, than: float | None) -> bool:
        """Compare a value of the metric with the best so far (None before the first)."""
        self.check({self.metric: value})
        if than is None:
            return True
        return value > than if self.mode == "max" else value < than

    def check(self, values: Mapping[str, float]) -> None:
        """Refuse a validation whose value of the metric is NaN."""
        if math.isnan(values[self.metric]):
            remedy = "check the data and the loss" if self.metric == "loss" else "fix the metric"
            raise TrainError(f"the metric {self.metric!r}, which selects the best weights, is NaN; {remedy}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EMASettings:
    """Exponential moving average (EMA) of the weights; it is validated and kept in place of the weights.

    The running statistics of batch norms are averaged too; other buffers are not.

    Args:
        decay: Share of the average that a step keeps, 0.999 for example. The average starts at the initial weights,
            which fade after about 5 / (1 - decay) steps.
        warm_up: Keep only (1 + n) / (10 + n) after n steps until that exceeds `decay`, so that the initial weights fade
            after a few steps.

    Raises:
        TrainError: The decay is out of range.
    """

    decay: float
    warm_up: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.decay, Real) and 0 <= self.decay < 1):
            raise TrainError(f"the recipe has ema.decay {self.decay!r}; it must be from 0 to below 1.")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    """Checkpoint interval; the last step always writes one.

    Args:
        every_s: Seconds between checkpoints.
        every_steps: Steps between checkpoints, instead of seconds.

    Raises:
        TrainError: A field is out of range.
    """

    every_s: float = 30.0
    every_steps: int | None = None

    def __post_init__(self) -> None:
        check_positive("checkpoints.every_s", self.every_s)
        check_positive("checkpoints.every_steps", self.every_steps)
        check_whole("checkpoints.every_steps", self.every_steps, optional=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """Parallelism over several processes.

    Args:
        placements: Placements of layers, by patterns of their names, `{"head": Placement(kind="vocab-parallel")}`;
            other layers are data-parallel. `"auto"` chooses the placements and prints the reasons.
        batch_norm: `"local"` normalises by each process's own examples, `"synchronized"` by those of all processes.
        gradient_precision: Precision of the gradient all-reduce, `"fp32"` (no conversion) or `"bf16"`. Gradients of
            weight slices are reduced in the precision of their layer.
        peer_memory: Exchange activations and small gradient buckets through the memory of the other GPUs of the host,
            where the hardware permits; otherwise through NCCL.

    Raises:
        TrainError: A field is out of range.
    """

    placements: Placements | Literal["auto"] = field(default_factory=dict)
    batch_norm: Literal["local", "synchronized"] = "local"
    gradient_precision: Literal["fp32", "bf16"] = "fp32"
    peer_memory: bool = True

    def __post_init__(self) -> None:
        if self.placements != "auto" and not isinstance(self.placements, Mapping):
            raise TrainError(
                f"the recipe has parallel.placements {self.placements!r}; give 'auto', or placements by layer."
            )
        check_choice("parallel.batch_norm", self.batch_norm, ("local", "synchronized"))
        check_choice("parallel.gradient_precision", self.gradient_precision, ("fp32", "bf16"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loading:
    """Reading of examples.

    Args:
        workers: Threads that read ahead of the steps; None for one per core but one. From four on, each decodes
            pictures and sounds in a process of its own. It does not affect the result.
        bad_examples: `"stop"` at an example that is damaged or missing, or `"skip"`: train on another example in its
            place, print its name, and count it in run.json.

    Raises:
        TrainError: A field is out of range.
    """

    workers: int | None = None
    bad_examples: OnBad = "stop"

    def __post_init__(self) -> None:
        check_positive("loading.workers", self.workers)
        check_whole("loading.workers", self.workers, optional=True)
        check_choice("loading.bad_examples", self.bad_examples, ("stop", "skip"))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExecution:
    """Execution of a step on its device.

    Args:
        threads: CPU threads of a step. None: `penstock train` measures some steps of a small network with several
            numbers, if the run has 20 steps or more, and otherwise takes torch's default. The last bits of the
            parameters depend on it; run.json records it, and a resumed run keeps it.
        accumulation_steps: Gradient accumulation: each process computes its share of a batch in this many parts.
        deterministic: Use deterministic algorithms, so that a resumed run ends exactly as an uninterrupted one. Some
            operations have no such algorithm on GPUs; False permits any algorithm.
        compile: Compile the network with torch.compile: the first step takes minutes, later ones are faster if the
            network has many small operations. Layers that are not data-parallel are not compiled.
        graph: Capture the step in a CUDA graph on a GPU, where possible. Python numbers and random numbers that are not
            torch's then keep the values of the fourth step.
        master_weights: With `precision="bf16"`, keep bf16 compute copies of the fp32 weights and let the optimizer step
            update both, instead of casting weights and gradients in every step: the same numbers with two thirds of the
            memory traffic. Supports plain SGD, Adam and AdamW, and weights that only their layers use; other weights
            are cast in every step.

    Raises:
        TrainError: A field is out of range.
    """

    threads: int | None = None
    accumulation_steps: int = 1
    deterministic: bool = True
    compile: bool = False
    graph: bool = True
    master_weights: bool = False

    def __post_init__(self) -> None:
        check_positive("execution.threads", self.threads)
        check_whole("execution.threads", self.threads, optional=True)
        check_positive("execution.accumulation_steps", self.accumulation_steps)
        check_whole("execution.accumulation_steps", self.accumulation_steps)


# Records of a recipe: name, class, and whether it may be None.
_RECORDS = (
    ("order", ExampleOrder, False),
    ("selection", Selection, False),
    ("ema", EMASettings, True),
    ("checkpoints", CheckpointPolicy, False),
    ("loading", Loading, False),
    ("execution", StepExecution, False),
    ("parallel", Parallel, False),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Training settings. Derive a variant with `dataclasses.replace(recipe, batch_size=512)`.

    Args:
        data: Makes the examples.
        loss: `loss(network(inputs), targets)`, the mean over the batch. It gets the network's result: a tensor, a
            tuple, a mapping, a dataclass or a Hugging Face output object; and the targets as the examples give them.
            A mapping of scalars by name is summed; validations report each as `loss.name`.
        optimizer: An `Optimizer`, declared by name and arguments, or a function that makes one of torch's from the
            parameters that require gradients. A function whose parameter is called `named_parameters` gets
            pairs of names and parameters instead, for groups by name: see
            `penstock.train.step.parameter_groups.parameter_groups`.
        schedule: A `Schedule`, declared by name, or a function that makes one of torch's from the optimizer and the
            number of steps. It advances once a step.
        freeze: Patterns of parameters that are not trained, such as `"backbone.*"`: of their names, or of the names of
            layers that contain them. They have no gradients, no optimizer state and no part in an all-reduce.
        frozen_statistics: `"keep"`: a batch norm whose parameters are all frozen by `freeze` normalises by its running
            statistics in training too, and keeps them. `"update"`: it normalises by the batch and updates them.
        lr_scale: Factors on the learning rate by such patterns, `{"head": 10.0}`; each parameter by one at most.
        metrics: Functions of the outputs and targets of the whole validation set, by name; they get the same trees as
            `loss`, concatenated over the set. A mapping of numbers is reported as `name.key`. The name `loss` is that
            of the loss.
        batch_size: Examples a step, over all devices together.
        epochs: Passes over the training examples; may be a fraction. Give exactly one of `epochs` and `steps`.
        steps: Training steps.
        seed: Seed of the weights, the order of the examples, the augmentation and dropout.
        precision: `"fp32"`; `"tf32"`, in which a GPU multiplies with 10 bits of each fp32 number's fraction; or
            `"bf16"` or `"fp16"` for autocast with fp32 weights. fp16 uses dynamic loss scaling and skips steps whose
            gradients overflow.
        clip_norm: Maximal Euclidean norm of the gradient; None for no clipping.
        augment: Changes a training batch at random; it must draw from the generator it is given and from nothing else.
            Several inputs are a dictionary of tensors by name, with the lengths `[B]` under the name of each `Dim`.
        order: The order of examples whose lengths vary.
        selection: Validation, and selection of the best weights.
        ema: Moving average of the weights; None for the weights themselves.
        checkpoints: Checkpoint interval.
        loading: Reading of examples.
        execution: Execution of a step on its device.
        parallel: Parallelism over several processes.
        calibrate: Called once, at the end, in the first process: `calibrate(run, validation, test)` gets the run's
            folder, for files it writes, and the outputs of the best weights on the validation set and on the test set
            (on the validation set again if there is no test set). It returns buffers of the network, by name, that the
            bundle gets: `{"temperature": ...}`, fitted on the validation set.
        raw_examples: Makes the inputs of the bundle's golden examples. For an application with a `prepare`: a few raw
            arrays of several sizes, as its `decode` gives them. For several inputs or varying lengths: a few
            dictionaries of arrays by name, needed where the network is trained on other inputs than it is served with,
            such as targets too. By default the first validation inputs.
        callbacks: Called with the events of the training, in the first process: instances of `Callback`, such as
            `EarlyStopping(3)`, or names of loggers, `"wandb"`, `"mlflow"`, `"trackio"`.

    Raises:
        TrainError: A field is out of range or contradicts another.
    """

    data: Callable[[], Data]
    loss: Loss
    optimizer: Callable[[Any], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    freeze: Sequence[str] = ()
    frozen_statistics: Literal["keep", "update"] = "keep"
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    batch_size: int = 64
    epochs: float | None = None
    steps: int | None = None
    seed: int = 0
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    clip_norm: float | None = None
    augment: Augment | None = None
    order: ExampleOrder = field(default_factory=ExampleOrder)
    selection: Selection = field(default_factory=Selection)
    ema: EMASettings | None = None
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    loading: Loading = field(default_factory=Loading)
    execution: StepExecution = field(default_factory=StepExecution)
    parallel: Parallel = field(default_factory=Parallel)
    calibrate: Calibrate | None = None
    raw_examples: Callable[[], Sequence[Array] | Sequence[Mapping[str, Array]]] | None = None
    callbacks: Sequence[Callback | str] = ()

    def __post_init__(self) -> None:
        check_functions(self)
        check_records(self, _RECORDS)
        if (self.epochs is None) == (self.steps is None):
            raise TrainError(f"the recipe has epochs={self.epochs} and steps={self.steps}; give exactly one of them.")
        for name in ("epochs", "steps", "batch_size", "clip_norm"):
            check_positive(name, getattr(self, name))
        for name in ("steps", "batch_size", "seed"):
            check_whole(name, getattr(self, name), optional=name == "steps")
        if not 0 <= self.seed < 1 << 63:
            raise TrainError(f"the recipe has seed {self.seed}; it must be from 0 to 2**63 - 1.")
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("frozen_statistics", self.frozen_statistics, ("keep", "update"))
        check_patterns(self.freeze, self.lr_scale)
        for name in self.metrics:
            if str(name).partition(".")[0] == "loss":
                raise TrainError(
                    f"the recipe has a metric {name!r}, and the loss is reported under that name; give it another name."
                )
        self._check_metric("selection.metric", self.selection.metric)
        check_callbacks(self.callbacks)
        for name in self.chosen_metrics[1:]:
            self._check_metric("EarlyStopping.metric", name)

    @property
    def chosen_metrics(self) -> tuple[str, ...]:
        """The metrics that select the best weights, and then those that end the training early."""
        stopping = [each.metric for each in self.callbacks if isinstance(each, EarlyStopping)]
        return (self.selection.metric, *(name for name in stopping if name is not None))

    def _check_metric(self, field: str, name: str) -> None:
        # The keys of a mapping are known when it is computed.
        of = name.partition(".")[0]
        check_choice(field, of if of in ("loss", *self.metrics) else name, ("loss", *self.metrics))

    def total_steps(self, examples: int) -> int:
        """Number of training steps for a training set of this size."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Top-1 accuracy of outputs `[n, classes, ...]` against targets `[n, ...]` or one-hot `[n, classes, ...]`.

    Targets -100 are left out.

    Raises:
        TrainError: There are scores of fewer than two classes; the highest would always be that of the same class.
    """
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise TrainError(
            f"accuracy compares the scores of classes, [n, classes, ...], and the outputs are {list(outputs.shape)}; "
            f"of one score an example, write a metric such as lambda outputs, targets: "
            f"((outputs > 0) == (targets > 0.5)).double().mean().item()."
        )
    labels = targets.argmax(1) if targets.shape == outputs.shape else targets
    return (outputs.argmax(1) == labels)[labels != IGNORED].double().mean().item()
