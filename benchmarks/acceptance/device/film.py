"""Films for Chromium's fake camera: raw frames, and the pixels that a browser shows of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.core.spec import Array

# RGB (0 to 255) to YUV in limited-range BT.601, as which Chromium reads Y4M.
_YUV_RGB = np.array([[65.481, 128.553, 24.966], [-37.797, -74.203, 112.0], [112.0, -93.786, -18.214]]) / 255
_OFFSET_YUV = np.array([16.0, 128.0, 128.0])


def write_film(file: Path, pictures: Sequence[Array], *, each: int, rate: int = 20) -> None:
    """Write a film as Y4M, 4:2:0.

    Args:
        file: The file to write.
        pictures: RGB, uint8 `[H, W, 3]` with H and W even, all of one size.
        each: Frames that show each picture.
        rate: Frames per second.
    """
    height, width, _ = pictures[0].shape
    with file.open("wb") as film:
        film.write(f"YUV4MPEG2 W{width} H{height} F{rate}:1 Ip A1:1 C420jpeg\n".encode())
        for picture in pictures:
            film.write((b"FRAME\n" + b"".join(plane.tobytes() for plane in _planes(picture))) * each)


def as_seen(picture_HWC: Array) -> Array:
    """The picture converted to YUV 4:2:0 and back in exact arithmetic, RGB uint8 `[H, W, 3]`."""
    planes = [plane.astype(np.float64) for plane in _planes(picture_HWC)]
    chroma = [_doubled(plane) for plane in planes[1:]]
    yuv_HWC = np.stack([planes[0], *chroma], -1) - _OFFSET_YUV
    return np.rint(yuv_HWC @ np.linalg.inv(_YUV_RGB).T).clip(0, 255).astype(np.uint8)


def _planes(picture_HWC: Array) -> list[Array]:
    yuv_HWC = picture_HWC.astype(np.float64) @ _YUV_RGB.T + _OFFSET_YUV
    height, width, _ = yuv_HWC.shape
    halved = [yuv_HWC[..., plane].reshape(height // 2, 2, width // 2, 2).mean((1, 3)) for plane in (1, 2)]
    return [np.rint(plane).clip(0, 255).astype(np.uint8) for plane in (yuv_HWC[..., 0], *halved)]


def _doubled(plane_HW: Array) -> Array:
    return plane_HW.repeat(2, 0).repeat(2, 1)
