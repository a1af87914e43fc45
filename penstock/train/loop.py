"""The training loop: steps, validations and checkpoints.

A step depends on the parameters, the optimizer's state and the step's number alone: its examples, augmentation and
dropout all follow from (seed, step), so that a resumed run continues exactly.
"""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

from torch import Tensor

from penstock.core.errors import TrainError
from penstock.train.checkpoint.format import state_hash
from penstock.train.checkpoint.saver import Saver
from penstock.train.data.examples import Examples
from penstock.train.data.loader import Loader
from penstock.train.history import History, save_checkpoint
from penstock.train.interrupt import Interrupt
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.profile.profiler import NoProfile, Profile
from penstock.train.report.progress import Progress
from penstock.train.report.run_log import RUN_FILE
from penstock.train.report.throughput import Pace, Rate
from penstock.train.step.host_sync import HostSync
from penstock.train.step.schedules import check_schedule
from penstock.train.trainer import Trainer

# Report time spent waiting for examples above this share of a run and this many seconds.
WAITED_SHARE, WAITED_S = 0.1, 5.0
MAX_BAD_NAMED = 5


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
        write: Called with the figures of each validation.
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
        write: Callable[[dict[str, Any]], object],
        resume_hint: str,
        profile: Profile | None = None,
    ) -> None:
        check_schedule(trainer.schedule)
        self.trainer, self.history, self.watchdog = trainer, history, watchdog
        self.pace = Pace(*trainer.mfu_of_one)
        self._train, self._validation, self._checkpoints = train, validation, checkpoints
        self._write, self._resume_hint, self._profile = write, resume_hint, profile

    def run(self, progress: Progress) -> None:
        """Take the remaining steps; an interrupt stops after the current one.

        Raises:
            TrainError: The loss or the weights are not finite, a checkpoint is damaged, or another process is lost.
            KeyboardInterrupt: The user stopped the training; a checkpoint was written if there is a folder for it.
        """
        trainer, history, world = self.trainer, self.history, self.trainer.world
        with Interrupt() as interrupt, progress:
            if self.pace.notice is not None:
                progress.notify(self.pace.notice)
            if world.size > 1 or world.device.type != "cpu":
                progress.notify(f"Training on {world.describe()}.")
            for notice in trainer.layout.notices:
                progress.notify(notice)
            trainer.notify = progress.notify
            started_s = time.monotonic()
            with (
                nullcontext() if self._checkpoints is None else Saver(self._checkpoints, world) as saver,
                trainer.feed(self._train, history.step, progress.notify) as feed,
            ):
                feed.bad.update(history.bad_examples)
                self._steps(feed, saver, progress, interrupt)
            _report_loading(feed, world.sum_counts(feed.bad), time.monotonic() - started_s, progress)

    def _steps(self, feed: Loader, saver: Saver | None, progress: Progress, interrupt: Interrupt) -> None:
        trainer, history, policy = self.trainer, self.history, self.trainer.recipe.checkpoints
        total, sync = trainer.total_steps, HostSync(trainer.world)
        validates_every = self._steps_between_validations()
        saved_s = started_s = time.monotonic()
        seconds_before = history.seconds
        self.pace.begin(started_s)
        while history.step < total:
            self.watchdog.beat(f"step {history.step}")
            sync.step_taken(self._step(feed, progress))
            history.step += 1
            last = history.step == total
            validates = last or history.step % validates_every == 0
            saves = last or (policy.every_steps is not None and history.step % policy.every_steps == 0)
            if not (validates or saves or sync.is_due):
                continue
            due = policy.every_steps is None and time.monotonic() - saved_s > policy.every_s
            # Defer timed checkpoints while one is being written.
            due = due and not (saver is not None and saver.is_busy)
            known = sync.wait(stops=interrupt.requested, due=due, failed=saver is not None and saver.has_failed)
            if known.failed and saver is not None:
                saver.check()
            history.seconds = seconds_before + time.monotonic() - started_s
            history.bad_examples = dict(feed.bad)
            rate = self._count(known.losses, progress, saver, validates=validates)
            saves = saves or known.due or known.stops
            with self._outside_steps() if validates or saves else nullcontext():
                if (validates or saves) and not trainer.is_finite():
                    raise TrainError(
                        f"weights are not finite after step {history.step}: a gradient overflowed there or shortly "
                        f"before; lower the learning rate, or check the data and the loss.{_kept(saver)}"
                    )
                if validates:
                    self._validate(known.losses[-1], rate, feed, progress)
                if saves and saver is not None:
                    self.watchdog.beat(f"the checkpoint of step {history.step}")
                    save_checkpoint(saver, trainer, history)
                    saved_s = time.monotonic()
            if known.stops and not last:
                self._stop(saver, progress)

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
        self.pace.leave_out(time.monotonic() - began_s)
        if profile.is_done:
            self._profile = None
        return share

    def _count(self, losses: list[float], progress: Progress, saver: Saver | None, *, validates: bool) -> Rate:
        """Check and report the losses of the steps since the last synchronization."""
        step = self.history.step
        for number, loss in enumerate(losses, start=step - len(losses) + 1):
            if not math.isfinite(loss):
                raise TrainError(
                    f"the loss is {loss} at step {number}; lower the learning rate or check the data.{_kept(saver)}"
                )
        self.pace.taken(len(losses) * self.trainer.recipe.batch_size)
        rate = self.pace.reset(time.monotonic()) if validates else self.pace.rate(time.monotonic())
        for loss in losses:
            progress.advance(loss, rate)
        return rate

    @contextmanager
    def _outside_steps(self) -> Generator[None]:
        """Exclude what runs in the context from the time of the steps."""
        began_s = time.monotonic()
        with nullcontext() if self._profile is None else self._profile.aside():
            yield
        self.pace.leave_out(time.monotonic() - began_s)

    def _validate(self, train_loss: float, rate: Rate, feed: Loader, progress: Progress) -> None:
        trainer, history, recipe = self.trainer, self.history, self.trainer.recipe
        self.watchdog.beat(f"the validation after step {history.step}")
        with trainer.ema_weights():
            metrics: dict[str, float] = {}
            if self._validation is not None:
                metrics = trainer.validate(self._validation, bad=feed.bad)
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
                # Without a validation set the last weights are the best.
                history.keep_best(trainer, {"loss": train_loss})
            elif recipe.selection.is_better(metrics[recipe.selection.metric], history.best_value):
                history.keep_best(trainer, metrics)
        history.bad_examples = dict(feed.bad)
        progress.note(history.best_metrics or {})

    def _stop(self, saver: Saver | None, progress: Progress) -> None:
        # A process that leaves early looks lost to the others, which would then abort their writing.
        if saver is not None:
            saver.wait()
        self.trainer.world.sum_on_host(0.0)
        progress.notify(f"Stopped at step {self.history.step:,} of {self.trainer.total_steps:,}. {self._resume_hint}")
        raise KeyboardInterrupt

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


def _kept(saver: Saver | None) -> str:
    return " The last checkpoint is kept." if saver is not None else ""


def _report_loading(feed: Loader, bad: dict[str, int], seconds: float, progress: Progress) -> None:
    if bad:
        names = ", ".join(sorted(bad)[:MAX_BAD_NAMED]) + (", ..." if len(bad) > MAX_BAD_NAMED else "")
        progress.notify(
            f"{len(bad):,} bad examples or files were replaced, {sum(bad.values()):,} times in all: {names}. "
            f"{RUN_FILE} has all of them."
        )
    if feed.waited_s > max(WAITED_SHARE * seconds, WAITED_S):
        progress.notify(
            f"{feed.waited_s / seconds:.0%} of the time the steps waited for examples; "
            f"decode them beforehand ('penstock shard'), or give the recipe more workers."
        )
