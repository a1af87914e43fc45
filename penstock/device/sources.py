"""Open the source that a command line names."""

import os
from pathlib import Path

from penstock.core.errors import SourceError
from penstock.device.picture_folder import SUFFIXES, PictureSource
from penstock.device.sound_source import MicrophoneSource, SoundSource, WavSource
from penstock.device.source import FrameSource
from penstock.device.video import READ_TIMEOUT_S, VideoInput, VideoSource

SOUNDS = (".wav", ".wave")
MICROPHONE = "mic"


def names_sound(source: str) -> bool:
    """True for a WAV file, the standard input (`-`) and a microphone (`mic`, `mic:DEVICE`)."""
    return source == "-" or source.partition(":")[0] == MICROPHONE or source.lower().endswith(SOUNDS)


def open_frames(
    source: str, *, size: str | None = None, rate: float | None = None, read_timeout_s: float = READ_TIMEOUT_S
) -> FrameSource:
    """Open a camera, an address, a folder of pictures, a picture or a video.

    Args:
        source: `0`, `/dev/video2`, `rtsp://host/path`, a folder or a file.
        size: Requested picture size of a camera, `"640x480"`.
        rate: Requested frames per second of a camera.
        read_timeout_s: Limit for one read from a camera or the network.

    Raises:
        SourceError: It cannot be opened, or is no video and no picture.
    """
    path = Path(source).expanduser()
    if not source:
        raise SourceError("--source is empty; name a camera (0), a video, a folder of pictures or an address.")
    camera = source.isdecimal() or source.startswith("/dev/video") or "://" in source
    if not camera and (os.path.isdir(path) or (path.suffix.lower() in SUFFIXES and os.path.isfile(path))):
        return PictureSource(path)
    return VideoSource(VideoInput.of(source if camera else str(path), size=size, rate=rate), read_timeout_s)


def open_sound(source: str, rate_hz: float, chunk: int) -> SoundSource:
    """Open a WAV file, the WAV on the standard input (`-`), or a microphone: `mic`, `mic:hw:1`.

    Args:
        source: The source.
        rate_hz: The pack's rate.
        chunk: Samples of a whole chunk.

    Raises:
        SourceError: It cannot be opened.
    """
    word, _, device = source.partition(":")
    if word == MICROPHONE:
        return MicrophoneSource(device or "default", rate_hz, chunk)
    return WavSource(None if source == "-" else Path(source).expanduser(), rate_hz, chunk)
