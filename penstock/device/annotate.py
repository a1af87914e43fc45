"""Answers drawn into the pictures, and a video of them."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import av
import av.error
import numpy as np
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from PIL import Image, ImageDraw, ImageFont, ImageOps

from penstock.core.errors import SourceError
from penstock.core.pictures.boxes import FoundBox
from penstock.core.spec import Array
from penstock.device.captions import answer_line
from penstock.device.drawn_boxes import draw_boxes
from penstock.device.watch import FrameResult

CODECS = {".mp4": "libx264", ".mkv": "libx264", ".webm": "libvpx-vp9"}
# Each frame is written with its own time.
TICKS_PER_SECOND = 1_000
_BT709 = 1


def annotated(pixels: Array, text: str, size: tuple[int, int] | None = None, found: Sequence[FoundBox] = ()) -> Array:
    """Draw a line of text on a dark strip at the bottom of a picture, and boxes over the picture.

    Args:
        pixels: RGBA `[H, W, 4]`.
        text: The line.
        size: Height and width of the result; the picture is scaled to fit, the rest is black.
        found: The boxes, in the pixels of the picture.

    Returns:
        RGB, uint8 `[H, W, 3]`, with an even height and width.
    """
    height, width = size or (max(pixels.shape[0] // 2, 1) * 2, max(pixels.shape[1] // 2, 1) * 2)
    picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
    draw_boxes(picture, found)
    canvas = ImageOps.pad(picture, (width, height))
    draw = ImageDraw.Draw(canvas, "RGBA")
    letter = max(height // 18, 10)
    strip = height - 2 * letter
    draw.rectangle((0, strip, width, height), fill=(0, 0, 0, 160))
    draw.text((letter // 2, strip + letter // 3), text, font=ImageFont.load_default(letter), fill="white")
    return np.asarray(canvas)


@final
class VideoWriter:
    """Write annotated frames as a video; to be used as a context.

    Args:
        file: Ends in .mp4, .mkv or .webm; an existing file is replaced.
        rate: Nominal frames per second; each frame has its own time.

    Raises:
        SourceError: Another ending, or the file cannot be written.
    """

    def __init__(self, file: Path, rate: float | None) -> None:
        if file.suffix.lower() not in CODECS:
            raise SourceError(f"--out is {file}; write a video that ends in {', '.join(CODECS)}.")
        try:
            # FFmpeg opens the file only with the first frame; fail now.
            file.open("wb").close()
            self._container = av.open(str(file), "w")
        except (av.error.FFmpegError, OSError) as error:
            raise SourceError(f"{file} cannot be written ({error.strerror}).") from None
        self._file = file
        self._rate = rate or 25.0
        self._stream: Any = None
        self._size = (0, 0)
        self._last = -1
        self._reformatter = VideoReformatter()

    def __enter__(self) -> "VideoWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                if self._stream is not None:
                    self._container.mux(self._stream.encode())
            finally:
                self._container.close()
        except (av.error.FFmpegError, OSError) as error:
            # The error that ended the run is the one to report.
            if kind is None:
                raise self._unwritable(error) from None

    def add(self, result: FrameResult) -> None:
        """Append a frame.

        Raises:
            SourceError: It cannot be written.
        """
        try:
            self._write(result)
        except (av.error.FFmpegError, OSError) as error:
            # FFmpeg crashes if more is written after a failure.
            self._stream = None
            raise self._unwritable(error) from None

    def _write(self, result: FrameResult) -> None:
        size, answer = self._size if self._stream is not None else None, result.answer
        found = answer if isinstance(answer, tuple) else ()
        picture = annotated(result.pixels, answer_line(answer), size, found)
        stream = self._begin(picture) if self._stream is None else self._stream
        frame = self._reformatter.reformat(
            av.VideoFrame.from_ndarray(picture, format="rgb24"),
            format="yuv420p",
            dst_colorspace=Colorspace.ITU709,
            dst_color_range=ColorRange.MPEG,
            threads=1,
        )
        frame.colorspace = frame.color_primaries = frame.color_trc = _BT709
        frame.color_range = ColorRange.MPEG
        self._last = max(round(result.frame.time_s * TICKS_PER_SECOND), self._last + 1)
        frame.pts, frame.time_base = self._last, Fraction(1, TICKS_PER_SECOND)
        self._container.mux(stream.encode(frame))

    def _unwritable(self, error: av.error.FFmpegError | OSError) -> SourceError:
        return SourceError(f"{self._file} cannot be written ({error.strerror}).")

    def _begin(self, picture: Array) -> Any:
        self._size = (picture.shape[0], picture.shape[1])
        rate = Fraction(self._rate).limit_denominator(1_001)
        stream: Any = self._container.add_stream(CODECS[self._file.suffix.lower()], rate=rate)
        stream.height, stream.width, stream.pix_fmt = *self._size, "yuv420p"
        context = stream.codec_context
        context.time_base = Fraction(1, TICKS_PER_SECOND)
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = ColorRange.MPEG
        # Fast presets, to keep up with a camera.
        stream.options = {"preset": "veryfast", "deadline": "realtime", "cpu-used": "8"}
        self._stream = stream
        return stream
