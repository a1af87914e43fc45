"""Views of pictures: a function of their seeds, of the places that are theirs, and within what they promise."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.errors import BadExample, TrainError
from penstock.core.spec import Array
from penstock.train.data.camera_views import CELLS, Distortion, Views, distorted, plain_view, small_rgba
from penstock.train.data.loader import first_batch
from penstock.train.data.picture_layouts import Picture, find_pictures
from penstock.train.data.sampler import example_seeds

SIDE = 24
STILL = Distortion(least_area=0.25, turn_degrees=0, perspective=0, light=0, blur=0)
EVERYTHING = Distortion(mirror=True, shake=True, noise=8, jpeg=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for label, suffix in (("cat", "jpg"), ("dog", "png")):
        (folder / label).mkdir()
        for number in range(3):
            pixels = np.linspace(0, 200, 90 * 120 * 3).reshape(90, 120, 3) + 10 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / label / f"{number}.{suffix}")
    return folder


def ramp() -> Any:
    """Red says how far to the right, green how far down."""
    down, across = np.mgrid[0:200, 0:300]
    return Image.fromarray(np.stack([across * 255 // 300, down * 255 // 200, 0 * down], -1).astype(np.uint8))


def read(views: Views, epoch: int = 0) -> tuple[Array, Array]:
    indices = np.arange(len(views))
    inputs = views.empty(len(views))
    return inputs, views.read(indices, example_seeds(3, np.full(len(indices), epoch), indices), inputs)


@pytest.mark.parametrize("in_memory", [False, True])
def test_views_are_a_function_of_their_seeds(root: Path, in_memory: bool) -> None:
    pictures = find_pictures(root)
    views = Views(pictures, ("cat", "dog"), SIDE, distortion=EVERYTHING, repeats=2, in_memory=in_memory)
    assert (len(views), views.varies, views.input_shape) == (12, True, (SIDE, SIDE, 3))
    (one, targets), (again, _), (other, _) = read(views), read(views), read(views, epoch=1)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1] * 2
    np.testing.assert_array_equal(one, again)
    assert all((left != right).any() for left, right in zip(one, other, strict=True))
    assert (one[:6] != one[6:]).any()


def test_without_a_distortion_the_middle_is_seen(root: Path) -> None:
    inputs, _ = read(Views(find_pictures(root), ("cat", "dog"), SIDE))
    with Image.open(root / "dog" / "1.png") as image:
        np.testing.assert_array_equal(inputs[4], plain_view(image, SIDE))
        np.testing.assert_array_equal(
            inputs[4], image.crop((15, 0, 105, 90)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
        )


def test_a_still_view_is_a_part_of_the_picture_as_it_is() -> None:
    view = distorted(ramp(), SIDE, STILL, np.random.default_rng(5)).astype(float)
    # From left to right and from top to bottom as even as in the picture, and of its other dimension independent.
    for channel, dim in ((0, 1), (1, 0)):
        steps = np.diff(view[..., channel].mean(1 - dim))
        assert steps.min() > 0
        assert steps.max() - steps.min() < 1.5
        assert view[..., channel].std(1 - dim).max() < 1
    assert view[..., 2].max() == 0


@pytest.mark.parametrize("cells", [(0, 1, 2), (3,), (4,)])
def test_the_middle_of_a_view_is_in_one_of_its_cells(cells: tuple[int, ...]) -> None:
    from penstock.train.data.camera_views import _part

    rng = np.random.default_rng(0)
    distortion = Distortion(cells=cells)
    found: set[int] = set()
    for _ in range(200):
        left, top, right, bottom = _part(300, 200, distortion, rng)
        assert 0 <= left < right <= 300
        assert 0 <= top < bottom <= 200
        x, y = left / (300 - right + left), top / (200 - bottom + top)
        found.add((int(x * CELLS) + 2 * int(y * CELLS)) % CELLS)
    assert found == set(cells)


def test_a_mirrored_view_is_mirrored_half_of_the_time() -> None:
    still = Distortion(turn_degrees=0, perspective=0, light=0, blur=0, mirror=True)
    rising = [
        bool(np.diff(distorted(ramp(), SIDE, still, np.random.default_rng(seed))[..., 0].mean(0)).mean() > 0)
        for seed in range(60)
    ]
    assert 15 < sum(rising) < 45


@pytest.mark.parametrize("size", [(1, 1), (3, 200), (1000, 30), (24, 24)])
def test_pictures_of_any_size_are_seen(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, (10, 200, 30))
    for seed in range(5):
        assert distorted(image, SIDE, EVERYTHING, np.random.default_rng(seed)).shape == (SIDE, SIDE, 3)


def test_an_error_of_the_machine_makes_no_picture_bad(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    views = Views(find_pictures(root), ("cat", "dog"), SIDE)

    def fails(picture: Picture) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Picture, "read", fails)
    with pytest.raises(TrainError, match="which is an error of the machine, not of the picture"):
        first_batch(views, 2, on_bad="skip")


def test_damaged_pictures_and_strange_labels_are_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "bad.jpg").write_bytes((root / "cat" / "0.jpg").read_bytes()[:300])
    with pytest.raises(BadExample, match=r"cat/bad\.jpg cannot be read") as bad:
        read(Views(find_pictures(tmp_path), ("cat",), SIDE))
    assert bad.value.index == 0
    with pytest.raises(TrainError, match="label 'dog', which is not one of the application's 1"):
        Views(find_pictures(root), ("cat",), SIDE)
    with pytest.raises(TrainError, match="no pictures"):
        Views([], ("cat",), SIDE)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"least_area": 0}, "least_area 0"), ({"light": 1}, "light 1"), ({"cells": ()}, r"cells \(\)")],
)
def test_a_distortion_beyond_its_range_is_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TrainError, match=sentence):
        Distortion(**fields)


def test_small_pictures_are_as_a_browser_has_them(root: Path) -> None:
    raw = small_rgba(find_pictures(root)[0], most=40)
    assert (raw.shape, raw.dtype) == ((30, 40, 4), np.uint8)
    assert raw[..., 3].min() == 255
