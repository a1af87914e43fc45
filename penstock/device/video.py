"""Frames of cameras, video files and streams over the network, by FFmpeg's libraries."""

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, final

import av
import av.error
import av.logging
from av.stream import Disposition

from penstock.core.errors import SourceError
from penstock.device.colour import Converter
from penstock.device.frames import Broken, Frame, Source

# Of a source that says nothing of its rate.
USUAL_RATE = 25.0
# In a row; then it is not a video that is damaged here and there.
MOST_BROKEN_PACKETS = 250
READ_S = 10.0
# RTSP over UDP loses packets, and then half of a frame is grey.
_LIVE = {"rtsp_transport": "tcp", "flags": "low_delay"}
# A playlist in a video's clothes opens nothing else than files.
_SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "tcp", "udp", "srt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """What FFmpeg is to open, and how.

    Args:
        url: A path or an address.
        name: For people.
        kind: `"camera"`, `"network"` or `"file"`.
        format: FFmpeg's name of the format, where it cannot find out.
        options: FFmpeg's.
    """

    url: str
    name: str
    kind: str
    format: str | None = None
    options: dict[str, str] | None = None


def opening_of(source: str, *, size: str | None = None, rate: float | None = None) -> Opening:
    """How a camera, an address or a file is opened.

    Args:
        source: A camera's number or `/dev/videoN`, an address such as `rtsp://host/path`, or a file.
        size: What a camera is asked for, `"640x480"`.
        rate: Frames a second that a camera is asked for.

    Raises:
        SourceError: An address of a kind that is not read.
    """
    if source.isdecimal() or source.startswith("/dev/video"):
        asked = {"video_size": size, "framerate": None if rate is None else f"{rate:g}"}
        path = f"/dev/video{int(source)}" if source.isdecimal() else source
        options = {name: value for name, value in asked.items() if value is not None}
        return Opening(url=path, name=f"camera {path}", kind="camera", format="v4l2", options=options)
    if "://" in source:
        scheme = source.partition("://")[0].lower()
        if scheme not in _SCHEMES:
            raise SourceError(f"'{scheme}://' is not watched; addresses begin with {', '.join(_SCHEMES)}.")
        return Opening(url=source, name=_without_password(source), kind="network", options=_LIVE)
    return Opening(url=f"file:{source}", name=source, kind="file")


def _without_password(address: str) -> str:
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


@final
class _Pipe:
    """A named pipe, read by Python: FFmpeg would wait for who writes to it, and not hear Ctrl-C.

    Args:
        path: Where it is.

    Attributes:
        interrupted: Whether Ctrl-C was heard; then the pipe is at its end.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self.interrupted = False
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - it is open as long as the video

    def read(self, size: int) -> bytes:
        try:
            return b"" if self.interrupted else self._file.read(size) or b""
        except KeyboardInterrupt:
            # No error comes through FFmpeg.
            self.interrupted = True
            return b""

    def close(self) -> None:
        self._file.close()


