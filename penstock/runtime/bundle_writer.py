"""Writing of bundles: a network's weights, and its answers to the golden examples."""

import logging
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from penstock.core.agreement import check_threshold
from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles, Manifest, read_bundle, write_bundle
from penstock.core.bundles.golden import WHOLE_NUMBERS, Golden, default_tolerance
from penstock.core.errors import (
    ApplicationError,
    BundleError,
    GoldenMismatch,
    InvalidInput,
    RequestError,
    WholeNumberMismatch,
    one_line,
)
from penstock.core.finish import network_output
from penstock.core.initial import StartedFrom
from penstock.core.machine.versions import versions_of
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.remote.remote_copy import local_bundle
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.gpu.shaped_inputs import clipped
from penstock.runtime.joined_rows import check_joined
from penstock.runtime.load import (
    as_found,
    check_network,
    check_streamed,
    finished,
    make_network,
    make_prepare,
    torch_executor,
)
from penstock.runtime.prepare_session import PrepareSession, exported_prepare
from penstock.runtime.torch_executor import TorchExecutor

log = logging.getLogger(__name__)

GOLDEN_EXAMPLES = 32
# Bytes of all raw golden examples together.
MAX_RAW_BYTES = 1 << 25
# Maximum bytes of the inputs of `finish` in golden examples; at least one example is kept.
MAX_NETWORK_BYTES = 1 << 23
# Golden examples that are computed alone where no length varies; at most twice as many.
ROWS_ALONE = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A trained network with its golden examples: the result of training, which serving and export read.

    Args:
        files: The verified folder.
    """

    files: BundleFiles

    @property
    def folder(self) -> Path:
        """Its folder."""
        return self.files.folder

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.files.manifest

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open the bundle in a folder or at a URL and verify every file.

        Raises:
            BundleError: There is none, or it is damaged.
        """
        return cls(files=read_bundle(local_bundle(folder)))

    @classmethod
    def write(
        cls,
        application: Application | FoundApplication,
        module: nn.Module,
        examples: Any,
        *,
        to: str | Path,
        metrics: Mapping[str, float] | None = None,
        tolerance: float | None = None,
        initial: StartedFrom | None = None,
    ) -> Self:
        """Record a network's answers and write its bundle.

        First, the weights are loaded into a new network of the application, which must give the same answers.

        Args:
            application: Its application.
            module: The network with its weights, on the CPU; it is put into evaluation mode.
            examples: Raw inputs `[N, *input.shape]`, N >= 1; for a live application whole signals, `[N, frames, ...]`;
                with a `prepare` a list of raw arrays of several sizes; where there are several inputs or lengths
                vary, a list of dictionaries of arrays by name. The first 32 become the golden examples.
            to: The bundle's folder. An existing bundle is replaced.
            metrics: Validation metrics by name.
            tolerance: The largest difference on the examples that other executors may show; by default 1e-4 of the
                largest recorded output, or 1e-4 where that is below 1.
            initial: The weights that the training started from, for the manifest.

        Raises:
            ApplicationError: The examples or the network's outputs do not have the declared specs, the application's
                `model` makes another network than `module`, or its `prepare` cannot be exported.
            BundleError: The folder holds something that is not a bundle, or cannot be written.
        """
        found = as_found(application) if isinstance(application, Application) else application
        if not isinstance(found, FoundApplication):
            raise ApplicationError(f"{application!r} is no Application; give the record, or find_application('name').")
        declared = found.application
        raws = _raw_examples(declared, examples)
        prepare = None if declared.prepare is None else exported_prepare(found)
        preparing = make_prepare(found)
        inputs = _examples(declared, examples if preparing is None else np.stack([preparing(raw) for raw in raws]))
        module.eval()
        tensors = _own_tensors(module)
        network = _network_outputs(declared, module, inputs)
        parameters = sum(parameter.numel() for parameter in module.parameters())
        module = finished(found, module)
        golden = _golden(declared, module, inputs, raws, network, tolerance)
        _check_reproduced(found, tensors, golden)
        _check_alone(declared, module, golden)
        check_joined(declared, module, golden)
        manifest = _manifest(found, golden.tolerance, metrics or {}, parameters, initial)
        if prepare is not None and declared.prepare is not None:
            golden.check_prepared(PrepareSession(prepare, declared.prepare.raw, declared.input_tensor))
        return cls(files=write_bundle(to, manifest, save(tensors), golden, prepare, _language(found)))


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedNetwork:
    """A network that could become a bundle, with its answers to some examples.

    Args:
        found: Its application.
        tensors: Its state by name, on the CPU.
        parameters: Their number.
        golden: The examples and the answers.
    """

    found: FoundApplication
    tensors: dict[str, torch.Tensor]
    parameters: int
    golden: Golden

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, to: str | Path, prepare: bytes | None) -> Bundle:
        """Write the bundle.

        Args:
            to: Its folder.
            prepare: The exported `prepare` of the application, if it has one.
        """
        manifest = _manifest(self.found, self.golden.tolerance, {}, self.parameters, None)
        return Bundle(files=write_bundle(to, manifest, save(self.tensors), self.golden, prepare, _language(self.found)))


