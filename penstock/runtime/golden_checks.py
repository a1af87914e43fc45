"""Checks of a network's answers to its golden examples, before they are recorded."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application
from penstock.core.bundles.golden import WHOLE_NUMBERS, Golden
from penstock.core.errors import ApplicationError, BundleError, GoldenMismatch, WholeNumberMismatch
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.gpu.shaped_inputs import clipped
from penstock.runtime.load import check_network, check_streamed, finished, make_network, torch_executor
from penstock.runtime.torch_executor import TorchExecutor

log = logging.getLogger(__name__)

# Golden examples that are computed alone where no length varies; at most twice as many.
ROWS_ALONE = 4


class NotFinite(BundleError):
    """The answers have NaN or infinity."""


def answers_of(application: Application, module: nn.Module, inputs: Array, between: ChunkSpec | None = None) -> Array:
    """Run the network; with `between`, return the inputs of its `finish`.

    Raises:
        ApplicationError: It fails, or gives other outputs than declared.
        NotFinite: It gives NaN or infinity.
    """
    if between is None:
        spec, executor = application.answer, torch_executor(application, module)
    else:
        spec, executor = between, TorchExecutor(module, application.input, between)
    return _checked_answers(application, spec, executor.predict, inputs)


def _checked_answers(
    application: Application, spec: ChunkSpec, predict: Callable[[Array], Array], inputs: Array
) -> Array:
    try:
        outputs = predict(inputs.copy())
    except ApplicationError:
        raise
    except Exception as error:
        # The application's network may raise anything.
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
        raise ApplicationError(
            f"the network of {application.name!r} cannot answer its examples, {_shapes(application.input, inputs)} "
            f"({cause}); it must take a batch on the CPU and give tensors that NumPy can hold."
        ) from error
    fits = spec.is_batch(outputs, any_frames=application.live is not None) and len(outputs) == len(inputs)
    if outputs.dtype != spec.numpy_dtype or not fits:
        raise ApplicationError(
            f"the network of {application.name!r} gives {outputs.dtype}{list(outputs.shape)} for {len(inputs)} chunks, "
            f"but its output is declared as {spec.describe()}."
        )
    if not (spec.finite(outputs) if isinstance(spec, RecordSpec) else np.isfinite(outputs)).all():
        raise NotFinite("the network answers its examples with NaN or infinity; it cannot be served.")
    return np.array(outputs, order="C")


def _shapes(spec: ChunkSpec, inputs: Array) -> str:
    """The dtypes and shapes of a batch; of records, those of each tensor by its name."""
    named = spec.batch(inputs) if isinstance(spec, RecordSpec) else {"": inputs}
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}".lstrip() for name, array in named.items())


def check_alone(application: Application, module: nn.Module, golden: Golden) -> None:
    """Check that examples have the same answers alone, without padding, as in the batch of all.

    Raises:
        ApplicationError: They have others.
    """
    dims = [*(application.input.dims if isinstance(application.input, RecordSpec) else ())]
    if application.generate is not None:
        dims += application.generate.growing(application.input)
    # Each length is padded by another amount. Without lengths, a few rows show whether others matter.
    every = 1 if dims else max(1, len(golden.inputs) // ROWS_ALONE)

    def some_alone(inputs: Array) -> Array:
        answers = golden.outputs.copy()
        answers[::every] = _each_alone(application, module, inputs[::every])
        return answers

    try:
        golden.check(some_alone)
        if (padded := _padded(application, torch_executor(application, module).predict, golden)) is not None:
            padded.check(lambda inputs: _each_alone(application, module, inputs))
    except GoldenMismatch as error:
        cause = str(error).partition(";")[0]
        if golden.sets is not None and golden.sets.fix:
            raise ApplicationError(
                f"the network of {application.name!r} gives other outputs for examples alone than in a batch: {cause}; "
                f"{golden.sets.fix} If no rows swapped, the network depends on padding or on other rows."
            ) from error
        if isinstance(error, WholeNumberMismatch):
            raise ApplicationError(
                f"the network of {application.name!r} gives other whole numbers for examples alone than in a batch: "
                f"{cause}; {WHOLE_NUMBERS} If they are not rounded, the network depends on padding or on other rows."
            ) from error
        if not dims:
            raise ApplicationError(
                f"the network of {application.name!r} depends on the other rows of its batch: computed alone, {cause}; "
                f"compute each row by itself, without a sum, mean or maximum over the batch."
            ) from error
        names = ", ".join(map(repr, dims))
        raise ApplicationError(
            f"the network of {application.name!r} depends on padding or on the other rows of its batch: computed "
            f"alone, {cause}; ignore the entries beyond each length, which a parameter of its name gives ({names}), "
            f"and compute each row by itself."
        ) from error


def _each_alone(application: Application, module: nn.Module, inputs: Array) -> Array:
    """Answer each example alone and without padding; with padding where the network fails otherwise."""
    exact, padded = (torch_executor(application, module, exact=each).predict for each in (True, False))
    answers: list[Array] = []
    failures: list[ApplicationError] = []
    for row in range(len(inputs)):
        chunk_1 = inputs[row : row + 1]
        try:
            answers.append(_checked_answers(application, application.answer, exact, chunk_1))
        except NotFinite as error:
            raise GoldenMismatch(f"example {row} is answered with NaN or infinity; train again.") from error
        except ApplicationError as error:
            # Executors pad the shortest ones, so the network need not take them as they are.
            answers.append(_checked_answers(application, application.answer, padded, chunk_1))
            failures.append(error)
    if failures:
        cause = failures[0].__cause__ or failures[0]
        log.warning(
            "%s: whether the network depends on padding is not known: it fails on an example that is not padded (%s)",
            application.name,
            " ".join(f"{type(cause).__name__}: {cause}".split())[:200],
        )
    return np.concatenate(answers)


def _padded(application: Application, predict: Callable[[Array], Array], golden: Golden) -> Golden | None:
    """Compute the first example beside its own first half, where all examples are as long and none is padded."""
    spec, first = application.input, golden.inputs[:1]
    if not isinstance(spec, RecordSpec) or not spec.dims:
        return None
    lengths = spec.lengths(golden.inputs)
    if any(len(np.unique(each)) > 1 for each in lengths.values()):
        return None
    rooms = {name: max(dim.min, int(lengths[name][0]) // 2) for name, dim in spec.dims.items()}
    if all(room == lengths[name][0] for name, room in rooms.items()):
        return None
    both = np.concatenate([clipped(spec, first, rooms), first])
    try:
        answers = predict(both.copy())
    except Exception as error:  # noqa: BLE001 - the application's network may raise anything
        log.warning(
            "%s: whether the network depends on padding is not known: all examples are as long, and it fails on a "
            "shorter one (%s); give examples of several lengths",
            application.name,
            " ".join(f"{type(error).__name__}: {error}".split())[:200],
        )
        return None
    return replace(golden, inputs=both, outputs=answers, raws=(), network=None)


def check_reproduced(found: FoundApplication, tensors: dict[str, torch.Tensor], golden: Golden) -> None:
    """Check that a new network with these weights gives the recorded answers, a live one in chunks too.

    Raises:
        ApplicationError: It does not.
    """
    application = found.application
    with torch.random.fork_rng(devices=[]):
        fresh = make_network(found)
    try:
        fresh.load_state_dict(tensors)
        check_network(application, fresh, golden)
        golden.check(torch_executor(application, finished(found, fresh)).predict)
    except (RuntimeError, GoldenMismatch) as error:
        if isinstance(error, GoldenMismatch) and (change := _change(application, fresh, golden)):
            raise ApplicationError(
                f"the network of {application.name!r} gives other answers each time ({change}); draw random numbers in "
                f"training alone (`if self.training:`)."
            ) from error
        cause = " ".join(str(error).split())[:300].rstrip(".")
        raise ApplicationError(
            f"a new network of {application.name!r} with these weights is not the one given ({cause}); give the "
            f"network that its `model` makes, and keep what it learned in parameters and buffers."
        ) from error
    if application.live is None:
        return
    try:
        check_streamed(application, fresh, golden)
    except GoldenMismatch as error:
        raise ApplicationError(
            f"the network of {application.name!r} does not give the answers of whole signals in chunks: "
            f"{chunks_cause(error)}."
        ) from error


def chunks_cause(error: GoldenMismatch) -> str:
    """Say why a live network has other answers in chunks, and what to do; nothing was recorded that may have changed.

    Args:
        error: What `check_streamed` raised.
    """
    return (
        f"{str(error).partition(';')[0]}; join layers that have a `step` by penstock.nn.Sequential, and let any other "
        f"layer treat each frame by itself"
    )


def _change(application: Application, network: nn.Module, golden: Golden) -> str:
    """Say where two answers of a network to the golden examples differ most; empty if they are the same."""
    predict = torch_executor(application, network).predict
    try:
        before, after = (predict(golden.inputs.copy()) for _ in range(2))
    except Exception:  # noqa: BLE001 - the application's network may raise anything; the first error is reported
        return ""
    if before.shape != after.shape or before.tobytes() == after.tobytes():
        return ""
    worst = golden.agreement.worst(after, before)
    return f"most {worst.place()}{worst.numbers()}"
