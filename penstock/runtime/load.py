"""Loading of bundles: the verified network, run by torch in this process."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from penstock.core.application import Application, decoded_chunk, reply_of, unpacked
from penstock.core.bundles.bundle import BundleFiles, read_bundle
from penstock.core.bundles.bundle_application import bundle_application
from penstock.core.bundles.golden import Golden
from penstock.core.errors import ApplicationError, InvalidInput
from penstock.core.finish import network_output
from penstock.core.named_arrays import SHORTEST_ROOM
from penstock.core.prepare import RawSpec
from penstock.core.record import RecordSpec, given_by_name
from penstock.core.remote.remote_copy import local_bundle
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array, TensorSpec
from penstock.core.wording.json_fault import json_kind
from penstock.nn.streaming import Streaming
from penstock.runtime.generation.generating import generated_outputs
from penstock.runtime.generation.generation_executor import GenerationExecutor
from penstock.runtime.load_weights import load_weights
from penstock.runtime.named_network import FinishedNetwork
from penstock.runtime.streaming_executor import RunStep, StatefulNetwork, Stateless, StreamingExecutor
from penstock.runtime.torch_executor import TorchExecutor
from penstock.runtime.whole_signals import run_in_chunks


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TorchPrepare:
    """An application's `prepare`, run by torch.

    Args:
        module: The application's `prepare`, in evaluation mode.
        raw: One raw array.
        input: One chunk.
    """

    module: nn.Module
    raw: RawSpec
    input: TensorSpec

    def __call__(self, raw: Array) -> Array:
        """Prepare one chunk, `[*input.shape]`, from one raw array.

        Raises:
            InvalidInput: The raw array does not fit the spec.
            TooLarge: It is larger than the spec allows.
            ApplicationError: The module does not give the declared input.
        """
        # A copy: a module that works in place must not change the caller's array.
        copied = torch.from_numpy(np.array(self.raw.check(raw), order="C"))
        try:
            with torch.inference_mode():
                chunk: Array = self.module(copied).numpy()
        except Exception as error:
            # The application's code may raise anything.
            raise ApplicationError(
                f"the prepare gives no array for {raw.dtype}{list(raw.shape)} ({type(error).__name__}: {error}); it "
                f"must turn {self.raw.describe()} into {self.input.describe()}."
            ) from error
        if chunk.dtype != self.input.numpy_dtype or chunk.shape != self.input.shape:
            raise ApplicationError(
                f"the prepare gives {chunk.dtype}{list(chunk.shape)} for {raw.dtype}{list(raw.shape)}, but the input "
                f"is declared as {self.input.describe()}."
            )
        self.input.check_numbers(chunk)
        return chunk


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """A network that predicts in this process, for example in a notebook.

    Args:
        application: Its application.
        files: The bundle.
        module: The network, in evaluation mode; with its `finish` behind it where the application has one.
        executor: Runs the network in batches.
        preparing: Prepares one raw array; None where the application has no `prepare`.
        difference: Largest difference from the recorded answers to the golden examples.
    """

    application: Application
    files: BundleFiles
    module: nn.Module
    executor: TorchExecutor | GenerationExecutor
    preparing: TorchPrepare | None = None
    difference: float = 0.0

    def predict(self, inputs: Any) -> Any:
        """Predict the outputs for raw inputs.

        Args:
            inputs: One chunk of the application's input spec, or a batch of them with a leading dimension: an array or
                nested lists of numbers, alone or as a dictionary by the input's name. It is not changed. For a live
                application, a whole signal of any length. For an application with `prepare`, also one raw array as
                `decode` returns it. Several inputs, or inputs of varying length: a dictionary of arrays by name, or a
                list of dictionaries.

        Returns:
            One output chunk, or a batch of them; several outputs as a dictionary of arrays by name, or a list of those.
            Of an application that generates, the outputs of all steps, `[steps, ...]`; a batch of inputs gives a list.

        Raises:
            InvalidInput: Another shape, not numbers, or numbers that the dtype cannot hold.
            TooLarge: A raw array is larger than the spec allows.
        """
        chunks, single = self._chunks_of(inputs)
        return self._outputs(chunks, single=single)

    def generate(self, inputs: Any) -> Iterator[Any]:
        """Yield the outputs of each step of an answer that takes steps.

        Args:
            inputs: As for `predict`.

        Yields:
            The output of one step, `[*output.shape]`, or a dictionary of arrays by name. For a batch of inputs a list
            of those, None for the answers that have ended.

        Raises:
            InvalidInput: As `predict`, or the application does not generate.
        """
        executor = self.executor
        if not isinstance(executor, GenerationExecutor):
            raise InvalidInput(f"application {self.application.name!r} answers in one step; use predict().")
        chunks, single = self._chunks_of(inputs)
        if len(chunks) > executor.max_rows:
            raise InvalidInput(f"There are {len(chunks):,} inputs; give at most {executor.max_rows:,} at once.")
        return generated_outputs(executor, chunks, single=single)

    def _chunks_of(self, inputs: Any) -> tuple[Array, bool]:
        """Return inputs as chunks `[n, ...]`, and whether it is one input."""
        spec = self.application.input
        if isinstance(spec, RecordSpec):
            single = isinstance(inputs, Mapping)
            return spec.of_many([inputs] if single else inputs), single
        if isinstance(inputs, Mapping):
            inputs = given_by_name([spec.name], inputs)[spec.name]
        if isinstance(inputs, str | bytes):
            raise InvalidInput(
                f"The input is {json_kind(type(inputs))}; predict takes arrays, {spec.describe()}. Give a file's bytes "
                f"or a text to answer."
            )
        if self._is_raw(inputs):
            inputs = self.prepare(inputs)
        return _chunks(self.application, spec, inputs)

    def _outputs(self, chunks: Array, *, single: bool) -> Any:
        spec, rows = self.application.answer, self.executor.max_rows
        parts = [self.executor.predict(chunks[start : start + rows]) for start in range(0, len(chunks), rows)]
        outputs = (
            np.concatenate([np.empty((0, *spec.shape), spec.numpy_dtype), *parts]) if len(parts) != 1 else parts[0]
        )
        if isinstance(spec, RecordSpec):
            named = [unpacked(self.application, outputs[row]) for row in range(len(outputs))]
            return named[0] if single else named
        return outputs[0] if single else outputs

    def prepare(self, raw: Array) -> Array:
        """Prepare one chunk of the application's input from one raw array.

        Raises:
            InvalidInput: The raw array does not fit the spec, or the application has no `prepare`.
            TooLarge: It is larger than the spec allows.
        """
        if self.preparing is None:
            raise InvalidInput(f"application {self.application.name!r} has no prepare; give inputs as they are.")
        return self.preparing(raw)

    def _is_raw(self, inputs: Any) -> bool:
        spec, preparing = self.application.input, self.preparing
        if preparing is None or not isinstance(inputs, np.ndarray):
            return False
        is_chunk = inputs.dtype == spec.numpy_dtype and spec.shape in (inputs.shape, inputs.shape[1:])
        return not is_chunk and inputs.dtype == preparing.raw.numpy_dtype and preparing.raw.accepts(inputs.shape)

    def answer(self, body: bytes, content_type: str = "") -> Any:
        """Decode a request's body, predict, and make the reply that a client would get.

        Args:
            body: The request's bytes, for example a PNG file.
            content_type: Its content type, `"image/png"`.

        Raises:
            InvalidInput: The application cannot decode it.
        """
        if self.application.decode is None:
            raise InvalidInput(f"application {self.application.name!r} has no decode; use predict().")
        raw = self.application.decode(body, content_type)
        chunk = decoded_chunk(self.application, raw) if self.preparing is None else self.preparing(raw)
        # A copy: a network that works in place must not change what the decode keeps.
        return reply_of(self.application)(self._outputs(np.array(chunk)[None], single=True))


def load(
    folder: str | Path,
    *,
    cache: str | Path | None = None,
    app: str | Path | Application | None = None,
    accept_changed: bool = False,
    threads: int | None = None,
) -> Predictor:
    """Load the network of a bundle and verify it: files and sources by hash, answers by the golden examples.

    Args:
        folder: The bundle, `RUN/bundle`, or its URL: `"s3://bucket/bundle"`, `"hf://user/name"`.
        cache: The folder that a bundle at a URL is downloaded into; `~/.cache/penstock` by default.
        app: The application, if it moved: a name, an import path, an app.py, or the record itself.
        accept_changed: Accept an application whose sources changed, if the golden examples still agree.
        threads: CPU threads for one step; by default torch's own choice.

    Raises:
        BundleError: The bundle is damaged, or its application or its answers changed.
        ApplicationError: Its application cannot be found.
        StorageError: The URL cannot be read.
    """
    files = read_bundle(local_bundle(folder, None if cache is None else Path(cache)))
    if isinstance(app, Application):
        files.check_specs(app)
        found = as_found(app)
    else:
        found = bundle_application(files, None if app is None else str(app), accept_changed=accept_changed)
    if threads is not None:
        torch.set_num_threads(threads)
    return make_predictor(files, found)


def make_predictor(files: BundleFiles, found: FoundApplication) -> Predictor:
    """Make the network of a verified bundle, and check it by the golden examples.

    Raises:
        BundleError: Its answers changed.
    """
    predictor = unchecked_predictor(files, found)
    application, module = predictor.application, predictor.module
    check_network(application, module, files.golden)
    difference = files.golden.check(predictor.executor.predict)
    if application.live is not None:
        difference = max(difference, check_streamed(application, module, files.golden))
    if predictor.preparing is not None:
        files.golden.check_prepared(predictor.preparing)
    return replace(predictor, difference=difference)


def unchecked_predictor(files: BundleFiles, found: FoundApplication) -> Predictor:
    """Make the network of a bundle whose answers were checked by another process, or will be."""
    module = make_network(found)
    load_weights(module, files.weights)
    module = finished(found, module)
    return Predictor(
        application=found.application,
        files=files,
        module=module,
        executor=torch_executor(found.application, module),
        preparing=make_prepare(found),
        difference=nan,
    )


def torch_executor(
    application: Application, module: nn.Module, *, exact: bool = False
) -> TorchExecutor | GenerationExecutor:
    """Make the executor of a network on the CPU, without graphs; it has `predict`, which gives whole answers.

    Args:
        application: Its application.
        module: The network.
        exact: Give tensors no more room than the longest row needs, also where executors pad.

    Raises:
        ApplicationError: The network does not take the application's inputs.
    """
    if application.generate is not None:
        return GenerationExecutor(module, application, exact=exact)
    room = 1 if exact else SHORTEST_ROOM
    return TorchExecutor(module, application.input, application.output, shortest_room=room)


def streaming_executor(
    application: Application,
    module: nn.Module,
    *,
    slots: int,
    max_rows: int,
    exact: bool = False,
    run: RunStep | None = None,
) -> StreamingExecutor:
    """Make the executor of a network with states on a CPU.

    Args:
        application: Its application.
        module: The network.
        slots: The number of streams.
        max_rows: See `StreamingExecutor`.
        exact: See `StreamingExecutor`.
        run: A replacement of the network's `step`.

    Raises:
        ApplicationError: The network cannot run in chunks.
    """
    streaming = as_streaming(application, module)
    network = StatefulNetwork(streaming, application.input_tensor, application.output_tensor, slots=slots, run=run)
    return StreamingExecutor(network, max_rows=max_rows, exact=exact)


def as_streaming(application: Application, module: nn.Module) -> Streaming:
    """View a network as a streaming one; a one-shot network has streams of one chunk.

    Raises:
        ApplicationError: The application is live and its network is no `Streaming`.
    """
    if application.live is None:
        return Stateless(module, application.output.shape[0] if application.output.shape else 1)
    if not isinstance(module, Streaming):
        raise ApplicationError(
            f"Application {application.name!r} is live, but its model makes a {type(module).__name__}; it must make a "
            f"penstock.nn.Streaming, such as a penstock.nn.Sequential of layers."
        )
    return module


def check_streamed(application: Application, module: nn.Module, golden: Golden) -> float:
    """Run a live application's golden examples in chunks; returns the largest difference.

    Raises:
        ApplicationError: The network cannot run in chunks.
        GoldenMismatch: The difference is above the tolerance.
    """
    rows = len(golden.inputs)
    executor = streaming_executor(application, module, slots=rows, max_rows=rows)
    return golden.check(lambda inputs: run_in_chunks(executor, inputs))


def as_found(application: Application) -> FoundApplication:
    """Wrap an application that is only an object; `":Net"` is looked up in the `__main__` module."""
    return FoundApplication(application=application, module=sys.modules["__main__"], reference="")


def make_network(found: FoundApplication) -> nn.Module:
    """Make a new network of an application, in evaluation mode.

    Raises:
        ApplicationError: Its `model` raises, or gives no `torch.nn.Module`.
    """
    return _module(found, "model", found.model())


def finished(found: FoundApplication, module: nn.Module) -> nn.Module:
    """Put an application's `finish` behind its network, if it has one.

    Raises:
        ApplicationError: Its `finish` raises, is no `torch.nn.Module`, or has a state.
    """
    application = found.application
    if application.finish is None:
        return module
    finish = _stateless(found, "finish", found.finish())
    between = network_output(application.finish)
    return FinishedNetwork(module, finish, application.input, between, application.output).eval()


def check_network(application: Application, module: nn.Module, golden: Golden) -> float:
    """Compare the inputs of `finish` with those of the golden examples; returns the largest difference.

    Args:
        application: The application.
        module: The network, with or without its `finish`.
        golden: The examples.

    Raises:
        GoldenMismatch: The difference is above the tolerance.
    """
    if application.finish is None:
        return 0.0
    between = network_output(application.finish)
    return golden.check_network(TorchExecutor(module, application.input, between).predict)


def make_prepare(found: FoundApplication) -> TorchPrepare | None:
    """Make the `prepare` of an application; None where it has none.

    Raises:
        ApplicationError: Its `prepare` raises, is no `torch.nn.Module`, or has a state.
    """
    application = found.application
    if application.prepare is None:
        return None
    module = _stateless(found, "prepare", found.prepare())
    return TorchPrepare(module=module, raw=application.prepare.raw, input=application.input_tensor)


def _stateless(found: FoundApplication, field: str, made: Any) -> nn.Module:
    module = _module(found, field, made)
    if learned := list(module.state_dict()):
        raise ApplicationError(
            f"The {field} of application {found.application.name!r} has {learned[0]!r} in its state, which a bundle "
            f"does not hold; move learned parameters to the model."
        )
    return module


def _module(found: FoundApplication, field: str, made: Any) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise ApplicationError(
            f"The {field} of application {found.application.name!r} gives a {type(made).__name__}; it must make a "
            f"torch.nn.Module."
        )
    return made.eval()


def _chunks(application: Application, spec: TensorSpec, inputs: Any) -> tuple[Array, bool]:
    try:
        given = np.asarray(inputs)
    except (ValueError, TypeError, RuntimeError):
        raise InvalidInput(f"inputs are ragged or no numbers; give {spec.describe()} or a batch of those.") from None
    single = given.ndim == len(spec.shape)
    shape = given.shape[0 if single else 1 :]
    fits = shape[1:] == spec.shape[1:] and given.size > 0 if application.live else shape == spec.shape
    if not fits or given.ndim > len(spec.shape) + 1:
        raise InvalidInput(f"inputs have shape {list(given.shape)}; give {list(spec.shape)} or a batch of those.")
    # Always a copy: a network that works in place must not change the caller's array.
    return np.array(spec.cast(given[None] if single else given), order="C"), single
