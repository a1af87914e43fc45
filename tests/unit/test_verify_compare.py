"""What verify finds between places, and what it is asked with."""

import math
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.apps.detect.app import app as detect
from penstock.core.agreement import Agreement
from penstock.core.errors import PackError
from penstock.core.source_files.find_application import find_application
from penstock.verify.backends import Backend, TrainingBackend
from penstock.verify.compare import Comparison, compare, difference_of
from penstock.verify.verify_inputs import Example, examples_of
from tests.support.dense import TILE, spotted, write_dense


class Fixed(Backend):
    """Answers each example by its name."""

    def __init__(self, name: str, answers: dict[str, Any]) -> None:
        self.name = name
        self.answers = answers

    def answer(self, example: Example) -> Any:
        return self.answers[example.name]

    def reply(self, answer: Any, example: Example) -> Any:
        return {"best": "ab"[int(answer.argmax())], "top": [["a", float(answer[0])]]}


TRUTH = {"one": np.array([0.8, 0.2], np.float32), "two": np.array([0.3, 0.7], np.float32)}
EXAMPLES = [Example(name=name, raw=np.zeros(1)) for name in TRUTH]


def compared(**answers: Any) -> Comparison:
    training: Any = Fixed("training", TRUTH)
    (found,) = compare(training, [Fixed("place", TRUTH | answers)], EXAMPLES, labelled=["shares"])
    return found


def test_the_same_everywhere() -> None:
    found = compared()
    assert (found.examples, found.difference, found.disagreements) == (2, 0, 0)


def test_the_worst_example_is_named() -> None:
    found = compared(two=np.array([0.31, 0.69], np.float32))
    assert (found.worst, found.disagreements) == ("two", 0)
    assert found.difference == pytest.approx(0.01, abs=1e-6)


def test_another_likeliest_entry_counts_however_near() -> None:
    assert compared(one=np.array([0.2, 0.8], np.float32)).disagreements == 1


@pytest.mark.parametrize("wrong", [np.zeros(3), np.array([np.nan, 0.2])])
def test_another_form_is_no_number(wrong: Any) -> None:
    assert compared(one=wrong).difference == math.inf


def test_replies_are_compared_number_by_number() -> None:
    found = compared(one={"best": "a", "top": [["a", 0.9]]}, two={"best": "b", "top": [["a", 0.3]]})
    assert (found.worst, found.disagreements) == ("one", 0)
    assert found.difference == pytest.approx(0.1, abs=1e-6)
    assert compared(one={"best": "b", "top": [["a", 0.8]]}).disagreements == 1
    # A server says why an answer in steps ended.
    assert compared(one={"best": "a", "top": [["a", 0.8]], "ended": "end"}).difference == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ({"a": 1, "b": [2, 3.5]}, {"a": 1, "b": [2, 3]}, 0.5),
        ({"a": 1}, {"b": 1}, math.inf),
        ([1, 2], [1, 2, 3], math.inf),
        ("x", "x", 0),
        ("x", "y", math.inf),
        (None, None, 0),
        (True, False, math.inf),
        (True, 1.5, math.inf),
        (None, 0, math.inf),
    ],
)
def test_json_apart(one: Any, other: Any, difference: float) -> None:
    assert difference_of(one, other) == difference


BOXES = {
    "boxes": np.array([[10, 20, 30, 40], [1, 1, 2, 2]], np.float32),
    "classes": np.array([0, 1]),
    "scores": np.array([0.9, 0.2], np.float32),
}


@pytest.mark.parametrize(("moved", "kept", "difference"), [(0, 1, 0), (1, 1, 0.5), (0, 2, math.inf), (0, 0, math.inf)])
def test_the_boxes_of_a_reply_are_compared_in_the_frame_from_the_smallest_score_that_is_answered(
    moved: float, kept: int, difference: float
) -> None:
    assert detect.row_sets is not None
    rule = Agreement(output=detect.output, sets=detect.row_sets, tolerance=0.05, scales=dict.fromkeys(BOXES, 1.0))
    predictor: Any = SimpleNamespace(application=detect, predict=lambda raw: BOXES)
    # A picture of 512 x 896 is twice as large as the frame.
    reply = {name: each[:kept].tolist() for name, each in BOXES.items()}
    reply["boxes"] = (2 * BOXES["boxes"][:kept] + moved).tolist()
    example = Example(name="street", raw=np.zeros((512, 896, 4), np.uint8), body=b"a PNG")
    server = Fixed("server", {"street": reply})
    found = compare(TrainingBackend(predictor), [server], [example], labelled=(), rule=rule)
    assert max(one.difference for one in found) == pytest.approx(difference, abs=1e-6)


def test_pictures_in_a_folder_broken_ones_named(tmp_path: Path) -> None:
    digits = find_application("digits").application
    (tmp_path / "inside").mkdir()
    Image.new("L", (28, 28), 9).save(tmp_path / "inside" / "a.png")
    (tmp_path / "b.jpg").write_bytes(b"no picture")
    (tmp_path / "notes.txt").write_text("left out without a word")
    broken, read = sorted(examples_of([tmp_path], digits), key=lambda found: isinstance(found, Example))
    assert isinstance(broken, str)
    assert broken.startswith(f"{tmp_path / 'b.jpg'}: ")
    assert isinstance(read, Example)
    assert (read.raw.shape, read.content_type) == ((28, 28), "image/png")
    assert read.raw.max() == 9


def test_slides_in_a_folder_are_tiles_of_a_dense_network(tmp_path: Path) -> None:
    application = find_application(str(write_dense(tmp_path).parent / "app.py")).application
    folder = tmp_path / "slides"
    (folder / "inside").mkdir(parents=True)
    Image.fromarray(spotted(60, 70, (30, 20))).save(folder / "inside" / "a.PNG")
    Image.fromarray(spotted(60, 70, (30, 20))).save(folder / "b.tif")
    (folder / "cut.png").write_bytes((folder / "inside" / "a.PNG").read_bytes()[:60])
    (folder / "notes.json").write_text("{}")
    found = list(examples_of([folder], application))
    (broken,) = (each for each in found if isinstance(each, str))
    assert broken.startswith(f"{folder / 'cut.png'}: ")
    tiles = [each for each in found if isinstance(each, Example)]
    assert {each.name.partition(",")[0] for each in tiles} == {str(folder / "inside" / "a.PNG"), str(folder / "b.tif")}
    assert {each.raw.shape for each in tiles} == {(TILE, TILE, 3)}
    for each in ("cut.png", "b.tif", "inside/a.PNG"):
        (folder / each).unlink()
    with pytest.raises(PackError, match=r"holds no file of a known kind \(.*\.svs"):
        list(examples_of([folder], application))


def test_recordings_come_at_the_rate_of_the_application(tmp_path: Path) -> None:
    keywords = find_application("keywords").application
    file = tmp_path / "hum.wav"
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8_000)
        sound.writeframes(np.arange(4_000, dtype="<i2").tobytes())
    (read,) = examples_of([file], keywords)
    assert isinstance(read, Example)
    assert read.raw.dtype == np.int16
    assert abs(len(read.raw) - 8_000) < 100


def test_what_is_not_there(tmp_path: Path) -> None:
    digits = find_application("digits").application
    with pytest.raises(PackError, match="does not exist"):
        list(examples_of([tmp_path / "none"], digits))
    with pytest.raises(PackError, match="holds no file of a known kind"):
        list(examples_of([tmp_path], digits))
