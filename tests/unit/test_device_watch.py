"""Watching: from a source to what is shown, written and reported."""

import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from penstock.cli import build
from penstock.core.errors import PackError, SourceError
from penstock.core.recognition import Recognition
from penstock.core.spec import Array
from penstock.device import source_reader
from penstock.device.annotate import VideoWriter, annotated
from penstock.device.captions import answer_line, frame_json
from penstock.device.pack_engine import PackEngine
from penstock.device.source import DecodeFailures, Frame, FrameSource
from penstock.device.sources import open_frames
from penstock.device.terminal_view import LineView, TerminalView, render
from penstock.device.watch import FrameResult, WatchRun, recognition_of
from tests.support.clock import Clock
from tests.support.packs import COLOURS, colour_pack, flowers_pack, loud_pack, motion_pack, plain
from tests.support.pictures import picture_folder
from tests.support.videos import BLUE, GREEN, RED, flat, video


@pytest.fixture(autouse=True)
def readers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that reads a source end, however busy the machine is."""
    monkeypatch.setattr(source_reader, "JOIN_TIMEOUT_S", 30.0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PackEngine:
    return PackEngine(colour_pack(tmp_path_factory.mktemp("pack")))


class Camera(FrameSource):
    """Gives frames when it is told to."""

    name, recorded, independent, rate = "camera 0", False, False, None

    def __init__(self) -> None:
        self.failures = DecodeFailures()
        self.waiting = threading.Semaphore(0)
        self.given: list[Array] = []
        self.read: list[int] = []
        self.over = self.closed = False

    def show(self, *pictures: Array) -> None:
        self.given += pictures
        for _ in pictures:
            self.waiting.release()

    def end(self) -> None:
        self.over = True
        self.waiting.release()

    def items(self) -> Iterator[Frame]:
        number = 0
        while self.waiting.acquire() and not (self.over and number == len(self.given)):
            yield Frame(number=number, time_s=number / 10, read=lambda n=number: self._read(n))
            number += 1

    def _read(self, number: int) -> Array:
        self.read.append(number)
        return self.given[number]

    def close(self) -> None:
        self.closed = True


def seen_in(engine: PackEngine, source: FrameSource, **options: object) -> list[FrameResult]:
    with WatchRun(engine, source, **options) as run:  # pyright: ignore[reportArgumentType]
        return list(run)


def test_every_frame_of_a_file_is_smoothed_on_its_own_clock(engine: PackEngine, tmp_path: Path) -> None:
    pictures = [flat(RED)] * 10 + [flat(GREEN)] * 10
    file = str(video(tmp_path / "v.mp4", pictures, rate=20))
    seen = seen_in(engine, open_frames(file), every_frame=True)
    answers: list[Any] = [answer.answer for answer in seen]
    groups = [answer["group"] for answer in answers]
    assert (len(seen), groups[0], groups[10], groups[-1]) == (20, "red", "red", "green")
    assert all(answer.age_s is None for answer in seen)
    # The same again, bit for bit: nothing depends on how fast it went.
    again = seen_in(engine, open_frames(file), every_frame=True)
    assert [answer.answer for answer in again] == [answer.answer for answer in seen]


def test_a_file_is_played_in_real_time(engine: PackEngine, tmp_path: Path) -> None:
    file = video(tmp_path / "v.mp4", [flat(RED)] * 10, rate=20)
    run = WatchRun(engine, open_frames(str(file)))
    with run:
        seen = list(run)
    assert run.seconds >= 9 / 20
    report = run.report()
    assert report.answered + report.dropped == 10
    assert report.answered == len(seen)
    assert all(answer.age_s is not None and answer.age_s >= answer.model_s for answer in seen)
    assert report.age_p50_ms is not None
    assert report.age_p95_ms is not None
    assert report.age_p50_ms <= report.age_p95_ms


def test_while_one_frame_is_looked_at_the_latest_waits_and_the_others_are_not_even_converted(
    engine: PackEngine,
) -> None:
    camera = Camera()
    run = WatchRun(engine, camera, stall_timeout_s=60)
    with run:
        seen = iter(run)
        camera.show(plain(RED))
        first: Any = next(seen).answer
        assert first["group"] == "red"
        camera.show(*[plain(GREEN)] * 5, plain(BLUE))
        while run.report().dropped < 5:
            time.sleep(0.005)
        latest = next(seen)
        camera.end()
        assert list(seen) == []
    assert latest.frame.number == 6
    assert camera.read == [0, 6]
    assert run.report().dropped == 5
    assert camera.closed


def test_a_source_that_stalls_is_given_up(engine: PackEngine) -> None:
    camera, clock = Camera(), Clock()
    run = WatchRun(engine, camera, stall_timeout_s=0.3, clock=clock)
    camera.show(plain(RED))
    with run:
        seen = iter(run)
        next(seen)
        clock.now_s += 0.31
        with pytest.raises(SourceError, match=r"camera 0 gave nothing for 0\.3 s; it stalled or is gone"):
            next(seen)
        camera.end()
    assert camera.closed


def test_what_is_read_from_for_ever_is_not_closed_under_its_reader(
    engine: PackEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_reader, "JOIN_TIMEOUT_S", 0.1)
    camera = Camera()
    with WatchRun(engine, camera, stall_timeout_s=0.2) as run, pytest.raises(SourceError, match="gave nothing"):
        list(run)
    assert not camera.closed
    camera.end()
    assert run._reader is not None
    run._reader._thread.join()


def test_a_source_that_breaks_ends_in_its_sentence(engine: PackEngine) -> None:
    class Broke(Camera):
        def items(self) -> Iterator[Frame]:
            yield Frame(number=0, time_s=0, read=lambda: plain(RED))
            raise SourceError("camera 0 stopped; is it still plugged in?")

    with WatchRun(engine, Broke()) as run, pytest.raises(SourceError, match="still plugged in"):
        list(run)


def test_a_folder_is_not_smoothed(engine: PackEngine, tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "p", per_class=2, classes=("a",))
    (root / "broken.png").write_bytes(b"no")
    with WatchRun(engine, open_frames(str(root))) as run:
        seen = list(run)
    recognition = recognition_of(engine.pack)
    for answer in seen:
        assert answer.answer == recognition.answer(engine.run(answer.pixels)[0])
    assert (run.report().answered, run.report().broken, run.report().age_p50_ms) == (2, 1, None)


@pytest.mark.parametrize("source", ["0", "film.mp4", "mic", "sound.wav"])
def test_a_source_of_another_kind_is_refused_with_those_that_fit(tmp_path: Path, source: str) -> None:
    table, sound = "a .csv, .npy or .npz file, or - for lines", "mic, a .wav file, or - for a WAV"
    packs = [(flowers_pack(tmp_path / "flowers"), table), (motion_pack(tmp_path / "motion", labels=True), table)]
    if source in ("0", "film.mp4"):
        packs.append((loud_pack(tmp_path / "loud"), sound))
    for pack, fitting in packs:
        said = CliRunner().invoke(build(), ["watch", str(pack.folder), "--source", source]).exception
        assert isinstance(said, PackError)
        assert f"name {fitting}" in str(said)


def test_packs_that_cannot_watch_say_so(tmp_path: Path) -> None:
    with pytest.raises(PackError, match="takes live signals"):
        PackEngine(loud_pack(tmp_path / "loud"))
    pack = colour_pack(tmp_path / "pack")
    object.__setattr__(pack, "recognition", None)
    assert recognition_of(pack) == Recognition(labels=COLOURS)
    object.__setattr__(pack, "outputs", pack.outputs[1:])
    with pytest.raises(
        PackError,
        match=r"answers with float32\[3\] \(the mean colour\); watch shows the answers of class",
    ):
        recognition_of(pack)


def test_the_annotated_video_shows_what_was_seen(engine: PackEngine, tmp_path: Path) -> None:
    frames = [flat(RED, 96, 128)] * 3 + [flat(BLUE, 96, 128)] * 12
    seen = seen_in(engine, open_frames(str(video(tmp_path / "v.mp4", frames))), every_frame=True)
    with VideoWriter(tmp_path / "out.mp4", 20.0) as writer:
        for answer in seen:
            writer.add(answer)
    written = list(open_frames(str(tmp_path / "out.mp4")).items())
    assert [frame.time_s for frame in written] == pytest.approx([answer.frame.time_s for answer in seen], abs=0.002)
    pixels = written[-1].read()
    assert pixels.shape == (96, 128, 4)
    assert np.abs(pixels[:60, :, :3].astype(int) - np.array(BLUE)).max() < 12
    # The strip with the words.
    assert pixels[-18:, :, :3].max() > 180
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.streams.video[0].codec_context.colorspace == 1


def test_frames_of_another_size_are_fitted_into_the_annotated_video() -> None:
    wide = annotated(plain(RED, 31, 200), "words", (96, 128))
    assert wide.shape == (96, 128, 3)
    assert (int(wide[0].max()), int(wide[46, 64, 0])) == (0, RED[0])
    assert annotated(plain(RED, 31, 33), "words").shape == (30, 32, 3)


def test_a_video_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"--out is .*out\.gif; write a video that ends in \.mp4"):
        VideoWriter(tmp_path / "out.gif", None)
    with pytest.raises(SourceError, match="cannot be written"):
        VideoWriter(tmp_path / "none" / "out.mp4", None)


def test_what_is_shown_in_words() -> None:
    pets = Recognition(labels=("pug", "beagle", "cat"), groups=("dog", "dog", "cat"), unsure_below=0.6)
    said = [answer_line(pets.answer(np.array(p))) for p in ([0.9, 0.05, 0.05], [0.5, 0.45, 0.05], [0.3, 0.2, 0.5])]
    assert said == ["dog, pug (90%)", "dog (95%)", "unsure (cat 50%)"]


def test_lines_come_where_what_is_shown_changes(engine: PackEngine, tmp_path: Path) -> None:
    frames = [flat(RED)] * 5 + [flat(BLUE)] * 15
    seen = seen_in(engine, open_frames(str(video(tmp_path / "v.mp4", frames))), every_frame=True)
    lines: list[str] = []
    view = LineView(lines.append)
    for answer in seen:
        view.show(answer)
    assert [line.split("s  ")[1].split()[0] for line in lines] == ["red", "blue"]
    fields = json.loads(frame_json(seen[-1]))
    assert (fields["frame"], fields["label"], fields["width"], fields["unsure"]) == (19, "blue", 64, False)
    assert "age_ms" not in fields


def test_the_terminal_shows_picture_words_and_bars(engine: PackEngine, tmp_path: Path) -> None:
    seen = seen_in(engine, open_frames(str(video(tmp_path / "v.mp4", [flat(GREEN)]))), every_frame=True)[0]
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, height=30)
    with console.capture() as captured:
        console.print(render(seen, 12.5))
    said = captured.get()
    assert "▀" in said
    assert "38;2;16;192;16" in said  # RGB in steps of 8
    assert "green (100%)" in said
    assert "12.5 frames/s" in said
    with TerminalView(console) as view:
        view.show(seen)


def test_nothing_is_left_open(engine: PackEngine, tmp_path: Path) -> None:
    file = str(video(tmp_path / "v.mp4", [flat(RED)] * 4, rate=50))
    (tmp_path / "text.mp4").write_text("no video")
    seen_in(engine, open_frames(file))

    def held() -> set[object]:
        return {*os.listdir("/proc/self/fd"), *threading.enumerate()}

    # Those of earlier tests may end meanwhile.
    before = held()
    for _ in range(5):
        seen_in(engine, open_frames(file))
        with pytest.raises(SourceError):
            open_frames(str(tmp_path / "text.mp4"))
    assert held() <= before
