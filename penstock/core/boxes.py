"""The declaration of outputs that are boxes in a picture, so that they are given and drawn in its pixels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ApplicationError
from penstock.core.json_record import JsonRecord
from penstock.core.spec import Array, TensorSpec

# N boxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Boxes(JsonRecord):
    """Three outputs that are boxes with classes and scores.

    The server answers a picture with boxes in the picture's own pixels, and its page draws them over it. Arrays are
    answered with boxes in the pixels of the frame, as networks, packs and the Open Inference Protocol give them.

    Args:
        labels: Names of the classes, in their order.
        frame: Height and width into which `prepare` scales a picture, by the same factor in both directions, at its
            top left; see `penstock.nn.letterbox.Letterbox`.
        boxes: The output `[N, 4]`: left, top, right and bottom.
        classes: The output `[N]` of whole numbers.
        scores: The output `[N]`, 0 to 1.
        least: Boxes with a smaller score are not drawn.

    Raises:
        ApplicationError: A field is out of range.
    """

    unreadable = "the declaration of boxes is not readable ({}); write it again."
    labels: tuple[str, ...]
    frame: tuple[int, int]
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
                sizes and all(type(size) is int and size > 0 for size in self.frame),
                "a height and a width in pixels",
            ),
            ("least", type(self.least) in (int, float) and 0 <= self.least <= 1, "0 to 1"),
        ):
            if not good:
                raise ApplicationError(f"Boxes has {name}={getattr(self, name)!r:.80}; it must be {fix}.")

    def check(self, outputs: Mapping[str, TensorSpec]) -> None:
        """Check that an application has these outputs.

        Raises:
            ApplicationError: One is missing or has another shape.
        """
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

    def in_picture(self, named: Mapping[str, Array], height: int, width: int) -> dict[str, Any]:
        """An answer with its boxes in the pixels of a picture.

        Args:
            named: The outputs by name.
            height: Of the picture, in pixels.
            width: Of the picture.
        """
        share = max(height / self.frame[0], width / self.frame[1])
        return {**named, self.boxes: named[self.boxes] * named[self.boxes].dtype.type(share)}
