"""Videos that are made by the tests."""

import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

from penstock.core.spec import Array

OPTIONS = {
    "libx264": {"crf": "4", "preset": "ultrafast"},
    "libvpx": {"crf": "4", "b:v": "5M", "deadline": "realtime", "cpu-used": "8"},
    "libvpx-vp9": {"crf": "4", "b:v": "0", "deadline": "realtime", "cpu-used": "8"},
}
RED, GREEN, BLUE = (220, 20, 20), (20, 200, 20), (20, 20, 220)


def video(
    file: Path,
    pictures: Sequence[Array],
    *,
    rate: int = 20,
    codec: str = "libx264",
    tags: tuple[int, int, int, int] = (1, 1, 1, 1),
    aspect: Fraction | None = None,
) -> Path:
    """A video of RGB pictures, `[H, W, 3]` each.

    Args:
        file: Where it goes.
        pictures: Its frames.
        rate: Of them in a second.
        codec: FFmpeg's name of the encoder.
        tags: Matrix, primaries, transfer function and range, in FFmpeg's numbers.
        aspect: A pixel's width over its height.
    """
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream(codec, rate=rate, options=OPTIONS[codec])
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.sample_aspect_ratio = aspect or Fraction(1)
        context.colorspace, context.color_primaries, context.color_trc, context.color_range = tags
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=1 if tags[0] == 1 else 5,
                dst_color_range=1 if tags[3] != 2 else 2,
            )
            frame.pts, frame.time_base = number, Fraction(1, rate)
            frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range = tags
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file


def flat(colour: tuple[int, int, int], height: int = 48, width: int = 64) -> Array:
    """A picture of one colour, RGB."""
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy()


def turned(file: Path, matrix: tuple[float, float, float, float]) -> None:
    """Write the rotation of a phone that was held upright into an MP4."""
    data = bytearray(file.read_bytes())
    at = data.index(b"tkhd") + 4
    assert data[at] == 0, "version 0"
    a, b, c, d = (round(value * 65536) for value in matrix)
    struct.pack_into(">9i", data, at + 40, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    file.write_bytes(data)
