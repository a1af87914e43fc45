"""Three toy applications that feed one another, their bundles, and chains of them.

`marks` finds the lit pixels of an 8 x 8 picture: any number of corners. `weigh` sums a patch of 2 x 2 pixels. `scale`
multiplies a list of any length. They are written as files, because servers and front-ends import them.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from penstock import Bundle
from penstock.core.source_files.find_application import find_application

MARKS = """
from penstock import Application, Dim, TensorSpec

marks = Dim("marks", max=8, min=0)


def network():
    import torch
    from torch import nn

    class Marks(nn.Module):
        def forward(self, picture):
            light, place = picture.flatten(1).float().topk(8)
            corners = torch.stack([place // 8, place % 8], -1).float()
            return {"corners": corners, "light": light, "marks": (light > 127).sum(1)}

    return Marks()


app = Application(
    name="marks",
    input=TensorSpec(dtype="uint8", shape=(8, 8), meaning="grey picture", name="picture"),
    outputs={
        "corners": TensorSpec(dtype="float32", shape=(marks, 2), meaning="row and column"),
        "light": TensorSpec(dtype="float32", shape=(marks,), meaning="brightness"),
    },
    model=":network",
)
"""

# 13 makes the network raise, 19 ends its process, and a negative first number takes as many seconds.
WEIGH = """
import os
import time
from penstock import Application, TensorSpec


def network():
    import torch
    from torch import nn

    class Weigh(nn.Module):
        def forward(self, patch):
            if (patch == 19).any():
                os._exit(19)
            if (patch == 13).any():
                raise ValueError("thirteen")
            time.sleep({sleep_s} + max(0, -float(patch.min())))
            return torch.where((patch == 17).any(1).any(1, keepdim=True), torch.nan, patch.sum((1, 2))[:, None])

    return Weigh()


app = Application(
    name="weigh",
    input=TensorSpec(dtype="float32", shape=(2, 2), meaning="four pixels", name="patch"),
    output=TensorSpec(dtype="float32", shape=(1,), meaning="their sum", name="weight"),
    model=":network",
)
"""

SCALE = """
from penstock import Application, Dim, TensorSpec

numbers = Dim("numbers", max=8, min=0)


def network():
    from torch import nn

    class Scale(nn.Module):
        def forward(self, numbers_in):
            return numbers_in * 0.5

    return Scale()


app = Application(
    name="scale",
    inputs={"numbers_in": TensorSpec(dtype="float32", shape=(numbers,), meaning="numbers")},
    outputs={"halves": TensorSpec(dtype="float32", shape=(numbers,), meaning="their halves")},
    model=":network",
)
"""

# Finds the marks, weighs a patch at each, and halves the weights.
CHAIN = """
import numpy as np
from penstock import Chain, Dim, ChainStep, TensorSpec

found = Dim("found", max=8, min=0)


def patches(results, picture):
    padded = np.pad(picture, 1)
    corners = results["marks"]["corners"].astype(int)
    return [padded[row + 1 : row + 3, column + 1 : column + 3] for row, column in corners]


def weights(results, picture):
    return {{"numbers_in": np.array([0 if one is None else one[0] for one in results["weigh"]], np.float32)}}


def join(results, picture):
    missing = [one is None for one in results["weigh"]]
    return {{"weights": results["scale"]["halves"], "missing": np.array(missing, np.bool_)}}


chain = Chain(
    name="look",
    description="Weighs the surroundings of each mark.",
    steps=(
        ChainStep(part="marks"),
        ChainStep(part="weigh", each=patches, partial={partial}),
        ChainStep(part="scale", feed=weights),
    ),
    join=join,
    outputs={{
        "weights": TensorSpec(dtype="float32", shape=(found,), meaning="half of the sum at each mark"),
        "missing": TensorSpec(dtype="bool", shape=(found,), meaning="whether there is no weight"),
    }},
)
"""


class Chained(NamedTuple):
    """The files of a chain.

    Args:
        chain: The file of the chain.
        marks: The bundle of the first part.
        weigh: The bundle of the second.
        scale: The bundle of the third.
    """

    chain: Path
    marks: Path
    weigh: Path
    scale: Path

    @property
    def bundles(self) -> tuple[Path, Path, Path]:
        return self.marks, self.weigh, self.scale

    @property
    def arguments(self) -> list[str]:
        """What `penstock serve` is given."""
        return [str(path) for path in (*self.bundles, self.chain)]


def write_chained(folder: Path, *, sleep_s: float = 0.0, partial: bool = False, chain: str = CHAIN) -> Chained:
    """Write the applications, their bundles and a chain of them into a folder."""
    rng = np.random.default_rng(0)
    examples = {
        "marks": rng.integers(0, 200, (2, 8, 8), np.uint8),
        "weigh": rng.random((2, 2, 2), np.float32),
        "scale": [{"numbers_in": np.arange(length, dtype=np.float32)} for length in (1, 8)],
    }
    bundles: list[Path] = []
    for name, text in (("marks", MARKS), ("weigh", WEIGH.replace("{sleep_s}", str(sleep_s))), ("scale", SCALE)):
        (folder / name).mkdir()
        (folder / name / f"{name}.py").write_text(text)
        found = find_application(str(folder / name / f"{name}.py"))
        Bundle.write(found, found.model(), examples[name], to=folder / name / "bundle")
        bundles.append(folder / name / "bundle")
    (folder / "chain.py").write_text(chain.format(partial=partial))
    return Chained(folder / "chain.py", *bundles)


def picture(*marks: tuple[int, int], light: int = 200, around: int = 1) -> np.ndarray:
    """A picture of lit pixels on a ground."""
    made = np.full((8, 8), around, np.uint8)
    for number, (row, column) in enumerate(marks):
        # Different lights, so that the order is known.
        made[row, column] = light - number
    return made


def answer(*marks: tuple[int, int], light: int = 200, around: int = 1) -> list[float]:
    """The weights that the chain gives for a picture, computed here."""
    padded = np.pad(picture(*marks, light=light, around=around), 1).astype(np.float32)
    return [float(padded[row + 1 : row + 3, column + 1 : column + 3].sum()) / 2 for row, column in marks]
