"""The objects of a road scene: those to find, and those that only resemble them.

Each function draws one thing that stands at `(x, y)` on the ground, `metre` pixels for each metre.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.apps.detect.pencil import Colour, Pencil, Point

Rng = np.random.Generator
Thing = Callable[[Pencil, Rng, float, float, float], None]

DARK: Colour = (28, 28, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """The things of one world.

    Args:
        car: As the other things, see the top of this module.
        person: A person.
        sign: The plate of a road sign, without its pole.
        light: A traffic light, without its pole.
        clutter: Objects without a label, which the detector must ignore.
        sign_height: Metres from the ground to the middle of a sign.
        light_height: Metres from the ground to the foot of a traffic light.
    """

    car: Thing
    person: Thing
    sign: Thing
    light: Thing
    clutter: tuple[Thing, ...]
    sign_height: float = 2.3
    light_height: float = 2.6


def any_colour(rng: Rng, least: float = 20, most: float = 235) -> Colour:
    """A random colour; half of them are nearly grey."""
    red, green, blue = rng.uniform(least, most, 3)
    if rng.random() < 0.5:
        grey = rng.uniform(least, most)
        red, green, blue = (0.85 * grey + 0.15 * each for each in (red, green, blue))
    return float(red), float(green), float(blue)


def shade(colour: Colour, factor: float) -> Colour:
    """A lighter or darker colour."""
    red, green, blue = (min(255.0, each * factor) for each in colour)
    return red, green, blue


def car(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A car from behind, from the front, or from the side."""
    (_car_side if rng.random() < 0.4 else _car_end)(pencil, rng, x, y, metre)