class _NotFinite(BundleError):
    """The answers have NaN or infinity."""


def check_examples(found: FoundApplication, module: nn.Module, examples: Any) -> CheckedNetwork | None:
    """Check that a bundle of a network could be written, as `Bundle.write` does, except for its `prepare`'s export.

    Args:
        found: The application.
        module: The network, on the CPU; it may be untrained.
        examples: As for `Bundle.write`; a few.

    Returns:
        The network with its answers; None if they are not finite, which says nothing of an untrained network.

    Raises:
        ApplicationError: As `Bundle.write`.
    """
    declared = found.application
    raws = _raw_examples(declared, examples)
    preparing = make_prepare(found)
    inputs = _examples(declared, examples if preparing is None else np.stack([preparing(raw) for raw in raws]))
    module.eval()
    tensors = _own_tensors(module)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    try:
        network = _network_outputs(declared, module, inputs)
        module = finished(found, module)
        golden = _golden(declared, module, inputs, raws, network, None)
    except _NotFinite:
        return None
    # Nearly equal scores of an untrained network are no ground to choose between rows, and so these may differ.
    if golden.sets is None:
        _check_reproduced(found, tensors, golden)
        _check_alone(declared, module, golden)
    return CheckedNetwork(found=found, tensors=tensors, parameters=parameters, golden=golden)


def check_first_steps(found: FoundApplication, module: nn.Module, examples: Any, *, steps: int) -> None:
    """Check that a network whose answers take steps takes its inputs, and gives its state and outputs as declared.

    Only the form of the first steps is checked: an untrained network ends nowhere, and its nearly equal scores choose
    no tokens reliably.

    Args:
        found: The application, which has `generate`.
        module: The network, on the CPU.
        examples: As for `Bundle.write`; a few.
        steps: The number of steps.

    Raises:
        ApplicationError: It does not.
    """
    declared = found.application
    assert declared.generate is not None, declared.name
    inputs = _examples(declared, examples)
    module.eval()
    shorter = replace(declared.generate, max_steps=min(steps, declared.generate.max_steps))
    try:
        _answers(replace(declared, generate=shorter), module, inputs)
    except _NotFinite:
        # This says nothing of an untrained network.
        return


def library_versions() -> dict[str, str]:
    """Return the versions of Python, torch, NumPy and penstock."""
    return {"python": platform.python_version(), **versions_of("torch", "numpy", "penstock")}


def _golden(
    application: Application,
    module: nn.Module,
    inputs: Array,
    raws: tuple[Array, ...],
    network: Array | None,
    tolerance: float | None,
) -> Golden:
    """Record the answers of a network, with its `finish`, to the golden examples."""
    outputs = _answers(application, module, inputs)
    if tolerance is None:
        tolerance = default_tolerance(outputs)
    if not 0 <= tolerance < math.inf:
        raise BundleError(f"the tolerance is {tolerance}; it must be a number of at least 0.")
    golden = Golden(
        inputs=inputs,
        outputs=outputs,
        tolerance=float(tolerance),
        raws=raws,
        exact_whole=application.generate is not None,
        output=application.answer,
        sets=application.row_sets,
        network=network,
    )
    if golden.sets is not None:
        near = golden.agreement.tolerances.get(golden.sets.score, 0.0)
        check_threshold(application.output, golden.sets, outputs, near)
    return golden


def _manifest(
    found: FoundApplication,
    tolerance: float,
    metrics: Mapping[str, float],
    parameters: int,
    initial: StartedFrom | None,
) -> Manifest:
    declared = found.application
    return Manifest(
        name=declared.name,
        reference=found.reference,
        sources=found.source_sha256() if found.reference else {},
        inputs=tuple(declared.inputs.values()),
        outputs=tuple(declared.outputs.values()),
        files={},
        tolerance=tolerance,
        metrics={name: float(value) for name, value in metrics.items()},
        versions=library_versions(),
        parameters=parameters,
        rate_hz=None if declared.live is None else float(declared.live.rate_hz),
        raw=None if declared.prepare is None else declared.prepare.raw,
        generate=declared.generate,
        initial=initial,
        network=() if declared.finish is None else declared.finish.tensors,
        sets=declared.row_sets,
    )


