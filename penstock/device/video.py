"""Frames of cameras, video files and network streams, decoded by FFmpeg."""

import errno
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, cast, final

import av
import av.error
import av.logging
from av.stream import Disposition

from penstock.core.errors import SourceError
from penstock.device.colour import FrameConverter
from penstock.device.source import DecodeFailures, Frame, FrameSource

# Of a source that does not state its rate.
DEFAULT_RATE = 25.0
# Consecutive; beyond that, the whole video is damaged.
MAX_BROKEN_PACKETS = 250
READ_TIMEOUT_S = 10.0
# RTSP over UDP loses packets, which leaves parts of frames grey.
_LIVE = {"rtsp_transport": "tcp", "flags": "low_delay"}
# Only these; a playlist named as a video may open nothing but files.
_SCHEMES = ("rtsp", "rtsps", "rtmp", "http", "https", "tcp", "udp", "srt")


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoInput:
    """Arguments for FFmpeg to open a video.

    Args:
        url: A path or an address.
        name: For messages.
        kind: `"camera"`, `"network"` or `"file"`.
        format: FFmpeg's name of the format, where it cannot be detected.
        options: FFmpeg's options.
    """

    url: str
    name: str
    kind: str
    format: str | None = None
    options: dict[str, str] | None = None

    @classmethod
    def of(cls, source: str, *, size: str | None = None, rate: float | None = None) -> Self:
        """Arguments to open a camera, an address or a file.

        Args:
            source: A camera's number or `/dev/videoN`, an address such as `rtsp://host/path`, or a file.
            size: Requested picture size of a camera, `"640x480"`.
            rate: Requested frames per second of a camera.

        Raises:
            SourceError: The scheme of the address is not supported.
        """
        if source.isdecimal() or source.startswith("/dev/video"):
            requested = {"video_size": size, "framerate": None if rate is None else f"{rate:g}"}
            path = f"/dev/video{int(source)}" if source.isdecimal() else source
            options = {name: value for name, value in requested.items() if value is not None}
            return cls(url=path, name=f"camera {path}", kind="camera", format="v4l2", options=options)
        if "://" in source:
            scheme = source.partition("://")[0].lower()
            if scheme not in _SCHEMES:
                raise SourceError(f"'{scheme}://' is not supported; addresses begin with {', '.join(_SCHEMES)}.")
            return cls(url=source, name=_without_password(source), kind="network", options=_LIVE)
        return cls(url=f"file:{source}", name=source, kind="file")


def _without_password(address: str) -> str:
    scheme, _, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


@final
class _Pipe:
    """A named pipe, read by Python, because FFmpeg cannot be interrupted while it waits for a writer.

    Attributes:
        interrupted: Ctrl-C came; the pipe is at its end.
    """

    def __init__(self, path: str) -> None:
        self.name = path
        self.interrupted = False
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - open as long as the video

    def read(self, size: int) -> bytes:
        try:
            return b"" if self.interrupted else self._file.read(size) or b""
        except KeyboardInterrupt:
            # FFmpeg does not pass exceptions on.
            self.interrupted = True
            return b""

    def close(self) -> None:
        self._file.close()


@final
class _FrameTimes:
    """Presentation times of decoded frames, or decoding times where presentation times run back more often.

    An AVI has no presentation times, and those that FFmpeg guesses for H.264 with B-frames are wrong. The rule is that
    of FFmpeg's `guess_correct_pts`.
    """

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._faults = {"pts": 0, "dts": 0}

    def of(self, frame: av.VideoFrame) -> float | None:
        """Return the time of the next frame in seconds; None if it has none."""
        stamps = {"pts": frame.pts, "dts": frame.dts}
        for name, stamp in stamps.items():
            if stamp is not None:
                self._faults[name] += name in self._last and stamp <= self._last[name]
                self._last[name] = stamp
        by_presentation = stamps["dts"] is None or self._faults["pts"] <= self._faults["dts"]
        stamp = stamps["pts"] if stamps["pts"] is not None and by_presentation else stamps["dts"]
        return None if stamp is None or frame.time_base is None else float(stamp * frame.time_base)


