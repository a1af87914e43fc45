"""Run folders: run.json, metrics, curves, and the bundle at the end."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from penstock.core.application import Application
from penstock.core.bundles.golden import Golden, default_tolerance
from penstock.core.errors import ApplicationError, GoldenMismatch, TrainError, one_line
from penstock.core.initial import StartedFrom
from penstock.core.record import Lengths, RecordSpec
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import TensorSpec
from penstock.runtime.bundle_writer import GOLDEN_EXAMPLES, Bundle, library_versions
from penstock.runtime.golden_checks import chunks_cause
from penstock.runtime.load import check_streamed, make_network, torch_executor
from penstock.train.callbacks.callback import Callback, Ended, Started, Stop, Validated
from penstock.train.data.loader import first_inputs, first_signals
from penstock.train.history import History
from penstock.train.overrides import declared_settings
from penstock.train.recipe import Data, Recipe
from penstock.train.report.run_log import METRICS_FILE, RUN_FILE, draw_runs, read_metrics, replace_text, writing
from penstock.train.report.throughput import Rate
from penstock.train.run_owner import RunAttempt
from penstock.train.trainer import Trainer

log = logging.getLogger(__name__)

# Examples that golden examples of several lengths are chosen from.
GOLDEN_CHOICE = 1024
# The fields of a recipe that run.json records.
RECIPE_FIELDS = (
    "batch_size",
    "epochs",
    "steps",
    "precision",
    "seed",
    "clip_norm",
    "order.buckets",
    "order.shortest_first",
    "selection.metric",
    "selection.mode",
    "execution.accumulation_steps",
    "execution.compile",
    "execution.graph",
    "loading.workers",
    "loading.bad_examples",
)


@final
class RunFolder(Callback):
    """The folder of a running training, in the first process: run.json, metrics.jsonl and curves.png.

    Args:
        folder: RUN.
        trainer: The trainer.
        identity: The fields of run.json that identify the run.
        from_step: The step that the run starts or resumes at; metrics after it are dropped.
        attempt: This attempt of the run: nothing is written once a newer one has begun.

    Attributes:
        before: Figures of the validations before that step.

    Raises:
        TrainError: A file cannot be written.
    """

    def __init__(
        self, folder: Path, trainer: Trainer, identity: dict[str, Any], from_step: int, attempt: RunAttempt
    ) -> None:
        self._attempt = attempt
        attempt.check()
        self._folder, self._fields = folder, {**identity, **described(trainer), "total_steps": trainer.total_steps}
        kept = [line for line in read_metrics(folder) if line["step"] <= from_step]
        replace_text(folder / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in kept))
        self.before = kept
        if find_spec("matplotlib") is None:
            log.warning("matplotlib is not installed, so the run has no curves.png; pip install 'penstock-nn[train]'")
        self.write({"state": "running"})

    def write(self, more: dict[str, Any]) -> None:
        """Rewrite run.json.

        Raises:
            RunTakenOver: A newer attempt of the run has begun.
        """
        self._attempt.check()
        self._state = more["state"]
        replace_text(self._folder / RUN_FILE, json.dumps(self._fields | more, indent=2) + "\n")

    def validation(self, event: Validated) -> None:
        """Append the figures of a validation to the metrics, flushed at once.

        Raises:
            RunTakenOver: A newer attempt of the run has begun.
        """
        self._attempt.check()
        with writing(self._folder), (self._folder / METRICS_FILE).open("a") as sink:
            sink.write(json.dumps(event.figures) + "\n")

    def end(self, event: Ended) -> None:
        """Record that the training stopped or failed, unless its state is written already, and plot the curves.

        Raises:
            RunTakenOver: A newer attempt of the run has begun.
        """
        if event.state != "finished" and self._state == "running":
            reason = {} if event.reason is None else {"reason": event.reason}
            self.write({"state": event.state, "step": event.step, **reason})
        if event.state == "failed":
            return
        with writing(self._folder):
            if find_spec("matplotlib"):
                draw_runs({self._folder.name: read_metrics(self._folder)}, self._folder / "curves.png")


def write_bundle(
    found: FoundApplication,
    folder: Path,
    weights: dict[str, Tensor],
    recipe: Recipe,
    data: Data,
    metrics: Any,
    initial: StartedFrom | None,
) -> str:
    """Write the bundle of a run and return its hash.

    Args:
        found: The application.
        folder: RUN.
        weights: The best weights, whole.
        recipe: The training recipe.
        data: Source of the golden examples.
        metrics: Metrics of the weights, for the manifest.
        initial: The weights that the run started from.
    """
    network = found.model()
    network.load_state_dict(weights)
    examples = golden_examples(found.application, recipe, data)
    bundle = Bundle.write(found, network, examples, to=folder / "bundle", metrics=metrics, initial=initial)
    return bundle.manifest.content_hash


def bound(application: Application, data: Data) -> Data:
    """Return the data as records of the application's inputs, where it has several or their lengths vary.

    A network that generates is trained on inputs of its own, such as the tokens that come before (teacher forcing), and
    a live one on whole signals.

    Raises:
        TrainError: An example has other inputs than the application, or the recipe's `data` gives something else.
    """
    if not isinstance(data, Data):
        raise TrainError(
            f"the `data` of the recipe of {application.name!r} gives a {type(data).__name__}; let it return "
            f"Data(train=..., validation=...)."
        )
    if application.generate is not None and data.train.record is not None:
        return data
    record = application.input
    parts = {"train": data.train, "validation": data.validation, "test": data.test}
    made: dict[str, Any] = {}
    for name, part in parts.items():
        if part is None or (isinstance(record, TensorSpec) and _are_as_served(application, part.record)):
            made[name] = part
        elif isinstance(record, TensorSpec):
            raise TrainError(
                f"the {name} inputs are {part.describe()}; application {application.name!r} declares one tensor of "
                f"fixed size, {record.describe()}."
            )
        else:
            try:
                made[name] = part.bound(record)
            except TrainError as error:
                raise TrainError(f"the {name} data of application {application.name!r}: {error}") from None
    return Data(**made)


def _are_as_served(application: Application, record: RecordSpec | None) -> bool:
    """True of examples of fixed size, and of whole signals of a live application, whose lengths vary."""
    if record is None:
        return True
    spec, first = application.input, record.tensors[0]
    alike = isinstance(spec, TensorSpec) and (first.dtype, first.shape[1:]) == (spec.dtype, spec.shape[1:])
    return alike and application.live is not None and len(record.tensors) == 1


def golden_examples(
    application: Application, recipe: Recipe, data: Data, *, count: int = GOLDEN_EXAMPLES, choice: int = GOLDEN_CHOICE
) -> Any:
    """Return the inputs of a bundle's golden examples, see `Bundle.write`.

    They are the first `count` of the validation set; where lengths vary, the shortest, the longest and some between
    them of the first `choice`.

    Raises:
        TrainError: The answers take steps, and the data lack an input of the application.
    """
    if recipe.raw_examples is not None:
        return recipe.raw_examples()
    record, on_bad = application.input, recipe.loading.bad_examples
    if application.generate is not None:
        record = data.validation.record or record
    if isinstance(record, TensorSpec):
        return first_signals(data.validation, count, on_bad=on_bad)
    records = first_inputs(bound(application, data).validation, choice, on_bad=on_bad)
    chosen = records[spread_rows(list(record.lengths(records).values()), len(records), count)]
    if application.generate is None:
        return chosen
    needed = {name for name, spec in application.inputs.items() if spec.default is None}
    if missing := sorted(needed - {spec.name for spec in record.tensors}):
        raise TrainError(
            f"application {application.name!r} takes {missing[0]!r}, which the validation data do not have, so that no "
            f"golden examples can be made of them; give the recipe raw_examples, a function that returns a few "
            f"dictionaries of the application's inputs."
        )
    # Training has more inputs than a request.
    unpacked = [record.unpack(each) for each in chosen]
    return [{name: array for name, array in each.items() if name in application.inputs} for each in unpacked]


def spread_rows(lengths: list[Lengths], rows: int, count: int) -> list[int]:
    """Choose rows of many lengths: for each length the shortest and the longest, then evenly between by their sum.

    Args:
        lengths: `[n]` of each dimension.
        rows: The number of rows, n.
        count: The number to choose.
    """
    if not lengths or rows <= count:
        return list(range(min(rows, count)))
    ends = [int(place) for each in lengths for place in (each.argmin(), each.argmax())]
    by_size = np.argsort(sum(lengths), kind="stable")
    between = by_size[np.linspace(0, rows - 1, count).round().astype(np.int64)].tolist()
    return list(dict.fromkeys([*ends, *between]))[:count]


def check_raw_examples(found: FoundApplication, recipe: Recipe) -> None:
    """Check before a training that its bundle can be written after it.

    Raises:
        TrainError: The application has a `prepare` and the recipe no raw examples; or raw examples, although its input
            is one tensor without a `prepare`; or no other process can import the application to export its `prepare`.
    """
    name, prepares = found.application.name, found.application.prepare is not None
    if prepares and recipe.raw_examples is None:
        raise TrainError(
            f"application {name!r} has a prepare and its recipe no raw_examples; give it a function that returns a few "
            f"raw arrays of several sizes, to record the golden examples from."
        )
    if not prepares and recipe.raw_examples is not None and isinstance(found.application.input, TensorSpec):
        raise TrainError(f"the recipe has raw_examples and application {name!r} no prepare; leave them out.")
    if prepares and not found.reference:
        raise TrainError(
            f"application {name!r} has a prepare, which another process has to find to export it; put the application "
            f"into a file, app.py."
        )


def check_streams(found: FoundApplication, recipe: Recipe, data: Data) -> None:
    """Check before a training that a live network, untrained, gives the answers of whole signals in chunks.

    Raises:
        TrainError: It does not, or it cannot run in chunks.
    """
    application = found.application
    if application.live is None:
        return
    network = make_network(found).eval()
    inputs = first_signals(data.validation, 1, on_bad=recipe.loading.bad_examples)
    outputs = torch_executor(application, network).predict(inputs)
    golden = Golden(inputs=inputs, outputs=outputs, tolerance=default_tolerance(outputs))
    try:
        check_streamed(application, network, golden)
    except (ApplicationError, GoldenMismatch) as error:
        cause = chunks_cause(error) if isinstance(error, GoldenMismatch) else one_line(error)
        raise TrainError(
            f"application {application.name!r} is live, and its network, before any training, does not give the "
            f"answers of whole signals in chunks, so that no bundle could be made of it: {cause}."
        ) from None


def described(trainer: Trainer) -> dict[str, Any]:
    """Return the part of run.json that describes the training."""
    return {
        "recipe": {
            **{name: attrgetter(name)(trainer.recipe) for name in RECIPE_FIELDS},
            **declared_settings(trainer.recipe),
        },
        "versions": library_versions(),
        "threads": torch.get_num_threads(),
        "processes": trainer.world.size,
        "device": trainer.world.device.type,
        "placements": {name: asdict(placement) for name, placement in trainer.layout.placements.items()},
    }


def started(
    trainer: Trainer,
    history: History,
    name: str,
    folder: Path | None,
    validations: Sequence[Mapping[str, float]] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Started:
    """Return the start of a training, for its callbacks."""
    what = described(trainer)
    more = {key: what[key] for key in ("device", "processes", "threads")}
    return Started(
        name=name,
        folder=folder,
        step=history.step,
        total_steps=trainer.total_steps,
        settings={**what["recipe"], **more, **(overrides or {})},
        metric=trainer.recipe.selection.metric,
        mode=trainer.recipe.selection.mode,
        validations=validations,
    )


def finished_fields(
    history: History,
    metrics: dict[str, float],
    parameter_hash: str,
    rate: Rate | None,
    bad_examples: dict[str, int],
    stop: Stop | None,
) -> dict[str, Any]:
    """Return the part of run.json that describes the result."""
    return {
        "state": "finished",
        **({} if stop is None else {"stopped_after": history.step, "stopped_because": stop.reason}),
        "metrics": metrics,
        "best_step": history.best_step,
        "seconds": round(history.seconds, 3),
        **({} if rate is None else rate.fields()),
        "bad_examples": bad_examples,
        "parameter_hash": parameter_hash,
    }


def make_folder(folder: Path) -> None:
    """Create the folder of a run if it does not exist.

    Raises:
        TrainError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"{folder} cannot be made ({error.strerror}); choose another folder for the run.") from None


def fitted_buffers(trainer: Trainer, folder: Path, data: Data) -> dict[str, Tensor]:
    """Return the buffers that the recipe's `calibrate` makes. Collective; only the first process gets any.

    Raises:
        TrainError: The network has no such buffer.
    """
    calibrate = trainer.recipe.calibrate
    if calibrate is None:
        return {}
    validation, test = (trainer.predict(part) for part in (data.validation, data.test or data.validation))
    if validation is None or test is None:
        return {}
    made = dict(calibrate(folder, validation, test))
    buffers = dict(trainer.module.named_buffers())
    for name, tensor in made.items():
        if name not in buffers or buffers[name].shape != tensor.shape:
            there = ", ".join(f"{known} {list(buffer.shape)}" for known, buffer in buffers.items()) or "none"
            raise TrainError(
                f"the recipe's calibrate returns {name!r} of shape {list(tensor.shape)}, which is no "
                f"buffer of the network; it has {there:.300}."
            )
    return made
