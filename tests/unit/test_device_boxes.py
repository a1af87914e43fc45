"""Boxes on devices: in the pixels of each frame, as lines, JSON, annotated video and terminal."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from penstock.core.errors import PackCorrupt
from penstock.core.packs.pack import Pack
from penstock.core.pictures.boxes import FoundBox
from penstock.core.spec import Array
from penstock.device.annotate import VideoWriter
from penstock.device.captions import answer_line, frame_json
from penstock.device.drawn_boxes import COLOURS, draw_boxes
from penstock.device.pack_engine import PackEngine
from penstock.device.sources import open_frames
from penstock.device.terminal_view import LineView, render
from penstock.device.watch import FrameResult, WatchRun
from tests.support.packs import plain, spots_pack
from tests.support.videos import video

RED, GREEN, DARK = (250, 0, 0), (0, 250, 0), (9, 9, 9)
# Twice as large as the frame of the network.
HEIGHT, WIDTH, SIDE = 96, 128, 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> PackEngine:
    return PackEngine(spots_pack(tmp_path_factory.mktemp("pack")))


def spot(left: int, top: int, colour: tuple[int, int, int] = RED) -> Array:
    picture = plain(DARK, HEIGHT, WIDTH)[..., :3]
    picture[top : top + SIDE, left : left + SIDE] = colour
    return picture


@pytest.fixture(scope="module")
def seen(engine: PackEngine, tmp_path_factory: pytest.TempPathFactory) -> list[FrameResult]:
    """Three frames of a red spot that moves, one of nothing, and one of a green spot."""
    pictures = [spot(10, 40), spot(40, 44), spot(70, 48), spot(0, 0, DARK), spot(30, 40, GREEN)]
    file = video(tmp_path_factory.mktemp("film") / "film.mp4", pictures)
    with WatchRun(engine, open_frames(str(file)), every_frame=True) as run:
        return list(run)


def near(colour: str, pixel: Array) -> bool:
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return bool(np.abs(pixel[:3].astype(int) - wanted).max() < 100)


def test_boxes_are_those_of_their_own_frame_in_its_own_pixels(seen: list[FrameResult]) -> None:
    lines = [json.loads(frame_json(each)) for each in seen]
    assert [[found["label"] for found in line["boxes"]] for line in lines] == [["car"]] * 3 + [[], ["person"]]
    for line, left, top in zip(lines, (10, 40, 70), (40, 44, 48), strict=False):
        assert (line["width"], line["height"]) == (WIDTH, HEIGHT)
        # Video codecs blur edges.
        assert line["boxes"][0]["box"] == pytest.approx([left, top, left + SIDE, top + SIDE], abs=1)
        assert line["boxes"][0].keys() == {"label", "class", "score", "box"}
    assert lines[4]["boxes"][0]["class"] == 1
    assert [answer_line(each.answer) for each in seen] == ["1 car"] * 3 + ["nothing found", "1 person"]


def test_lines_come_where_other_things_are_found(seen: list[FrameResult]) -> None:
    lines: list[str] = []
    view = LineView(lines.append)
    for each in seen:
        view.show(each)
    assert [line.split("s  ")[1] for line in lines] == ["1 car", "nothing found", "1 person"]


def test_the_annotated_video_has_each_frames_boxes(seen: list[FrameResult], tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "out.mp4", 20.0) as writer:
        for each in seen:
            writer.add(each)
    frames = [frame.read() for frame in open_frames(str(tmp_path / "out.mp4")).items()]
    for pixels, left, top in zip(frames[:3], (10, 40, 70), (40, 44, 48), strict=True):
        assert near(COLOURS[0], pixels[top + 10, left])
        assert near(COLOURS[0], pixels[top + 10, left + SIDE])
        assert near(COLOURS[0], pixels[top - 5, left + 2]), "the strip with the class"
    assert frames[3][:80, :, :3].max() < 60
    assert near(COLOURS[1], frames[4][50, 30])


def test_the_terminal_shows_boxes_and_what_was_found(seen: list[FrameResult]) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80, height=30)
    for each, said, drawn in ((seen[0], "1 car", True), (seen[3], "nothing found", False)):
        with console.capture() as captured:
            console.print(render(each, 12.5))
        assert said in captured.get()
        # The first colour in steps of 8.
        assert ("38;2;248;208;72" in captured.get()) == drawn


@pytest.mark.parametrize(
    "box", [(50, 40, 10, 5), (-1e30, -5, float("inf"), 900), (float("nan"), 0, 3, 4), (3, 3, 3, 3), (200, 99, 300, 120)]
)
def test_any_numbers_of_a_network_can_be_drawn(box: tuple[float, float, float, float]) -> None:
    picture = Image.new("RGB", (64, 48))
    draw_boxes(picture, [FoundBox(label="car", kind=7, score=0.5, box=box)])
    assert np.asarray(picture).max() > 0


def test_a_pack_whose_boxes_are_no_outputs_is_refused(tmp_path: Path) -> None:
    pack = spots_pack(tmp_path / "pack")
    assert Pack.from_json(pack.folder, pack.to_json()).shows == pack.shows
    assert pack.shows is not None
    with pytest.raises(PackCorrupt, match="'nowhere' is no output"):
        Pack.from_json(pack.folder, replace(pack, shows=replace(pack.shows, boxes="nowhere")).to_json())
