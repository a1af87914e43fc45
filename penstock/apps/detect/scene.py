"""Road scenes drawn at random: a road in perspective, things on it, clutter that looks like them, light and weather."""

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from penstock.apps.detect.pencil import Colour, Pencil
from penstock.apps.detect.things import Rng, Style, any_colour, shade
from penstock.core.spec import Array

# H height, W width, n objects

# A thing is to be found if this share of its silhouette's box is seen, and its box has these sides.
LEAST_SEEN = 0.28
LEAST_SIDE = 7.0
CAMERA_HEIGHT_M = 1.5
NEAR_M, FAR_M = 6.0, 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A picture and its things.

    Args:
        pixels: uint8 `[3, H, W]`.
        boxes: float32 `[n, 4]`: left, top, right, bottom in pixels.
        classes: int64 `[n]`, in the order of the application's labels.
    """

    pixels: Array
    boxes: Array
    classes: Array


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The place of a thing: pixels on the ground, pixels for each metre, metres away."""

    x: float
    y: float
    metre: float
    away: float


def draw_scene(seed: int, style: Style, height: int, width: int) -> Scene:
    """Draw a scene; the same seed gives the same.

    Args:
        seed: Of everything.
        style: The things.
        height: Of the picture, in pixels.
        width: Of the picture.
    """
    rng = np.random.default_rng(seed)
    pencil = Pencil(height, width)
    horizon = height * rng.uniform(0.32, 0.5)
    pencil.haze = _haze_colour(rng)
    reach_m = rng.uniform(30, 70) if rng.random() < 0.3 else rng.uniform(120, 600)
    vanishing = width * rng.uniform(0.3, 0.7)
    _backdrop(pencil, rng, horizon, reach_m)
    half_m = rng.uniform(3.0, 6.5)
    focal = height * rng.uniform(0.9, 1.3)
    _road(pencil, rng, horizon, vanishing, half_m, focal)
    classes = _things(pencil, rng, style, horizon, vanishing, half_m, focal, reach_m)
    boxes, seen = pencil.boxes()
    sides = np.minimum(boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1])
    kept = (seen >= LEAST_SEEN) & (sides >= LEAST_SIDE)
    pixels = _weathered(pencil.pixels(), rng)
    return Scene(pixels=np.ascontiguousarray(pixels.transpose(2, 0, 1)), boxes=boxes[kept], classes=classes[kept])


def _haze_colour(rng: Rng) -> Colour:
    grey = rng.uniform(120, 230)
    return grey, grey * rng.uniform(0.95, 1.05), grey * rng.uniform(0.95, 1.1)


def _backdrop(pencil: Pencil, rng: Rng, horizon: float, reach_m: float) -> None:
    wide, sky = pencil.width, any_colour(rng, 90, 235)
    for band in range(12):
        top = horizon * band / 12
        pencil.box(0, top, wide, top + horizon / 12 + 1, shade(sky, 0.75 + 0.03 * band))
    ground = shade((105, 110, 90), rng.uniform(0.5, 1.3))
    pencil.box(0, horizon, wide, pencil.height, ground)
    pencil.haze_share = 1 - float(np.exp(-FAR_M / reach_m))
    for _ in range(int(rng.integers(3, 12))):
        left, broad = rng.uniform(-0.1, 1) * wide, rng.uniform(0.05, 0.3) * wide
        top = horizon * rng.uniform(0.15, 0.95)
        if rng.random() < 0.3:
            foot = horizon + 2
            pencil.polygon([(left, foot), (left + broad / 2, top), (left + broad, foot)], any_colour(rng, 30, 140))
            continue
        wall = any_colour(rng, 40, 200)
        pencil.box(left, top, left + broad, horizon + 2, wall)
        pane, step = shade(wall, rng.choice([0.5, 0.7, 1.5])), rng.uniform(6, 16)
        for column in np.arange(left + step * 0.3, left + broad - step * 0.6, step):
            for row in np.arange(top + step * 0.4, horizon - step * 0.5, step * 1.2):
                if rng.random() < 0.8:
                    pencil.box(column, row, column + step * 0.5, row + step * 0.6, pane)
    pencil.haze_share = 0.0


def _road(pencil: Pencil, rng: Rng, horizon: float, vanishing: float, half_m: float, focal: float) -> None:
    down, wide = pencil.height - horizon, pencil.width
    asphalt = shade((88, 88, 92), rng.uniform(0.5, 1.4))
    # A metre at the bottom of the picture.
    metre = down / CAMERA_HEIGHT_M

    def at(offset_m: float, share: float) -> tuple[float, float]:
        return vanishing + offset_m * metre * share + (wide / 2 - vanishing) * share, horizon + down * share

    def strip(left_m: float, right_m: float, start: float, end: float, colour: Colour) -> None:
        pencil.polygon([at(left_m, start), at(right_m, start), at(right_m, end), at(left_m, end)], colour)

    strip(-half_m - 2.5, half_m + 2.5, 0.0, 1.0, shade(asphalt, rng.uniform(1.1, 1.5)))
    strip(-half_m, half_m, 0.0, 1.0, asphalt)
    paint = shade((225, 225, 215), rng.uniform(0.6, 1.0))
    for edge in (-half_m + 0.2, half_m - 0.35):
        strip(edge, edge + 0.15, 0.02, 1.0, paint)
    away = rng.uniform(3, 6)
    while away < FAR_M:
        near, far = (min(1.0, CAMERA_HEIGHT_M * focal / (each * down)) for each in (away, away + 3))
        strip(-0.08, 0.08, far, near, paint)
        away += 8
    for _ in range(int(rng.integers(0, 5))):
        share, offset = rng.uniform(0.1, 0.9), rng.uniform(-half_m, half_m)
        x, y = at(offset, share)
        pencil.disc(x, y, metre * share * 0.6, metre * share * 0.12, shade(asphalt, rng.uniform(0.6, 1.3)))


