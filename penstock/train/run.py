"""A training run of an application, from its recipe to its bundle."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.errors import TrainError
from penstock.core.initial import StartedFrom
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.train.callbacks.dispatch import Callbacks
from penstock.train.callbacks.named_callbacks import ready_callbacks
from penstock.train.checkpoint.format import newest_checkpoint
from penstock.train.cpu_threads import choose_threads, recorded_threads
from penstock.train.data.arrays import check_finite
from penstock.train.data.examples import Examples
from penstock.train.data.loader import first_inputs
from penstock.train.device_errors import explained
from penstock.train.early_export import TrialExport
from penstock.train.history import History, restore_checkpoint
from penstock.train.initial_weights import started_from
from penstock.train.loop import Loop, Stopped
from penstock.train.numerics import numerics
from penstock.train.parallel.layout import TRACED_EXAMPLES
from penstock.train.parallel.watchdog import Watchdog
from penstock.train.parallel.world import World
from penstock.train.preflight import Preflight, check_untrained
from penstock.train.profile.profiler import Profile
from penstock.train.recipe import Data, Recipe
from penstock.train.report.progress import Progress
from penstock.train.run_folder import (
    RunFolder,
    bound,
    check_raw_examples,
    check_streams,
    finished_fields,
    fitted_buffers,
    make_folder,
    started,
    write_bundle,
)
from penstock.train.run_owner import Launch, RunAttempt, owned
from penstock.train.run_place import RunPlace
from penstock.train.run_uploads import RunUploads, check_shared
from penstock.train.same_data import check_data, fingerprints
from penstock.train.trainer import Trainer

DATA_REMEDY = "restore them, begin a new run, or accept the change by --accept-changed-data"


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
    accept_changed_data: bool = False,
    place: RunPlace | None = None,
    launch: Launch | None = None,
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
        accept_changed_data: Resume the run even if its examples changed.
        place: The place of the run, if `folder` is the local copy of a run at a URL.
        launch: The engine's start of this command, if it may start it again: then an earlier start of the same launch
            is overtaken, and this process ends soon after a later one has begun.

    Raises:
        TrainError: The folder cannot be made, another command trains in it, the loss is not finite, a checkpoint is
            damaged, the examples changed since the run began, another process is lost, or the run is shorter than its
            profile; or the run at a URL could not be uploaded, or was taken over by another command.
        StorageError: The run is at a URL that cannot be written.
        KeyboardInterrupt: The user stopped the training; a checkpoint was written, and the bundle of the best weights.
    """
    world = world or World()
    make_folder(folder)
    place = place or RunPlace(folder=folder)
    with owned(folder, parent, launch) if world.is_rank_zero else nullcontext() as attempt:
        # The first process clears what older attempts have not named before any process reads the folder.
        world.sum_on_host(0.0)
        if place.remote is not None and world.size > 1:
            check_shared(folder, world)
        with RunUploads(place) if place.remote is not None and world.is_rank_zero else nullcontext() as uploads:
            return _trained(
                found,
                place,
                recipe,
                overrides,
                quiet,
                world,
                parent,
                profiled_steps,
                accept_changed_data,
                uploads,
                attempt,
                ends_when_overtaken=launch is not None,
            )


def _trained(
    found: FoundApplication,
    place: RunPlace,
    recipe: Recipe,
    overrides: dict[str, Any],
    quiet: bool,
    world: World,
    parent: int | None,
    profiled_steps: int | None,
    accept_changed_data: bool,
    uploads: RunUploads | None,
    attempt: RunAttempt | None,
    *,
    ends_when_overtaken: bool,
) -> RunResult:
    folder = place.folder
    check_raw_examples(found, recipe)
    # In all processes, so that a missing package ends all of them.
    watching = ready_callbacks(recipe.callbacks, has_folder=True)
    data = bound(found.application, recipe.data())
    _check_counts(found.application, recipe, data)
    _check_inputs(found.application, data)
    data.prefetch()
    with torch.random.fork_rng([]):
        check_streams(found, recipe, data)
    overtaken_by = attempt if ends_when_overtaken else None
    with numerics(recipe), explained(recipe, world), Watchdog(world, parent, overtaken_by) as watchdog:
        inputs = first_inputs(data.train, TRACED_EXAMPLES, on_bad=recipe.loading.bad_examples)
        checkpoint = newest_checkpoint(folder / "checkpoints", world, set_aside=True)
        parts = {"train": data.train, "validation": data.validation, "test": data.test}
        same = fingerprints(parts, world)
        if checkpoint is not None and not accept_changed_data:
            check_data(same, folder, DATA_REMEDY)
        is_new = checkpoint is None and world.is_rank_zero
        preflight = check_untrained(found, recipe, data) if is_new else Preflight()
        network = found.model()
        initial = started_from(found, network, folder, world, resumed=checkpoint is not None)
        threads = _threads(network, recipe, data, world, inputs, folder if checkpoint else None)
        trainer = Trainer(
            network, recipe, recipe.total_steps(len(data.train)), world, inputs=inputs, record=data.train.record
        )
        trainer.layout.notices.extend([*threads, *preflight.notes])
        history = restore_checkpoint(checkpoint, trainer) if checkpoint else History()
        profile = None
        if profiled_steps is not None:
            left = trainer.total_steps - history.step
            profile = Profile(world, profiled_steps, recipe.batch_size, folder, left=left)
        identity = _identity(found, overrides, initial) | {"data": same}
        run = None if attempt is None else RunFolder(folder, trainer, identity, history.step, attempt)
        records = [each for each in (run, uploads) if each is not None]
        loop = Loop(
            trainer,
            data.train,
            data.validation,
            history,
            watchdog,
            checkpoints=folder / "checkpoints",
            attempt=attempt,
            callbacks=Callbacks(watching if records else (), required=records),
            start_event=started(
                trainer, history, found.application.name, folder, () if run is None else run.before, overrides
            ),
            resume_hint=f"Go on with: penstock train --resume {place}",
            profile=profile,
        )
        shown = world.is_rank_zero and not quiet
        progress = Progress(found.application.name, trainer.total_steps, history.step, quiet=not shown)
        with loop.ending():
            try:
                with TrialExport(preflight.network, progress.notify):
                    loop.run(progress)
            except Stopped:
                _stopped(loop, found, run, place, data, initial, progress)
                raise
            return _finished(loop, found, run, folder, data, initial)


