"""An application that knows things in pictures, of a user's labels."""

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.spec import Array, TensorSpec
from penstock.train.pictures import kinds_and_groups

MOST_PIXELS = 4096 * 4096
ACCEPTS = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")


def image_application(
    *,
    name: str,
    labels: tuple[str, ...],
    side: int,
    model: Callable[[], Any] | str,
    recipe: Any,
    description: str = "",
) -> Application:
    """Declare one.

    Args:
        name: See `Application`.
        labels: `"cat"`, or `"dog/terrier"` for a kind within a general class, in the order of the network's outputs.
        side: Of the square picture that the network sees, in pixels.
        model: See `Application`; made of `penstock.models.calibrated.Calibrated`, say.
        recipe: See `Application`; made by `penstock.apps.images.recipe.images_recipe`, say.
        description: See `Application`.
    """
    kinds, _ = kinds_and_groups(labels)
    return Application(
        name=name,
        description=description,
        input=TensorSpec(
            name="image",
            dtype="uint8",
            shape=(side, side, 3),
            meaning="the middle square of a colour picture",
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
        decode=partial(_decode, side=side),
        accepts=ACCEPTS,
        max_body_bytes=1 << 24,
        model=model,
        recipe=recipe,
    )


def _decode(body: bytes, content_type: str, *, side: int) -> Array:
    return decode_image(body, mode="RGB", size=(side, side), max_pixels=MOST_PIXELS)