@final
class VideoSource(FrameSource):
    """A camera, a video file or a network stream.

    Args:
        opening: Arguments for FFmpeg.
        read_timeout_s: Limit for one read from a camera or the network.

    Raises:
        SourceError: It cannot be opened, or has no video.
    """

    def __init__(self, opening: VideoInput, read_timeout_s: float = READ_TIMEOUT_S) -> None:
        av.logging.set_level(None)
        self.name = opening.name
        self.recorded = opening.kind == "file"
        self.independent = False
        self.failures = DecodeFailures()
        self._opening = opening
        self._pipe: _Pipe | None = None
        self._container = self._open(read_timeout_s)
        streams = self._container.streams.video
        real = [stream for stream in streams if not stream.disposition & Disposition.attached_pic]
        if not real:
            self._container.close()
            raise SourceError(f"{self.name} has no video in it; give a video, a camera or a folder of pictures.")
        self._stream = real[0]
        # Frame threading would delay a camera by a frame per thread.
        self._stream.thread_type = "AUTO" if self.recorded else "SLICE"
        rate = self._stream.average_rate
        self.rate = float(rate) if rate else None
        self._converter = FrameConverter(self._stream.codec_context.name, camera=opening.kind == "camera")

    def items(self) -> Iterator[Frame]:
        """Frames as they are decoded; pixels are converted when read."""
        first_s: float | None = None
        last_s, number, times = -math.inf, 0, _FrameTimes()
        step_s = 1 / (self.rate or DEFAULT_RATE)
        for decoded in self._decoded():
            time_s = times.of(decoded)
            now_s = 0.0 if number == 0 else last_s + step_s
            if time_s is not None:
                if first_s is None or time_s - first_s <= last_s:
                    # The first one, or one that ran back, as in a stream joined from several.
                    first_s = time_s - now_s
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
                self.failures.add(f"a packet: {error.strerror}")
                if in_a_row >= MAX_BROKEN_PACKETS:
                    raise SourceError(f"{self.name} is damaged: {in_a_row} packets in a row give no frame.") from None
                continue
            except (av.error.FFmpegError, OSError) as error:
                raise _read_error(self._opening, error) from None
            in_a_row = 0
            yield from cast("list[av.VideoFrame]", frames)

    def close(self) -> None:
        """Release the device or file."""
        self._container.close()
        if self._pipe is not None:
            self._pipe.close()

    def _open(self, read_timeout_s: float) -> Any:
        opening = self._opening
        path = Path(opening.url.removeprefix("file:"))
        if opening.kind == "file" and os.path.isdir(path):
            raise SourceError(f"{opening.name} is a folder without pictures.")
        # Files have no timeout; the source reader notices a stall.
        timeout = None if opening.kind == "file" else (read_timeout_s, read_timeout_s)
        try:
            if opening.kind == "file" and path.is_fifo():
                self._pipe = _Pipe(str(path))
            target: Any = self._pipe or opening.url
            return av.open(target, format=opening.format, options=dict(opening.options or {}), timeout=timeout)
        except (av.error.FFmpegError, OSError, ValueError) as error:
            self._check_interrupted()
            raise _open_error(opening, error) from None

    def _check_interrupted(self) -> None:
        if self._pipe is not None and self._pipe.interrupted:
            raise KeyboardInterrupt


def _open_error(opening: VideoInput, error: Exception) -> SourceError:
    name, code = opening.name, getattr(error, "errno", None)
    if opening.kind == "camera":
        sentences = {
            errno.ENOENT: f"there is no {name}; plug it in, or name another one, such as --source 1.",
            errno.ENODEV: f"{name} is gone; plug it in again.",
            errno.EBUSY: f"{name} is in use by another program; close that one, or name another camera.",
            errno.EACCES: f"{name} may not be read by this user; join the group 'video' and log in again.",
            errno.EINVAL: f"{name} gives no such pictures ({_options(opening)}); ask for another --size or --fps.",
            errno.ENOTTY: f"{name} is no camera.",
        }
        return SourceError(sentences.get(code or 0, f"{name} cannot be opened ({_strerror(error)})."))
    if opening.kind == "network":
        return SourceError(f"{name} cannot be opened ({_strerror(error)}); is it running, and is the address right?")
    sentences = {
        errno.ENOENT: f"there is no file {name}.",
        errno.EACCES: f"{name} may not be read by this user.",
        errno.EISDIR: f"{name} is a folder.",
    }
    return SourceError(sentences.get(code or 0, f"{name} is not a video that can be read ({_strerror(error)})."))


def _read_error(opening: VideoInput, error: Exception) -> SourceError:
    if opening.kind == "camera":
        return SourceError(f"{opening.name} stopped ({_strerror(error)}); is it still plugged in?")
    if opening.kind == "network":
        return SourceError(f"{opening.name} stopped ({_strerror(error)}); watch it again when it is back.")
    return SourceError(f"{opening.name} cannot be read on ({_strerror(error)}).")


def _options(opening: VideoInput) -> str:
    return ", ".join(f"{name} {value}" for name, value in (opening.options or {}).items()) or "the default size"


def _strerror(error: Exception) -> str:
    if isinstance(error, av.error.ExitError):
        return "it gave nothing in time"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).rstrip(".")
