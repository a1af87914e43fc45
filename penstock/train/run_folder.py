"""The folder of a run of an application: run.json, metrics, curves, and the bundle at the end."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from penstock.core.application import FoundApplication
from penstock.core.errors import TrainError
from penstock.runtime.bundle import GOLDEN_EXAMPLES, Bundle, library_versions
from penstock.train.feed import first_inputs
from penstock.train.recipe import Data, Recipe
from penstock.train.report import RUN_FILE, Log, draw_curves, writing
from penstock.train.trainer import Trainer

# Of a recipe, what is a plain value.
RECIPE_FIELDS = (
    "batch_size",
    "epochs",
    "steps",
    "precision",
    "seed",
    "best",
    "best_mode",
    "accumulate",
    "clip_norm",
    "workers",
    "compile",
    "graph",
    "bad_examples",
)


@final
class RunFolder:
    """Only the first process has one.

    Args:
        found: The application.
        folder: RUN.
        recipe: How it is trained.
        overrides: What was changed of the application's own recipe.
        trainer: Says what was laid out where.
        from_step: With which step the run goes on.
    """

    def __init__(
        self,
        found: FoundApplication,
        folder: Path,
        recipe: Recipe,
        overrides: dict[str, Any],
        trainer: Trainer,
        from_step: int,
    ) -> None:
        self._found, self._folder, self._recipe, self._overrides = found, folder, recipe, overrides
        self._trainer = trainer
        self.log = Log(folder, from_step=from_step)

    def write(self, more: dict[str, Any]) -> None:
        """Write run.json anew."""
        write_json(
            self._folder / RUN_FILE,
            {
                "application": self._found.reference,
                "name": self._found.application.name,
                "sources": self._found.source_sha256(),
                "overrides": self._overrides,
                **described(self._recipe, self._trainer),
                **more,
            },
        )

    def finish(self, weights: dict[str, Tensor], data: Data, metrics: dict[str, float]) -> str:
        """Draw the curves and write the bundle.

        Args:
            weights: The best, whole.
            data: Of which the golden examples are.
            metrics: What the bundle says of them.

        Returns:
            The bundle's hash.
        """
        self.log.close()
        draw_curves(self._folder)
        whole = self._found.model()
        whole.load_state_dict(weights)
        bundle = Bundle.write(
            self._found, whole, golden_examples(self._recipe, data), to=self._folder / "bundle", metrics=metrics
        )
        return bundle.manifest.content_hash


def golden_examples(recipe: Recipe, data: Data) -> Any:
    """Of what the golden examples of a bundle are made, see `Bundle.write`."""
    if recipe.raw_examples is not None:
        return recipe.raw_examples()
    return first_inputs(data.validation, GOLDEN_EXAMPLES, on_bad=recipe.bad_examples)


def check_raw_examples(found: FoundApplication, recipe: Recipe) -> None:
    """See before the training whether its bundle could be written after it.

    Raises:
        TrainError: The application has a `prepare` and the recipe no raw examples, or the other way round; or no other
            process can find the application to export its `prepare`.
    """
    name, prepares = found.application.name, found.application.prepare is not None
    if prepares and recipe.raw_examples is None:
        raise TrainError(
            f"application {name!r} has a prepare and its recipe no raw_examples; give it a function that returns a few "
            f"raw arrays of several sizes, to record the golden examples from."
        )
    if not prepares and recipe.raw_examples is not None:
        raise TrainError(f"the recipe has raw_examples and application {name!r} no prepare; leave them out.")
    if prepares and not found.reference:
        raise TrainError(
            f"application {name!r} has a prepare, which another process has to find to export it; put the application "
            f"into a file, app.py."
        )


def described(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """What run.json says of how a network is trained."""
    return {
        "recipe": {name: getattr(recipe, name) for name in RECIPE_FIELDS},
        "versions": library_versions(),
        "threads": torch.get_num_threads(),
        "processes": trainer.world.size,
        "device": trainer.world.device.type,
        "placements": {name: asdict(placement) for name, placement in trainer.layout.placements.items()},
    }


def make_folder(folder: Path) -> None:
    """Make the folder of a run, where it is not there.

    Raises:
        TrainError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainError(f"{folder} cannot be made ({error.strerror}); choose another folder for the run.") from None


def write_json(file: Path, fields: dict[str, Any]) -> None:
    """Write a file that is whole at any moment."""
    beside = file.with_name(f".{file.name}")
    with writing(file.parent):
        beside.write_text(json.dumps(fields, indent=2) + "\n")
        beside.replace(file)


def fitted_buffers(trainer: Trainer, folder: Path, data: Data) -> dict[str, Tensor]:
    """What the recipe's `finish` gives the bundle, in the first process; all must ask.

    Raises:
        TrainError: The network has no such buffer.
    """
    finish = trainer.recipe.finish
    if finish is None:
        return {}
    validation, test = (trainer.seen(part) for part in (data.validation, data.test or data.validation))
    if validation is None or test is None:
        return {}
    made = dict(finish(folder, validation, test))
    buffers = dict(trainer.module.named_buffers())
    for name, tensor in made.items():
        if name not in buffers or buffers[name].shape != tensor.shape:
            there = ", ".join(f"{known} {list(buffer.shape)}" for known, buffer in buffers.items()) or "none"
            raise TrainError(
                f"the recipe's finish gives {name!r} of shape {list(tensor.shape)}, which is no buffer of the network; "
                f"it has {there:.300}."
            )
    return made
