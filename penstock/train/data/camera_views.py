"""Random camera views of pictures: another crop, angle, light and focus in every epoch."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from PIL import Image, ImageFilter, UnidentifiedImageError

from penstock.core.decode import FORMATS, plain_pixels
from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.train.data.examples import Examples
from penstock.train.data.picture_layouts import Picture
from penstock.train.data.picture_reader import MAX_RATIO, TRIES, is_of_the_machine
from penstock.train.data.sampler import Indices, Seeds

# B examples of a batch, H height, W width

# Possible crop centres form a grid of this many cells a side; one in so many is held out for other sets of views.
CELLS = 5
# The crop is reduced before the perspective transform, to slightly more than the view's size against blur.
ROOM = 1.25
JPEG_QUALITY = (20, 60)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distortion:
    """Random changes to a picture. Zero turns a change off.

    Args:
        least_area: The smallest crop, as a share of the picture's area.
        turn_degrees: The largest rotation.
        perspective: The largest shift of each corner, as a share of the crop's sides.
        light: The largest change of brightness, contrast, gamma, colour and evenness, as a share.
        blur: The largest radius of the blur in pixels of the view; half of the views have none.
        mirror: Mirror half of the views.
        shake: Apply motion blur over five pixels to a third of the views.
        noise: The largest standard deviation of pixel noise, of 255.
        jpeg: Encode half of the views as JPEG of low quality.
        cells: The classes of crop centres to use, `(x + 2 y) % 5` of a 5 x 5 grid over all possible centres.
    """

    least_area: float = 0.25
    turn_degrees: float = 15.0
    perspective: float = 0.1
    light: float = 0.4
    blur: float = 1.0
    mirror: bool = False
    shake: bool = False
    noise: float = 0.0
    jpeg: bool = False
    cells: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if not 0 < self.least_area <= 1:
            raise TrainError(f"Distortion has least_area {self.least_area}; it must be above 0, and 1 at most.")
        if not 0 <= self.light < 1 or not 0 <= self.perspective < 0.5:
            raise TrainError(
                f"Distortion has light {self.light} and perspective {self.perspective}; they must be from 0 to below 1 "
                f"and to below 0.5."
            )
        if not self.cells or not set(self.cells) <= set(range(CELLS)):
            raise TrainError(f"Distortion has cells {self.cells}; give some of 0..{CELLS - 1}.")


@final
class Views(Examples):
    """Views of pictures, uint8 `[side, side, 3]`, decoded on reading; the targets are the indices of their labels.

    Args:
        pictures: The pictures.
        labels: In the order of the targets; all labels of the pictures must be among them.
        side: The side of a view in pixels.
        distortion: The random changes; None for the centre square.
        repeats: Views of each picture.
        in_memory: Keep the decoded pictures in memory, for few that are read often.

    Raises:
        TrainError: A picture has another label, or there are none.
    """

    def __init__(
        self,
        pictures: Sequence[Picture],
        labels: tuple[str, ...],
        side: int,
        *,
        distortion: Distortion | None = None,
        repeats: int = 1,
        in_memory: bool = False,
    ) -> None:
        unknown = sorted({picture.label for picture in pictures} - set(labels))
        if unknown:
            raise TrainError(
                f"the pictures have the label {unknown[0]!r}, which is not one of the application's {len(labels)}; "
                f"declare the application anew, with the labels of this folder."
            )
        if not pictures:
            raise TrainError("there are no pictures to make views of; give some.")
        number = {label: index for index, label in enumerate(labels)}
        self.pictures, self._side, self._distortion, self._repeats = tuple(pictures), side, distortion, repeats
        self.input_dtype, self.input_shape = np.dtype(np.uint8), (side, side, 3)
        self.varies = distortion is not None
        self.targets = np.array([number[picture.label] for picture in pictures], np.int64)
        self._decoded = [self._smaller(self._opened(index)) for index in range(len(pictures))] if in_memory else None

    def __len__(self) -> int:
        return len(self.pictures) * self._repeats

    def read(self, indices_B: Indices, seeds_B: Seeds, inputs_B: Array) -> Array:
        """See `Examples`."""
        pictures_B = indices_B % len(self.pictures)
        for row, (index, picture) in enumerate(zip(indices_B.tolist(), pictures_B.tolist(), strict=True)):
            image = self._opened(picture, index) if self._decoded is None else self._decoded[picture]
            if self._distortion is None:
                inputs_B[row] = plain_view(image, self._side)
            else:
                inputs_B[row] = distorted(image, self._side, self._distortion, np.random.default_rng(seeds_B[row]))
        return self.targets[pictures_B]

    def _opened(self, picture: int, index: int | None = None) -> Any:
        return _decoded(self.pictures[picture], picture if index is None else index, self._enough)

    def _smaller(self, image: Any) -> Any:
        return image.resize(self._enough(image), Image.Resampling.BOX, reducing_gap=2.0)

    def _enough(self, image: Any) -> tuple[int, int]:
        """Compute a size at which even the smallest crop is larger than a view."""
        part = 1.0 if self._distortion is None else math.sqrt(self._distortion.least_area)
        smaller = max(1.0, min(image.size) * part / (ROOM * self._side))
        return round(image.width / smaller), round(image.height / smaller)


def plain_view(image: Any, side: int) -> Array:
    """Resize the centre square of a picture to uint8 `[side, side, 3]`, as `SquareResize` does, rounded."""
    # Cropped first: with a box Pillow would mix in neighbouring pixels.
    shorter = min(image.width, image.height)
    left, top = (image.width - shorter) // 2, (image.height - shorter) // 2
    middle = image.crop((left, top, left + shorter, top + shorter))
    return np.asarray(middle.resize((side, side), Image.Resampling.BILINEAR))


def small_rgba(picture: Picture, most: int) -> Array:
    """Read a whole picture as a browser does, uint8 `[H, W, 4]`, with a limit on the longer side in pixels.

    Raises:
        BadExample: It cannot be read.
    """
    image = _decoded(picture, 0)
    image.thumbnail((most, most))
    return np.asarray(image.convert("RGBA"))


def _decoded(picture: Picture, index: int, size_of: Callable[[Any], tuple[int, int]] | None = None) -> Any:
    """Decode a picture to RGB, where the format permits no larger than `size_of` requires."""
    try:
        image = Image.open(io.BytesIO(picture.read()), formats=FORMATS)
        if size_of is not None:
            # JPEG alone can be decoded smaller, and only by halves.
            image.draft(None, size_of(image))
        return plain_pixels(image, "RGB")
    except MemoryError:
        raise
    except Exception as error:
        where = picture.file if picture.nbytes is None else picture.name
        if is_of_the_machine(error):
            raise TrainError(
                f"{where} cannot be read ({type(error).__name__}: {error}), which is an error of the machine, not of "
                f"the picture; correct it and resume."
            ) from error
        # Each of Pillow's decoders has its own errors for damaged files: EOFError, struct.error, IndexError, ...
        unknown = isinstance(error, UnidentifiedImageError)
        why = "it is no picture" if unknown else f"{type(error).__name__}: {error}"
        raise BadExample(
            f"{where} cannot be read ({why}); replace or remove it, or give the recipe "
            f"loading=Loading(bad_examples='skip').",
            index=index,
            name=picture.name,
        ) from error


def distorted(image: Any, side: int, distortion: Distortion, rng: np.random.Generator) -> Array:
    """Make one random view of a picture, uint8 `[side, side, 3]`.

    Args:
        image: A Pillow image in RGB.
        side: The side of the view in pixels.
        distortion: The random changes.
        rng: The source of all random numbers.
    """
    view = _perspective_crop(image, side, distortion, rng)
    view = _blurred(view, distortion, rng)
    pixels_HWC = _relit(np.asarray(view), distortion, rng)
    if distortion.noise:
        deviation = np.float32(rng.uniform(0, distortion.noise))
        pixels_HWC += deviation * rng.standard_normal(pixels_HWC.shape, np.float32)
    view_HWC = np.clip(pixels_HWC + 0.5, 0, 255).astype(np.uint8)
    return _as_jpeg(view_HWC, rng) if distortion.jpeg and rng.random() < 0.5 else view_HWC


def _perspective_crop(image: Any, side: int, distortion: Distortion, rng: np.random.Generator) -> Any:
    left, top, right, bottom = _part(image.width, image.height, distortion, rng)
    middle = np.array([left + right, top + bottom]) / 2
    half = np.array([right - left, bottom - top]) / 2
    angle = math.radians(rng.uniform(-1, 1) * distortion.turn_degrees)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    if distortion.mirror and rng.random() < 0.5:
        corners = corners * [-1, 1]
    moved = 1 + rng.uniform(-2, 2, (4, 2)) * distortion.perspective
    seen = middle + (corners * moved * half) @ turn.T
    seen = np.clip(seen, 0, [image.width, image.height])
    low, high = np.floor(seen.min(0)), np.ceil(seen.max(0))
    scale = np.minimum(1, ROOM * side / (2 * half))
    size = np.maximum(1, np.round((high - low) * scale)).astype(int)
    box = (*low.tolist(), *high.tolist())
    small = image.resize(tuple(size.tolist()), Image.Resampling.BILINEAR, box, reducing_gap=2.0)
    coefficients = _perspective_coefficients((seen - low) / (high - low) * size, side)
    return small.transform((side, side), Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BILINEAR)


def _part(width: int, height: int, distortion: Distortion, rng: np.random.Generator) -> tuple[float, ...]:
    """Choose left, top, right and bottom of a crop whose centre is in one of the cells."""
    for _ in range(TRIES):
        pixels = width * height * rng.uniform(distortion.least_area, 1)
        ratio = math.exp(rng.uniform(-1, 1) * math.log(MAX_RATIO))
        wide, high = math.sqrt(pixels * ratio), math.sqrt(pixels / ratio)
        if wide <= width and high <= height:
            break
    else:
        wide = high = min(width, height) * math.sqrt(rng.uniform(distortion.least_area, 1))
    while True:
        x, y = rng.random(2).tolist()
        if (int(x * CELLS) + 2 * int(y * CELLS)) % CELLS in distortion.cells:
            left, top = x * (width - wide), y * (height - high)
            return left, top, left + wide, top + high


def _perspective_coefficients(corners: Array, side: int) -> list[float]:
    """Compute Pillow's eight perspective coefficients, which map a pixel of the view to the picture.

    Args:
        corners: The view's corners in the picture: `[4, 2]`, clockwise from the upper left.
        side: The side of the view.
    """
    rows: list[Any] = []
    for (x, y), (u, v) in zip(((0, 0), (side, 0), (side, side), (0, side)), corners.tolist(), strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    return np.linalg.solve(np.array(rows, np.float64), corners.reshape(8)).tolist()


def _blurred(view: Any, distortion: Distortion, rng: np.random.Generator) -> Any:
    if distortion.blur and rng.random() < 0.5:
        view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0, distortion.blur)))
    if distortion.shake and rng.random() < 1 / 3:
        along = np.zeros((5, 5))
        across = np.arange(5)
        # Sideways, downwards, or along one of the diagonals.
        where = ((2, across), (across, 2), (across, across), (across, 4 - across))[rng.integers(4)]
        along[where] = 1
        view = view.filter(ImageFilter.Kernel((5, 5), along.ravel().tolist()))
    return view


def _relit(view_HWC: Array, distortion: Distortion, rng: np.random.Generator) -> Array:
    """Change brightness, contrast, gamma, colour and evenness; returns float32, not clipped to 0..255."""
    most = distortion.light
    gain, contrast, gamma = np.exp(rng.uniform(-1, 1, 3) * math.log1p(most)).tolist()
    level = np.linspace(0, 1, 256)
    curve = (((level**gamma) - 0.5) * contrast + 0.5) * 255
    colour = gain * np.exp(rng.uniform(-1, 1, 3) * math.log1p(most) / 3)
    table = np.clip(curve[:, None] * colour, 0, 400).astype(np.float32)
    pixels_HWC = np.stack([table[view_HWC[..., channel], channel] for channel in range(3)], -1)
    grey_HW1 = pixels_HWC.mean(-1, keepdims=True)
    # From grey to slightly oversaturated.
    pixels_HWC = grey_HW1 + np.float32(1 + rng.uniform(-2 * most, most / 2)) * (pixels_HWC - grey_HW1)
    place = np.linspace(-1, 1, len(view_HWC), dtype=np.float32)
    down, across = (rng.uniform(-1, 1, 2) * most / 2).astype(np.float32)
    return pixels_HWC * (1 + down * place[:, None] + across * place)[..., None]


def _as_jpeg(view_HWC: Array, rng: np.random.Generator) -> Array:
    sink = io.BytesIO()
    Image.fromarray(view_HWC).save(sink, "JPEG", quality=int(rng.integers(*JPEG_QUALITY)))
    return np.asarray(Image.open(sink))
