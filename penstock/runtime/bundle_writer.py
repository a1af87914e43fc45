"""Writing of bundles: a network's weights, and its answers to the golden examples."""

import math
import platform
from collections.abc import Mapping
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
from penstock.core.bundles.golden import Golden, default_tolerance
from penstock.core.errors import ApplicationError, BundleError, InvalidInput, RequestError, one_line
from penstock.core.finish import network_output
from penstock.core.initial import StartedFrom
from penstock.core.machine.versions import versions_of
from penstock.core.record import RecordSpec
from penstock.core.remote.remote_copy import local_bundle
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array
from penstock.runtime.golden_checks import NotFinite, answers_of, check_alone, check_reproduced
from penstock.runtime.joined_rows import check_joined
from penstock.runtime.load import as_found, finished, make_prepare
from penstock.runtime.onnx.prepare_session import PrepareSession, exported_prepare

GOLDEN_EXAMPLES = 32
# Bytes of all raw golden examples together.
MAX_RAW_BYTES = 1 << 25
# Maximum bytes of the inputs of `finish` in golden examples; at least one example is kept.
MAX_NETWORK_BYTES = 1 << 23


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
        check_reproduced(found, tensors, golden)
        check_alone(declared, module, golden)
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
    except NotFinite:
        return None
    # Nearly equal scores of an untrained network are no ground to choose between rows, and so these may differ.
    if golden.sets is None:
        check_reproduced(found, tensors, golden)
        check_alone(declared, module, golden)
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
        answers_of(replace(declared, generate=shorter), module, inputs)
    except NotFinite:
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
    outputs = answers_of(application, module, inputs)
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


def _network_outputs(application: Application, module: nn.Module, inputs: Array) -> Array | None:
    """Run the network alone on the first examples; None without a `finish`."""
    if application.finish is None:
        return None
    between = network_output(application.finish)
    rows = max(1, min(len(inputs), MAX_NETWORK_BYTES // between.nbytes))
    return answers_of(application, module, inputs[:rows], between)


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
