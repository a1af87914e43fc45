"""A network into a bundle: its weights, and the answers it gives to its golden examples."""

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self, final

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from penstock.core.application import Application, FoundApplication
from penstock.core.bundle import BundleFiles, Manifest, read_bundle, write_bundle
from penstock.core.errors import ApplicationError, BundleError
from penstock.core.golden import Golden
from penstock.core.spec import Array
from penstock.runtime.executor import TorchExecutor

TOLERANCE_FP32 = 1e-4
GOLDEN_EXAMPLES = 32


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """What training leaves and everything else takes.

    Args:
        files: The verified folder.
    """

    files: BundleFiles

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.files.folder

    @property
    def manifest(self) -> Manifest:
        """What it says of itself."""
        return self.files.manifest

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The bundle in a folder, every file verified.

        Raises:
            BundleError: There is none, or it is damaged.
        """
        return cls(files=read_bundle(folder))

    @classmethod
    def write(
        cls,
        application: Application | FoundApplication,
        module: nn.Module,
        examples: Array,
        *,
        to: str | Path,
        metrics: dict[str, float] | None = None,
        tolerance: float = TOLERANCE_FP32,
    ) -> Self:
        """Record what a network answers and write its bundle.

        Args:
            application: What it is for.
            module: The network with its weights, on the CPU; it is put into evaluation mode.
            examples: Raw inputs `[N, *input.shape]`, N >= 1; the first 32 become the golden examples.
            to: The bundle's folder.
            metrics: Validation metrics by name.
            tolerance: The largest difference that other places may show on the examples.

        Raises:
            ApplicationError: The examples or the network's outputs do not have the declared specs.
            BundleError: The place is taken by something that is not a bundle.
        """
        found = application if isinstance(application, FoundApplication) else None
        declared = found.application if found else application
        assert isinstance(declared, Application)
        inputs = np.ascontiguousarray(examples[:GOLDEN_EXAMPLES])
        if len(inputs) == 0 or inputs.dtype != declared.input.numpy_dtype or inputs.shape[1:] != declared.input.shape:
            raise ApplicationError(
                f"the examples are {inputs.dtype}{list(inputs.shape)}; {declared.name!r} needs at least one, "
                f"{declared.input.dtype}{['N', *declared.input.shape]}."
            )
        module.eval()
        manifest = Manifest(
            name=declared.name,
            reference=found.reference if found else "",
            sources=found.source_sha256() if found else {},
            input=declared.input,
            output=declared.output,
            files={},
            tolerance=tolerance,
            metrics=metrics or {},
            versions=library_versions(),
            parameters=sum(parameter.numel() for parameter in module.parameters()),
        )
        golden = Golden(inputs=inputs, outputs=_answers(declared, module, inputs), tolerance=tolerance)
        return cls(files=write_bundle(to, manifest, save(_own_tensors(module)), golden))


def library_versions() -> dict[str, str]:
    """The versions of what computes: Python, torch, NumPy, penstock."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "numpy", "penstock"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "from source"
    return versions


def _answers(application: Application, module: nn.Module, inputs: Array) -> Array:
    outputs = TorchExecutor(module, application.input, application.output).predict(inputs)
    if outputs.dtype != application.output.numpy_dtype or outputs.shape[1:] != application.output.shape:
        raise ApplicationError(
            f"the network of {application.name!r} gives {outputs.dtype}{list(outputs.shape[1:])} for a chunk, but its "
            f"output is declared as {application.output.describe()}."
        )
    if not np.isfinite(outputs).all():
        raise BundleError("the network answers its examples with NaN or infinity; it cannot be served.")
    return np.ascontiguousarray(outputs)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict with tied tensors written twice, since safetensors stores no sharing."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in module.state_dict().items()}
