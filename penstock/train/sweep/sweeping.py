"""A sweep: trials of an application, some at a time, until there are enough."""

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from penstock.core.errors import ApplicationError, TrainError
from penstock.core.machine.cores import available_cores
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.source_files.unrun_sources import UnrunSources
from penstock.train.interrupt import Interrupt
from penstock.train.overrides import setting_text, with_overrides
from penstock.train.recipe import Recipe
from penstock.train.report.run_log import RUN_FILE, replace_text, writing
from penstock.train.run_folder import make_folder
from penstock.train.same_run import check_sources, check_unrun_sources
from penstock.train.sweep.ranges import SearchSpace
from penstock.train.sweep.trial_run import RunPlan, TrialRun
from penstock.train.sweep.trials import TrialRecord, Trials

SWEEP_FILE = "sweep.json"
POLL_S = 0.1
# Runs of a sweep that was killed end within seconds, and hold its folder until then.
HELD_S = 15.0
CANNOT_COMPARE = ", so that its trials cannot be compared; begin a new sweep"
# So many failures without any success are a mistake of the application, not of the settings.
MAX_FIRST_FAILURES = 3


@final
class SweepStopped(KeyboardInterrupt):
    """The user stopped the sweep, and its trials stopped too."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """The settings and limits of a sweep.

    Args:
        application: The application, as the command names it.
        folder: OUT.
        space: The settings.
        trials: The number of trials.
        seed: Seed of the choices.
        prunes: Stop trials that are worse than the median of the others.
        gpus: One for each trial at a time, as CUDA_VISIBLE_DEVICES names them; None on the CPU.
        jobs: Trials at a time.
        options: Further options of `penstock train`.
        accepts_changed_app: Go on although the application's sources changed.
    """

    application: str
    folder: Path
    space: SearchSpace
    trials: int
    seed: int = 0
    prunes: bool = True
    gpus: tuple[str, ...] | None = None
    jobs: int = 1
    options: tuple[str, ...] = ()
    accepts_changed_app: bool = False

    def environment(self, slot: int) -> dict[str, str]:
        """Return the variables of the trials in one of the `jobs` slots."""
        if self.gpus is not None:
            return {"CUDA_VISIBLE_DEVICES": self.gpus[slot]}
        if self.jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(1, available_cores() // self.jobs))}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResult:
    """The result of a sweep.

    Args:
        metric: The metric that the trials are compared by.
        mode: `"max"` if a larger value is better, else `"min"`.
        trials: All trials.
        best: The best complete trial; None if there is none.
    """

    metric: str
    mode: Literal["max", "min"]
    trials: list[TrialRecord]
    best: TrialRecord | None


def sweep(plan: SweepPlan, found: FoundApplication, say: Callable[[str], object]) -> SweepResult:
    """Run the trials of a sweep, or go on with those in its folder.

    Args:
        plan: What to do.
        found: The application.
        say: Called with a sentence for the user.

    Raises:
        TrainError: The settings, the recipe or the folder do not suit, another command sweeps there, the sweep in the
            folder is another one, or the first trials all failed.
        SweepStopped: The user stopped it; the same command goes on.
    """
    recipe = check_space(found, plan.space)
    selection = recipe.selection
    make_folder(plan.folder)
    with _held(plan.folder) as lock:
        _keep_identity(plan, found, recipe)
        prunes = plan.prunes and "selection.every_epochs" not in plan.space.varied
        if plan.prunes and not prunes:
            say("No trial is pruned, because selection.every_epochs varies: validations are at different epochs.")
        trials = Trials(plan.folder, plan.space, selection.mode, seed=plan.seed, prunes=prunes)
        _Running(plan, trials, selection.metric, lock, say).run()
        return SweepResult(metric=selection.metric, mode=selection.mode, trials=trials.records, best=trials.best)


def check_space(found: FoundApplication, space: SearchSpace) -> Recipe:
    """Check the settings of a sweep against the application's recipe, and return the recipe of its first trial.

    Raises:
        TrainError: There is no such setting, a value is out of range, or trials with these settings cannot be compared.
    """
    recipe: Recipe = found.recipe()
    recipes = [with_overrides(recipe, settings) for settings in space.probes()]
    first = recipes[0]
    for name in space.varied:
        if name in ("selection.metric", "selection.mode"):
            raise TrainError(f"{name} varies, but the trials are compared by it; give one value.")
        if name.startswith("loss.") and first.selection.metric == "loss":
            raise TrainError(
                f"{name} varies and changes the loss itself, by which the trials are compared; compare them by a "
                f"metric, such as --set selection.metric=accuracy --set selection.mode=max."
            )
        if name == "callbacks":
            raise TrainError("callbacks vary, which only watch a training; give one list, such as [[wandb]].")
    validation: Any = first.data().validation
    if validation is None or not len(validation):
        raise TrainError(
            f"the recipe of {found.application.name!r} has no validation examples, by which trials are compared; "
            f"give it some: Data(train=..., validation=...)."
        )
    return first


@contextmanager
def _held(folder: Path) -> Generator[int]:
    """Hold the folder of a sweep; the lock is free when this process and all runs that it started have ended."""
    with writing(folder):
        file = (folder / ".lock").open("w")
    deadline_s = time.monotonic() + HELD_S
    with file:
        while not _is_locked(file.fileno()):
            if time.monotonic() > deadline_s:
                raise TrainError(
                    f"another command sweeps in {folder} now, or a trial of one that was killed still ends; wait for "
                    f"its end, or give another --out."
                )
            time.sleep(POLL_S)
        yield file.fileno()


def _is_locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_unrun_sweep(plan: SweepPlan) -> None:
    """Refuse sources that changed since the sweep in the folder began, before any of them is imported.

    Raises:
        TrainError: They changed, and the plan does not accept it.
        ApplicationError: The application is not there.
    """
    file = plan.folder / SWEEP_FILE
    if plan.accepts_changed_app or not file.exists():
        return
    then = _read_identity(file)
    # Another application is another sweep, which is said after the import.
    if then.get("sources") and _home(plan.application) == _home(str(then.get("application"))):
        check_unrun_sources(then, plan.application, plan.folder, CANNOT_COMPARE)


def _home(application: str) -> Path | None:
    try:
        return UnrunSources.of(application).home
    except ApplicationError:
        return None


def _read_identity(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise TrainError(f"{file} is not JSON ({error}); restore it, or give --fresh.") from None


def _keep_identity(plan: SweepPlan, found: FoundApplication, recipe: Recipe) -> None:
    """Record what a sweep is, or compare it with the record of the one in the folder."""
    file = plan.folder / SWEEP_FILE
    now: dict[str, Any] = {
        "application": found.reference,
        "settings": plan.space.texts(),
        "seed": plan.seed,
        "prune": plan.prunes,
        "metric": recipe.selection.metric,
        "mode": recipe.selection.mode,
    }
    if (plan.folder / RUN_FILE).exists():
        raise TrainError(f"{plan.folder} holds a single run; give the sweep another --out.")
    if not file.exists():
        hashes = {"sources": found.source_sha256(), "code": found.code_sha256()}
        replace_text(file, json.dumps(now | hashes, indent=2) + "\n")
        return
    then = _read_identity(file)
    if different := identity_differences(then, now):
        raise TrainError(
            f"{plan.folder} holds a sweep that this command does not go on with: {'; '.join(different)}. Give the same "
            f"options, another --out, or --fresh to begin a new sweep beside it."
        )
    if not plan.accepts_changed_app:
        check_sources(then, found, plan.folder, CANNOT_COMPARE)


def identity_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between a command and the sweep in its folder, one phrase each."""
    found: list[str] = []
    given, settings = then.get("settings", {}), now["settings"]
    for name in sorted({*given, *settings}):
        if given.get(name) != settings.get(name):
            phrases = (settings.get(name, "not given"), given.get(name, "not given"))
            found.append(f"{name} is {phrases[0]}, the sweep's is {phrases[1]}")
    for name, value in now.items():
        if name != "settings" and then.get(name) != value:
            found.append(f"{name} is {setting_text(value)}, the sweep's is {setting_text(then.get(name))}")
    return found


