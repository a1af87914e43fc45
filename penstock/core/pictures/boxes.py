"""The declaration of outputs that are boxes in a picture, so that they are given and drawn in its pixels.

`device/web/boxes.js` computes the same; `tests/data/boxes.json` tests both.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from penstock.core.dim import Dim
from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord
from penstock.core.spec import Array, TensorSpec

# N boxes

NOTHING_FOUND = "nothing found"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FoundBox:
    """A thing that was found in a picture.

    Args:
        label: Name of its class; the number of a class without a name.
        kind: Number of its class.
        score: 0 to 1.
        box: Left, top, right and bottom in the pixels of the picture.
    """

    label: str
    kind: int
    score: float
    box: tuple[float, float, float, float]

    def crop(self, picture: Array) -> Array:
        """Cut the box out of its picture, to whole pixels and within its edges; one pixel at least.

        Args:
            picture: `[H, W, ...]`.

        Returns:
            A copy, `[h, w, ...]`.
        """
        height, width, *_ = picture.shape
        left, top, right, bottom = self.box
        return picture[_pixels(top, bottom, height), _pixels(left, right, width)].copy()


def _pixels(low: float, high: float, size: int) -> slice:
    # Not numbers, and what is beyond the picture, become its edges.
    first = min(max(math.floor(low), 0), size - 1) if math.isfinite(low) else 0
    last = min(max(math.ceil(high), 0), size) if math.isfinite(high) else size
    return slice(first, max(last, first + 1))


def found_line(found: Sequence[FoundBox]) -> str:
    """The found things in words, in the order of the classes: `2 cars, 1 person`, or `nothing found`."""
    counts = Counter((each.kind, each.label) for each in found)
    parts = [f"{count} {label if count == 1 else plural(label)}" for (_, label), count in sorted(counts.items())]
    return ", ".join(parts) or NOTHING_FOUND


def plural(label: str) -> str:
    """The regular English plural of a label: `cars`, `buses`, `lorries`."""
    if label.endswith(("s", "x", "z", "ch", "sh")):
        return f"{label}es"
    if label.endswith("y") and label[-2:-1] not in tuple("aeiou"):
        return f"{label[:-1]}ies"
    return f"{label}s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes(JsonRecord):
    """Three outputs that are boxes with classes and scores.

    The server answers a picture with the boxes of a score of `least` or more, in the picture's own pixels. Its page,
    `penstock watch` and the web app draw the same boxes over the picture. Arrays are answered with all boxes, in the
    pixels of the frame, as networks, packs and the Open Inference Protocol give them.

    Args:
        labels: Names of the classes, in their order.
        frame: Height and width into which `prepare` scales a picture, by the same factor in both directions, at its
            top left; see `penstock.nn.letterbox.Letterbox`. None for boxes in the picture's own pixels, as the
            functions of a chain make them.
        boxes: The output `[N, 4]`: left, top, right and bottom.
        classes: The output `[N]` of whole numbers.
        scores: The output `[N]`, 0 to 1.
        least: Boxes with a smaller score are no part of the answer to a picture.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "the declaration of boxes is not readable ({}); write it again."
    labels: tuple[str, ...]
    frame: tuple[int, int] | None = None
    boxes: str = "boxes"
    classes: str = "classes"
    scores: str = "scores"
    least: float = 0.3

    def __post_init__(self) -> None:
        named = isinstance(self.labels, tuple) and all(isinstance(label, str) and label for label in self.labels)
        sizes = isinstance(self.frame, tuple) and len(self.frame) == 2
        for name, good, fix in (
            ("labels", named and self.labels, "a tuple of names"),
            (
                "frame",
                self.frame is None or (sizes and all(type(size) is int and size > 0 for size in self.frame)),
                "a height and a width in pixels",
            ),
            ("least", type(self.least) in (int, float) and 0 <= self.least <= 1, "0 to 1"),
        ):
            if not good:
                raise ApplicationError(f"Boxes has {name}={getattr(self, name)!r:.80}; it must be {fix}.")

    def check(self, outputs: Mapping[str, TensorSpec], *, scaled: bool = True) -> None:
        """Check that an application has these outputs.

        Args:
            outputs: Its outputs by name.
            scaled: Whether its boxes are in a frame; those of a chain are in the picture's own pixels.

        Raises:
            ApplicationError: One is missing or has another shape, or a frame is missing, or there where none is used.
        """
        if scaled != (self.frame is not None):
            fix = (
                "boxes of a network are in a frame; give its height and width"
                if scaled
                else "the functions of a chain have the whole picture; give boxes in its pixels, and leave frame out"
            )
            raise ApplicationError(f"Boxes has frame={self.frame!r}, but {fix}.")
        rows = None
        for name, rest in ((self.boxes, (4,)), (self.classes, ()), (self.scores, ())):
            spec = outputs.get(name)
            rows = spec.shape[:1] if spec is not None and rows is None else rows
            if spec is None or spec.shape[:1] != rows or spec.shape[1:] != rest:
                found = "no output" if spec is None else spec.describe()
                raise ApplicationError(
                    f"Boxes needs the outputs {self.boxes!r} [N, 4], {self.classes!r} [N] and {self.scores!r} [N] of "
                    f"one N, and {name!r} is {found}; give the names of such outputs."
                )

    def in_picture(
        self, named: Mapping[str, Array], height: int, width: int, outputs: Mapping[str, TensorSpec]
    ) -> dict[str, Any]:
        """The answer to a picture: boxes with a score of `least` or more, in the picture's own pixels.

        Args:
            named: The outputs by name.
            height: Of the picture, in pixels.
            width: Of the picture.
            outputs: The application's outputs by name; those with the same `Dim` as the boxes lose the same rows.
        """
        kept = self.kept(named, outputs)
        return {**kept, self.boxes: kept[self.boxes] * kept[self.boxes].dtype.type(self.share(height, width))}

    def share(self, height: int, width: int) -> float:
        """Pixels of a picture of this size for each pixel of the frame; 1 without one."""
        if self.frame is None:
            return 1.0
        return max(height / self.frame[0], width / self.frame[1])

    def kept(self, named: Mapping[str, Array], outputs: Mapping[str, TensorSpec]) -> dict[str, Array]:
        """The outputs without the boxes whose score is smaller than `least`."""
        keep_N = named[self.scores] >= self.least
        axes = dict.fromkeys((self.boxes, self.classes, self.scores), 0)
        rows = outputs[self.boxes].shape[0]
        if isinstance(rows, Dim):
            # A Dim also equals the number that is its largest length.
            dims = {name: [getattr(size, "name", "") for size in spec.shape] for name, spec in outputs.items()}
            axes |= {name: names.index(rows.name) for name, names in dims.items() if rows.name in names}
        return {name: np.compress(keep_N, each, axes[name]) if name in axes else each for name, each in named.items()}

    def found(self, named: Mapping[str, Array], height: int, width: int) -> tuple[FoundBox, ...]:
        """The boxes of a picture with a score of `least` or more, the largest score first.

        Args:
            named: The outputs by name.
            height: Of the picture, in pixels.
            width: Of the picture.
        """
        scores_N, share = named[self.scores], self.share(height, width)
        order = np.argsort(-scores_N, kind="stable")
        made: list[FoundBox] = []
        for row in order[scores_N[order] >= self.least].tolist():
            kind = int(named[self.classes][row])
            left, top, right, bottom = (share * float(side) for side in named[self.boxes][row])
            label = self.labels[kind] if 0 <= kind < len(self.labels) else str(kind)
            made.append(FoundBox(label=label, kind=kind, score=float(scores_N[row]), box=(left, top, right, bottom)))
        return tuple(made)
