"""Training, from top to bottom: set up or resume, step, validate, checkpoint, and a bundle at the end.

One step is a function of the step's number: which examples, which augmentation and which units drop out all follow from
(seed, step), so that a run goes on exactly from its parameters, its optimizer and one number.
"""

import json
import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from penstock.core.application import Application, FoundApplication
from penstock.core.bundle import read_bundle
from penstock.core.errors import TrainError
from penstock.runtime.bundle import GOLDEN_EXAMPLES, Bundle, library_versions
from penstock.train.checkpoint import Checkpoint, newest_checkpoint, parameter_hash, save_checkpoint
from penstock.train.data import one_pass, training_order
from penstock.train.examples import Examples
from penstock.train.feed import Batch, Feed, first_inputs
from penstock.train.interrupt import Interrupt
from penstock.train.progress import Progress
from penstock.train.reading import reading_threads
from penstock.train.recipe import Data, Recipe
from penstock.train.report import RUN_FILE, Log, draw_curves
from penstock.train.resident import make_feed

# B examples of a batch

EVALUATED_AT_ONCE = 1024
EVALUATED_BYTES = 1 << 26
# Of a run's time; more than this is worth saying.
WAITED_SHARE = 0.1
DROPOUT = 0x5DEECE66D


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """What a finished run is known by.

    Args:
        folder: RUN; its bundle is in `folder / "bundle"`.
        metrics: The validation metrics of the best weights, and `test_...` where there is a test set.
        best_step: After how many steps those were reached.
        seconds: Wall time of the training, over all resumptions.
        parameter_hash: Of the last weights: equal for equal seeds on the same machine, resumed or not.
    """

    folder: Path
    metrics: dict[str, float]
    best_step: int
    seconds: float
    parameter_hash: str


