"""Videos, folders and cameras as sources of frames."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Callable, Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import av.error
import numpy as np
import pytest

from penstock.core.errors import SourceError
from penstock.core.spec import Array
from penstock.device.colour import Matrix, matrix_of
from penstock.device.picture_folder import PictureSource
from penstock.device.source import FrameSource
from penstock.device.sources import names_sound, open_frames
from penstock.device.video import VideoInput, VideoSource, _open_error
from tests.support.pictures import picture_folder
from tests.support.videos import BLUE, GREEN, RED, flat, turned, video

# What 8 bits, limited range and chroma of half the size leave of a flat colour.
NEAR = 4


def pixels_of(source: FrameSource) -> list[Array]:
    try:
        return [frame.read() for frame in source.items()]
    finally:
        source.close()


def far(pixels: Array, colour: tuple[int, int, int]) -> int:
    return int(np.abs(pixels[:, :, :3].astype(int) - np.array(colour)).max())


def test_frames_of_a_file_in_order_with_their_times(tmp_path: Path) -> None:
    file = video(tmp_path / "v.mp4", [flat(RED), flat(GREEN), flat(BLUE)], rate=20)
    source = open_frames(str(file))
    frames = list(source.items())
    assert [frame.number for frame in frames] == [0, 1, 2]
    assert [frame.time_s for frame in frames] == pytest.approx([0, 0.05, 0.1])
    for frame, colour in zip(frames, (RED, GREEN, BLUE), strict=True):
        pixels = frame.read()
        assert (pixels.shape, pixels.dtype, int(pixels[..., 3].min())) == ((48, 64, 4), np.uint8, 255)
        assert far(pixels, colour) <= NEAR
    source.close()


@pytest.mark.parametrize(
    ("tags", "height"),
    [
        ((1, 1, 1, 1), 48),
        ((1, 1, 1, 2), 48),
        ((6, 6, 6, 1), 48),
        ((6, 6, 6, 1), 720),
        ((6, 6, 6, 2), 48),
        ((2, 2, 2, 1), 48),
    ],
)
def test_colours_are_those_that_were_filmed(tmp_path: Path, tags: tuple[int, int, int, int], height: int) -> None:
    # Untagged and below 720 lines a browser takes BT.601, with which the helper encodes it.
    file = video(tmp_path / "v.mp4", [flat((200, 90, 30), height), flat((30, 160, 220), height)], tags=tags)
    first, second = pixels_of(open_frames(str(file)))
    assert (far(first, (200, 90, 30)) <= NEAR, far(second, (30, 160, 220)) <= NEAR) == (True, True)


@pytest.mark.parametrize(
    ("tags", "lines", "full", "codec", "camera", "expected"),
    [
        ((1, 1, 1), 480, False, "h264", False, Matrix.BT709),
        ((6, 6, 6), 1080, False, "h264", False, Matrix.BT601),
        ((9, 9, 16), 2160, False, "hevc", False, Matrix.BT2020),
        ((2, 2, 2), 719, False, "h264", False, Matrix.BT601),
        ((2, 2, 2), 720, False, "h264", False, Matrix.BT709),
        # A browser does not trust a matrix alone.
        ((6, 2, 2), 720, False, "h264", False, Matrix.BT709),
        ((1, 2, 2), 480, False, "h264", False, Matrix.BT601),
        ((2, 2, 2), 1080, True, "mjpeg", False, Matrix.BT601),
        ((5, 2, 2), 720, False, "vp8", False, Matrix.BT709),
        ((2, 2, 2), 1080, False, "vp9", False, Matrix.BT601),
        ((1, 2, 2), 480, False, "vp9", False, Matrix.BT709),
        ((2, 2, 2), 1080, False, "rawvideo", True, Matrix.BT601),
    ],
)
def test_the_matrix_is_the_one_that_a_browser_takes(
    tags: tuple[int, int, int], lines: int, full: bool, codec: str, camera: bool, expected: Matrix
) -> None:
    matrix, primaries, transfer = tags
    assert expected == matrix_of(
        matrix=matrix,
        primaries=primaries,
        transfer=transfer,
        lines=lines,
        full_range=full,
        codec=codec,
        camera=camera,
    )


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [
        ((1, 0, 0, 1), "top left"),
        # QuickTime's matrix for 90 degrees clockwise: what was at the top left is shown at the top right.
        ((0, 1, -1, 0), "top right"),
        ((-1, 0, 0, -1), "bottom right"),
        ((0, -1, 1, 0), "bottom left"),
    ],
)
def test_frames_are_turned_as_the_phone_was_held(tmp_path: Path, matrix: tuple[float, ...], corner: str) -> None:
    picture = flat((20, 20, 20), 48, 96)
    picture[:16, :16] = (250, 250, 250)
    file = video(tmp_path / "v.mp4", [picture] * 3)
    turned(file, matrix)  # pyright: ignore[reportArgumentType]
    pixels = pixels_of(open_frames(str(file)))[0]
    upright = corner in ("top left", "bottom right")
    assert pixels.shape[:2] == ((48, 96) if upright else (96, 48))
    bright = np.argwhere(pixels[:, :, 0] > 128).mean(0)
    vertical = "top" if bright[0] < pixels.shape[0] / 2 else "bottom"
    assert f"{vertical} {'left' if bright[1] < pixels.shape[1] / 2 else 'right'}" == corner


@pytest.mark.parametrize(("aspect", "shape"), [(Fraction(2), (48, 128, 4)), (Fraction(1, 2), (96, 64, 4))])
def test_pixels_that_are_not_square_are_made_so(tmp_path: Path, aspect: Fraction, shape: tuple[int, ...]) -> None:
    file = video(tmp_path / "v.mp4", [flat(RED)] * 2, aspect=aspect)
    assert pixels_of(open_frames(str(file)))[0].shape == shape


def test_a_video_that_changes_its_size(tmp_path: Path) -> None:
    small = video(tmp_path / "small.ts", [flat(RED)] * 4, codec="libx264").read_bytes()
    large = video(tmp_path / "large.ts", [flat(BLUE, 96, 128)] * 4).read_bytes()
    file = tmp_path / "both.ts"
    file.write_bytes(small + large)
    pixels = pixels_of(open_frames(str(file)))
    assert {shown.shape for shown in pixels} == {(48, 64, 4), (96, 128, 4)}
    assert (far(pixels[0], RED) <= NEAR, far(pixels[-1], BLUE) <= NEAR) == (True, True)
    times = [frame.time_s for frame in open_frames(str(file)).items()]
    assert times == sorted(set(times)), "time ran back where the second video began"


def test_frames_of_an_avi_come_in_their_time(tmp_path: Path) -> None:
    # An AVI has no times for display, and those that FFmpeg guesses for B-frames run back.
    file, frames = tmp_path / "v.avi", 30
    with av.open(str(file), "w") as container:
        stream: Any = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.codec_context.max_b_frames = 2
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(flat((8 * number, 0, 0)), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    source = open_frames(str(file))
    times_s = [frame.time_s for frame in source.items()]
    source.close()
    assert len(times_s) == frames
    assert np.abs(np.array(times_s) - np.arange(frames) / 10).max() < 0.15


@pytest.mark.parametrize(
    ("stamps", "times_s"),
    [
        ([0, 1, None, 3, 4], [0, 0.1, 0.2, 0.3, 0.4]),
        ([None, None, 6, 8], [0, 0.1, 0.2, 0.4]),
        # Joined of two.
        ([10, 12, 0, 1], [0, 0.2, 0.3, 0.4]),
    ],
)
def test_frames_without_a_time_do_not_turn_back_those_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamps: list[int | None], times_s: list[float]
) -> None:
    source = open_frames(str(video(tmp_path / "v.mp4", [flat(RED), flat(RED)], rate=10)))

    def decoded() -> Iterator[av.VideoFrame]:
        for stamp in stamps:
            frame = av.VideoFrame(64, 48, "yuv420p")
            if stamp is not None:
                frame.pts, frame.time_base = stamp, Fraction(1, 10)
            yield frame

    monkeypatch.setattr(source, "_decoded", decoded)
    assert [frame.time_s for frame in source.items()] == pytest.approx(times_s)
    source.close()


def test_a_video_that_is_cut_short_gives_what_is_there(tmp_path: Path) -> None:
    file = video(tmp_path / "v.ts", [flat(RED), flat(GREEN)] * 20)
    file.write_bytes(file.read_bytes()[:-4000])
    assert 0 < len(pixels_of(open_frames(str(file)))) < 40


def test_a_named_pipe_is_watched_as_another_program_writes_it(tmp_path: Path) -> None:
    file = video(tmp_path / "v.mp4", [flat(RED), flat(GREEN), flat(BLUE)])
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(file.read_bytes()))
    writer.start()
    found = pixels_of(open_frames(str(tmp_path / "pipe")))
    writer.join()
    assert [far(pixels, colour) <= NEAR for pixels, colour in zip(found, (RED, GREEN, BLUE), strict=True)] == [True] * 3


WAITS = """
import sys
from penstock.device.sources import open_frames

