"""Loading of a safetensors file into a network."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.core.errors import BundleCorrupt, BundleError

_DIFFERENCES_NAMED = 3
# Characters of a difference: a file may name its tensors as it likes.
_DIFFERENCE_SHOWN = 200


def load_weights(module: nn.Module, file: Path) -> None:
    """Load the weights of a safetensors file into a network.

    A missing name is taken from the name that it is tied to, since safetensors stores shared weights once.

    Raises:
        BundleError: A name or shape in the file does not fit the network, or integers stand for floats.
        BundleCorrupt: It is not a safetensors file.
    """
    module.load_state_dict(_fitting(module, file))


def check_weights(make: Callable[[], object], file: Path) -> None:
    """Check that the weights of a file fit a network that is not made yet, as `load_weights` does.

    It is made without memory for its weights. One that cannot be made so is not checked.

    Args:
        make: Makes the network.
        file: The safetensors file.

    Raises:
        BundleError: See `load_weights`.
        BundleCorrupt: See `load_weights`.
    """
    try:
        with torch.device("meta"):
            module = make()
    except Exception:  # noqa: BLE001 - an application may raise anything, and whoever loads the network reports it
        return
    if isinstance(module, nn.Module):
        _fitting(module, file)


def _fitting(module: nn.Module, file: Path) -> dict[str, Tensor]:
    """Read the weights of a network, under all names of its state dict."""
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BundleCorrupt(f"{file} is not a readable safetensors file ({error}); write it again.") from None
    own = module.state_dict(keep_vars=True)
    present = {id(own[name]): tensor for name, tensor in tensors.items() if name in own}
    tied = {name: present[id(tensor)] for name, tensor in own.items() if name not in tensors and id(tensor) in present}
    differences = _differences(own, tensors | tied)
    if differences:
        first = "; ".join(each[:_DIFFERENCE_SHOWN] for each in differences[:_DIFFERENCES_NAMED])
        more = len(differences) - _DIFFERENCES_NAMED
        others = f"; and {more:,} more" if more > 0 else ""
        raise BundleError(
            f"the weights in {file} do not fit the network: {first}{others}. Use the application that they were "
            f"trained with, and the names of its state_dict."
        )
    return tensors | tied


def _differences(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    missing = [f"{name} {list(own[name].shape)} is not in the file" for name in own if name not in given]
    unknown = [f"{name} {list(given[name].shape)} is not in the network" for name in given if name not in own]
    both = [(name, given[name], own[name]) for name in own if name in given]
    shapes = [(name, list(theirs.shape), list(ours.shape)) for name, theirs, ours in both if theirs.shape != ours.shape]
    kinds = [
        (name, theirs.dtype, ours.dtype)
        for name, theirs, ours in both
        if theirs.is_floating_point() != ours.is_floating_point()
    ]
    differ = [f"{name} is {theirs} in the file and {ours} in the network" for name, theirs, ours in shapes + kinds]
    return missing + differ + unknown
