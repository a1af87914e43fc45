"""An application whose answers say which version of the weights and of the sources made them.

The network returns the doubles of its four inputs and a constant of the version; `reply` adds a constant of the source
file. An answer in which the two differ is a mixture.
"""

import shutil
from pathlib import Path

import numpy as np

from penstock.core.source_files.find_application import find_application

# The front-ends import torch with it, as many users' applications do.
_APPLICATION = """
import numpy as np
import torch
from torch import nn

from penstock import Application, TensorSpec
from penstock.core.decode import decode_image

SOURCE = {version}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.version = nn.Parameter(torch.tensor([{version}.0]))

    def forward(self, x):
        return torch.cat([2 * x, self.version.expand(x.shape[0], 1)], 1)


def decode(body, content_type):
    return decode_image(body, mode="L", size=(2, 2), max_pixels=1 << 20).astype(np.float32).ravel()


def reply(output):
    return {{"doubles": output[:4].tolist(), "weights": int(output[4]), "source": SOURCE}}


app = Application(
    name="versioned",
    input=TensorSpec(dtype="float32", shape=(4,), meaning="four numbers", name="numbers"),
    output=TensorSpec(dtype="float32", shape=(5,), meaning="their doubles and the version", name="answer"),
    decode=decode,
    reply=reply,
    accepts=("image/png", "image/jpeg"),
    max_body_bytes=1 << 20,
    model=Network,
)
"""

_LIVE = """
import torch

from penstock import Application, Live, TensorSpec


def network():
    from penstock.nn import GRU, CausalConv1d, LogMel, Sequential

    torch.manual_seed(5)
    return Sequential(
        LogMel(8000, bands=8),
        CausalConv1d(8, 8, 3, 2),
        GRU(8, 16),
        torch.nn.Linear(16, 2),
    )


app = Application(
    name="listener",
    input=TensorSpec(dtype="int16", shape=(320,), meaning="sound", units="int16 PCM at 8 kHz", name="sound"),
    output=TensorSpec(dtype="float32", shape=(2, 2), meaning="scores", labels=("no", "yes"), name="scores"),
    live=Live(rate_hz=8000),
    chunks=4,
    model=network,
)
"""

EXAMPLES = np.arange(16, dtype=np.float32).reshape(4, 4)


def write_version(bundle: Path, sources: Path, version: int) -> None:
    """Write a version's source file and bundle; a bundle that exists is replaced in one step.

    Args:
        bundle: The bundle's folder.
        sources: Folder of the source files of all versions.
        version: The number that its answers carry.
    """
    from penstock.runtime.bundle_writer import Bundle

    folder = sources / f"v{version}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "app.py").write_text(_APPLICATION.format(version=version))
    application = find_application(str(folder / "app.py"))
    network = application.model()  # pyright: ignore[reportOptionalCall]
    Bundle.write(application, network, EXAMPLES, to=bundle)


def edit_source(sources: Path, version: int, shown: int) -> None:
    """Change the source file of a version, as a user who edits it does; its answers would carry another number."""
    (sources / f"v{version}" / "app.py").write_text(_APPLICATION.format(version=shown))


def write_live(bundle: Path, sources: Path) -> None:
    """Write the bundle of a small live application."""
    from penstock.runtime.bundle_writer import Bundle
    from penstock.runtime.load import make_network

    sources.mkdir(parents=True, exist_ok=True)
    file = sources / "listener_app.py"
    file.write_text(_LIVE)
    application = find_application(str(file))
    sounds = np.random.default_rng(2).normal(0, 300, (3, 1000)).astype(np.int16)
    Bundle.write(application, make_network(application), sounds, to=bundle)


def remove(folder: Path) -> None:
    """Remove a model's folder, whatever is in it."""
    shutil.rmtree(folder, ignore_errors=True)