@final
class Video(Source):
    """A camera, a video file or a stream.

    Args:
        opening: What is to be opened.
        read_s: How long a camera or the network may give nothing.

    Raises:
        SourceError: It cannot be opened, or has no video.
    """

    def __init__(self, opening: Opening, read_s: float = READ_S) -> None:
        av.logging.set_level(None)
        self.name = opening.name
        self.recorded = opening.kind == "file"
        self.apart = False
        self.broken = Broken()
        self._opening = opening
        self._pipe: _Pipe | None = None
        self._container = self._opened(read_s)
        streams = self._container.streams.video
        real = [stream for stream in streams if not stream.disposition & Disposition.attached_pic]
        if not real:
            self._container.close()
            raise SourceError(f"{self.name} has no video in it; give a video, a camera or a folder of pictures.")
        self._stream = real[0]
        # Threads that take a frame each would answer some frames later.
        self._stream.thread_type = "AUTO" if self.recorded else "SLICE"
        rate = self._stream.average_rate
        self.rate = float(rate) if rate else None
        self._converter = Converter(self._stream.codec_context.name, camera=opening.kind == "camera")

    def frames(self) -> Iterator[Frame]:
        """Every frame as it is decoded, pixels unconverted until they are read."""
        first_s: float | None = None
        last_s, number = -math.inf, 0
        step_s = 1 / (self.rate or USUAL_RATE)
        for decoded in self._decoded():
            # Of a frame without a time it is None, whatever its type says.
            time_s = cast("float | None", decoded.time)
            if time_s is None or (first_s is not None and time_s - first_s <= last_s):
                # No time, or one that ran back: a stream that was put together of several.
                now_s = 0.0 if number == 0 else last_s + step_s
                first_s = None if time_s is None else time_s - now_s
            else:
                first_s = time_s if first_s is None else first_s
                now_s = time_s - first_s
            aspect = float(self._stream.sample_aspect_ratio or 1)
            yield Frame(number=number, time_s=now_s, read=partial(self._converter.rgba, decoded, aspect))
            last_s, number = now_s, number + 1
        if number == 0:
            raise SourceError(f"{self.name} has no frame that can be decoded; it is damaged or empty.")

    def _decoded(self) -> Iterator[av.VideoFrame]:
        in_a_row = 0
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
                self._check_interrupted()
                if packet is None:
                    return
                frames = packet.decode()
            except av.error.InvalidDataError as error:
                in_a_row += 1
                self.broken.add(f"a packet: {error.strerror}")
                if in_a_row >= MOST_BROKEN_PACKETS:
                    raise SourceError(f"{self.name} is damaged: {in_a_row} packets in a row give no frame.") from None
                continue
            except (av.error.FFmpegError, OSError) as error:
                raise _while_reading(self._opening, error) from None
            in_a_row = 0
            yield from cast("list[av.VideoFrame]", frames)

    def close(self) -> None:
        """Let go of the device or file."""
        self._container.close()
        if self._pipe is not None:
            self._pipe.close()

    def _opened(self, read_s: float) -> Any:
        opening = self._opening
        path = Path(opening.url.removeprefix("file:"))
        if opening.kind == "file" and os.path.isdir(path):
            raise SourceError(f"{opening.name} is a folder; only folders of pictures are watched.")
        # A file is read however long that takes; what plays it notices a stall itself.
        timeout = None if opening.kind == "file" else (read_s, read_s)
        try:
            if opening.kind == "file" and path.is_fifo():
                self._pipe = _Pipe(str(path))
            asked: Any = self._pipe or opening.url
            return av.open(asked, format=opening.format, options=dict(opening.options or {}), timeout=timeout)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            self._check_interrupted()
            raise _at_opening(opening, error) from None

    def _check_interrupted(self) -> None:
        if self._pipe is not None and self._pipe.interrupted:
            raise KeyboardInterrupt


def _at_opening(opening: Opening, error: Exception) -> SourceError:
    name, code = opening.name, getattr(error, "errno", None)
    if opening.kind == "camera":
        said = {
            errno.ENOENT: f"there is no {name}; plug it in, or name another one, such as --source 1.",
            errno.ENODEV: f"{name} is gone; plug it in again.",
            errno.EBUSY: f"{name} is in use by another program; close that one, or name another camera.",
            errno.EACCES: f"{name} may not be read by this user; join the group 'video' and log in again.",
            errno.EINVAL: f"{name} gives no such pictures ({_options(opening)}); ask for another --size or --fps.",
            errno.ENOTTY: f"{name} is no camera.",
        }
        return SourceError(said.get(code or 0, f"{name} cannot be opened ({_strerror(error)})."))
    if opening.kind == "network":
        return SourceError(f"{name} cannot be opened ({_strerror(error)}); is it running, and is the address right?")
    said = {
        errno.ENOENT: f"there is no file {name}.",
        errno.EACCES: f"{name} may not be read by this user.",
        errno.EISDIR: f"{name} is a folder.",
    }
    return SourceError(said.get(code or 0, f"{name} is not a video that can be read ({_strerror(error)})."))


def _while_reading(opening: Opening, error: Exception) -> SourceError:
    if opening.kind == "camera":
        return SourceError(f"{opening.name} stopped ({_strerror(error)}); is it still plugged in?")
    if opening.kind == "network":
        return SourceError(f"{opening.name} stopped ({_strerror(error)}); watch it again when it is back.")
    return SourceError(f"{opening.name} cannot be read on ({_strerror(error)}).")


def _options(opening: Opening) -> str:
    return ", ".join(f"{name} {value}" for name, value in (opening.options or {}).items()) or "the default size"


def _strerror(error: Exception) -> str:
    if isinstance(error, av.error.ExitError):
        return "it gave nothing in time"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")
