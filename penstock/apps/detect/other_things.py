"""A second world for a test without training: the same things in other shapes and colours."""

import math

from penstock.apps.detect.pencil import Colour, Pencil
from penstock.apps.detect.things import (
    DARK,
    Rng,
    Style,
    any_colour,
    barrier,
    bin_,
    board,
    bush,
    kiosk,
    post,
    ring,
    shade,
)


def pastel(rng: Rng) -> Colour:
    """A bright, pale colour."""
    base = rng.uniform(120, 200)
    red, green, blue = (base + rng.uniform(0, 55) for _ in range(3))
    return red, green, blue


def round_car(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A small round car, or a van."""
    side, paint = rng.random() < 0.45, pastel(rng)
    wide = (rng.uniform(3.2, 5.2) if side else rng.uniform(1.6, 2.1)) * metre
    high = rng.uniform(1.5, 2.2) * metre
    left, right = x - wide / 2, x + wide / 2
    if rng.random() < 0.5:
        pencil.box(left, y - high, right, y - high * 0.14, paint, high * 0.1)
        pencil.box(left + wide * 0.08, y - high * 0.92, right - wide * 0.08, y - high * 0.56, shade((60, 90, 120), 1.2))
    else:
        pencil.disc(x, y - high * 0.55, wide * 0.4, high * 0.45, paint)
        pencil.disc(x, y - high * 0.66, wide * 0.31, high * 0.26, shade((60, 90, 120), 1.2))
        pencil.box(left, y - high * 0.55, right, y - high * 0.14, shade(paint, 0.9), high * 0.2)
    for place in (0.2, 0.8) if side else (0.12, 0.88):
        size = high * (0.19 if side else 0.12)
        pencil.disc(left + wide * place, y - size, size, size, DARK)
    if not side:
        for place in (0.14, 0.86):
            pencil.disc(left + wide * place, y - high * 0.42, wide * 0.08, wide * 0.08, (255, 90, 70))


def skirted_person(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A person in a coat or a skirt, with a hat or a bag."""
    high, coat = rng.uniform(1.3, 1.9) * metre, pastel(rng)
    head = high * 0.085
    for leg in (-0.05, 0.05):
        pencil.line((x + high * leg, y - high * 0.3), (x + high * leg * 1.4, y), high * 0.06, any_colour(rng, 20, 120))
    pencil.polygon(
        [
            (x - high * 0.08, y - high * 0.82),
            (x + high * 0.08, y - high * 0.82),
            (x + high * 0.17, y - high * 0.25),
            (x - high * 0.17, y - high * 0.25),
        ],
        coat,
    )
    pencil.disc(x, y - high + head, head, head, shade((225, 180, 150), rng.uniform(0.4, 1.0)))
    pencil.box(x - head * 1.2, y - high, x + head * 1.2, y - high + head * 0.6, pastel(rng))
    if rng.random() < 0.5:
        pencil.box(x + high * 0.1, y - high * 0.55, x + high * 0.22, y - high * 0.4, any_colour(rng))


def shield(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A road sign: a pentagon, a hexagon, or a wide plate."""
    radius, edge, face = rng.uniform(0.32, 0.5) * metre, pastel(rng), any_colour(rng)
    corners = int(rng.integers(4, 7))
    if corners == 4:
        pencil.box(x - radius * 1.3, y - radius * 0.7, x + radius * 1.3, y + radius * 0.7, edge, radius * 0.1)
        pencil.box(x - radius * 1.1, y - radius * 0.5, x + radius * 1.1, y + radius * 0.5, face)
    else:
        pencil.polygon(ring(x, y, radius, corners, -math.pi / 2), edge)
        pencil.polygon(ring(x, y, radius * 0.75, corners, -math.pi / 2), face)
    pencil.line((x - radius * 0.4, y + radius * 0.3), (x + radius * 0.4, y - radius * 0.3), radius * 0.15, edge)


def yellow_light(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A traffic light in a yellow case, sometimes of two lamps."""
    lamps = int(rng.integers(2, 4))
    wide, high = rng.uniform(0.34, 0.46) * metre, lamps * 0.38 * metre
    pencil.box(x - wide / 2, y - high, x + wide / 2, y, shade((225, 180, 40), rng.uniform(0.6, 1.05)))
    lit = int(rng.integers(lamps))
    for place in range(lamps):
        colour: Colour = ((255, 60, 60), (255, 200, 60), (60, 235, 160))[place if lamps == 3 else place * 2]
        size, shown = wide * 0.33, colour if place == lit else (45, 40, 25)
        pencil.disc(x, y - high * (1 - (place + 0.5) / lamps), size, size, shown)


STYLE = Style(
    car=round_car,
    person=skirted_person,
    sign=shield,
    light=yellow_light,
    clutter=(kiosk, bin_, bush, post, board, board, barrier),
    sign_height=2.0,
    light_height=2.9,
)
