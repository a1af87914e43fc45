"""The training loop: steps, validations and checkpoints.

A step depends on the parameters, the optimizer's state and the step's number alone: its examples, augmentation and
dropout all follow from (seed, step), so that a resumed run continues exactly.
"""

import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Literal, final

from torch import Tensor

from penstock.core.errors import PeersLost, PenstockError, TrainError, one_line
from penstock.core.wording.counted import counted
from penstock.train.callbacks.callback import CheckpointWritten, Ended, Started, StepTaken, Stop, Validated
from penstock.train.callbacks.dispatch import Callbacks
from penstock.train.checkpoint.format import checkpoint_places, state_hash, step_folder
from penstock.train.checkpoint.saver import Saver
from penstock.train.data.arrays import describe_nonfinite_targets
from penstock.train.data.examples import Examples
from penstock.train.data.loader import Loader
from penstock.train.history import History, save_checkpoint
from penstock.train.interrupt import Interrupt
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.profile.profiler import NoProfile, Profile
from penstock.train.report.feed_report import FeedFigures, feed_figures, feed_sentence
from penstock.train.report.progress import Progress
from penstock.train.report.run_log import RUN_FILE
from penstock.train.report.throughput import Pace, Rate, WarmSteps
from penstock.train.run_owner import RunAttempt
from penstock.train.step.host_sync import HostSync, SharedStatus
from penstock.train.step.schedules import check_schedule
from penstock.train.trainer import Trainer

MAX_BAD_NAMED = 5
# Validation examples that are tried before the first step.
TRIED_EXAMPLES = 8
# Several processes agree on a callback's wish to stop after steps whose number is a multiple of this, so that the last
# step depends on no clock; at validations and checkpoints by steps too.
AGREE_EVERY_STEPS = 64


@final
class Stopped(KeyboardInterrupt):
    """The user stopped the training, and all processes stopped after the same step."""


