"""A bundle made runnable in this process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from penstock.core.application import Application, FoundApplication, find_application, reply_of
from penstock.core.bundle import BundleFiles, read_bundle
from penstock.core.errors import BundleCorrupt, BundleError, InvalidInput
from penstock.core.spec import Array
from penstock.runtime.executor import TorchExecutor


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """A network that answers in this process, in a notebook say.

    Args:
        application: What it is for.
        files: The bundle that it was loaded from.
        module: The network, in evaluation mode.
        executor: Runs it in batches.
    """

    application: Application
    files: BundleFiles
    module: nn.Module
    executor: TorchExecutor

    def predict(self, inputs: Any) -> Array:
        """The network's answer to raw inputs.

        Args:
            inputs: One chunk of the application's input spec, or a batch of them with a dimension in front.

        Returns:
            One output chunk, or a batch of them.

        Raises:
            InvalidInput: Another shape, or numbers that the dtype cannot hold.
        """
        spec = self.application.input
        chunks = np.asarray(inputs)
        single = chunks.ndim == len(spec.shape)
        if chunks.shape[chunks.ndim - len(spec.shape) :] != spec.shape or chunks.ndim > len(spec.shape) + 1:
            raise InvalidInput(f"inputs have shape {list(chunks.shape)}; give {list(spec.shape)} or a batch of those.")
        outputs = self.executor.predict(np.ascontiguousarray(spec.cast(chunks[None] if single else chunks)))
        return outputs[0] if single else outputs

    def answer(self, body: bytes, content_type: str = "") -> Any:
        """What a client would get for a request's body: decoded, predicted, replied.

        Args:
            body: The request's bytes, a PNG file's say.
            content_type: Its content type, `"image/png"`.

        Raises:
            InvalidInput: The application cannot decode it.
        """
        if self.application.decode is None:
            raise InvalidInput(f"application {self.application.name!r} has no decode; use predict().")
        raw = self.application.input.check(self.application.decode(body, content_type))
        return reply_of(self.application)(self.predict(raw))


def load(
    folder: str | Path,
    *,
    app: str | Application | None = None,
    accept_changed: bool = False,
    threads: int | None = None,
) -> Predictor:
    """The network of a bundle, verified: files by hash, sources by hash, answers by its golden examples.

    Args:
        folder: The bundle, `RUN/bundle`.
        app: Where the application is now, if it moved: a name, an import path, an app.py, or the record itself.
        accept_changed: Take an application whose sources changed, as long as the golden examples agree.
        threads: CPU threads for one step; by default torch's own choice.

    Raises:
        BundleError: The bundle is damaged, its application changed, or its answers did.
        ApplicationError: Its application cannot be found.
    """
    files = read_bundle(folder)
    module, application = _network(files, app, accept_changed)
    if threads is not None:
        torch.set_num_threads(threads)
    executor = TorchExecutor(module, application.input, application.output)
    files.golden.check(executor.predict)
    return Predictor(application=application, files=files, module=module, executor=executor)


def found_for(files: BundleFiles, app: str | None = None) -> FoundApplication:
    """The application of a bundle: where it was when the bundle was written, or where `app` says.

    Raises:
        BundleError: The bundle does not know, because it was made in a notebook.
        ApplicationError: It is not there.
    """
    reference = app or files.manifest.reference
    if not reference:
        raise BundleError("the bundle does not say where its application is; name it with --app (app=...).")
    return find_application(reference)


def _network(files: BundleFiles, app: str | Application | None, accept_changed: bool) -> tuple[nn.Module, Application]:
    if isinstance(app, Application):
        if isinstance(app.model, str):
            raise BundleError("an application given as an object needs its model as an object too, not an import path.")
        module, application = app.model(), app
    else:
        found = found_for(files, app)
        files.check_sources(found, accept_changed=accept_changed)
        module, application = found.model(), found.application
    load_weights(module, files.weights)
    return module.eval(), application


def load_weights(module: nn.Module, file: Path) -> None:
    """Fill a network with the weights of a safetensors file.

    Raises:
        BundleCorrupt: A name or shape in the file does not fit the network.
    """
    try:
        module.load_state_dict(load_file(file))
    except RuntimeError as error:
        first_lines = " ".join(str(error).split())[:300]
        raise BundleCorrupt(f"the weights in {file} do not fit the network: {first_lines}") from None