def _language(found: FoundApplication) -> bytes | None:
    """The language model of the endpoint beam, as it is stored."""
    language = found.language()
    return None if language is None else language.to_bytes()


def _raw_examples(application: Application, examples: Any) -> tuple[Array, ...]:
    """Check the raw arrays that become golden examples; none where the application has no `prepare`."""
    if application.prepare is None:
        return ()
    raw = application.prepare.raw
    try:
        raws = tuple(np.array(raw.check(np.asarray(example)), order="C") for example in examples[:GOLDEN_EXAMPLES])
    except (TypeError, ValueError, RuntimeError, RequestError) as error:
        raise ApplicationError(
            f"the examples of {application.name!r} are not raw arrays ({one_line(error)}); give a list of "
            f"{raw.describe()} of several sizes."
        ) from None
    count = sum(array.nbytes for array in raws)
    if not raws or count > MAX_RAW_BYTES:
        raise ApplicationError(
            f"the {len(raws)} examples of {application.name!r} have {count:,} bytes; give at least one raw array, and "
            f"at most {MAX_RAW_BYTES:,} bytes of them: they are part of the bundle."
        )
    return raws


def _examples(application: Application, examples: Any) -> Array:
    if isinstance(application.input, RecordSpec):
        return _records(application, application.input, examples)
    spec = application.input
    fix = f"{application.name!r} needs at least one, {spec.dtype}[N{''.join(f', {size}' for size in spec.shape)}]"
    first = examples[0] if isinstance(examples, list | tuple) and examples else examples
    if isinstance(first, Mapping):
        raise ApplicationError(f"the examples are dictionaries; {fix}: give the values themselves, not by name.")
    if application.live is not None:
        fix += ", with any number of frames, as many in each"
    try:
        given = np.asarray(examples[:GOLDEN_EXAMPLES])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ApplicationError(f"the examples are not an array ({one_line(error)}); {fix}.") from None
    if not spec.is_batch(given, any_frames=application.live is not None):
        raise ApplicationError(f"the examples are {given.dtype}{list(given.shape)}; {fix}.")
    try:
        return np.array(spec.cast(given), order="C")
    except InvalidInput as error:
        raise ApplicationError(
            f"the examples are {given.dtype}{list(given.shape)} ({one_line(error)}); {fix}."
        ) from None


def _records(application: Application, spec: RecordSpec, examples: Any) -> Array:
    try:
        records = spec.of_many(examples)[:GOLDEN_EXAMPLES]
    except (InvalidInput, TypeError, ValueError, RuntimeError) as error:
        raise ApplicationError(
            f"the examples of {application.name!r} do not fit ({one_line(error)}); give a list of dictionaries of "
            f"arrays, or one dictionary of batches: {spec.describe()}."
        ) from None
    if not len(records):
        raise ApplicationError(f"{application.name!r} needs at least one example, {spec.describe()}.")
    return records


def _answers(application: Application, module: nn.Module, inputs: Array, between: ChunkSpec | None = None) -> Array:
    """Run the network; with `between`, return the inputs of its `finish`."""
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
        raise _NotFinite("the network answers its examples with NaN or infinity; it cannot be served.")
    return np.array(outputs, order="C")


def _shapes(spec: ChunkSpec, inputs: Array) -> str:
    """The dtypes and shapes of a batch; of records, those of each tensor by its name."""
    named = spec.batch(inputs) if isinstance(spec, RecordSpec) else {"": inputs}
    return ", ".join(f"{name} {array.dtype}{list(array.shape)}".lstrip() for name, array in named.items())


def _network_outputs(application: Application, module: nn.Module, inputs: Array) -> Array | None:
    """Run the network alone on the first examples; None without a `finish`."""
    if application.finish is None:
        return None
    between = network_output(application.finish)
    rows = max(1, min(len(inputs), MAX_NETWORK_BYTES // between.nbytes))
    return _answers(application, module, inputs[:rows], between)


def _check_alone(application: Application, module: nn.Module, golden: Golden) -> None:
    """Check that examples have the same answers alone, without padding, as in the batch of all."""
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
        except _NotFinite as error:
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


def _check_reproduced(found: FoundApplication, tensors: dict[str, torch.Tensor], golden: Golden) -> None:
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


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy the state dict; tied tensors are duplicated, since safetensors stores no sharing."""
    state: dict[str, Any] = module.state_dict()
    invalid = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
    if invalid:
        raise ApplicationError(
            f"the network's state holds {invalid[0]!r}, a {type(state[invalid[0]]).__name__}; a bundle carries tensors "
            f"only, so keep it in a buffer or in the application."
        )
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
