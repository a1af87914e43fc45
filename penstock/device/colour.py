"""Decoded frames as the RGBA pixels that a browser would show of them.

What a browser makes of YUV was found by drawing videos with every tag on a canvas in Chromium, see decision 021.
swscale alone takes BT.601 for whatever says nothing, however large it is; a browser takes BT.709 from 720 lines on.
"""

from enum import IntEnum
from typing import Any, final

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from penstock.core.spec import Array

# H height, W width, 4 RGBA

HD_LINES = 720
# Codecs whose own stream says what its colours are, and means BT.601 where it says nothing.
_SELF_DESCRIBED = ("vp9",)
# ITU-T H.273, which FFmpeg's numbers are.
_RGB, _UNSPECIFIED = 0, 2
_FULL = 2


class Matrix(IntEnum):
    """How Y, U and V become R, G and B, in swscale's numbers."""

    BT709 = 1
    BT601 = 5
    BT2020 = 9


def matrix_of(
    *, matrix: int, primaries: int, transfer: int, lines: int, full_range: bool, codec: str, camera: bool
) -> Matrix:
    """The matrix that a browser takes for a frame.

    Args:
        matrix: The frame's, in the numbers of ITU-T H.273, as the primaries and the transfer function.
        primaries: 2 where nothing is said.
        transfer: 2 where nothing is said.
        lines: Its height in pixels.
        full_range: Whether black is 0 and white 255.
        codec: FFmpeg's name, `"h264"`.
        camera: Whether it comes from a camera of this machine; those mean BT.601 where they say nothing.
    """
    # Chromium trusts tags only if all three are there.
    told = _UNSPECIFIED not in (matrix, primaries, transfer) or (codec in _SELF_DESCRIBED)
    if told or camera:
        return {1: Matrix.BT709, 9: Matrix.BT2020, 10: Matrix.BT2020}.get(matrix, Matrix.BT601)
    if matrix == _UNSPECIFIED and full_range:
        # As JPEG has it.
        return Matrix.BT601
    return Matrix.BT709 if lines >= HD_LINES else Matrix.BT601


@final
class Converter:
    """Makes pixels of one source's frames: colours, square pixels, turned as the source says.

    Args:
        codec: FFmpeg's name of the source's codec.
        camera: Whether the source is a camera of this machine.
    """

    def __init__(self, codec: str, *, camera: bool) -> None:
        self._codec = codec
        self._camera = camera
        self._reformatter = VideoReformatter()

    def rgba(self, frame: av.VideoFrame, aspect: float = 1.0) -> Array:
        """The pixels, uint8 `[H, W, 4]`, opaque.

        Args:
            frame: As it was decoded.
            aspect: Width of a pixel over its height.
        """
        full_range = frame.color_range == _FULL or frame.format.name.startswith("yuvj")
        matrix = matrix_of(
            matrix=frame.colorspace,
            primaries=frame.color_primaries,
            transfer=frame.color_trc,
            lines=frame.height,
            full_range=full_range,
            codec=self._codec,
            camera=self._camera,
        )
        options: dict[str, Any] = {}
        if not frame.format.is_rgb:
            options = {"src_colorspace": int(matrix), "src_color_range": 2 if full_range else 1}
        converted = self._reformatter.reformat(
            frame,
            width=round(frame.width * aspect) if aspect > 1 else frame.width,
            height=round(frame.height / aspect) if aspect < 1 else frame.height,
            format="rgba",
            dst_colorspace=_RGB,
            dst_color_range=_FULL,
            interpolation=Interpolation.BILINEAR | Interpolation.ACCURATE_RND,
            threads=1,
            **options,
        )
        # The rotation is how far the picture is to be turned counter-clockwise.
        turned = np.rot90(converted.to_ndarray(), round(frame.rotation / 90) % 4)
        return np.ascontiguousarray(turned)