try:
    print("waits", flush=True)
    open_frames(sys.argv[1])
except KeyboardInterrupt:
    print("heard", flush=True)
"""


@pytest.mark.parametrize("writes", [False, True])
def test_ctrl_c_is_heard_while_a_named_pipe_gives_nothing(tmp_path: Path, writes: bool) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([sys.executable, "-c", WAITS, pipe], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        # A writer that holds it open and is silent.
        writer = os.open(pipe, os.O_WRONLY) if writes else None
        deadline_s = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline_s:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                # Not sooner: another one may come while the first is heard.
                process.wait(10)
        process.kill()
        assert process.stdout.read() == "heard\n"
    if writer is not None:
        os.close(writer)


def damaged(file: Path) -> None:
    data = video(file, [flat(RED)] * 5).read_bytes()
    file.write_bytes(data[: len(data) // 3])


def sound(file: Path) -> None:
    with wave.open(str(file), "wb") as sink:
        sink.setnchannels(1)
        sink.setsampwidth(2)
        sink.setframerate(8000)
        sink.writeframes(bytes(16_000))


@pytest.mark.parametrize(
    ("name", "made", "sentence"),
    [
        ("none.mp4", lambda file: None, "there is no file .*none.mp4"),
        ("text.mp4", lambda file: file.write_text("this is a letter\n" * 100), "is not a video that can be read"),
        ("empty.mp4", lambda file: file.write_bytes(b""), "is not a video that can be read"),
        ("cut.mp4", damaged, "is not a video that can be read"),
        ("sound.mp4", sound, "has no video in it"),
        ("folder", lambda file: file.mkdir(), "has no picture in it"),
    ],
)
def test_what_is_not_a_video_is_refused_in_a_sentence(
    tmp_path: Path, name: str, made: Callable[[Path], None], sentence: str
) -> None:
    made(tmp_path / name)
    with pytest.raises(SourceError, match=sentence):
        pixels_of(open_frames(str(tmp_path / name)))


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (errno.ENOENT, "there is no camera /dev/video7; plug it in"),
        (errno.EBUSY, "camera /dev/video7 is in use by another program"),
        (errno.EACCES, "may not be read by this user; join the group 'video'"),
        (errno.EINVAL, r"gives no such pictures \(video_size 1x1\); ask for another --size"),
        (errno.ENODEV, "is gone; plug it in again"),
        (errno.EIO, r"cannot be opened \(Input/output error\)"),
    ],
)
def test_a_camera_that_does_not_open(monkeypatch: pytest.MonkeyPatch, code: int, sentence: str) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "Input/output error")

    monkeypatch.setattr(av, "open", refuse)
    with pytest.raises(SourceError, match=sentence):
        open_frames("7", size="1x1")


def test_there_is_no_such_camera_here() -> None:
    with pytest.raises(SourceError, match="there is no camera /dev/video4711; plug it in"):
        open_frames("4711")


def test_a_camera_that_is_unplugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = video(tmp_path / "v.mp4", [flat(RED)] * 10)
    source = VideoSource(VideoInput(url=str(file), name="camera /dev/video0", kind="camera"))

    class Unplugged:
        def __init__(self) -> None:
            self.packets = container.demux(stream)

        def __iter__(self) -> "Unplugged":
            return self

        def __next__(self) -> Any:
            packet = next(self.packets)
            if packet.pts:
                raise OSError(errno.ENODEV, "No such device")
            return packet

    container, stream = source._container, source._stream
    monkeypatch.setattr(source, "_container", type("Container", (), {"demux": lambda *_: Unplugged()})())
    with pytest.raises(SourceError, match=r"camera /dev/video0 stopped \(No such device\); is it still plugged in"):
        list(source.items())
    container.close()


def test_errors_of_ffmpeg_are_said_in_its_words() -> None:
    error = av.error.ExitError(errno.ETIMEDOUT, "Immediate exit requested")
    sentence = str(_open_error(VideoInput.of("rtsp://user:secret@cam/1"), error))
    assert sentence.startswith("rtsp://cam/1 cannot be opened (it gave nothing in time)")
    assert "secret" not in sentence


@pytest.mark.parametrize("address", ["concat://a", "file:///etc/passwd", "gopher://x"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(SourceError, match="is not supported; addresses begin with rtsp"):
        open_frames(address)


def test_a_folder_with_broken_pictures_names_and_counts_them(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "p", per_class=2, classes=("a", "b"))
    (root / "a" / "text.jpg").write_text("not a picture")
    whole = (root / "b" / "0.jpg").read_bytes()
    (root / "b" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (root / ".hidden.png").write_bytes(b"")
    source = PictureSource(root)
    assert [frame.name for frame in source.items()] == ["a/0.jpg", "a/1.png", "b/0.jpg", "b/1.png"]
    assert source.failures.count == 2
    assert "text.jpg cannot be used: the file is not a picture" in source.failures.sentences[0]
    assert "cut.jpg cannot be used: the picture is cut short" in source.failures.sentences[1]


def test_a_folder_of_nothing_but_broken_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no")
    with pytest.raises(SourceError, match="none of the 1 pictures"):
        pixels_of(open_frames(str(tmp_path)))


def test_which_sources_are_sound() -> None:
    assert all(map(names_sound, ("a.wav", "b.WAV", "mic", "mic:hw:1", "-")))
    assert not any(map(names_sound, ("0", "a.mp4", "mice.mp4", "rtsp://mic/1")))
