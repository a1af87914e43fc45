"""`penstock.fit`: a network and arrays, in a notebook or a script, by the very loop of `penstock train`."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from penstock.core.errors import TrainError
from penstock.train.arrays import check_fit, examples_of, first_of
from penstock.train.checkpoint import newest_checkpoint
from penstock.train.examples import ArraySet, Examples
from penstock.train.interrupt import Interrupt
from penstock.train.layout import check_trainable
from penstock.train.loop import Loop
from penstock.train.numerics import numerics
from penstock.train.pace import Rate, pace_of
from penstock.train.progress import Progress
from penstock.train.recipe import Data, Loss, Recipe, accuracy
from penstock.train.refused import explained
from penstock.train.report import RUN_FILE, Log, draw_curves, read_metrics
from penstock.train.run_folder import described, make_folder, write_json
from penstock.train.runs import read_run
from penstock.train.trainer import History, Trainer
from penstock.train.world import Watchdog, World

LEARNING_RATE = 1e-3
EPOCHS = 10
BATCH_SIZE = 64
# Set before cuBLAS is first used, it makes its products deterministic.
WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
# What `fit` has arguments for, and what is of several processes.
_NOT_HERE = ("data", "loss", "optimizer", "batch_size", "epochs", "placements", "batch_norm", "gradient_precision")
# A training that goes on may read, compile or launch in another way.
# Of an optimizer, how it steps on a device and not what it does.
_OF_DEVICE = ("fused", "foreach", "capturable", "differentiable", "maximize")
_MAY_CHANGE = ("workers", "compile", "graph")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """What `fit` gives.

    Args:
        network: Trained, with its best weights, on the device that it was trained on, in evaluation mode.
        metrics: Of those weights on the validation examples; `train_loss` of the last step where there are none.
        best_step: After how many steps those weights were reached.
        history: A record a validation: step, seconds, losses, metrics, samples a second.
        seconds: Wall time of the training, over all resumptions.
        parameter_hash: Of the last weights: equal for equal seeds and first weights on the same machine, resumed or
            not.
    """

    network: nn.Module
    metrics: dict[str, float]
    best_step: int
    history: list[dict[str, Any]]
    seconds: float
    parameter_hash: str


# Whoever calls it may be in a block where nothing is learned, `torch.no_grad()` say.
@torch.inference_mode(mode=False)
@torch.enable_grad()
def fit(
    module: nn.Module,
    train: Any = None,
    *,
    validation: Any = None,
    loss: Loss | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    **recipe: Any,
) -> Fitted:
    """Train a network on arrays, tensors or examples, by the same steps as `penstock train`.

    Args:
        module: The network. It is left as it is: a copy is trained.
        train: Learned from: `(X, y)`, inputs `[n, ...]` and targets `[n]` or `[n, ...]`, or `Examples`. Arrays and
            tensors of numbers with a point are brought to the type of the network's weights, other targets to int64.
        validation: Held out to choose the best weights by, of the same kinds; None to keep the last weights.
        loss: `loss(network(X), y)`, the mean over the batch. By default the cross entropy where targets are integers,
            and the mean square else.
        optimizer: Makes the optimizer of the parameters; by default AdamW with the learning rate 0.001.
        epochs: How often every example is seen; 10 by default, if there is no `steps`.
        batch_size: Examples a step; 64 by default, or all if there are fewer.
        device: As torch names it, `"cpu"`, `"cuda"` or `"cuda:1"`; a GPU if there is one, by default.
        out: A folder for checkpoints, metrics and curves. If it holds a training that was stopped, that goes on.
        quiet: Print nothing.
        recipe: Further fields of `Recipe`, as `metrics`, `schedule`, `precision`, `seed`, `steps`. On a GPU,
            `deterministic` is False by default.

    Returns:
        The trained network and what is known of it.

    Raises:
        TrainError: Something given is wrong, or the loss is not finite.
        KeyboardInterrupt: The user asked to stop; with `out`, a checkpoint was written.
    """
    if not isinstance(module, nn.Module):
        raise TrainError(f"the network is a {type(module).__name__}; give a torch.nn.Module.")
    if train is None:
        raise TrainError("there is nothing to learn from; give train=(X, y), or train=Examples.")
    network = deepcopy(module).cpu()
    check_trainable(network)
    learned = examples_of(train, "train", network)
    held_out = None if validation is None else examples_of(validation, "validation", network)
    where = _device(device)
    made = _recipe(recipe, learned, held_out, loss, optimizer, epochs, batch_size, where)
    world = World(device=where)
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext(), explained(made, world):
        network.to(where)
        check_fit(network, learned, made.loss, "train")
        if held_out is not None:
            check_fit(network, held_out, made.loss, "validation")
        return _fit(network, learned, held_out, made, world, None if out is None else Path(out), quiet=quiet)


def _fit(
    network: nn.Module,
    train: Examples,
    validation: Examples | None,
    recipe: Recipe,
    world: World,
    out: Path | None,
    *,
    quiet: bool,
) -> Fitted:
    total = recipe.total_steps(len(train))
    with numerics(recipe), Watchdog(world) as watchdog:
        inputs = first_of(train)[0].numpy()
        pace, sentences = pace_of(network, inputs, recipe, world)
        trainer = Trainer(network, recipe, total, world, inputs=inputs)
        kept = _Kept(out, trainer, train)
        loop = Loop(
            trainer,
            train,
            validation,
            kept.history,
            watchdog,
            pace,
            checkpoints=None if out is None else out / "checkpoints",
            write=kept.write,
            go_on="What was learned is lost; out=FOLDER keeps it."
            if out is None
            else f"Go on by calling penstock.fit as before, with out={str(out)!r}.",
        )
        name = type(network).__name__
        with Interrupt() as interrupt, Progress(name, total, kept.history.step, quiet=quiet) as progress:
            for sentence in sentences:
                progress.say(sentence)
            loop.run(progress, interrupt)
        last_hash, metrics = loop.take_best()
        trainer.close()
        fitted = Fitted(
            network=trainer.module.eval(),
            metrics=metrics if validation is not None else {"train_loss": metrics["loss"]},
            best_step=kept.history.best_step,
            history=kept.lines,
            seconds=kept.history.seconds,
            parameter_hash=last_hash,
        )
        kept.finish(fitted, pace.whole)
    return fitted


@final
class _Kept:
    """What is kept of a training: its records, and in a folder, where there is one, all that it can go on from.

    Raises:
        TrainError: The folder holds something else, or the training of something else.
    """

    def __init__(self, out: Path | None, trainer: Trainer, train: Examples) -> None:
        self.lines: list[dict[str, Any]] = []
        self.history = History()
        self._out, self._trainer = out, trainer
        self._log: Log | None = None
        if out is None:
            return
        self._learned = {"examples": len(train), "inputs": f"{train.input_dtype}{list(train.input_shape)}"}
        self._learned |= _made_with(trainer)
        if isinstance(train, ArraySet):
            digest = hashlib.sha256(np.ascontiguousarray(train.inputs).data)
            digest.update(np.ascontiguousarray(train.targets).data)
            self._learned["sha256"] = digest.hexdigest()
        make_folder(out)
        if (out / RUN_FILE).exists():
            self._check(out)
        checkpoint = newest_checkpoint(out / "checkpoints")
        if checkpoint is not None:
            self.history = trainer.restore(checkpoint)
        self._log = Log(out, from_step=self.history.step)
        self.lines += read_metrics(out)
        self._describe({"state": "running"})

    def write(self, line: dict[str, Any]) -> None:
        """Keep the figures of a validation."""
        self.lines.append(line)
        if self._log is not None:
            self._log.write(line)

    def finish(self, fitted: Fitted, rate: Rate | None) -> None:
        """Write what was reached."""
        if self._log is None:
            return
        assert self._out is not None
        self._log.close()
        draw_curves(self._out)
        self._describe(
            {
                "state": "finished",
                "metrics": fitted.metrics,
                "best_step": fitted.best_step,
                "seconds": round(fitted.seconds, 3),
                **({} if rate is None else rate.fields()),
                "bad_examples": self.history.bad_examples,
                "parameter_hash": fitted.parameter_hash,
            }
        )

    def _describe(self, more: dict[str, Any]) -> None:
        assert self._out is not None
        trainer = self._trainer
        write_json(
            self._out / RUN_FILE,
            {
                "name": type(trainer.module).__name__,
                "learned": self._learned,
                **described(trainer.recipe, trainer),
                "total_steps": trainer.total_steps,
                **more,
            },
        )

    def _check(self, out: Path) -> None:
        fields = read_run(out).fields
        before = {"learned": fields.get("learned"), **fields.get("recipe", {})}
        now = {"learned": self._learned, **described(self._trainer.recipe, self._trainer)["recipe"]}
        other = [name for name in now if now[name] != before.get(name) and name not in _MAY_CHANGE]
        if "application" in fields or other:
            what = f"of the application {fields['name']!r}" if "application" in fields else "of something else"
            why = f" ({other[0]}: {before.get(other[0])!r} and now {now[other[0]]!r})" if other else ""
            raise TrainError(f"{out} holds a training {what}{why}; go on as it began, or choose another folder.")


def _made_with(trainer: Trainer) -> dict[str, Any]:
    """What of a recipe is made by functions, as far as it can be written down."""
    recipe, schedule = trainer.recipe, trainer.schedule
    first = trainer.optimizer.param_groups
    settings = [
        {name: str(value) for name, value in sorted(group.items()) if name not in (*_OF_DEVICE, "params", "lr")}
        | {"lr": str(float(group.get("initial_lr", group["lr"])))}
        for group in first
    ]
    for group in settings:
        group.pop("initial_lr", None)
    return {
        "optimizer": [type(trainer.optimizer).__name__, settings],
        "schedule": None if schedule is None else type(schedule).__name__,
        "loss": getattr(recipe.loss, "__qualname__", repr(recipe.loss)),
        "average": [recipe.average_decay, recipe.average_warm_up],
        "metrics": sorted(recipe.metrics),
    }


def _recipe(
    given: dict[str, Any],
    train: Examples,
    validation: Examples | None,
    loss: Loss | None,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    epochs: float | None,
    batch_size: int | None,
    device: torch.device,
) -> Recipe:
    known = [field.name for field in fields(Recipe) if field.name not in _NOT_HERE]
    for name in given:
        if name not in known:
            raise TrainError(f"there is no {name!r} to give; of a recipe there are {', '.join(known)}.")
    if isinstance(optimizer, Optimizer):
        raise TrainError(
            f"the optimizer is a {type(optimizer).__name__} already, of the network that is left as it is; give what "
            f"makes one: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        )
    if validation is None and given.get("metrics"):
        raise TrainError("metrics are of validation examples, and there are none; give validation=(X, y).")
    labels = loss is None and not first_of(train)[1].is_floating_point()
    chosen: dict[str, Any] = {"deterministic": device.type == "cpu"}
    if labels and validation is not None:
        chosen["metrics"] = {"accuracy": accuracy}
    if epochs is None and given.get("steps") is None:
        epochs = EPOCHS
    if given.get("deterministic") and device.type == "cuda" and WORKSPACE_VARIABLE not in os.environ:
        raise TrainError(
            f"deterministic=True needs {WORKSPACE_VARIABLE}=:4096:8 in the environment before Python starts; set it, "
            f"or leave deterministic out."
        )
    return Recipe(
        data=lambda: Data(train=train, validation=train if validation is None else validation),
        loss=loss or (nn.functional.cross_entropy if labels else nn.functional.mse_loss),
        optimizer=optimizer or _adamw,
        epochs=epochs,
        batch_size=min(BATCH_SIZE, len(train)) if batch_size is None else batch_size,
        **(chosen | given),
    )


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
        raise TrainError(f"the device is {name!r}; networks are trained on 'cpu' or 'cuda'.")
    if device.type == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if (device.index or 0) >= there:
        raise TrainError(f"the device is {name!r} and torch sees {there} GPUs; choose another, or make it visible.")
    return device if ":" in str(device) else torch.device("cuda", torch.cuda.current_device())
