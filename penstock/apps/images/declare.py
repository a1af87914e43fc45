"""Declare an application that knows things in pictures; nothing here needs torch until a network is made."""

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.recognition import Recognition
from penstock.core.spec import Array, TensorSpec
from penstock.train.pictures import kinds_and_groups

# H height, W width, S side of what the network sees

MOST_SIDE = 4096
# What a video shows stays until it is so much less probable than what is named at first.
LEAVE_SHARE = 0.6
ACCEPTS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")


def image_application(
    *,
    name: str,
    labels: tuple[str, ...],
    side: int,
    model: Callable[[], Any] | str,
    recipe: Any,
    description: str = "",
    unsure_below: float = 0.8,
) -> Application:
    """Declare one.

    A client sends a picture of any size and gets `Recognition.answer`: the general class, the kind within it, or that
    neither is sure.

    Args:
        name: See `Application`.
        labels: `"cat"`, or `"dog/terrier"` for a kind within a general class, in the order of the network's outputs.
        side: Of the square picture that the network sees, in pixels.
        model: See `Application`; it makes a `penstock.models.calibrated.Calibrated`, say.
        recipe: See `Application`; `penstock.apps.images.recipe.images_recipe` makes one.
        description: See `Application`.
        unsure_below: What is less probable is not named, and in a video not shown anew. The network's probabilities are
            calibrated; `report.json` of a run says how many are named at which value, and how many of those are right.
    """
    kinds, groups = kinds_and_groups(labels)
    recognition = Recognition(
        labels=kinds,
        groups=groups,
        unsure_below=unsure_below,
        enter=unsure_below,
        leave=unsure_below * LEAVE_SHARE,
    )
    return Application(
        name=name,
        description=description,
        input=TensorSpec(
            name="image",
            dtype="float32",
            shape=(side, side, 3),
            meaning="the middle square of a picture: red, green, blue",
            units="0..255",
        ),
        output=TensorSpec(
            name="probabilities",
            dtype="float32",
            shape=(len(kinds),),
            meaning="probability of each kind of thing",
            units="probability",
            labels=kinds,
        ),
        decode=decode,
        prepare=Prepare(
            module=partial(_square_resize, side),
            raw=RawSpec(
                dtype="uint8",
                shape=(None, None, 4),
                meaning="a whole picture: red, green, blue, opacity",
                units="0..255",
                most=(MOST_SIDE, MOST_SIDE, 4),
            ),
        ),
        recognition=recognition,
        reply=recognition.answer,
        accepts=ACCEPTS,
        max_body_bytes=1 << 24,
        model=model,
        recipe=recipe,
    )


def decode(body: bytes, content_type: str) -> Array:
    """A picture's pixels as a browser has them, uint8 `[H, W, 4]`."""
    return decode_image(body, mode="RGBA", max_pixels=MOST_SIDE * MOST_SIDE)


def _square_resize(side: int) -> Any:
    from penstock.nn.pictures import SquareResize

    return SquareResize(side)
