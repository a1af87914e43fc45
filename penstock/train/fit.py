"""`penstock.fit`: train a network on arrays, in a notebook or a script, by the loop of `penstock train`."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from penstock.core.errors import TrainError
from penstock.core.initial import Initial, StartedFrom
from penstock.core.remote.remote_copy import DEFAULT_CACHE
from penstock.core.spec import Array
from penstock.train.callbacks.callback import Callback
from penstock.train.callbacks.dispatch import Callbacks
from penstock.train.callbacks.early_stopping import EarlyStopping
from penstock.train.callbacks.named_callbacks import ready_callbacks
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.data.arrays import TRIED, check_fit, examples_of
from penstock.train.data.examples import ArraySet, Examples
from penstock.train.data.loader import first_batch, first_inputs
from penstock.train.device_errors import explained
from penstock.train.fit_records import FitRecords
from penstock.train.initial_weights import as_initial, load_initial, recorded
from penstock.train.loop import Loop
from penstock.train.numerics import numerics
from penstock.train.parallel.layout import check_trainable
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.parallel.world import World
from penstock.train.recipe import Data, Loss, Recipe, Selection, StepExecution, accuracy
from penstock.train.report.progress import Progress
from penstock.train.run_folder import make_folder
from penstock.train.run_owner import owned
from penstock.train.run_place import RunPlace
from penstock.train.run_uploads import RunUploads
from penstock.train.trainer import Trainer

LEARNING_RATE = 1e-3
EPOCHS = 10
BATCH_SIZE = 64
# Makes cuBLAS deterministic if it is set before the first product.
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# Fields of a recipe that are arguments of `fit`, or need several processes or a bundle.
_NOT_HERE = ("data", "loss", "optimizer", "batch_size", "epochs", "parallel", "calibrate", "raw_examples")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The result of `fit`.

    Args:
        network: The trained network with its best weights, on its training device, in evaluation mode.
        metrics: Metrics of those weights on the validation examples; `train_loss` of the last step where there are
            none.
        best_step: The step after which those weights were reached.
        history: A record for each validation: step, seconds, losses, metrics, samples a second.
        seconds: Wall time of the training, over all resumptions.
        parameter_hash: Hash of the last weights: equal for equal seeds and initial weights on the same machine, resumed
            or not.
    """

    network: nn.Module
    metrics: dict[str, float]
    best_step: int
    history: list[dict[str, Any]]
    seconds: float
    parameter_hash: str


