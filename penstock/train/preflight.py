"""Checks before the first step: faults that would otherwise end a run when its bundle is written."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
import torch

from penstock.core.application import Application, reply_of, unpacked
from penstock.core.errors import PenstockError, TrainError, one_line
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.bundle_writer import CheckedNetwork, check_examples, check_first_steps
from penstock.runtime.load import make_network
from penstock.train.recipe import Data, Recipe
from penstock.train.run_folder import golden_examples

# Examples that are tried, chosen from so many.
TRIED = 4
TRIED_FROM = 32
# Steps that are tried of answers that take steps: the second one takes the state that the first one gave.
TRIED_STEPS = 2
# Characters of what is wrong with a network: a few sentences.
SENTENCES = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Preflight:
    """The result of the checks.

    Args:
        network: The untrained network; None if it was not run, or its answers are not finite.
        notes: Sentences for the user, on what does not end a training.
    """

    network: CheckedNetwork | None = None
    notes: tuple[str, ...] = ()


def check_untrained(found: FoundApplication, recipe: Recipe, data: Data) -> Preflight:
    """Check that the network, before any training, could become a bundle.

    It must take the application's inputs, give its outputs, give the same answer alone as in a padded batch, and have
    all that it learns in its state. Of answers that take steps, only the form of the first two is checked; the rest is
    checked with their bundle, because an untrained network gives all the steps that are allowed.

    Args:
        found: The application.
        recipe: The training recipe.
        data: Source of the examples.

    Raises:
        TrainError: No bundle could be made of the network.
    """
    application = found.application
    examples: Any = golden_examples(application, recipe, data, count=TRIED, choice=TRIED_FROM)
    if recipe.raw_examples is not None:
        examples = examples[:TRIED] if isinstance(examples, Sequence) else examples
    network = None
    with torch.random.fork_rng([]):
        try:
            if application.generate is not None:
                check_first_steps(found, make_network(found), examples, steps=TRIED_STEPS)
            else:
                network = check_examples(found, make_network(found), examples)
        except PenstockError as error:
            raise TrainError(
                f"no bundle could be made of application {application.name!r} after a training, as its network shows "
                f"before it: {one_line(error, SENTENCES)}."
            ) from None
    # The reply of a live application takes the output of a chunk.
    if network is None or application.live is not None:
        return Preflight(network=network)
    return Preflight(network=network, notes=_reply_notes(network))


def _reply_notes(network: CheckedNetwork) -> tuple[str, ...]:
    note = reply_note(network.found.application, network.golden.outputs, "the untrained network")
    return () if note is None else (note,)


def reply_note(application: Application, outputs: Array, network: str) -> str | None:
    """Try the reply on the first golden example, as a server does; return a sentence if it fails.

    Args:
        application: The application.
        outputs: Answers, one or more.
        network: The network in the sentence.
    """
    try:
        orjson.dumps(reply_of(application)(unpacked(application, outputs[0])))
    except Exception as error:  # noqa: BLE001 - the application's code raises anything
        return (
            f"Note: the reply of {application.name!r} fails on the answer of {network} to example 0 "
            f"({type(error).__name__}: {one_line(error)}); a server would answer status 500."
        )
    return None
