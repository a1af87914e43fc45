"""Records of `penstock.fit`, and the folder that a stopped training resumes from."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, final

from penstock.core.errors import TrainError
from penstock.core.initial import StartedFrom
from penstock.train.callbacks.callback import Callback, Ended, Stop, Validated
from penstock.train.data.examples import Examples
from penstock.train.history import History, resume
from penstock.train.report.run_comparison import read_run
from penstock.train.report.run_log import RUN_FILE
from penstock.train.report.throughput import Rate
from penstock.train.run_folder import RunFolder, described, finished_fields, started
from penstock.train.run_owner import RunAttempt
from penstock.train.same_data import check_data, fingerprints
from penstock.train.trainer import Trainer

# Entries of an optimizer's groups that do not change its result; the learning rate is recorded by itself.
_NOT_SETTINGS = ("fused", "foreach", "capturable", "differentiable", "params", "param_names", "lr", "initial_lr")
# Settings that a resumed training may change.
_MAY_CHANGE = ("loading.workers", "execution.compile", "execution.graph")


@final
class FitRecords(Callback):
    """Figures of the validations, and with a folder the run's files too.

    Args:
        out: The folder; None for none.
        trainer: The trainer; it is restored from the folder's newest checkpoint.
        train: The training set.
        validation: The validation set, if there is one.
        initial: The weights that the training started from, for run.json.
        attempt: This attempt of the run, if there is a folder.

    Attributes:
        lines: A record for each validation.
        start_event: The start of the training, for its callbacks.
        history: Progress of the training.

    Raises:
        TrainError: The folder holds another training.
    """

    def __init__(
        self,
        out: Path | None,
        trainer: Trainer,
        train: Examples,
        validation: Examples | None,
        initial: StartedFrom | None = None,
        attempt: RunAttempt | None = None,
    ) -> None:
        self.lines: list[dict[str, Any]] = []
        self.history = History()
        name = type(trainer.module).__name__
        self.start_event = started(trainer, self.history, name, None)
        self._trainer = trainer
        self._folder: RunFolder | None = None
        if out is None:
            return
        assert attempt is not None, out
        self._learned = _made_by_functions(trainer)
        self._data = fingerprints({"train": train, "validation": validation}, trainer.world)
        if (out / RUN_FILE).exists():
            self._check(out)
        self.history = resume(out, trainer)
        began = None if initial is None else asdict(initial)
        identity = {"name": name, "learned": self._learned, "data": self._data, "initial": began}
        self._folder = RunFolder(out, trainer, identity, self.history.step, attempt)
        self.lines += self._folder.before
        self.start_event = started(trainer, self.history, name, out, self._folder.before)

    def validation(self, event: Validated) -> None:
        """Record the figures of a validation."""
        self.lines.append(dict(event.figures))
        if self._folder is not None:
            self._folder.validation(event)

    def end(self, event: Ended) -> None:
        """Draw the curves, if there is a folder."""
        if self._folder is not None:
            self._folder.end(event)

    def finish(
        self, *, metrics: dict[str, float], parameter_hash: str, rate: Rate | None, stop: Stop | None = None
    ) -> None:
        """Write the result, if there is a folder."""
        if self._folder is not None:
            bad = self.history.bad_examples
            self._folder.write(finished_fields(self.history, metrics, parameter_hash, rate, bad, stop))

    def _check(self, out: Path) -> None:
        fields = read_run(out).fields
        before = {"learned": fields.get("learned"), **fields.get("recipe", {})}
        now = {"learned": self._learned, **described(self._trainer)["recipe"]}
        # A run of an older version has fewer fields.
        other = [name for name in now if name in before and now[name] != before[name] and name not in _MAY_CHANGE]
        if "application" in fields or other:
            what = f"of the application {fields['name']!r}" if "application" in fields else "of something else"
            why = f" ({other[0]}: {before.get(other[0])!r} and now {now[other[0]]!r})" if other else ""
            raise TrainError(f"{out} holds a training {what}{why}; go on as it began, or choose another folder.")
        check_data(self._data, out, "go on as it began, or choose another folder")


def _made_by_functions(trainer: Trainer) -> dict[str, Any]:
    """Describe what the functions of a recipe made, as far as JSON can hold it."""
    recipe, schedule = trainer.recipe, trainer.schedule
    settings = [
        {name: str(value) for name, value in sorted(group.items()) if name not in _NOT_SETTINGS}
        | {"lr": str(float(group.get("initial_lr", group["lr"])))}
        for group in trainer.optimizer.param_groups
    ]
    return {
        "optimizer": [type(trainer.optimizer).__name__, settings],
        "schedule": None if schedule is None else type(schedule).__name__,
        "loss": _name_of(recipe.loss),
        "ema": None if recipe.ema is None else asdict(recipe.ema),
        "metrics": sorted(recipe.metrics),
    }


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        # The representation of a partial has the function's address.
        return f"{_name_of(function.func)}{function.args}{function.keywords}"
    return getattr(function, "__qualname__", repr(function))