# The caller may be in a `torch.no_grad()` or `torch.inference_mode()` block.
@torch.inference_mode(mode=False)
@torch.enable_grad()
def fit(
    module: nn.Module,
    train: Any = None,
    *,
    validation: Any = None,
    loss: Loss | None = None,
    optimizer: Callable[[Any], Optimizer] | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    deterministic: bool | None = None,
    out: str | Path | None = None,
    cache: str | Path | None = None,
    quiet: bool = False,
    initial: Initial | str | Path | None = None,
    callbacks: Sequence[Callback | str] = (),
    **recipe: Any,
) -> Fitted:
    """Train a network on arrays, tensors or examples, by the same steps as `penstock train`.

    Args:
        module: The network. It is not changed: a copy is trained.
        train: The training set: `(X, y)`, inputs `[n, ...]` and targets `[n]` or `[n, ...]`, or `Examples`.
            Floating-point arrays and tensors are converted to the type of the network's weights, other targets to
            int64. X may be a dictionary of inputs by the names of the network's parameters; y a dictionary or tuple. In
            these, a list of arrays may have different lengths; it is padded, see `ArraySet`.
        validation: Held out to select the best weights, of the same kinds; None to keep the last weights.
        loss: `loss(network(X), y)`, the mean over the batch. By default the cross entropy for integer targets, and the
            mean squared error for others.
        optimizer: Makes the optimizer from the parameters, or from pairs of names and parameters if its parameter is
            called `named_parameters`; by default AdamW with the learning rate 0.001.
        epochs: Passes over the training set; 10 by default, if there is no `steps`.
        batch_size: Examples a step; 64 by default, or all if there are fewer.
        device: torch's name, `"cpu"`, `"cuda"` or `"cuda:1"`; by default a GPU if there is one.
        deterministic: Use deterministic algorithms only; by default on a CPU. It replaces `execution.deterministic`.
        out: A folder or a URL (`"s3://bucket/x"`) for checkpoints, metrics and curves. A stopped training in it is
            resumed.
        cache: Holds the local copy of a training at a URL; `~/.cache/penstock` by default.
        quiet: Print nothing.
        initial: Weights to start from instead of the network's own: a safetensors file, a folder of Hugging Face,
            `"timm:NAME"`, `"torchvision:NAME"`, or an `Initial`. A resumed training does not read them.
        callbacks: Called with the events of the training: instances of `Callback`, such as `EarlyStopping(3)`, or names
            of loggers, `"wandb"`, `"mlflow"`, `"trackio"`.
        recipe: Further fields of `Recipe`, as `metrics`, `schedule`, `precision`, `seed`, `steps`, `execution`.

    Returns:
        The trained network and its figures.

    Raises:
        TrainError: An argument is wrong, the loss is not finite, or the training at a URL could not be uploaded.
        StorageError: `out` is a URL that cannot be read or written.
        KeyboardInterrupt: The user stopped the training; with `out`, a checkpoint was written.
    """
    if not isinstance(module, nn.Module):
        raise TrainError(f"the network is a {type(module).__name__}; give a torch.nn.Module.")
    if train is None:
        raise TrainError("there is no training set; give train=(X, y), or train=Examples.")
    network = deepcopy(module).cpu()
    check_trainable(network)
    place = None if out is None else _place(out, cache)
    began = _started_from(network, initial, None if place is None else place.folder)
    learned = examples_of(train, "train", network)
    held_out = None if validation is None else examples_of(validation, "validation", network)
    learned, held_out = _equally_named(learned, held_out)
    where = _device(device)
    given = recipe | {
        "callbacks": callbacks,
        "execution": _execution(recipe.get("execution", StepExecution()), deterministic, where),
    }
    made = _recipe(given, learned, held_out, loss, optimizer, epochs, batch_size)
    world = World(device=where)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext(), explained(made, world):
        network.to(where)
        check_fit(network, learned, made.loss, "train")
        if held_out is not None:
            check_fit(network, held_out, made.loss, "validation")
        return _fit(network, learned, held_out, made, world, place, began, quiet=quiet)


def _fit(
    network: nn.Module,
    train: Examples,
    validation: Examples | None,
    recipe: Recipe,
    world: World,
    place: RunPlace | None,
    initial: StartedFrom | None,
    *,
    quiet: bool,
) -> Fitted:
    total = recipe.total_steps(len(train))
    out = None if place is None else place.folder
    elsewhere = None if place is None or place.remote is None else place
    if out is not None:
        make_folder(out)
    with (
        nullcontext() if out is None else owned(out) as attempt,
        nullcontext() if elsewhere is None else RunUploads(elsewhere) as uploads,
        numerics(recipe),
        Watchdog(world) as watchdog,
    ):
        for examples in (train, validation):
            if examples is not None:
                examples.prefetch()
        inputs = first_inputs(train, TRIED)
        trainer = Trainer(network, recipe, total, world, inputs=inputs, record=train.record)
        watching = ready_callbacks(recipe.callbacks, has_folder=out is not None)
        records = FitRecords(out, trainer, train, validation, initial, attempt)
        loop = Loop(
            trainer,
            train,
            validation,
            records.history,
            watchdog,
            checkpoints=None if out is None else out / "checkpoints",
            attempt=attempt,
            callbacks=Callbacks(watching, required=[each for each in (records, uploads) if each is not None]),
            start_event=records.start_event,
            resume_hint="The weights are lost; out=FOLDER keeps them."
            if out is None
            else f"Go on by calling penstock.fit as before, with out={str(place)!r}.",
        )
        with loop.ending():
            loop.run(Progress(type(network).__name__, total, records.history.step, quiet=quiet))
            last_hash, metrics = loop.load_best()
            trainer.close()
            fitted = Fitted(
                network=trainer.module.eval(),
                metrics=metrics if validation is not None else {"train_loss": metrics["loss"]},
                best_step=records.history.best_step,
                history=records.lines,
                seconds=records.history.seconds,
                parameter_hash=last_hash,
            )
            loop.finish(fitted.metrics)
        records.finish(metrics=fitted.metrics, parameter_hash=last_hash, rate=loop.pace.whole, stop=loop.stop)
    return fitted


def _place(out: str | Path, cache: str | Path | None) -> RunPlace:
    """Return the place of a run, with the run at a URL brought here."""
    place = RunPlace.of(out, cache or DEFAULT_CACHE)
    if place.remote is not None:
        place.fetch()
        place.fetch_checkpoint()
    return place


