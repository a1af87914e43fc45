"""Training, from top to bottom: set up or resume, step, validate, checkpoint, and a bundle at the end.

One step is a function of the step's number: which examples, which augmentation and which units drop out all follow from
(seed, step), so that a run goes on exactly from its parameters, its optimizer and one number.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from penstock.core.application import Application, FoundApplication
from penstock.core.errors import TrainError
from penstock.train.checkpoint import newest_checkpoint, state_hash
from penstock.train.examples import Examples
from penstock.train.feed import Feed, first_inputs
from penstock.train.interrupt import Interrupt
from penstock.train.layout import EXAMPLES_SEEN
from penstock.train.looks import Looks
from penstock.train.numerics import numerics
from penstock.train.pace import Pace, Rate, pace_of
from penstock.train.profiling import NoProfile, Profile
from penstock.train.progress import Progress
from penstock.train.recipe import Data, Recipe
from penstock.train.refused import explained
from penstock.train.report import RUN_FILE
from penstock.train.run_folder import RunFolder, check_raw_examples, fitted_buffers, make_folder
from penstock.train.saver import Saver
from penstock.train.schedules import check_schedule
from penstock.train.trainer import History, Trainer
from penstock.train.world import Watchdog, World

# Of a run's time, and all in all; more than this is worth saying.
WAITED_SHARE, WAITED_S = 0.1, 5.0
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
    profiled_steps: int | None = None,
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
        profiled_steps: How many steps are profiled, after a warm-up; None for none. RUN then has trace.json,
            receipt.json and timeline.svg too.

    Raises:
        TrainError: The folder cannot be made, the loss is not finite, a checkpoint is damaged, another process is lost,
            or the run is shorter than what is to be profiled.
        KeyboardInterrupt: The user asked to stop; a checkpoint was written.
    """
    world = world or World()
    make_folder(folder)
    check_raw_examples(found, recipe)
    data = recipe.data()
    _check_inputs(found.application, data)
    total = recipe.total_steps(len(data.train))
    with numerics(recipe), explained(recipe, world), Watchdog(world, parent) as watchdog:
        looked_at = first_inputs(data.train, EXAMPLES_SEEN, on_bad=recipe.bad_examples)
        module = found.model()
        pace, sentences = pace_of(module, looked_at, recipe, world)
        trainer = Trainer(module, recipe, total, world, inputs=looked_at)
        history = _restored(trainer, folder / "checkpoints")
        profile = None
        if profiled_steps is not None:
            profile = Profile(world, profiled_steps, recipe.batch_size, folder, left=total - history.step)
        run = RunFolder(found, folder, recipe, overrides, trainer, history.step) if world.is_first else None
        if run is not None:
            run.write({"state": "running", "total_steps": total})
        loop = Loop(
            trainer,
            data.train,
            data.validation,
            history,
            watchdog,
            pace,
            checkpoints=folder / "checkpoints",
            write=run.log.write if run is not None else lambda line: None,
            go_on=f"Go on with: penstock train --resume {folder}",
            profile=profile,
        )
        quiet = quiet or not world.is_first
        with Interrupt() as interrupt, Progress(found.application.name, total, history.step, quiet=quiet) as progress:
            for sentence in sentences:
                progress.say(sentence)
            loop.run(progress, interrupt)
        return _finished(loop, run, folder, data, progress)


def _finished(loop: "Loop", run: RunFolder | None, folder: Path, data: Data, progress: Progress) -> RunResult:
    """Test the best weights, and write their bundle."""
    trainer, history, world = loop.trainer, loop.history, loop.trainer.world
    loop.watchdog.beat("the bundle")
    last_hash, metrics = loop.take_best()
    if data.test is not None:
        test = trainer.validate(data.test, bad=history.bad_examples, notice=progress.say)
        metrics |= {f"test_{name}": value for name, value in test.items()}
    weights = trainer.whole_state() | fitted_buffers(trainer, folder, data)
    bad_examples, rate = world.counts(history.bad_examples), loop.pace.whole
    loop.watchdog.alone("the bundle")
    if run is not None:
        bundle = run.finish(weights, data, metrics)
        run.write(
            {
                "state": "finished",
                "total_steps": trainer.total_steps,
                "metrics": metrics,
                "best_step": history.best_step,
                "seconds": round(history.seconds, 3),
                **({} if rate is None else rate.fields()),
                "bad_examples": bad_examples,
                "parameter_hash": last_hash,
                "bundle": bundle,
            }
        )
    return RunResult(
        folder=folder,
        metrics=metrics,
        best_step=history.best_step,
        seconds=history.seconds,
        parameter_hash=last_hash,
    )


