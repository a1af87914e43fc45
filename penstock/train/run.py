"""A training run of an application, from its recipe to its bundle."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.application import Application
from penstock.core.errors import TrainError
from penstock.core.find_application import FoundApplication
from penstock.core.initial import StartedFrom
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.data.loader import first_inputs
from penstock.train.device_errors import explained
from penstock.train.history import History, restore_checkpoint
from penstock.train.initial_weights import started_from
from penstock.train.loop import Loop
from penstock.train.numerics import numerics
from penstock.train.parallel.layout import TRACED_EXAMPLES
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.parallel.world import World
from penstock.train.profile.profiler import Profile
from penstock.train.recipe import Data, Recipe
from penstock.train.report.progress import Progress
from penstock.train.run_folder import (
    RunFolder,
    bound,
    check_raw_examples,
    finished_fields,
    fitted_buffers,
    make_folder,
    write_bundle,
)
from penstock.train.trainer import Trainer


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The result of a finished run.

    Args:
        folder: RUN; its bundle is in `folder / "bundle"`.
        metrics: The validation metrics of the best weights, and `test_...` where there is a test set.
        best_step: The step after which these weights were reached.
        seconds: Wall time of the training, over all resumptions.
        parameter_hash: Hash of the last weights: equal for equal seeds on the same machine, resumed or not.
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
    """Train an application's network into a run folder, or resume the run in it.

    Every process of a world calls this, with the same arguments; the first one writes.

    Args:
        found: The application.
        folder: RUN: run.json, metrics.jsonl, TensorBoard events, curves.png, checkpoints/, and bundle/ at the end. All
            processes must see it.
        recipe: The recipe, with the overrides applied.
        overrides: The fields that differ from the application's own recipe, for run.json.
        quiet: Print nothing.
        world: The processes that train together; by default this one alone.
        parent: The process that started this one, which this one must not outlive.
        profiled_steps: Number of steps to profile, after a warm-up; None for none. RUN then has trace.json,
            step-time.json and timeline.svg too.

    Raises:
        TrainError: The folder cannot be made, the loss is not finite, a checkpoint is damaged, another process is lost,
            or the run is shorter than its profile.
        KeyboardInterrupt: The user stopped the training; a checkpoint was written.
    """
    world = world or World()
    make_folder(folder)
    check_raw_examples(found, recipe)
    data = bound(found.application, recipe.data())
    _check_inputs(found.application, data)
    with numerics(recipe), explained(recipe, world), Watchdog(world, parent) as watchdog:
        inputs = first_inputs(data.train, TRACED_EXAMPLES, on_bad=recipe.loading.bad_examples)
        checkpoint = newest_checkpoint(folder / "checkpoints", world)
        network = found.model()
        initial = started_from(found, network, folder, world, resumed=checkpoint is not None)
        trainer = Trainer(
            network, recipe, recipe.total_steps(len(data.train)), world, inputs=inputs, record=data.train.record
        )
        history = restore_checkpoint(checkpoint, trainer) if checkpoint else History()
        profile = None
        if profiled_steps is not None:
            left = trainer.total_steps - history.step
            profile = Profile(world, profiled_steps, recipe.batch_size, folder, left=left)
        identity = _identity(found, overrides, initial)
        run = RunFolder(folder, trainer, identity, history.step) if world.is_rank_zero else None
        loop = Loop(
            trainer,
            data.train,
            data.validation,
            history,
            watchdog,
            checkpoints=folder / "checkpoints",
            write=run.record if run is not None else lambda line: None,
            resume_hint=f"Go on with: penstock train --resume {folder}",
            profile=profile,
        )
        shown = world.is_rank_zero and not quiet
        progress = Progress(found.application.name, trainer.total_steps, history.step, quiet=not shown)
        loop.run(progress)
        return _finished(loop, found, run, folder, data, initial)


def _identity(found: FoundApplication, overrides: dict[str, Any], initial: StartedFrom | None) -> dict[str, Any]:
    return {
        "application": found.reference,
        "name": found.application.name,
        "sources": found.source_sha256(),
        "overrides": overrides,
        "initial": None if initial is None else asdict(initial),
    }


def _finished(
    loop: Loop,
    found: FoundApplication,
    run: RunFolder | None,
    folder: Path,
    data: Data,
    initial: StartedFrom | None,
) -> RunResult:
    """Test the best weights and write their bundle."""
    trainer, history, world = loop.trainer, loop.history, loop.trainer.world
    loop.watchdog.beat("the bundle")
    last_hash, metrics = loop.load_best()
    if data.test is not None:
        test = trainer.validate(data.test, bad=history.bad_examples)
        metrics |= {f"test_{name}": value for name, value in test.items()}
    weights = trainer.full_state() | fitted_buffers(trainer, folder, data)
    bad_examples, rate = world.sum_counts(history.bad_examples), loop.pace.whole
    loop.watchdog.pause("the bundle")
    if run is not None:
        run.close()
        bundle = write_bundle(found, folder, weights, trainer.recipe, data, metrics, initial)
        run.write({**finished_fields(history, metrics, last_hash, rate, bad_examples), "bundle": bundle})
    return RunResult(
        folder=folder,
        metrics=metrics,
        best_step=history.best_step,
        seconds=history.seconds,
        parameter_hash=last_hash,
    )


def _check_inputs(application: Application, data: Data) -> None:
    """Reject data that do not match the application's spec before the training, not after it."""
    spec = application.input
    for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if part is None or part.record is not None:
            continue
        # A live application trains on whole signals of any one length.
        frames = part.input_shape[:1] if application.live is not None else spec.shape[:1]
        same = part.input_dtype == spec.numpy_dtype
        # A `prepare` returns fractions where decoded pictures are bytes.
        same = same or (application.prepare is not None and np.can_cast(part.input_dtype, spec.numpy_dtype))
        if not same or part.input_shape != (*frames, *spec.shape[1:]):
            raise TrainError(
                f"the {name} inputs are {part.input_dtype}{list(part.input_shape)}; application "
                f"{application.name!r} declares {spec.describe()}."
            )
