"""Which source a word on the command line means."""

import os
from pathlib import Path

from penstock.core.errors import SourceError
from penstock.device.frames import Source
from penstock.device.pictures import SUFFIXES, Pictures
from penstock.device.video import READ_S, Video, opening_of

SOUNDS = (".wav", ".wave")
MICROPHONE = "mic"


def is_sound(source: str) -> bool:
    """Whether it is a WAV file, one on the standard input (`-`), or a microphone (`mic`, `mic:DEVICE`)."""
    return source == "-" or source.partition(":")[0] == MICROPHONE or source.lower().endswith(SOUNDS)


def source_of(source: str, *, size: str | None = None, rate: float | None = None, stall_s: float = READ_S) -> Source:
    """The frames of a camera, an address, a folder of pictures, a picture or a video.

    Args:
        source: `0`, `/dev/video2`, `rtsp://host/path`, a folder or a file.
        size: What a camera is asked for, `"640x480"`.
        rate: Frames a second that a camera is asked for.
        stall_s: How long a camera or the network may give nothing.

    Raises:
        SourceError: It cannot be opened, or is no video and no picture.
    """
    path = Path(source).expanduser()
    if not source:
        raise SourceError("--source is empty; name a camera (0), a video, a folder of pictures or an address.")
    camera = source.isdecimal() or source.startswith("/dev/video") or "://" in source
    if not camera and (os.path.isdir(path) or (path.suffix.lower() in SUFFIXES and os.path.isfile(path))):
        return Pictures(path)
    return Video(opening_of(source if camera else str(path), size=size, rate=rate), read_s=stall_s)