@final
class Loop:
    """The steps of a training, its validations and checkpoints, whatever is trained and wherever that is kept.

    Args:
        trainer: Takes the steps.
        train: Learned from.
        validation: Held out to choose the best weights by; None to keep the last ones.
        history: How far the training is.
        watchdog: Of this process.
        pace: Counts what is learned from.
        checkpoints: The folder where checkpoints go; None for none.
        write: Called with the figures of each validation.
        go_on: How one goes on who stopped here, as a sentence.
        profile: Watches some steps; None for none.

    Raises:
        TrainError: The schedule moves by what a step does not know.
    """

    def __init__(
        self,
        trainer: Trainer,
        train: Examples,
        validation: Examples | None,
        history: History,
        watchdog: Watchdog,
        pace: Pace,
        *,
        checkpoints: Path | None,
        write: Callable[[dict[str, Any]], object],
        go_on: str,
        profile: Profile | None = None,
    ) -> None:
        check_schedule(trainer.schedule)
        self.trainer, self.history, self.watchdog, self.pace = trainer, history, watchdog, pace
        self._train, self._validation, self._checkpoints = train, validation, checkpoints
        self._write, self._go_on, self._profile = write, go_on, profile

    def run(self, progress: Progress, interrupt: Interrupt) -> None:
        """Take the steps that are left.

        Raises:
            TrainError: The loss or the weights are not finite, a checkpoint is damaged, or another process is lost.
            KeyboardInterrupt: The user asked to stop; a checkpoint was written if there is a folder for it.
        """
        trainer, history, world = self.trainer, self.history, self.trainer.world
        if world.size > 1 or world.device.type != "cpu":
            progress.say(f"Training on {world.describe()}.")
        for sentence in trainer.layout.sentences:
            progress.say(sentence)
        trainer.say = progress.say
        started_s = time.monotonic()
        with (
            nullcontext() if self._checkpoints is None else Saver(self._checkpoints, world) as saver,
            trainer.feed(self._train, history.step, progress.say) as feed,
        ):
            feed.bad.update(history.bad_examples)
            self._steps(feed, saver, progress, interrupt)
        _say_of_feed(feed, world.counts(feed.bad), time.monotonic() - started_s, progress)

    def _steps(self, feed: Feed, saver: Saver | None, progress: Progress, interrupt: Interrupt) -> None:
        trainer, history, world, recipe = self.trainer, self.history, self.trainer.world, self.trainer.recipe
        total = trainer.total_steps
        validated_every = max(1, round(recipe.validate_every_epochs * len(self._train) / recipe.batch_size))
        saved = started = time.monotonic()
        self.pace.begin(started)
        seconds_before = history.seconds
        looks = Looks(world)
        while history.step < total:
            self.watchdog.beat(f"step {history.step}")
            looks.taken(self._step(feed, progress))
            history.step += 1
            last = history.step == total
            validates = history.step % validated_every == 0 or last
            saves = last or bool(recipe.checkpoint_every_steps and history.step % recipe.checkpoint_every_steps == 0)
            if not (validates or saves or looks.are_due):
                continue
            due = recipe.checkpoint_every_steps is None and time.monotonic() - saved > recipe.checkpoint_every_s
            # By the clock, one that is due while another is being written is put off: nobody was promised the moment.
            busy, failed = saver is not None and saver.is_busy, saver is not None and saver.has_failed
            seen = looks.look(asked=interrupt.asked, due=due and not busy, failed=failed)
            if seen.failed and saver is not None:
                saver.check()
            history.seconds = seconds_before + time.monotonic() - started
            history.bad_examples = dict(feed.bad)
            _check_finite(seen.losses, history.step, saver)
            self.pace.taken(len(seen.losses) * recipe.batch_size)
            rate = self.pace.turn(time.monotonic()) if validates else self.pace.rate(time.monotonic())
            for loss in seen.losses:
                progress.advance(loss, rate)
            loss, asked, saves = seen.losses[-1], seen.asked, saves or seen.due or seen.asked
            with self._aside() if validates or saves else nullcontext():
                if (validates or saves) and not trainer.is_finite():
                    raise TrainError(
                        f"weights are not finite after step {history.step}: a gradient overflowed there or shortly "
                        f"before; lower the learning rate, or check the data and the loss.{_kept(saver)}"
                    )
                if validates:
                    self.watchdog.beat(f"the validation after step {history.step}")
                    with trainer.averaged():
                        self._validate(loss, rate, feed, progress)
                    history.bad_examples = dict(feed.bad)
                    progress.note(history.best_metrics or {})
                if saves and saver is not None:
                    self.watchdog.beat(f"the checkpoint of step {history.step}")
                    trainer.save(saver, history)
                    saved = time.monotonic()
            if asked and not last:
                # Who leaves sooner may be taken for lost, and the others' writing be cut short.
                if saver is not None:
                    saver.wait()
                world.total(0.0)
                progress.say(f"Stopped at step {history.step:,} of {total:,}. {self._go_on}")
                raise KeyboardInterrupt

    def _step(self, feed: Feed, progress: Progress) -> Tensor:
        profile = self._profile
        if profile is None:
            return self.trainer.step(next(feed), self.history.step)
        with profile.batch():
            batch = next(feed)
        with profile.step():
            share = self.trainer.step(batch, self.history.step)
        began_s = time.monotonic()
        try:
            receipt = profile.taken()
            if receipt is not None:
                progress.say(receipt.describe())
        except NoProfile as error:
            progress.say(f"No profile: {error}")
        self.pace.leave_out(time.monotonic() - began_s)
        if profile.is_done:
            self._profile = None
        return share

    @contextmanager
    def _aside(self) -> Generator[None]:
        """What is done inside is of no step."""
        began_s = time.monotonic()
        with nullcontext() if self._profile is None else self._profile.aside():
            yield
        self.pace.leave_out(time.monotonic() - began_s)

    def _validate(self, train_loss: float, rate: Rate, feed: Feed, progress: Progress) -> None:
        trainer, history, recipe = self.trainer, self.history, self.trainer.recipe
        metrics: dict[str, float] = {}
        if self._validation is not None:
            metrics = trainer.validate(self._validation, bad=feed.bad, notice=progress.say)
        self._write(
            {
                "step": history.step,
                "seconds": round(history.seconds, 3),
                "waited_s": round(feed.waited_s, 3),
                **rate.fields(),
                "samples": history.step * recipe.batch_size,
                "train_loss": train_loss,
                "learning_rate": float(trainer.optimizer.param_groups[0]["lr"]),
                **{f"validation_{name}": value for name, value in metrics.items()},
            }
        )
        if self._validation is None:
            # There is nothing to choose by: the newest are the best.
            trainer.keep_best(history, {"loss": train_loss})
        elif recipe.is_better(metrics[recipe.best], history.best_value):
            trainer.keep_best(history, metrics)

    def take_best(self) -> tuple[str, dict[str, float]]:
        """Give the network its best weights, at the end.

        Returns:
            The hash of the last weights, and the metrics of the best.
        """
        trainer, history = self.trainer, self.history
        assert history.best_weights is not None, history.step
        assert history.best_metrics is not None, history.step
        last_hash = state_hash(trainer.whole_state())
        trainer.module.load_state_dict(history.best_weights)
        return last_hash, dict(history.best_metrics)