@final
class _Running:
    """The trials that run now."""

    def __init__(self, plan: SweepPlan, trials: Trials, metric: str, lock: int, say: Callable[[str], object]) -> None:
        self._plan, self._trials, self._metric, self._lock, self._say = plan, trials, metric, lock, say
        # By their slots.
        self._runs: dict[int, TrialRun] = {}

    def run(self) -> None:
        """Run trials until there are enough."""
        interrupted = [each for each in self._trials.records if each.outcome == "running"]
        try:
            with Interrupt() as interrupt:
                while True:
                    if interrupt.requested:
                        for run in self._runs.values():
                            run.stop()
                    else:
                        self._fill(interrupted)
                    if not self._runs:
                        break
                    for slot, run in list(self._runs.items()):
                        if self._is_over(run, is_stopping=interrupt.requested):
                            del self._runs[slot]
                    time.sleep(POLL_S)
        finally:
            for run in self._runs.values():
                run.kill()
        if interrupt.requested:
            raise SweepStopped

    def _fill(self, interrupted: list[TrialRecord]) -> None:
        """Start trials in the free slots; those that were interrupted come first."""
        for slot in sorted(set(range(self._plan.jobs)) - set(self._runs)):
            record = interrupted.pop(0) if interrupted else self._trials.begin(self._plan.trials)
            if record is None:
                return
            shown = " ".join(f"{name}={_short(value)}" for name, value in record.settings.items())
            folder = trial_folder(self._plan.folder, record.number)
            goes_on = " goes on" if (folder / RUN_FILE).exists() else ""
            self._say(f"Trial {record.number}{goes_on}: {shown}")
            run_plan = RunPlan(
                application=self._plan.application,
                folder=folder,
                settings={**self._plan.space.fixed, **record.settings},
                options=self._plan.options,
                environment=self._plan.environment(slot),
                keeps=self._lock,
            )
            run = TrialRun(record.number, run_plan, self._metric, record.validations)
            self._runs[slot] = run
            if self._trials.is_worse(record.number):
                # The sweep was killed between the report and the decision.
                run.stop()

    def _is_over(self, run: TrialRun, *, is_stopping: bool) -> bool:
        """Report the new validations of a run, stop it if it is worse than others, and record its end."""
        number = run.number
        # Before the validations, so that none of an ended run is missed.
        has_ended = run.has_ended
        if not run.is_stopped:
            for validation, value, is_last in run.validations():
                self._trials.report(number, validation, value)
                # By the validations alone, not by how far the run is now, so that a repeated sweep decides the same.
                if not is_last and self._trials.is_worse(number):
                    run.stop()
                    break
        if not has_ended:
            return False
        value = run.result()
        if run.is_stopped and not is_stopping:
            self._trials.prune(number)
            self._say(f"Trial {number}: pruned, worse than the median of the trials before.")
        elif value is not None and math.isfinite(value):
            self._trials.complete(number, value)
            best = self._trials.best
            mark = ", the best so far" if best is not None and best.number == number else ""
            self._say(f"Trial {number}: {self._metric} {value:.4f}{mark}.")
        elif not is_stopping:
            self._fail(number, run.failure() if value is None else f"its {self._metric} is {value}")
        return True

    def _fail(self, number: int, reason: str) -> None:
        self._trials.fail(number, reason)
        self._say(f"Trial {number} failed: {reason}")
        outcomes = [each.outcome for each in self._trials.records]
        if outcomes.count("failed") >= MAX_FIRST_FAILURES and not {"complete", "pruned"} & set(outcomes):
            raise TrainError(f"the first {MAX_FIRST_FAILURES} trials all failed, the last with: {reason}")


def trial_folder(folder: Path, number: int) -> Path:
    """Return the folder of a trial's run."""
    return folder / f"{number:03d}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else setting_text(value)
