"""Boxes drawn over a picture, with class and score; `web/boxes.js` draws the same."""

from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from penstock.core.pictures.boxes import FoundBox

COLOURS = ("#ffd54a", "#4dd0e1", "#ff7ad9", "#9cff57", "#ff8a65", "#b39dff")
# Height of the letters as a share of the picture's longer side, and in pixels at least.
SHARE, LEAST_LETTERS = 1 / 40, 11


def colour_of(found: FoundBox) -> str:
    """The colour of a class."""
    return COLOURS[found.kind % len(COLOURS)]


def corners(found: FoundBox, width: float, height: float) -> tuple[float, float, float, float]:
    """The box within a picture, with its sides in order, as a network may give others."""
    left, top, right, bottom = found.box
    xs = sorted(min(max(0.0, side), width) for side in (left, right))
    ys = sorted(min(max(0.0, side), height) for side in (top, bottom))
    return xs[0], ys[0], xs[1], ys[1]


def draw_boxes(picture: Image.Image, found: Sequence[FoundBox]) -> None:
    """Draw boxes into a picture, the largest score on top.

    Args:
        picture: RGB.
        found: In its pixels, the largest score first.
    """
    draw = ImageDraw.Draw(picture)
    letters = max(LEAST_LETTERS, round(max(picture.size) * SHARE))
    font = ImageFont.load_default(letters)
    for each in reversed(found):
        left, top, right, bottom = corners(each, picture.width - 1, picture.height - 1)
        draw.rectangle((left, top, right, bottom), outline=colour_of(each), width=max(2, letters // 6))
        text = f"{each.label} {each.score:.2f}"
        wide = draw.textlength(text, font=font) + letters / 2
        x = max(0.0, min(left, picture.width - wide))
        y = max(0.0, top - 1.3 * letters)
        draw.rectangle((x, y, x + wide, y + 1.3 * letters), fill=colour_of(each))
        draw.text((x + letters / 4, y + letters / 10), text, font=font, fill="black")