def _threads(
    network: nn.Module, recipe: Recipe, data: Data, world: World, inputs: Array, resumed: Path | None
) -> list[str]:
    """Set the CPU threads that were measured, or those of the run that is resumed; return a sentence if they were."""
    if resumed is not None:
        recorded = recorded_threads(resumed, world)
        if recorded is not None and recipe.execution.threads is None:
            # The last bits of a sum depend on them.
            torch.set_num_threads(recorded)
        return []
    chosen = choose_threads(network, recipe, data.train, world, inputs)
    if chosen is None:
        return []
    torch.set_num_threads(chosen[0])
    return [chosen[1]]


def _identity(found: FoundApplication, overrides: dict[str, Any], initial: StartedFrom | None) -> dict[str, Any]:
    return {
        "application": found.reference,
        "name": found.application.name,
        "sources": found.source_sha256(),
        "code": found.code_sha256(),
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
        bundle = write_bundle(found, folder, weights, trainer.recipe, data, metrics, initial)
        loop.finish(metrics)
        fields = finished_fields(history, metrics, last_hash, rate, bad_examples, loop.stop)
        reading = {} if loop.feed is None else {"reading": loop.feed.fields()}
        run.write({**fields, **reading, "bundle": bundle})
    return RunResult(
        folder=folder,
        metrics=metrics,
        best_step=history.best_step,
        seconds=history.seconds,
        parameter_hash=last_hash,
    )


def _stopped(
    loop: Loop,
    found: FoundApplication,
    run: RunFolder | None,
    place: RunPlace,
    data: Data,
    initial: StartedFrom | None,
    progress: Progress,
) -> None:
    """Write the bundle of the best weights so far, of a run that the user stopped after a whole step."""
    folder = place.folder
    world, history = loop.trainer.world, loop.history
    fields: dict[str, Any] = {"state": "stopped", "step": history.step}
    if run is not None:
        # Before the bundle, which a second Ctrl-C may interrupt.
        run.write(fields)
    if history.best_weights is None:
        progress.notify("There was no validation yet, and so there is no bundle.")
    else:
        _, metrics = loop.load_best()
        weights = loop.trainer.full_state() | fitted_buffers(loop.trainer, folder, data)
        loop.watchdog.pause("the bundle")
        if run is not None:
            fields |= {"metrics": metrics, "best_step": history.best_step}
            fields["bundle"] = write_bundle(found, folder, weights, loop.trainer.recipe, data, metrics, initial)
            progress.notify(f"Bundle of the best so far, after step {history.best_step:,}: {place.bundle}")
    if run is not None:
        run.write(fields)
    # A launcher ends the other processes when one leaves.
    world.sum_on_host(0.0)


def _check_counts(application: Application, recipe: Recipe, data: Data) -> None:
    """Reject sets without examples, and no validation set where the run needs one."""
    sets: dict[str, Examples | None] = {"train": data.train, "validation": data.validation, "test": data.test}
    for name, part in sets.items():
        if part is not None and not len(part):
            raise TrainError(f"the {name} data of application {application.name!r} has no examples; give at least one.")
    if sets["validation"] is not None:
        return
    if recipe.metrics or recipe.chosen_metrics != ("loss",) or recipe.calibrate is not None:
        need = "metrics, the selection of weights by one, EarlyStopping and calibrate need them"
    elif recipe.raw_examples is None or application.live is not None:
        need = "the golden examples of its bundle are made of them"
    else:
        return
    raise TrainError(
        f"the data of application {application.name!r} has no validation examples, and {need}; give "
        f"Data(train=..., validation=...)."
    )


def _check_inputs(application: Application, data: Data) -> None:
    """Reject data that do not match the application's spec before the training, not after it."""
    spec = application.input
    for name, part in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if part is None:
            continue
        check_finite(part, name)
        if part.record is not None:
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
