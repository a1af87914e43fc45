"""Pictures as training examples: a random or the centre crop, resized, at a fraction of the size of a JPEG."""

import errno
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from PIL import Image

from penstock.core.decode import FORMATS, JPEG_FORMATS, ORIENTATION, SCALES, SIDEWAYS, jpeg_decoder, plain_pixels
from penstock.core.errors import TrainError
from penstock.core.pictures.jpeg_header import PlainJpeg, plain_jpeg
from penstock.core.pictures.picture_resize import resize_part
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.sampler import Seeds, draws_of

# B examples of a batch, D draws, H height, W width

# Szegedy et al. 2015, "Going deeper with convolutions", section 6: the share of the picture, and its sides' ratio.
MIN_AREA, MAX_AREA = 0.08, 1.0
MIN_RATIO, MAX_RATIO = 3 / 4, 4 / 3
# Errors of the machine, not of the picture: a replacement would fail as well.
_OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO}
TRIES = 10
# One draw for the flip; for each try of a crop two for its size and two for its position.
DRAWS = 1 + 4 * TRIES
# The centre crop's share of the shorter side: 224 of 256 pixels.
CENTRE = 0.875

# Channels of a JPEG of each mode.
CHANNELS = {"L": 1, "RGB": 3}

Box = tuple[float, float, float, float]


# A picture: its file, its bytes, or one that Pillow opened and did not decode yet.
PictureSource = Path | bytes | Image.Image