def _car_end(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    wide, high = rng.uniform(1.6, 2.0) * metre, rng.uniform(1.35, 1.9) * metre
    paint, left, right = any_colour(rng), x - wide / 2, x + wide / 2
    waist, top, inset = y - high * rng.uniform(0.5, 0.6), y - high, wide * rng.uniform(0.08, 0.2)
    for wheel in (left + wide * 0.04, right - wide * 0.2):
        pencil.box(wheel, y - high * 0.25, wheel + wide * 0.16, y, DARK)
    pencil.polygon(
        [(left + inset, top), (right - inset, top), (right - wide * 0.02, waist), (left + wide * 0.02, waist)], paint
    )
    glass = shade((70, 85, 100), rng.uniform(0.4, 1.8))
    pencil.polygon(
        [
            (left + inset * 1.3, top + high * 0.06),
            (right - inset * 1.3, top + high * 0.06),
            (right - wide * 0.08, waist),
            (left + wide * 0.08, waist),
        ],
        glass,
    )
    pencil.box(left, waist, right, y - high * 0.12, shade(paint, rng.uniform(0.8, 1.1)), wide * 0.05)
    pencil.box(left + wide * 0.03, y - high * 0.22, right - wide * 0.03, y - high * 0.1, shade(paint, 0.5))
    lamp: Colour = (230, 40, 30) if rng.random() < 0.6 else (250, 245, 215)
    lamp, deep = shade(lamp, rng.uniform(0.6, 1.1)), wide * rng.uniform(0.1, 0.2)
    for start in (left + wide * 0.03, right - wide * 0.03 - deep):
        pencil.box(start, waist + high * 0.08, start + deep, waist + high * 0.2, lamp)
    pencil.box(x - wide * 0.14, waist + high * 0.2, x + wide * 0.14, waist + high * 0.29, (225, 225, 215))


def _car_side(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    long, high = rng.uniform(3.7, 4.7) * metre, rng.uniform(1.35, 1.8) * metre
    paint, left, right = any_colour(rng), x - long / 2, x + long / 2
    waist, floor, facing = y - high * 0.55, y - high * 0.16, rng.choice([-1, 1])
    front, back = rng.uniform(0.1, 0.25), rng.uniform(0.12, 0.35)
    if facing > 0:
        front, back = back, front
    roof: list[Point] = [
        (left + long * front, y - high),
        (right - long * back, y - high),
        (right - long * back * 0.4, waist),
        (left + long * front * 0.4, waist),
    ]
    pencil.polygon(roof, paint)
    glass = shade((75, 90, 105), rng.uniform(0.4, 1.7))
    inner: list[Point] = [(px + (x - px) * 0.1, py + (1 if py < waist else -1) * high * 0.04) for px, py in roof]
    pencil.polygon(inner, glass)
    pencil.box(x - long * 0.02, y - high, x + long * 0.02, waist, paint)
    pencil.box(left, waist, right, floor, shade(paint, rng.uniform(0.85, 1.1)), high * 0.12)
    for wheel in (left + long * 0.2, right - long * 0.2):
        pencil.disc(wheel, y - high * 0.2, high * 0.2, high * 0.2, DARK)
        pencil.disc(wheel, y - high * 0.2, high * 0.1, high * 0.1, (150, 150, 155))


def person(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A person who stands or walks."""
    high = rng.uniform(1.45, 1.95) * metre
    skin = shade((235, 195, 165), rng.uniform(0.35, 1.0))
    shirt, trousers = any_colour(rng), any_colour(rng, 15, 150)
    head, hip, stride = high * 0.075, y - high * 0.47, high * rng.uniform(0.02, 0.16)
    shoulder, half = y - high * 0.82, high * rng.uniform(0.09, 0.14)
    pencil.line((x - half * 0.4, hip), (x - stride, y), high * 0.09, trousers)
    pencil.line((x + half * 0.4, hip), (x + stride, y), high * 0.09, shade(trousers, 0.85))
    swing = high * rng.uniform(-0.12, 0.12)
    pencil.line((x - half, shoulder + head * 0.5), (x - half + swing, hip), high * 0.055, shade(shirt, 0.85))
    pencil.line((x + half, shoulder + head * 0.5), (x + half - swing, hip), high * 0.055, shade(shirt, 0.85))
    pencil.polygon(
        [
            (x - half, shoulder),
            (x + half, shoulder),
            (x + half * 0.75, hip + high * 0.04),
            (x - half * 0.75, hip + high * 0.04),
        ],
        shirt,
    )
    pencil.disc(x, y - high + head, head * 0.8, head, skin)
    pencil.disc(x, y - high + head * 0.7, head * 0.85, head * 0.65, any_colour(rng, 10, 120))


def sign(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A road sign: a disc, a triangle, an octagon, a square or a rhomb with something on it."""
    radius = rng.uniform(0.3, 0.48) * metre
    edge, face = _sign_colours(rng)
    corners, turn = _SIGN_SHAPES[int(rng.integers(len(_SIGN_SHAPES)))]
    for scale, colour in ((1.0, edge), (rng.uniform(0.68, 0.8), face)):
        size = radius * scale
        if corners == 0:
            pencil.disc(x, y, size, size, colour)
        else:
            pencil.polygon(ring(x, y, size, corners, turn), colour)
    ink = (245, 245, 245) if sum(face) < 330 else (20, 20, 20)
    mark = rng.integers(3)
    if mark == 0:
        pencil.box(x - radius * 0.45, y - radius * 0.12, x + radius * 0.45, y + radius * 0.12, ink)
    elif mark == 1:
        pencil.box(x - radius * 0.1, y - radius * 0.4, x + radius * 0.1, y + radius * 0.35, ink)
    else:
        pencil.disc(x, y, radius * 0.2, radius * 0.3, ink)


# Corners (0: a disc) and turn of each shape.
_SIGN_SHAPES = ((0, 0.0), (3, -math.pi / 2), (3, math.pi / 2), (8, math.pi / 8), (4, math.pi / 4), (4, 0.0))


def _sign_colours(rng: Rng) -> tuple[Colour, Colour]:
    red, blue, yellow, white = (200.0, 25.0, 30.0), (20.0, 70.0, 170.0), (240.0, 200.0, 30.0), (240.0, 240.0, 240.0)
    pairs = ((red, white), (red, red), (white, blue), (blue, blue), (white, red), (DARK, yellow), (yellow, white))
    edge, face = pairs[int(rng.integers(len(pairs)))]
    worn = rng.uniform(0.6, 1.05)
    return shade(edge, worn), shade(face, worn)


def ring(x: float, y: float, radius: float, corners: int, turn: float) -> list[Point]:
    """The corners of a regular polygon."""
    angles = [turn + 2 * math.pi * corner / corners for corner in range(corners)]
    return [(x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles]


def light(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A traffic light with three lamps, one of them lit."""
    wide, high = rng.uniform(0.32, 0.45) * metre, rng.uniform(0.95, 1.25) * metre
    pencil.box(x - wide / 2, y - high, x + wide / 2, y, shade(DARK, rng.uniform(0.6, 1.8)), wide * 0.15)
    lit = int(rng.integers(3))
    for place, colour in enumerate(((255, 50, 40), (255, 190, 40), (50, 240, 110))):
        size = wide * 0.34
        bright: Colour = colour if place == lit else shade(colour, 0.18)
        pencil.disc(x, y - high * (0.83 - 0.33 * place), size, size, bright)


def kiosk(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A box with a window, as large as a car."""
    wide, high = rng.uniform(1.2, 3.0) * metre, rng.uniform(1.3, 2.4) * metre
    paint = any_colour(rng)
    pencil.box(x - wide / 2, y - high, x + wide / 2, y, paint)
    pencil.box(
        x - wide * 0.35, y - high * 0.8, x + wide * 0.35, y - high * 0.45, shade((80, 95, 110), rng.uniform(0.5, 1.6))
    )


def bin_(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A bin or a hydrant, of a person's width."""
    wide, high, paint = rng.uniform(0.3, 0.6) * metre, rng.uniform(0.7, 1.3) * metre, any_colour(rng)
    pencil.box(x - wide / 2, y - high, x + wide / 2, y, paint, wide * 0.2)
    pencil.disc(x, y - high, wide * 0.45, wide * 0.3, shade(paint, 0.7))


def bush(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A bush or a tree."""
    high, green = rng.uniform(0.8, 4.5) * metre, shade((60, 105, 45), rng.uniform(0.4, 1.3))
    if high > 1.6 * metre:
        pencil.line((x, y), (x, y - high * 0.6), high * 0.08, (85, 65, 45))
    for _ in range(6):
        size = high * rng.uniform(0.12, 0.26)
        at_x, at_y = x + high * rng.uniform(-0.2, 0.2), y - high * (0.7 + rng.uniform(-0.2, 0.2))
        pencil.disc(
            at_x,
            max(at_y, y - high) if high > 1.6 * metre else y - size,
            size,
            size,
            shade(green, rng.uniform(0.75, 1.25)),
        )


def post(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A lamp post, a pole or a tree trunk."""
    high, paint = rng.uniform(2.0, 6.0) * metre, any_colour(rng, 30, 170)
    pencil.line((x, y), (x, y - high), rng.uniform(0.08, 0.4) * metre, paint)
    if rng.random() < 0.5:
        reach = rng.choice([-1, 1]) * rng.uniform(0.5, 1.4) * metre
        pencil.line((x, y - high), (x + reach, y - high), 0.1 * metre, paint)
        pencil.disc(x + reach, y - high, 0.25 * metre, 0.12 * metre, (250, 240, 200))


def board(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """An advertisement: a rectangle on legs, with discs and bars like a sign."""
    wide, high, up = rng.uniform(1.0, 3.0) * metre, rng.uniform(0.6, 1.6) * metre, rng.uniform(0.6, 2.0) * metre
    for leg in (-0.4, 0.4):
        pencil.line((x + wide * leg, y), (x + wide * leg, y - up), 0.1 * metre, (90, 90, 95))
    pencil.box(x - wide / 2, y - up - high, x + wide / 2, y - up, any_colour(rng))
    for _ in range(int(rng.integers(1, 5))):
        at_x, at_y = x + wide * rng.uniform(-0.35, 0.35), y - up - high * rng.uniform(0.2, 0.8)
        if rng.random() < 0.5:
            pencil.box(at_x - wide * 0.15, at_y - high * 0.08, at_x + wide * 0.15, at_y + high * 0.08, any_colour(rng))
        else:
            pencil.disc(at_x, at_y, high * 0.15, high * 0.15, any_colour(rng))


def barrier(pencil: Pencil, rng: Rng, x: float, y: float, metre: float) -> None:
    """A striped barrier."""
    wide, high = rng.uniform(1.0, 2.5) * metre, rng.uniform(0.7, 1.0) * metre
    first, second = (200.0, 40.0, 35.0), (235.0, 235.0, 230.0)
    stripes = int(rng.integers(3, 7))
    for stripe in range(stripes):
        left = x - wide / 2 + wide * stripe / stripes
        pencil.box(left, y - high, left + wide / stripes, y - high * 0.6, first if stripe % 2 else second)
    for leg in (-0.4, 0.4):
        pencil.line((x + wide * leg, y), (x + wide * leg, y - high), 0.08 * metre, (120, 120, 120))


STYLE = Style(
    car=car, person=person, sign=sign, light=light, clutter=(kiosk, bin_, bush, bush, post, post, board, barrier)
)