def train(
    found: FoundApplication, folder: Path, recipe: Recipe, *, overrides: dict[str, Any], quiet: bool = False
) -> RunResult:
    """Train an application's network into a run folder, or go on with the run that is there.

    Args:
        found: The application.
        folder: RUN: run.json, metrics.jsonl, TensorBoard events, curves.png, checkpoints/, and bundle/ at the end.
        recipe: How, with the overrides already in it.
        overrides: What was changed of the application's own recipe, for run.json.
        quiet: Print nothing.

    Raises:
        TrainError: The loss is not finite, or a checkpoint is damaged.
        KeyboardInterrupt: The user asked to stop; a checkpoint was written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = recipe.data()
    _check_inputs(found.application, data)
    total = recipe.total_steps(len(data.train))
    with _deterministic(recipe.seed, recipe.threads):
        trainer = Trainer(found.model(), recipe, total)
        checkpoint = newest_checkpoint(folder / "checkpoints")
        history = trainer.restore(checkpoint) if checkpoint else History()
        log = Log(folder, from_step=history.step)
        _write_run(folder, found, recipe, overrides, {"state": "running", "total_steps": total})
        with Interrupt() as interrupt, Progress(found.application.name, total, history.step, quiet=quiet) as progress:
            _run(trainer, data, history, folder, log, progress, interrupt)
        log.close()
        draw_curves(folder)
        return _finish(trainer, found, data, history, folder, recipe, overrides)


@dataclass(slots=True)
class History:
    """How far a run is and the best it has seen."""

    step: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_value: float | None = None
    best_metrics: dict[str, float] | None = None
    best_weights: dict[str, Tensor] | None = None
    bad_examples: dict[str, int] = field(default_factory=dict)


@final
class Trainer:
    """A network, its optimizer and schedule, and the one step that moves them.

    Args:
        module: The network.
        recipe: How it is trained.
        total_steps: How many steps the schedule spans.
    """

    def __init__(self, module: nn.Module, recipe: Recipe, total_steps: int) -> None:
        self.module = module
        self.recipe = recipe
        self.total_steps = total_steps
        self.optimizer = recipe.optimizer(module.parameters())
        self.schedule = recipe.schedule(self.optimizer, total_steps) if recipe.schedule else None

    def feed(self, examples: Examples, first_step: int, notice: Callable[[str], object]) -> Feed:
        """The batches of the steps from one on."""
        recipe = self.recipe
        order = training_order(recipe.seed, len(examples), recipe.batch_size, first_step=first_step)
        workers = recipe.workers or reading_threads()
        return make_feed(examples, order, workers=workers, on_bad=recipe.bad_examples, notice=notice)

    def step(self, batch: Batch, step: int) -> Tensor:
        """Take one step, a function of its number and batch alone; returns the loss, a scalar still on its device."""
        recipe = self.recipe
        inputs_B, targets_B = batch
        generator = torch.Generator().manual_seed(_step_seed(recipe.seed, step))
        # Dropout has no generator of its own; its chance must not be the augmentation's.
        torch.manual_seed(_step_seed(recipe.seed, step) ^ DROPOUT)
        if recipe.augment is not None:
            inputs_B, targets_B = recipe.augment(inputs_B, targets_B, generator)
        self.module.train()
        with self._autocast():
            loss = recipe.loss(self.module(inputs_B), targets_B)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss.detach()

    def validate(self, examples: Examples) -> dict[str, float]:
        """The loss and every metric over a whole set."""
        self.module.eval()
        recipe = self.recipe
        at_once = max(1, min(EVALUATED_AT_ONCE, EVALUATED_BYTES // max(1, examples.input_nbytes)))
        order, workers = one_pass(len(examples), at_once), recipe.workers or reading_threads()
        with (
            make_feed(examples, order, workers=workers, on_bad=recipe.bad_examples) as feed,
            torch.inference_mode(),
            self._autocast(),
        ):
            parts = [(self.module(inputs), targets) for inputs, targets in feed]
            outputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
            outputs = outputs.float()
            metrics = {"loss": self.recipe.loss(outputs, targets).item()}
        return metrics | {name: float(metric(outputs, targets)) for name, metric in self.recipe.metrics.items()}

    def save(self, folder: Path, history: History) -> Path:
        """Write a checkpoint of all that the next step depends on."""
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": _plain(self.schedule.state_dict()) if self.schedule else None,
            "seconds": history.seconds,
            "bad_examples": history.bad_examples,
            "best": {
                "step": history.best_step,
                "value": history.best_value,
                "metrics": history.best_metrics,
                "weights": history.best_weights,
            },
        }
        return save_checkpoint(folder, Checkpoint(step=history.step, state=state))

    def restore(self, checkpoint: Checkpoint) -> History:
        """Go back to where a checkpoint was written."""
        state, best = checkpoint.state, checkpoint.state["best"]
        try:
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise TrainError(f"the checkpoint does not fit the network: {' '.join(str(error).split())[:200]}") from None
        if self.schedule is not None:
            self.schedule.load_state_dict(state["schedule"])
        return History(
            step=checkpoint.step,
            seconds=state["seconds"],
            best_step=best["step"],
            best_value=best["value"],
            best_metrics=best["metrics"],
            best_weights=best["weights"],
            bad_examples=state.get("bad_examples", {}),
        )

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.precision == "bf16")


def _run(
    trainer: Trainer,
    data: Data,
    history: History,
    folder: Path,
    log: Log,
    progress: Progress,
    interrupt: Interrupt,
) -> None:
    recipe, total = trainer.recipe, trainer.total_steps
    validated_every = max(1, round(recipe.validate_every_epochs * len(data.train) / recipe.batch_size))
    saved = started = time.monotonic()
    seconds_before = history.seconds
    with trainer.feed(data.train, history.step, progress.say) as feed:
        feed.bad.update(history.bad_examples)
        while history.step < total:
            loss = trainer.step(next(feed), history.step)
            history.step += 1
            history.seconds = seconds_before + time.monotonic() - started
            history.bad_examples = dict(feed.bad)
            loss_value = loss.item()
            if not math.isfinite(loss_value):
                raise TrainError(
                    f"the loss is {loss_value} at step {history.step}; lower the learning rate or check the data."
                )
            progress.advance(loss_value, recipe.batch_size)
            if history.step % validated_every == 0 or history.step == total:
                _validate(trainer, data.validation, history, log, loss_value, feed.waited_s)
                progress.note(history.best_metrics or {})
            due = (
                history.step % recipe.checkpoint_every_steps == 0
                if recipe.checkpoint_every_steps
                else time.monotonic() - saved > recipe.checkpoint_every_s
            )
            if due or interrupt.asked or history.step == total:
                trainer.save(folder / "checkpoints", history)
                saved = time.monotonic()
            if interrupt.asked and history.step < total:
                progress.say(
                    f"Stopped at step {history.step:,} of {total:,}. Go on with: penstock train --resume {folder}"
                )
                raise KeyboardInterrupt
    _say_of_feed(feed, time.monotonic() - started, progress)


def _say_of_feed(feed: Feed, seconds: float, progress: Progress) -> None:
    if feed.bad:
        progress.say(f"{len(feed.bad):,} bad examples or files were replaced, {sum(feed.bad.values()):,} times in all.")
    if feed.waited_s > WAITED_SHARE * seconds:
        progress.say(
            f"{feed.waited_s / seconds:.0%} of the time the steps waited for examples; "
            f"decode them beforehand ('penstock shard'), or give the recipe more workers."
        )


def _validate(
    trainer: Trainer, held_out: Examples, history: History, log: Log, train_loss: float, waited_s: float
) -> None:
    recipe = trainer.recipe
    metrics = trainer.validate(held_out)
    rate = trainer.optimizer.param_groups[0]["lr"]
    log.write(
        {
            "step": history.step,
            "seconds": round(history.seconds, 3),
            "waited_s": round(waited_s, 3),
            "samples": history.step * recipe.batch_size,
            "train_loss": train_loss,
            "learning_rate": float(rate),
            **{f"validation_{name}": value for name, value in metrics.items()},
        }
    )
    if recipe.is_better(metrics[recipe.best], history.best_value):
        history.best_step, history.best_value, history.best_metrics = history.step, metrics[recipe.best], metrics
        history.best_weights = {name: tensor.detach().clone() for name, tensor in trainer.module.state_dict().items()}


def _finish(
    trainer: Trainer,
    found: FoundApplication,
    data: Data,
    history: History,
    folder: Path,
    recipe: Recipe,
    overrides: dict[str, Any],
) -> RunResult:
    assert history.best_weights is not None, history.step
    assert history.best_metrics is not None, history.step
    last_hash = parameter_hash(trainer.module)
    trainer.module.load_state_dict(history.best_weights)
    metrics = dict(history.best_metrics)
    if data.test is not None:
        metrics |= {f"test_{name}": value for name, value in trainer.validate(data.test).items()}
    golden = first_inputs(data.validation, GOLDEN_EXAMPLES, on_bad=recipe.bad_examples)
    Bundle.write(found, trainer.module, golden, to=folder / "bundle", metrics=metrics)
    result = RunResult(
        folder=folder,
        metrics=metrics,
        best_step=history.best_step,
        seconds=history.seconds,
        parameter_hash=last_hash,
    )
    done = {
        "state": "finished",
        "total_steps": trainer.total_steps,
        "metrics": result.metrics,
        "best_step": result.best_step,
        "seconds": round(result.seconds, 3),
        "bad_examples": history.bad_examples,
        "parameter_hash": result.parameter_hash,
        "bundle": read_bundle(folder / "bundle").manifest.content_hash,
    }
    _write_run(folder, found, recipe, overrides, done)
    return result


def _check_inputs(application: Application, data: Data) -> None:
    """Refuse data of another spec than the application's now, and not at the end of the training."""
    spec = application.input
    for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if part is None:
            continue
        # Of a live application, whole signals are learned from, of any one length.
        frames = part.input_shape[:1] if application.live is not None else spec.shape[:1]
        if part.input_dtype != spec.numpy_dtype or part.input_shape != (*frames, *spec.shape[1:]):
            raise TrainError(
                f"the {name} inputs are {part.input_dtype}{list(part.input_shape)}; application "
                f"{application.name!r} declares {spec.describe()}."
            )


