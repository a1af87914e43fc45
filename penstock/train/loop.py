"""Training, from top to bottom: set up or resume, step, validate, checkpoint, and a bundle at the end.

One step is a function of the step's number: which examples, which augmentation and which units drop out all follow from
(seed, step), so that a run goes on exactly from its parameters, its optimizer and one number.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from penstock.core.application import Application, FoundApplication
from penstock.core.errors import TrainError
from penstock.runtime.bundle import GOLDEN_EXAMPLES, Bundle, library_versions
from penstock.train.checkpoint import newest_checkpoint, state_hash
from penstock.train.feed import Feed, first_inputs
from penstock.train.interrupt import Interrupt
from penstock.train.layout import EXAMPLES_SEEN
from penstock.train.looks import Looks
from penstock.train.numerics import numerics
from penstock.train.progress import Progress
from penstock.train.recipe import Data, Recipe
from penstock.train.report import RUN_FILE, Log, draw_curves
from penstock.train.saver import Saver
from penstock.train.trainer import History, Trainer
from penstock.train.world import Watchdog, World

# Of a run's time; more than this is worth saying.
WAITED_SHARE = 0.1
BAD_NAMED = 5


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
    found: FoundApplication,
    folder: Path,
    recipe: Recipe,
    *,
    overrides: dict[str, Any],
    quiet: bool = False,
    world: World | None = None,
    parent: int | None = None,
) -> RunResult:
    """Train an application's network into a run folder, or go on with the run that is there.

    Every process of a world calls this, with the same arguments; the first one writes.

    Args:
        found: The application.
        folder: RUN: run.json, metrics.jsonl, TensorBoard events, curves.png, checkpoints/, and bundle/ at the end. All
            processes must see it.
        recipe: How, with the overrides already in it.
        overrides: What was changed of the application's own recipe, for run.json.
        quiet: Print nothing.
        world: The processes that train together; by default this one alone.
        parent: The process that started this one, if its end is this one's too.

    Raises:
        TrainError: The loss is not finite, a checkpoint is damaged, or another process is lost.
        KeyboardInterrupt: The user asked to stop; a checkpoint was written.
    """
    world = world or World()
    folder.mkdir(parents=True, exist_ok=True)
    data = recipe.data()
    _check_inputs(found.application, data)
    total = recipe.total_steps(len(data.train))
    with numerics(recipe), Watchdog(world, parent) as watchdog:
        looked_at = first_inputs(data.train, EXAMPLES_SEEN, on_bad=recipe.bad_examples)
        trainer = Trainer(found.model(), recipe, total, world, inputs=looked_at)
        history = _restored(trainer, folder / "checkpoints")
        run = _Run(found, folder, recipe, overrides, trainer, data, history, watchdog)
        run.write({"state": "running", "total_steps": total})
        quiet = quiet or not world.is_first
        with Interrupt() as interrupt, Progress(found.application.name, total, history.step, quiet=quiet) as progress:
            run.steps(progress, interrupt)
        return run.finish(progress)


@final
class _Run:
    """A run in its folder. Only the first process writes; the others do all else with it."""

    def __init__(
        self,
        found: FoundApplication,
        folder: Path,
        recipe: Recipe,
        overrides: dict[str, Any],
        trainer: Trainer,
        data: Data,
        history: History,
        watchdog: Watchdog,
    ) -> None:
        self._found, self._folder, self._recipe, self._overrides = found, folder, recipe, overrides
        self._trainer, self._data, self._history, self._watchdog = trainer, data, history, watchdog
        self._world = trainer.world
        self._log = Log(folder, from_step=history.step) if self._world.is_first else None

    def steps(self, progress: Progress, interrupt: Interrupt) -> None:
        """Take the steps that are left."""
        for sentence in self._sentences():
            progress.say(sentence)
        self._trainer.say = progress.say
        history, started = self._history, time.monotonic()
        with (
            Saver(self._folder / "checkpoints", self._world) as saver,
            self._trainer.feed(self._data.train, history.step, progress.say) as feed,
        ):
            feed.bad.update(history.bad_examples)
            self._steps(feed, saver, progress, interrupt)
        _say_of_feed(feed, self._world.counts(feed.bad), time.monotonic() - started, progress)

    def _steps(self, feed: Feed, saver: Saver, progress: Progress, interrupt: Interrupt) -> None:
        recipe, trainer, history, world = self._recipe, self._trainer, self._history, self._world
        total = trainer.total_steps
        validated_every = max(1, round(recipe.validate_every_epochs * len(self._data.train) / recipe.batch_size))
        saved = started = time.monotonic()
        seconds_before = history.seconds
        looks = Looks(world)
        while history.step < total:
            self._watchdog.beat(f"step {history.step}")
            looks.taken(trainer.step(next(feed), history.step))
            history.step += 1
            last = history.step == total
            validates = history.step % validated_every == 0 or last
            saves = last or bool(recipe.checkpoint_every_steps and history.step % recipe.checkpoint_every_steps == 0)
            if not (validates or saves or looks.are_due):
                continue
            due = recipe.checkpoint_every_steps is None and time.monotonic() - saved > recipe.checkpoint_every_s
            # By the clock, one that is due while another is being written is put off: nobody was promised the moment.
            seen = looks.look(asked=interrupt.asked, due=due and not saver.is_busy, failed=saver.has_failed)
            if seen.failed:
                saver.check()
            history.seconds = seconds_before + time.monotonic() - started
            history.bad_examples = dict(feed.bad)
            _check_finite(seen.losses, history.step)
            for loss in seen.losses:
                progress.advance(loss, recipe.batch_size)
            loss, asked, saves = seen.losses[-1], seen.asked, saves or seen.due or seen.asked
            if (validates or saves) and not trainer.is_finite():
                raise TrainError(
                    f"weights are not finite after step {history.step}: a gradient overflowed there or shortly before. "
                    f"The last checkpoint is kept; lower the learning rate, or check the data and the loss."
                )
            if validates:
                self._watchdog.beat(f"the validation after step {history.step}")
                with trainer.averaged():
                    self._validate(loss, feed, progress)
                history.bad_examples = dict(feed.bad)
                progress.note(history.best_metrics or {})
            if saves:
                self._watchdog.beat(f"the checkpoint of step {history.step}")
                trainer.save(saver, history)
                saved = time.monotonic()
            if asked and not last:
                # Who leaves sooner may be taken for lost, and the others' writing be cut short.
                saver.wait()
                progress.say(
                    f"Stopped at step {history.step:,} of {total:,}. Go on with: penstock train --resume {self._folder}"
                )
                raise KeyboardInterrupt

    def finish(self, progress: Progress) -> RunResult:
        """Write the bundle of the best weights."""
        trainer, history, world = self._trainer, self._history, self._world
        assert history.best_weights is not None, history.step
        assert history.best_metrics is not None, history.step
        self._watchdog.beat("the bundle")
        last_hash = state_hash(trainer.whole_state())
        trainer.module.load_state_dict(history.best_weights)
        metrics = dict(history.best_metrics)
        if self._data.test is not None:
            test = trainer.validate(self._data.test, bad=history.bad_examples, notice=progress.say)
            metrics |= {f"test_{name}": value for name, value in test.items()}
        result = RunResult(
            folder=self._folder,
            metrics=metrics,
            best_step=history.best_step,
            seconds=history.seconds,
            parameter_hash=last_hash,
        )
        weights = trainer.whole_state()
        bad_examples = world.counts(history.bad_examples)
        self._watchdog.alone("the bundle")
        if self._log is not None:
            self._log.close()
            draw_curves(self._folder)
            whole = self._found.model()
            whole.load_state_dict(weights)
            golden = first_inputs(self._data.validation, GOLDEN_EXAMPLES, on_bad=self._recipe.bad_examples)
            bundle = Bundle.write(self._found, whole, golden, to=self._folder / "bundle", metrics=metrics)
            self.write(
                {
                    "state": "finished",
                    "total_steps": trainer.total_steps,
                    "metrics": result.metrics,
                    "best_step": result.best_step,
                    "seconds": round(result.seconds, 3),
                    "bad_examples": bad_examples,
                    "parameter_hash": result.parameter_hash,
                    "bundle": bundle.manifest.content_hash,
                }
            )
        return result

    def write(self, more: dict[str, Any]) -> None:
        """Write run.json anew."""
        if not self._world.is_first:
            return
        recipe = self._recipe
        fields = {
            "application": self._found.reference,
            "name": self._found.application.name,
            "sources": self._found.source_sha256(),
            "overrides": self._overrides,
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
            "processes": self._world.size,
            "device": self._world.device.type,
            "placements": {name: asdict(placement) for name, placement in self._trainer.layout.placements.items()},
            **more,
        }
        beside = self._folder / f".{RUN_FILE}"
        beside.write_text(json.dumps(fields, indent=2) + "\n")
        beside.replace(self._folder / RUN_FILE)

    def _sentences(self) -> list[str]:
        if self._world.size == 1 and self._world.device.type == "cpu":
            return self._trainer.layout.sentences
        return [f"Training on {self._world.describe()}.", *self._trainer.layout.sentences]

    def _validate(self, train_loss: float, feed: Feed, progress: Progress) -> None:
        recipe, trainer, history = self._recipe, self._trainer, self._history
        metrics = trainer.validate(self._data.validation, bad=feed.bad, notice=progress.say)
        if self._log is not None:
            self._log.write(
                {
                    "step": history.step,
                    "seconds": round(history.seconds, 3),
                    "waited_s": round(feed.waited_s, 3),
                    "samples": history.step * recipe.batch_size,
                    "train_loss": train_loss,
                    "learning_rate": float(trainer.optimizer.param_groups[0]["lr"]),
                    **{f"validation_{name}": value for name, value in metrics.items()},
                }
            )
        if recipe.is_better(metrics[recipe.best], history.best_value):
            trainer.keep_best(history, metrics)


def _check_finite(losses: list[float], step: int) -> None:
    """See that the losses of the steps up to one are numbers."""
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            at = step - len(losses) + 1 + index
            raise TrainError(f"the loss is {loss} at step {at}; lower the learning rate or check the data.")


def _say_of_feed(feed: Feed, bad: dict[str, int], seconds: float, progress: Progress) -> None:
    if bad:
        names = ", ".join(sorted(bad)[:BAD_NAMED]) + (", ..." if len(bad) > BAD_NAMED else "")
        progress.say(
            f"{len(bad):,} bad examples or files were replaced, {sum(bad.values()):,} times in all: {names}. "
            f"{RUN_FILE} has all of them."
        )
    if feed.waited_s > WAITED_SHARE * seconds:
        progress.say(
            f"{feed.waited_s / seconds:.0%} of the time the steps waited for examples; "
            f"decode them beforehand ('penstock shard'), or give the recipe more workers."
        )


def _restored(trainer: Trainer, folder: Path) -> History:
    checkpoint = newest_checkpoint(folder, trainer.world)
    return trainer.restore(checkpoint) if checkpoint else History()


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
