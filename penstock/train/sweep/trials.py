"""The trials of a sweep: an Optuna study in a journal file, which a later command goes on with."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner, NopPruner
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from penstock.core.errors import TrainError
from penstock.train.report.run_log import writing
from penstock.train.sweep.ranges import Choices, NumberRange, SearchSpace

JOURNAL_FILE = "journal.log"
STUDY = "penstock"
REASON = "reason"
Outcome = Literal["running", "complete", "pruned", "failed"]
_OUTCOMES: dict[TrialState, Outcome] = {
    TrialState.RUNNING: "running",
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """A trial of a sweep.

    Args:
        number: From 0.
        outcome: `"running"`, also of a trial that was interrupted with the sweep; `"complete"`, `"pruned"` or
            `"failed"`.
        settings: The varied settings.
        value: The best value of the metric so far; None before the first.
        validations: Validations whose value was reported.
        reason: The error of a trial that failed.
    """

    number: int
    outcome: Outcome
    settings: dict[str, Any]
    value: float | None
    validations: int
    reason: str | None


@final
class Trials:
    """Choose the settings of trials and record their results.

    The choice of a trial depends on the seed, its number and the results before it alone, so that a sweep which is
    interrupted makes the choices of an undisturbed one. If there are no more combinations than trials, each is
    trained once.

    Args:
        folder: The folder of the sweep, which this process holds.
        space: The settings.
        mode: `"max"` if a larger value of the metric is better, else `"min"`.
        seed: Seed of the choices.
        prunes: Stop trials that are worse than the median of the others.

    Raises:
        TrainError: The journal is damaged, or cannot be written.
    """

    def __init__(
        self, folder: Path, space: SearchSpace, mode: Literal["max", "min"], *, seed: int, prunes: bool
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._space, self._mode, self._seed = folder, space, mode, seed
        self._distributions = {name: _distribution(values) for name, values in space.varied.items()}
        file = folder / JOURNAL_FILE
        with writing(folder):
            _mend(file)
        try:
            with writing(folder):
                self._study = optuna.create_study(
                    storage=JournalStorage(JournalFileBackend(str(file.resolve()))),
                    study_name=STUDY,
                    direction="maximize" if mode == "max" else "minimize",
                    pruner=MedianPruner() if prunes else NopPruner(),
                    load_if_exists=True,
                )
        except (ValueError, KeyError) as error:
            raise TrainError(
                f"{file} is damaged ({error}); restore it, or give --fresh to begin a new sweep beside it."
            ) from None

    @property
    def records(self) -> list[TrialRecord]:
        """All trials, by number."""
        found = self._study.get_trials(deepcopy=False, states=tuple(_OUTCOMES))
        return [self._record(trial) for trial in found]

    @property
    def best(self) -> TrialRecord | None:
        """The best complete trial; None before the first."""
        complete = [each for each in self.records if each.outcome == "complete" and each.value is not None]
        sign = -1 if self._mode == "max" else 1
        return min(complete, key=lambda each: sign * (each.value or 0.0), default=None)

    def begin(self, trials: int) -> TrialRecord | None:
        """Choose the settings of the next trial.

        Args:
            trials: The number of trials of the whole sweep.

        Returns:
            The trial; None if there are enough, or every combination has one.
        """
        number = len(self.records)
        if number >= trials:
            return None
        # Numbers of a generator that is seeded once would begin anew with each command.
        seed = random.Random(f"{self._seed} {number}").getrandbits(32)
        self._study.sampler = TPESampler(seed=seed)
        with writing(self._folder):
            waits = self._study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            combinations = self._space.combinations(trials)
            if combinations is not None and not waits:
                random.Random(self._seed).shuffle(combinations)
                used = [each.settings for each in self.records]
                left = [each for each in combinations if each not in used]
                if not left:
                    return None
                self._study.enqueue_trial({name: self._stored(name, value) for name, value in left[0].items()})
            return self._record(self._study.ask(fixed_distributions=self._distributions).number)

    def report(self, number: int, validation: int, value: float) -> None:
        """Record the value of the metric at a validation, which are counted from 1; one is recorded once."""
        trial = self._trial(number)
        if validation not in self._frozen(number).intermediate_values:
            with writing(self._folder):
                trial.report(value, validation)

    def is_worse(self, number: int) -> bool:
        """Check whether a trial is worse than the median of the others at its last validation.

        Before 5 complete trials none is.
        """
        return bool(self._frozen(number).intermediate_values) and self._trial(number).should_prune()

    def complete(self, number: int, value: float) -> None:
        """Record the result of a trial."""
        with writing(self._folder):
            self._study.tell(number, value)

    def prune(self, number: int) -> None:
        """Record that a trial was stopped."""
        with writing(self._folder):
            self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, reason: str) -> None:
        """Record that a trial failed."""
        with writing(self._folder):
            self._trial(number).set_user_attr(REASON, reason)
            self._study.tell(number, state=TrialState.FAIL)

    def _frozen(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]

    def _trial(self, number: int) -> Trial:
        return Trial(self._study, self._frozen(number)._trial_id)  # pyright: ignore[reportPrivateUsage]

    def _stored(self, name: str, value: Any) -> Any:
        """Return a value as Optuna stores it: choices as JSON, because it knows no lists among them."""
        return json.dumps(value) if isinstance(self._space.varied[name], Choices) else value

    def _record(self, trial: FrozenTrial | int) -> TrialRecord:
        found = self._frozen(trial) if isinstance(trial, int) else trial
        settings = {
            name: json.loads(found.params[name]) if isinstance(values, Choices) else found.params[name]
            for name, values in self._space.varied.items()
            if name in found.params
        }
        reported = [value for value in found.intermediate_values.values() if not math.isnan(value)]
        best = (max if self._mode == "max" else min)(reported, default=None)
        return TrialRecord(
            number=found.number,
            outcome=_OUTCOMES[found.state],
            settings=settings,
            value=found.value if found.state is TrialState.COMPLETE else best,
            validations=len(found.intermediate_values),
            reason=found.user_attrs.get(REASON),
        )


def _distribution(values: Choices | NumberRange) -> BaseDistribution:
    if isinstance(values, Choices):
        return CategoricalDistribution([json.dumps(value) for value in values.values])
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return FloatDistribution(values.low, values.high, log=values.is_log)


def _mend(file: Path) -> None:
    """Remove what a command that was killed left: Optuna's lock, and a last line that is not whole."""
    file.with_name(f"{file.name}.lock").unlink(missing_ok=True)
    if file.exists():
        whole = file.read_bytes().rpartition(b"\n")
        if whole[2]:
            with file.open("r+b") as journal:
                journal.truncate(len(whole[0]) + len(whole[1]))