@final
class PictureReader:
    """Reads pictures in the form of a spec. JPEG is decoded at a half, a quarter or an eighth of its size where that
    is enough.

    Args:
        spec: The raw input: uint8 `(H, W)` for grey, `(H, W, 3)` or `(3, H, W)` for colour.
        random: Random crops of 8% to 100% of the area and an aspect ratio of 3/4 to 4/3, mirrored half of the time.
            Otherwise the centre crop.
        share: The sides of the centre crop, as a share of the largest crop with the spec's ratio.
        decode: The application's `decode`, to read pictures exactly as the server does, in place of a crop.
        user: The class of examples, for messages.

    Raises:
        TrainError: The spec is not a picture's, or the arguments contradict one another.
    """

    def __init__(
        self,
        spec: TensorSpec,
        *,
        random: bool = False,
        share: float = CENTRE,
        decode: Callable[[bytes, str], Any] | None = None,
        user: str,
    ) -> None:
        self._spec, self._share, self._decode, self._random = spec, share, decode, random
        if decode is None:
            self._mode, self._height, self._width, self._channels_first = _layout(spec)
        elif random:
            raise TrainError(f"{user} has random=True and a decode, which is not random; give one of them.")
        if not 0 < share <= 1:
            raise TrainError(f"{user} has share {share}; it must be above 0, and 1 at most.")

    def draws(self, seeds_B: Seeds) -> list[list[float]]:
        """Draw the random numbers of each picture from its seed; none for centre crops."""
        return draws_of(seeds_B, DRAWS).tolist() if self._random else [[] for _ in seeds_B]

    def read(self, source: PictureSource, content_type: str, draws: list[float]) -> Array:
        """Read one picture.

        Args:
            source: The picture.
            content_type: Its type, for the application's `decode`.
            draws: Of `draws`.

        Returns:
            The array of the spec.
        """
        if self._decode is not None:
            return self._spec.check(self._decode(encoded(source), content_type))
        if isinstance(source, Image.Image):
            return self._crop(source, None, draws)
        body = encoded(source)
        header = plain_jpeg(body)
        if header is not None and header.height * header.width <= (Image.MAX_IMAGE_PIXELS or 0):
            pixels = self._crop_of_plain(header, body, draws)
            if pixels is not None:
                return pixels
        with Image.open(io.BytesIO(body), formats=FORMATS) as image:
            return self._crop(image, body, draws)

    def _crop_of_plain(self, header: PlainJpeg, body: bytes, draws: list[float]) -> Array | None:
        """Decode a plain JPEG of the mode, about which Pillow knows no more than its header says; None for others."""
        if header.channels != CHANNELS[self._mode]:
            return None
        size = header.width, header.height
        box = self._box(size, draws)
        whole = self._jpeg_pixels(body, size, self._scaled(size, box))
        return None if whole is None else self._part(whole, size, box, draws)

    def _crop(self, image: Any, body: bytes | None, draws: list[float]) -> Array:
        orientation = image.getexif().get(ORIENTATION, 1)
        size = (image.height, image.width) if orientation in SIDEWAYS else image.size
        box = self._box(size, draws)
        scaled = self._scaled(image.size, box)
        is_jpeg = image.format in JPEG_FORMATS and orientation == 1 and image.mode == self._mode
        whole: Any = self._jpeg_pixels(body, image.size, scaled) if body is not None and is_jpeg else None
        if whole is None:
            if scaled is not None:
                image.draft(None, scaled)
            whole = plain_pixels(image, self._mode)
        return self._part(whole, size, box, draws)

    def _box(self, size: tuple[int, int], draws: list[float]) -> Box:
        (width, height), ratio = size, self._width / self._height
        if draws:
            return random_box(width, height, ratio, draws[1:])
        return centre_box(width, height, ratio, self._share)

    def _scaled(self, size: tuple[int, int], box: Box) -> tuple[int, int] | None:
        """Return the smallest width and height to decode that still have the crop at full resolution; None for all."""
        smaller = min((box[2] - box[0]) / self._width, (box[3] - box[1]) / self._height)
        return (max(1, int(size[0] / smaller)), max(1, int(size[1] / smaller))) if smaller > 1 else None

    def _part(self, whole: Any, size: tuple[int, int], box: Box, draws: list[float]) -> Array:
        """Resize the crop of a picture that may have been decoded at a fraction of its width and height."""
        wide, high = whole.shape[1::-1] if isinstance(whole, np.ndarray) else whole.size
        across, down = wide / size[0], high / size[1]
        part = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        pixels = resize_part(whole, (self._height, self._width), part)
        if draws and draws[0] < 0.5:
            pixels = pixels[:, ::-1]
        return pixels.transpose(2, 0, 1) if self._channels_first else pixels

    def _jpeg_pixels(self, body: bytes, size: tuple[int, int], scaled: tuple[int, int] | None) -> Array | None:
        """Decode an upright JPEG of the mode, in less time than Pillow takes for the same pixels; None for others.

        Args:
            body: The file.
            size: Its width and height.
            scaled: See `_scaled`.
        """
        decode, fraction = jpeg_decoder(), 1
        if decode is None:
            return None
        if scaled is not None:
            # As Pillow's `draft` chooses it. Below 8 pixels, two fractions may give the same size.
            most = min(size[0] // scaled[0], size[1] // scaled[1])
            fraction = next((each for each in SCALES if each <= most), 1)
            if fraction > 1 and min(size) < SCALES[0]:
                return None
        return decode(body, size[1], size[0], fraction, self._mode)


def encoded(source: PictureSource) -> bytes:
    """Return the bytes of a picture's file; a picture without a file is written as PNG."""
    if isinstance(source, bytes):
        return source
    if isinstance(source, Path):
        return source.read_bytes()
    sink = io.BytesIO()
    source.save(sink, "PNG")
    return sink.getvalue()


def is_of_the_machine(error: Exception) -> bool:
    """Return True for an error of the machine, not of one file: a replacement would fail as well."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_THE_MACHINE


def random_box(width: int, height: int, ratio: float, draws: list[float]) -> Box:
    """Choose a random crop: left, top, right, bottom in pixels.

    Args:
        width: Of the picture.
        height: Of the picture.
        ratio: Width over height of the output; that of the crop is 3/4 to 4/3 of it.
        draws: Four numbers from 0 to 1 for each try; a crop that does not fit is drawn again.
    """
    for attempt in range(TRIES):
        area, shape, x, y = draws[4 * attempt : 4 * attempt + 4]
        pixels = width * height * (MIN_AREA + (MAX_AREA - MIN_AREA) * area)
        own = ratio * math.exp(math.log(MIN_RATIO) + (math.log(MAX_RATIO) - math.log(MIN_RATIO)) * shape)
        wide, high = math.sqrt(pixels * own), math.sqrt(pixels / own)
        if wide <= width and high <= height:
            left, top = x * (width - wide), y * (height - high)
            return left, top, left + wide, top + high
    return centre_box(width, height, ratio, 1.0)


def centre_box(width: int, height: int, ratio: float, share: float) -> Box:
    """Compute the centre crop: left, top, right, bottom in pixels.

    Args:
        width: Of the picture.
        height: Of the picture.
        ratio: Width over height of the crop.
        share: The crop's sides, as a share of the largest crop with that ratio.
    """
    wide, high = share * min(width, height * ratio), share * min(height, width / ratio)
    left, top = (width - wide) / 2, (height - high) / 2
    return left, top, left + wide, top + high


def _layout(spec: TensorSpec) -> tuple[Any, int, int, bool]:
    match spec.shape:
        case (height, width) if spec.dtype == "uint8":
            return "L", height, width, False
        case (height, width, 3) if spec.dtype == "uint8":
            return "RGB", height, width, False
        case (3, height, width) if spec.dtype == "uint8":
            return "RGB", height, width, True
        case _:
            raise TrainError(
                f"pictures are read as {spec.describe()}; give a spec of uint8 with shape (H, W), (H, W, 3) or "
                f"(3, H, W)."
            )