@final
class Loop:
    """The remaining steps of a training, with their validations and checkpoints.

    Args:
        trainer: Takes the steps.
        train: The training set.
        validation: Held out to select the best weights; None to keep the last ones.
        history: Progress of the training.
        watchdog: This process's watchdog.
        checkpoints: The folder of checkpoints; None for none.
        attempt: This attempt of the run, in the first process: once a newer one has begun, no checkpoint is named.
        callbacks: Called with the events; those of other processes than the first have none.
        start_event: The start, for the callbacks.
        resume_hint: A sentence for a user who stops the training.
        profile: Profiles some steps; None for none.

    Raises:
        TrainError: The schedule needs more than the step's number.
    """

    def __init__(
        self,
        trainer: Trainer,
        train: Examples,
        validation: Examples | None,
        history: History,
        watchdog: Watchdog,
        *,
        checkpoints: Path | None,
        attempt: RunAttempt | None = None,
        callbacks: Callbacks,
        start_event: Started,
        resume_hint: str,
        profile: Profile | None = None,
    ) -> None:
        check_schedule(trainer.schedule)
        self.trainer, self.history, self.watchdog = trainer, history, watchdog
        self.pace, self._warm = Pace(*trainer.mfu_of_one), WarmSteps()
        self._train, self._validation, self._checkpoints = train, validation, checkpoints
        self._attempt = attempt
        self.callbacks, self._start_event = callbacks, start_event
        self._resume_hint, self._profile = resume_hint, profile
        # Set when all steps are taken.
        self.feed: FeedFigures | None = None
        # The step of a checkpoint that is being written.
        self._saving: int | None = None

    def run(self, progress: Progress) -> None:
        """Take the remaining steps; an interrupt stops after the current one.

        Raises:
            TrainError: The loss or the weights are not finite, a checkpoint is damaged, or another process is lost.
            Stopped: The user stopped the training; a checkpoint was written if there is a folder for it.
        """
        trainer, history, world = self.trainer, self.history, self.trainer.world
        with Interrupt() as interrupt, progress:
            progress.notify(f"Training on {world.describe()}, in {trainer.recipe.precision}.")
            if self.pace.notice is not None:
                progress.notify(self.pace.notice)
            for notice in trainer.layout.notices:
                progress.notify(notice)
            trainer.notify = progress.notify
            self.watchdog.beat("the start of callbacks")
            self.callbacks.notify = progress.notify
            self.callbacks.start(self._start_event)
            if history.step == 0 and self._validation is not None:
                self._try_validation(self._validation, progress)
            started_s = time.monotonic()
            with (
                nullcontext() if self._checkpoints is None else Saver(self._checkpoints, world, self._attempt) as saver,
                trainer.feed(self._train, history.step, progress.notify) as feed,
            ):
                feed.bad.update(history.bad_examples)
                self._steps(feed, saver, progress, interrupt)
            self._report_checkpoint()
            _report_bad(world.sum_counts(feed.bad), progress)
            steps_per_s, per_step = self._warm.steps_per_s, trainer.recipe.batch_size / world.size
            examples_per_s = None if steps_per_s is None else steps_per_s * per_step
            self.feed = feed_figures(feed, time.monotonic() - started_s, examples_per_s)
            if said := feed_sentence(self.feed, in_memory=self._train.in_memory):
                progress.notify(said)

    def _try_validation(self, validation: Examples, progress: Progress) -> None:
        """Say at once what fails in a validation: the first one may be hours away, and would end the training."""
        self.watchdog.beat("the trial of a validation")
        fault = self.trainer.try_validation(validation, TRIED_EXAMPLES)
        if fault is not None:
            tried = counted(min(TRIED_EXAMPLES, len(validation)), "validation example")
            progress.notify(
                f"Note: a validation of the untrained network on {tried} fails ({fault}); the first validation, after "
                f"step {min(self._steps_between_validations(), self.trainer.total_steps):,}, ends the training if it "
                f"fails like that."
            )

    def _steps(self, feed: Loader, saver: Saver | None, progress: Progress, interrupt: Interrupt) -> None:
        trainer, history, policy = self.trainer, self.history, self.trainer.recipe.checkpoints
        total, sync, from_step = trainer.total_steps, HostSync(trainer.world), history.step
        validates_every = self._steps_between_validations()
        saved_s = started_s = time.monotonic()
        seconds_before = history.seconds
        self.pace.begin(started_s)

        def synchronized() -> SharedStatus:
            due = policy.every_steps is None and time.monotonic() - saved_s > policy.every_s
            # Defer timed checkpoints while one is being written.
            due = due and not (saver is not None and saver.is_busy)
            known = sync.wait(stops=interrupt.requested, due=due, failed=saver is not None and saver.has_failed)
            if known.failed and saver is not None:
                saver.check()
            history.seconds = seconds_before + time.monotonic() - started_s
            history.bad_examples = dict(feed.bad)
            self._warm.synchronized(history.step - from_step, time.monotonic(), feed.waited_s)
            self._count(known.losses, progress)
            return known

        # A run that was stopped by a callback and resumed takes no step.
        ends = history.best_weights is not None and self._ends(agrees=True)
        while history.step < total and not ends:
            self.watchdog.beat(f"step {history.step}")
            sync.step_taken(self._step(feed, progress))
            history.step += 1
            last = history.step == total
            validates = last or history.step % validates_every == 0
            saves = last or (policy.every_steps is not None and history.step % policy.every_steps == 0)
            agrees = validates or saves or self._may_end_at(history.step)
            known = synchronized() if agrees or sync.is_due else None
            if self.callbacks.takes_steps:
                losses = () if known is None else known.losses
                self.callbacks.step(StepTaken(step=history.step, time_s=time.monotonic(), losses=losses))
            ends = self._ends(agrees=agrees)
            known = synchronized() if known is None and ends else known
            if known is None:
                continue
            validates = validates or ends
            saves = saves or ends or known.due or known.stops
            if saver is not None and not saver.is_busy:
                self._report_checkpoint()
            rate = self.pace.reset(time.monotonic()) if validates else None
            with self._outside_steps() if validates or saves else nullcontext():
                if (validates or saves) and not trainer.is_finite():
                    raise TrainError(
                        f"weights are not finite after step {history.step}: a gradient overflowed there or shortly "
                        f"before; lower the learning rate, or check the data and the loss.{self._kept()}"
                    )
                if (validates or saves) and trainer.skips_all_steps():
                    raise TrainError(
                        f"gradients are NaN or infinite at every loss scale of fp16, so that all steps are skipped, up "
                        f"to step {history.step}; check the data and the loss: in precision 'fp32' the first of these "
                        f"steps ends the training.{self._kept()}"
                    )
                if rate is not None:
                    self._validate(known.losses[-1], rate, feed, progress)
                    ends = ends or self._ends(agrees=True)
                if (saves or ends) and saver is not None:
                    self._save(saver)
                    saved_s = time.monotonic()
            if known.stops and not last:
                self._stop(saver, progress)
        if ends and history.step < total:
            reason = "" if self.callbacks.stop is None else f": {self.callbacks.stop.reason}"
            progress.notify(f"Stopped by a callback after step {history.step:,} of {total:,}{reason}.")

    def _may_end_at(self, step: int) -> bool:
        """Check whether several processes agree after this step on a callback's wish to stop."""
        trainer = self.trainer
        return trainer.world.size > 1 and bool(trainer.recipe.callbacks) and step % AGREE_EVERY_STEPS == 0

    def _ends(self, *, agrees: bool) -> bool:
        """Check whether a callback stops the training. Collective if `agrees`."""
        world, wish = self.trainer.world, self.callbacks.stop is not None
        if world.size == 1:
            return wish
        return agrees and bool(self.trainer.recipe.callbacks) and world.broadcast_on_host([float(wish)]) == [1.0]

    def _save(self, saver: Saver) -> None:
        self.watchdog.beat(f"the checkpoint of step {self.history.step}")
        save_checkpoint(saver, self.trainer, self.history)
        # The one before is complete.
        self._report_checkpoint()
        self._saving = self.history.step

    def _report_checkpoint(self) -> None:
        if self._saving is not None and self._checkpoints is not None:
            step, self._saving = self._saving, None
            self.callbacks.checkpoint(CheckpointWritten(step=step, folder=step_folder(self._checkpoints, step)))

    def _steps_between_validations(self) -> int:
        recipe = self.trainer.recipe
        return max(1, round(recipe.selection.every_epochs * len(self._train) / recipe.batch_size))

    def _step(self, feed: Loader, progress: Progress) -> Tensor:
        profile = self._profile
        if profile is None:
            return self.trainer.step(next(feed), self.history.step)
        share = profile.step(self.trainer, feed, self.history.step)
        began_s = time.monotonic()
        try:
            breakdown = profile.taken()
            if breakdown is not None:
                progress.notify(breakdown.describe())
        except NoProfile as error:
            progress.notify(f"No profile: {error}")
        self._leave_out(time.monotonic() - began_s)
        if profile.is_done:
            self._profile = None
        return share

    def _kept(self) -> str:
        kept = self._checkpoints is not None and checkpoint_places(self._checkpoints)
        return " The last checkpoint is kept." if kept else ""

    def _count(self, losses: list[float], progress: Progress) -> None:
        """Check and report the losses of the steps since the last synchronization."""
        step = self.history.step
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            if not math.isfinite(loss):
                found = describe_nonfinite_targets(self._train, "train")
                remedy = f"lower the learning rate or check the data{found and f': {found}'}"
                raise TrainError(f"the loss is {loss} at step {number}; {remedy}.{self._kept()}")
        self.pace.taken(len(losses) * self.trainer.recipe.batch_size)
        rate = self.pace.rate(time.monotonic())
        for loss in losses:
            progress.advance(loss, rate)

    @contextmanager
    def _outside_steps(self) -> Generator[None]:
        """Exclude what runs in the context from the time of the steps."""
        began_s = time.monotonic()
        with nullcontext() if self._profile is None else self._profile.aside():
            yield
        self._leave_out(time.monotonic() - began_s)

    def _leave_out(self, seconds: float) -> None:
        self.pace.leave_out(seconds)
        self._warm.leave_out(seconds)

    def _validate(self, train_loss: float, rate: Rate, feed: Loader, progress: Progress) -> None:
        trainer, history, recipe = self.trainer, self.history, self.trainer.recipe
        self.watchdog.beat(f"the validation after step {history.step}")
        with trainer.ema_weights():
            metrics: dict[str, float] = {}
            if self._validation is not None:
                metrics = trainer.validate(self._validation, bad=feed.bad)
            figures: dict[str, float] = {
                "step": history.step,
                "seconds": round(history.seconds, 3),
                "waited_s": round(feed.waited_s, 3),
                **rate.fields(),
                "samples": history.step * recipe.batch_size,
                "train_loss": train_loss,
                "learning_rate": float(trainer.optimizer.param_groups[0]["lr"]),
                **{f"validation_{name}": value for name, value in metrics.items()},
            }
            # Without a validation set the last weights are the best.
            selected = metrics or {"loss": train_loss}
            if self._validation is not None and recipe.selection.metric == "loss" and math.isnan(metrics["loss"]):
                found = describe_nonfinite_targets(self._validation, "validation")
                remedy = f"check the data and the loss{found and f': {found}'}"
                raise TrainError(f"the loss of the validation set is nan; {remedy}.{self._kept()}")
            is_best = not metrics or recipe.selection.is_better(metrics[recipe.selection.metric], history.best_value)
            if is_best:
                history.keep_best(trainer, selected)
        self.callbacks.validation(Validated(step=history.step, figures=figures, is_best=is_best))
        history.bad_examples = dict(feed.bad)
        progress.note(history.best_metrics or {})

    def _stop(self, saver: Saver | None, progress: Progress) -> None:
        # A process that leaves early looks lost to the others, which would then abort their writing.
        if saver is not None:
            saver.wait()
        self._report_checkpoint()
        self.trainer.world.sum_on_host(0.0)
        progress.notify(f"Stopped at step {self.history.step:,} of {self.trainer.total_steps:,}. {self._resume_hint}")
        raise Stopped

    @property
    def stop(self) -> Stop | None:
        """The wish of the callback that stopped the training early, in the first process."""
        return self.callbacks.stop if self.history.step < self.trainer.total_steps else None

    @contextmanager
    def ending(self) -> Generator[None]:
        """Let callbacks know of an exception that ends the training in this context.

        Except where other processes are lost: this one is ended with them, perhaps before it notices.
        """
        try:
            yield
        except PeersLost:
            raise
        except KeyboardInterrupt:
            self._end("stopped", self.history.best_metrics or {})
            raise
        except BaseException as error:
            kind = "" if isinstance(error, PenstockError) else type(error).__name__
            said = f"{kind}: {one_line(error)}" if kind and str(error) else kind or one_line(error)
            self._end("failed", self.history.best_metrics or {}, said)
            raise

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Let callbacks know that the training is finished."""
        self._end("finished", metrics)

    def _end(
        self,
        state: Literal["finished", "stopped", "failed"],
        metrics: Mapping[str, float],
        error: str | None = None,
    ) -> None:
        reason = error if error is not None or self.stop is None else self.stop.reason
        self.callbacks.end(Ended(state=state, step=self.history.step, metrics=metrics, reason=reason))

    def load_best(self) -> tuple[str, dict[str, float]]:
        """Load the best weights into the network, at the end.

        Returns:
            The hash of the last weights, and the metrics of the best.
        """
        trainer, history = self.trainer, self.history
        assert history.best_weights is not None, history.step
        assert history.best_metrics is not None, history.step
        last_hash = state_hash(trainer.full_state())
        trainer.module.load_state_dict(history.best_weights)
        return last_hash, dict(history.best_metrics)


def _report_bad(bad: dict[str, int], progress: Progress) -> None:
    if bad:
        names = ", ".join(sorted(bad)[:MAX_BAD_NAMED]) + (", ..." if len(bad) > MAX_BAD_NAMED else "")
        progress.notify(
            f"{counted(len(bad), 'bad example or file was', 'bad examples or files were')} replaced, "
            f"{counted(sum(bad.values()), 'time')} in all: {names}. "
            f"{RUN_FILE} has all of them."
        )
