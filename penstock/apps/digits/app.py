"""Handwritten digits: classify a picture as one of ten digits."""

from typing import Any

from penstock.core.application import Application
from penstock.core.decode import decode_image
from penstock.core.spec import Array, TensorSpec

DIGITS = tuple("0123456789")
SIDE = 28


def decode(body: bytes, content_type: str) -> Array:
    """Decode a PNG or JPEG to grey pixels, `[28, 28]` uint8."""
    return decode_image(body, mode="L", size=(SIDE, SIDE), max_pixels=1 << 20)


def reply(probabilities: Array) -> dict[str, Any]:
    """The likeliest digit, and the probability of each, from `[10]` float32."""
    best = int(probabilities.argmax())
    return {
        "digit": DIGITS[best],
        "probability": float(probabilities[best]),
        "probabilities": dict(zip(DIGITS, probabilities.tolist(), strict=True)),
    }


app = Application(
    name="digits",
    description="Reads one handwritten digit.",
    input=TensorSpec(
        name="image",
        dtype="uint8",
        shape=(SIDE, SIDE),
        meaning="grey image of one digit, white on black or black on white",
        units="0..255",
    ),
    output=TensorSpec(
        name="probabilities",
        dtype="float32",
        shape=(10,),
        meaning="probability of each digit",
        units="probability",
        labels=DIGITS,
    ),
    decode=decode,
    reply=reply,
    accepts=("image/png", "image/jpeg"),
    max_body_bytes=1 << 20,
    model="penstock.apps.digits.model:DigitsNet",
    recipe="penstock.apps.digits.recipe:recipe",
)
