"""Declare an image classification application; torch is loaded only when a network is made."""

from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.prepare import Prepare, RawSpec
from penstock.core.recognition import Recognition, kinds_and_groups
from penstock.core.spec import Array, TensorSpec

# H height, W width, S side of what the network sees

MAX_SIDE = 4096
# `leave` relative to `enter`: a shown group stays down to this share of the probability that it entered with.
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
    """Declare an image classification application.

    A client sends a picture of any size and gets `Recognition.answer`: the group, the label within it, or "unsure".

    Args:
        name: See `Application`.
        labels: `"cat"`, or `"dog/terrier"` for a label within a group, in the order of the network's outputs.
        side: Side of the network's square input, in pixels.
        model: See `Application`; for example one that makes a `penstock.models.calibrated.Calibrated`.
        recipe: See `Application`; `penstock.apps.images.recipe.images_recipe` makes one.
        description: See `Application`.
        unsure_below: Probability below which an answer is "unsure", and from which a video's group is shown. The
            probabilities are calibrated; `report.json` of a run has coverage and accuracy for several thresholds.
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
                max_shape=(MAX_SIDE, MAX_SIDE, 4),
            ),
        ),
        recognition=recognition,
        reply=recognition.answer,
        accepts=ACCEPTS,
        max_body_bytes=1 << 24,
        model=model,
        recipe=recipe,
    )


def embedding_application(application: Application, *, model: Callable[[], Any], length: int) -> Application:
    """Declare the application whose output is the embedding of another one's network, for a served search.

    Its bundle has the same weights: `penstock bundle embedding.py --weights RUN/bundle/weights.safetensors`.

    Args:
        application: An application whose network has an `embed`, such as one of `image_application`.
        model: Makes its network.
        length: Length of an embedding.
    """
    return Application(
        name=f"{application.name}-embedding",
        description=f"The embedding of a picture by the network of {application.name}.",
        inputs=application.inputs,
        output=TensorSpec(
            name="embedding", dtype="float32", shape=(length,), meaning="feature vector, to compare inputs by"
        ),
        decode=application.decode,
        prepare=application.prepare,
        accepts=application.accepts,
        max_body_bytes=application.max_body_bytes,
        model=partial(_embedding_network, model),
    )


def _embedding_network(make: Callable[[], Any]) -> Any:
    network = make()
    # The names of the weights stay those of the network.
    network.predict = network.embed
    return network


def decode(body: bytes, content_type: str) -> Array:
    """Decode a picture to the pixels that a browser has, uint8 `[H, W, 4]`."""
    return decode_image(body, mode="RGBA", max_pixels=MAX_SIDE * MAX_SIDE)


def _square_resize(side: int) -> Any:
    from penstock.nn.resize import SquareResize

    return SquareResize(side)