def _things(
    pencil: Pencil,
    rng: Rng,
    style: Style,
    horizon: float,
    vanishing: float,
    half_m: float,
    focal: float,
    reach_m: float,
) -> Array:
    """Draw the things, the farthest first; returns the class of each object."""
    down = pencil.height - horizon
    count, clutter = int(rng.integers(0, 13)), int(rng.integers(3, 14))
    if rng.random() < 0.05:
        count = 0
    kinds = np.concatenate([rng.choice(4, count, p=[0.38, 0.27, 0.19, 0.16]), np.full(clutter, -1)])
    aways = np.exp(rng.uniform(np.log(NEAR_M), np.log(FAR_M), count + clutter))
    # Small things are of no use where they are a few pixels.
    aways[kinds >= 1] *= np.array([1.0, 0.75, 0.5, 0.6])[kinds[kinds >= 1]]
    order = np.argsort(-aways)
    classes: list[int] = []
    for away, kind in zip(aways[order].tolist(), kinds[order].tolist(), strict=True):
        metre = focal / away
        share = CAMERA_HEIGHT_M * metre / down
        y = horizon + CAMERA_HEIGHT_M * metre
        pencil.haze_share = 1 - float(np.exp(-away / reach_m))
        on_road = kind == 0 or (kind == 1 and rng.random() < 0.3)
        offset = (
            rng.uniform(-half_m, half_m) if on_road else rng.choice([-1, 1]) * rng.uniform(half_m + 0.3, half_m + 7)
        )
        x = vanishing + offset * metre + (pencil.width / 2 - vanishing) * share
        if not -0.2 * pencil.width < x < 1.2 * pencil.width:
            x = rng.uniform(0, pencil.width)
        _thing(pencil, rng, style, kind, _Place(x=x, y=y, metre=metre, away=away))
        if kind >= 0:
            classes.append(kind)
    return np.array(classes, np.int64)


def _thing(pencil: Pencil, rng: Rng, style: Style, kind: int, place: _Place) -> None:
    x, y, metre = place.x, place.y, place.metre
    if kind < 0:
        style.clutter[int(rng.integers(len(style.clutter)))](pencil, rng, x, y, metre)
        return
    if kind >= 2:
        up = (style.sign_height if kind == 2 else style.light_height) * rng.uniform(0.9, 1.25) * metre
        pencil.line((x, y), (x, y - up), max(0.8, 0.09 * metre), shade((110, 112, 115), rng.uniform(0.4, 1.3)))
        y -= up
    elif kind == 0:
        # A shadow on the ground is no part of a car.
        pencil.disc(x, y, 1.2 * metre, 0.12 * metre, (45, 45, 48))
    pencil.begin_object()
    (style.car, style.person, style.sign, style.light)[kind](pencil, rng, x, y, metre)
    pencil.end_object()


def _weathered(pixels: Array, rng: Rng) -> Array:
    """Texture, night, rain, an unsteady exposure, blur, noise and compression; uint8 `[H, W, 3]`."""
    height, width = pixels.shape[:2]
    pixels = pixels * (1 + _cloud(rng, height, width, 24) * rng.uniform(0.02, 0.18))[..., None]
    pixels = pixels * (1 + _grain(rng, (height, width, 1), rng.uniform(0.01, 0.08)))
    if rng.random() < 0.25:
        dark = rng.uniform(0.3, 0.6)
        lamp = np.exp(-(((np.arange(height)[:, None] / height - 0.8) / 0.3) ** 2)) * rng.uniform(0.2, 0.8)
        pixels = pixels * (dark + lamp[..., None] * (1 - dark)) * np.array([0.9, 0.95, 1.1])
    pixels = pixels * rng.uniform(0.75, 1.2) * rng.uniform(0.9, 1.1, 3)
    pixels = (pixels - 128) * rng.uniform(0.6, 1.15) + 128 + rng.uniform(-15, 15)
    if rng.random() < 0.25:
        pixels = _rain(pixels, rng)
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if rng.random() < 0.5:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 1.1)))
    noisy = np.asarray(picture, np.float32) + _grain(rng, (height, width, 3), rng.uniform(1, 14))
    return noisy.clip(0, 255).astype(np.uint8)


def _grain(rng: Rng, shape: tuple[int, ...], deviation: float) -> Array:
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _cloud(rng: Rng, height: int, width: int, grain: int) -> Array:
    """Smooth noise of mean 0, `[H, W]`."""
    small = rng.normal(0, 1, (height // grain + 2, width // grain + 2)).astype(np.float32)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def _rain(pixels: Array, rng: Rng) -> Array:
    height, width = pixels.shape[:2]
    drops = (rng.random((height, width)) < rng.uniform(0.001, 0.006)).astype(np.float32)
    long, lean = int(rng.integers(5, 14)), rng.uniform(-0.4, 0.4)
    streaks = np.zeros_like(drops)
    for step in range(long):
        streaks += np.roll(drops, (step, round(step * lean)), (0, 1))
    return pixels + streaks.clip(0, 1)[..., None] * rng.uniform(25, 80)