def _write_run(
    folder: Path, found: FoundApplication, recipe: Recipe, overrides: dict[str, Any], more: dict[str, Any]
) -> None:
    fields = {
        "application": found.reference,
        "name": found.application.name,
        "sources": found.source_sha256(),
        "overrides": overrides,
        "recipe": {
            "batch_size": recipe.batch_size,
            "epochs": recipe.epochs,
            "steps": recipe.steps,
            "precision": recipe.precision,
            "seed": recipe.seed,
            "best": recipe.best,
            "best_mode": recipe.best_mode,
        },
        "versions": library_versions(),
        "threads": torch.get_num_threads(),
        **more,
    }
    beside = folder / f".{RUN_FILE}"
    beside.write_text(json.dumps(fields, indent=2) + "\n")
    beside.replace(folder / RUN_FILE)


@contextmanager
def _deterministic(seed: int, threads: int | None) -> Generator[None]:
    memory = cast(Any, torch.utils.deterministic)
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    torch.use_deterministic_algorithms(True)
    # Filling all new memory first costs time at every step and makes nothing here more deterministic.
    memory.fill_uninitialized_memory = False
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]
        torch.set_num_threads(threads_before)


def _step_seed(seed: int, step: int) -> int:
    # Neighbouring seeds and steps must not share their chance: spread both over 64 bits (splitmix64's constants).
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ (mixed >> 31)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    # A schedule's state names its functions and its optimizer's hooks; numbers, texts and lists of them are the state.
    return {name: value for name, value in state.items() if isinstance(value, int | float | str | list | bool | None)}