def _started_from(network: nn.Module, initial: Initial | str | Path | None, out: Path | None) -> StartedFrom | None:
    if out is not None and newest_checkpoint(out / "checkpoints") is not None:
        return recorded(out)
    return None if initial is None else load_initial(as_initial(initial), network, Path.cwd())


def _recipe(
    given: dict[str, Any],
    train: Examples,
    validation: Examples | None,
    loss: Loss | None,
    optimizer: Callable[[Any], Optimizer] | None,
    epochs: float | None,
    batch_size: int | None,
) -> Recipe:
    known = [field.name for field in fields(Recipe) if field.name not in _NOT_HERE]
    for name in given:
        if name not in known:
            raise TrainError(
                f"fit has no argument {name!r}; fields of a recipe that it accepts are {', '.join(known)}."
            )
    if isinstance(optimizer, Optimizer):
        raise TrainError(
            f"the optimizer is a {type(optimizer).__name__} of the original network, and a copy is trained; give a "
            f"function that makes one: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    if validation is None and given.get("metrics"):
        raise TrainError("metrics need validation examples; give validation=(X, y).")
    selection = given.get("selection")
    if validation is None and isinstance(selection, Selection) and selection.metric != "loss":
        raise TrainError(f"the selection by {selection.metric!r} needs validation examples; give validation=(X, y).")
    if validation is None and any(isinstance(each, EarlyStopping) for each in given["callbacks"]):
        raise TrainError("EarlyStopping needs validation examples; give validation=(X, y).")
    labels = loss is None and _has_labels(train)
    chosen: dict[str, Any] = {}
    if labels and validation is not None:
        chosen["metrics"] = {"accuracy": accuracy}
    if epochs is None and given.get("steps") is None:
        epochs = EPOCHS
    return Recipe(
        data=lambda: Data(train=train, validation=train if validation is None else validation),
        loss=loss or (nn.functional.cross_entropy if labels else nn.functional.mse_loss),
        optimizer=optimizer or _adamw,
        epochs=epochs,
        batch_size=min(BATCH_SIZE, len(train)) if batch_size is None else batch_size,
        **(chosen | given),
    )


def _has_labels(train: Examples) -> bool:
    targets = first_batch(train, TRIED).targets
    if not isinstance(targets, Tensor):
        raise TrainError(f"the targets are a {type(targets).__name__}; give loss=FUNCTION, which gets them.")
    if not targets.is_floating_point():
        return True
    padded = any(name is not None for name in train.target_axes or ())
    if isinstance(train, ArraySet) and isinstance(train.targets, list):
        padded = padded or len({row.shape for row in cast(list[Array], train.targets)}) > 1
    if padded:
        raise TrainError(
            "the targets are floats of different lengths, padded with 0, and the mean squared error would count the "
            "padding; give loss=FUNCTION, which leaves it out."
        )
    return False


def _equally_named(train: Examples, validation: Examples | None) -> tuple[Examples, Examples | None]:
    """Let both sets have the same tensors, with lengths up to the longest of both."""
    if validation is None or train.record == validation.record:
        return train, validation
    named = train.record is not None and validation.record is not None
    if named and isinstance(train, ArraySet) and isinstance(validation, ArraySet):
        both = train.joint_record(validation)
        if both is not None:
            return train.bound(both), validation.bound(both)
    raise TrainError(
        f"the training inputs are {train.describe()} and the validation inputs {validation.describe()}; give both "
        f"the same tensors."
    )


def _execution(given: StepExecution, deterministic: bool | None, device: torch.device) -> StepExecution:
    if deterministic and device.type == "cuda" and WORKSPACE_VARIABLE not in os.environ:
        raise TrainError(
            f"deterministic=True needs {WORKSPACE_VARIABLE}=:4096:8 in the environment before Python starts; set it, "
            f"or leave deterministic out."
        )
    return replace(given, deterministic=device.type == "cpu" if deterministic is None else deterministic)


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=LEARNING_RATE)


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise TrainError(f"the device is {name!r}; give 'cpu', 'cuda' or 'cuda:1'.") from None
    if device.type not in ("cpu", "cuda"):
        raise TrainError(f"the device is {name!r}; choose 'cpu' or 'cuda'.")
    if device.type == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if (device.index or 0) >= there:
        raise TrainError(f"the device is {name!r} and torch sees {there} GPUs; choose another, or make it visible.")
    return device if ":" in str(device) else torch.device("cuda", torch.cuda.current_device())
