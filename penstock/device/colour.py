"""Convert decoded frames to the RGBA pixels that a browser would show.

The rules were measured by drawing videos with every colour tag on a canvas in Chromium, see decision 021. swscale takes
untagged frames of any size as BT.601; a browser takes them as BT.709 from 720 lines on.
"""

from enum import IntEnum
from typing import Any, final

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from penstock.core.spec import Array

# H height, W width, 4 RGBA

HD_LINES = 720
# Codecs whose bitstream carries the colour tags; untagged means BT.601.
_SELF_DESCRIBED = ("vp9",)
# ITU-T H.273 numbers, as FFmpeg uses.
_RGB, _UNSPECIFIED = 0, 2
_FULL = 2


class Matrix(IntEnum):
    """YUV to RGB matrices, in swscale's numbers."""

    BT709 = 1
    BT601 = 5
    BT2020 = 9


def matrix_of(
    *, matrix: int, primaries: int, transfer: int, lines: int, full_range: bool, codec: str, camera: bool
) -> Matrix:
    """The matrix that a browser uses for a frame.

    Args:
        matrix: The frame's tag, in the numbers of ITU-T H.273.
        primaries: The same; 2 is unspecified.
        transfer: The same; 2 is unspecified.
        lines: Height in pixels.
        full_range: Whether black is 0 and white 255.
        codec: FFmpeg's name, `"h264"`.
        camera: Whether it comes from a local camera, where untagged means BT.601.
    """
    # Chromium trusts the tags only if all three are set.
    tagged = _UNSPECIFIED not in (matrix, primaries, transfer) or (codec in _SELF_DESCRIBED)
    if tagged or camera:
        return {1: Matrix.BT709, 9: Matrix.BT2020, 10: Matrix.BT2020}.get(matrix, Matrix.BT601)
    if matrix == _UNSPECIFIED and full_range:
        # As in JPEG.
        return Matrix.BT601
    return Matrix.BT709 if lines >= HD_LINES else Matrix.BT601


@final
class FrameConverter:
    """Convert one source's frames to upright RGBA with square pixels.

    Args:
        codec: FFmpeg's name of the source's codec.
        camera: Whether the source is a local camera.
    """

    def __init__(self, codec: str, *, camera: bool) -> None:
        self._codec = codec
        self._camera = camera
        self._reformatter = VideoReformatter()

    def rgba(self, frame: av.VideoFrame, aspect: float = 1.0) -> Array:
        """Opaque pixels, uint8 `[H, W, 4]`.

        Args:
            frame: The decoded frame.
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
        # FFmpeg's rotation is counter-clockwise.
        upright = np.rot90(converted.to_ndarray(), round(frame.rotation / 90) % 4)
        return np.ascontiguousarray(upright)