def _restored(trainer: Trainer, folder: Path) -> History:
    """From the newest checkpoint, whose files are let go of."""
    checkpoint = newest_checkpoint(folder, trainer.world)
    return trainer.restore(checkpoint) if checkpoint else History()


def _check_finite(losses: list[float], step: int, saver: Saver | None) -> None:
    """See that the losses of the steps up to one are numbers."""
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            at = step - len(losses) + 1 + index
            advice = "lower the learning rate or check the data"
            raise TrainError(f"the loss is {loss} at step {at}; {advice}.{_kept(saver)}")


def _kept(saver: Saver | None) -> str:
    return " The last checkpoint is kept." if saver is not None else ""


def _say_of_feed(feed: Feed, bad: dict[str, int], seconds: float, progress: Progress) -> None:
    if bad:
        names = ", ".join(sorted(bad)[:BAD_NAMED]) + (", ..." if len(bad) > BAD_NAMED else "")
        progress.say(
            f"{len(bad):,} bad examples or files were replaced, {sum(bad.values()):,} times in all: {names}. "
            f"{RUN_FILE} has all of them."
        )
    if feed.waited_s > max(WAITED_SHARE * seconds, WAITED_S):
        progress.say(
            f"{feed.waited_s / seconds:.0%} of the time the steps waited for examples; "
            f"decode them beforehand ('penstock shard'), or give the recipe more workers."
        )


def _check_inputs(application: Application, data: Data) -> None:
    """Refuse data of another spec than the application's now, and not at the end of the training."""
    spec = application.input
    for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if part is None:
            continue
        # Of a live application, whole signals are learned from, of any one length.
        frames = part.input_shape[:1] if application.live is not None else spec.shape[:1]
        same = part.input_dtype == spec.numpy_dtype
        # What is prepared are fractions where pictures that were decoded beforehand are bytes.
        same = same or (application.prepare is not None and np.can_cast(part.input_dtype, spec.numpy_dtype))
        if not same or part.input_shape != (*frames, *spec.shape[1:]):
            raise TrainError(
                f"the {name} inputs are {part.input_dtype}{list(part.input_shape)}; application "
                f"{application.name!r} declares {spec.describe()}."
            )
