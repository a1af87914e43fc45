from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.core.decode import decode_image
from penstock.core.errors import BadExample, InvalidInput, TrainError
from penstock.core.spec import Array, TensorSpec
from penstock.train.data.image_folder import ImageFolder
from penstock.train.data.picture_reader import centre_box, random_box
from penstock.train.data.sampler import Seeds, draws_of, example_seeds
from tests.support.pictures import COLOUR, picture_folder, save, smooth


def seeds_of(indices: Array, epoch: int = 0) -> Seeds:
    return example_seeds(7, np.full(len(indices), epoch), indices)


def read(folder: ImageFolder, indices: list[int], epoch: int = 0) -> tuple[Array, Array]:
    which = np.array(indices)
    inputs = folder.empty(len(which))
    targets = folder.read(which, seeds_of(which, epoch), inputs)
    return inputs, targets


def apart(left: Array, right: Array) -> float:
    return float(np.abs(left.astype(float) - right.astype(float)).mean())


def test_classes_are_folders_and_targets_their_numbers(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos")
    (root / "cats" / "more").mkdir()
    save(smooth(1, 20, 20), root / "cats" / "more" / "deep.JPEG")
    for other in ("notes.txt", ".hidden.jpg"):
        (root / "dogs" / other).write_bytes(b"not a picture")
    (root / ".cache").mkdir()
    folder = ImageFolder(root, COLOUR)
    assert folder.classes == ("cats", "dogs", "eels")
    assert folder.files[:5] == ["cats/0.jpg", "cats/1.jpg", "cats/2.jpg", "cats/3.png", "cats/more/deep.JPEG"]
    assert folder.targets.tolist() == [0] * 5 + [1] * 4 + [2] * 4
    assert (folder.input_dtype, folder.input_shape, len(folder), folder.varies) == ("uint8", (16, 20, 3), 13, False)
    assert read(folder, [0, 5, 12])[1].tolist() == [0, 1, 2]


def test_the_middle_is_what_resizing_the_middle_gives(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    whole = smooth(3, 64, 100)
    save(whole, tmp_path / "a" / "x.png")
    inputs, _ = read(ImageFolder(tmp_path, COLOUR, share=1.0), [0])
    # The largest part with the ratio 20:16 of 100 x 64 pixels is 80 x 64.
    middle = Image.fromarray(whole[:, 10:90]).resize((20, 16), Image.Resampling.BILINEAR)
    assert apart(inputs[0], np.asarray(middle)) < 1
    smaller, _ = read(ImageFolder(tmp_path, COLOUR, share=0.5), [0])
    middle = Image.fromarray(whole[16:48, 30:70]).resize((20, 16), Image.Resampling.BILINEAR)
    assert apart(smaller[0], np.asarray(middle)) < 1


@pytest.mark.parametrize("random", [False, True])
def test_a_large_jpeg_decoded_small_looks_as_if_decoded_whole(tmp_path: Path, random: bool) -> None:
    for name in ("jpg", "png"):
        (tmp_path / name / "a").mkdir(parents=True)
        save(smooth(4, 300, 420), tmp_path / name / "a" / f"x.{name}")
    small, whole = (read(ImageFolder(tmp_path / name, COLOUR, random=random), [0])[0] for name in ("jpg", "png"))
    assert apart(small, whole) < 4


def test_layouts_are_those_of_the_spec(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos", per_class=1)
    last, first, grey = (
        read(ImageFolder(root, TensorSpec(dtype="uint8", shape=shape, meaning="a picture")), [0, 1, 2])[0]
        for shape in ((16, 20, 3), (3, 16, 20), (16, 20))
    )
    np.testing.assert_array_equal(first, last.transpose(0, 3, 1, 2))
    assert grey.shape == (3, 16, 20)
    assert apart(grey, last @ np.array([0.299, 0.587, 0.114])) < 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_upright(tmp_path: Path, orientation: int) -> None:
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif[0x0112] = orientation
    upright = smooth(5, 120, 200)
    # How a camera that is held so stores what is upright: the inverse of the turn that the tag asks for.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    save(np.ascontiguousarray(stored), tmp_path / "a" / "x.jpg", exif=exif)
    save(upright, tmp_path / "a" / "y.png")
    inputs, _ = read(ImageFolder(tmp_path, COLOUR), [0, 1])
    assert apart(inputs[0], inputs[1]) < 3


def test_chance_is_the_examples_own_in_each_epoch(tmp_path: Path) -> None:
    folder = ImageFolder(picture_folder(tmp_path / "photos"), COLOUR, random=True)
    assert folder.varies
    all_of = list(range(12))
    together, _ = read(folder, all_of)
    for row in (0, 5, 11):
        np.testing.assert_array_equal(read(folder, [row])[0][0], together[row])
    np.testing.assert_array_equal(read(folder, all_of[::-1])[0][::-1], together)
    other, _ = read(folder, all_of, epoch=1)
    assert all(apart(one, another) > 0 for one, another in zip(together, other, strict=True))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("random", [False, True])
def test_a_jpeg_with_metadata_gives_the_pixels_of_one_without(tmp_path: Path, mode: str, random: bool) -> None:
    """The header of a plain one is read without Pillow."""
    spec = COLOUR if mode == "RGB" else replace(COLOUR, shape=COLOUR.shape[:2])
    exif = Image.Exif()
    exif[0x010F] = "a camera"
    found: list[Array] = []
    options: dict[str, Any]
    for name, options in (("plain", {}), ("tagged", {"exif": exif})):
        (tmp_path / name / "one").mkdir(parents=True)
        for number, (height, width) in enumerate(((40, 60), (300, 200), (9, 7), (129, 517))):
            picture = Image.fromarray(smooth(number, height, width)).convert(mode)
            picture.save(tmp_path / name / "one" / f"{number}.jpg", **options)
        folder = ImageFolder(tmp_path / name, spec, random=random)
        found.append(np.concatenate([read(folder, [0, 1, 2, 3], epoch)[0] for epoch in range(5)]))
    assert np.array_equal(found[0], found[1])


def test_random_parts_have_the_sizes_that_they_should() -> None:
    draws = draws_of(np.arange(2000, dtype=np.uint64), 40)
    boxes = np.array([random_box(300, 200, 1.0, row.tolist()) for row in draws])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= 300).all()
    assert (bottom <= 200).all()
    areas, ratios = (right - left) * (bottom - top) / 60_000, (right - left) / (bottom - top)
    assert areas.min() == pytest.approx(0.08, abs=0.01)
    assert 0.75 - 1e-9 <= ratios.min() < 0.77
    assert 1.3 < ratios.max() <= 4 / 3 + 1e-9
    assert 0.3 < np.median(areas) < 0.6
    # Wherever it lies, the room on both sides of a part is used alike.
    assert np.mean(left / (300 - (right - left))) == pytest.approx(0.5, abs=0.03)
    # Of what is far too narrow every try fails.
    assert random_box(1000, 10, 1.0, draws[0].tolist()) == centre_box(1000, 10, 1.0, 1.0) == (495, 0, 505, 10)


def test_half_of_the_random_parts_are_mirrored(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    ramp = np.repeat(np.linspace(0, 255, 64).astype(np.uint8)[None, :, None], 48, 0).repeat(3, 2)
    save(ramp, tmp_path / "a" / "x.png")
    folder = ImageFolder(tmp_path, COLOUR, random=True)
    inputs = folder.empty(400)
    folder.read(np.zeros(400, np.int64), seeds_of(np.arange(400)), inputs)
    rising = (inputs[:, 8, -1, 0].astype(int) > inputs[:, 8, 0, 0]).mean()
    assert 0.42 < rising < 0.58


def test_an_applications_decode_is_used_where_given(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos", per_class=2)
    seen: list[str] = []

    def decode(body: bytes, content_type: str) -> Array:
        seen.append(content_type)
        return decode_image(body, mode="RGB", size=(16, 20))

    inputs, _ = read(ImageFolder(root, COLOUR, decode=decode), [0, 1])
    assert seen == ["image/jpeg", "image/png"]
    np.testing.assert_array_equal(inputs[0], decode((root / "cats" / "0.jpg").read_bytes(), "image/jpeg"))
    with pytest.raises(TrainError, match="random=True and a decode"):
        ImageFolder(root, COLOUR, decode=decode, random=True)
    with pytest.raises(BadExample, match=r"0.jpg cannot be read \(No\)"):
        read(ImageFolder(root, COLOUR, decode=refuse), [0])
    with pytest.raises(BadExample, match=r"cannot be read \(the array is uint8\[8\]; it must be uint8\[16, 20, 3\]"):
        read(ImageFolder(root, COLOUR, decode=lambda body, content_type: np.zeros(8, np.uint8)), [0])


def refuse(body: bytes, content_type: str) -> Array:
    raise InvalidInput("No.")


def test_damaged_and_missing_pictures_are_named(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos")
    folder = ImageFolder(root, COLOUR)
    cut = root / "dogs" / "1.jpg"
    cut.write_bytes(cut.read_bytes()[:-200])
    (root / "dogs" / "2.jpg").write_bytes(b"")
    (root / "eels" / "0.jpg").unlink()
    for index, name, why in (
        (5, "dogs/1.jpg", "cannot be read .*truncated"),
        (6, "dogs/2.jpg", "cannot be read"),
        (8, "eels/0.jpg", "is missing"),
    ):
        with pytest.raises(BadExample, match=f"{name} {why}") as caught:
            read(folder, [0, index, 1])
        assert (caught.value.index, caught.value.name) == (index, name)


def test_what_is_no_folder_of_classes_is_refused(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos", per_class=1)
    (tmp_path / "empty").mkdir()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"root": tmp_path / "none"}, "there is no folder"),
        ({"root": tmp_path / "empty"}, "has no folders"),
        ({"root": tmp_path}, "empty holds no picture"),
        ({"share": 0.0}, "share 0.0"),
        ({"classes": ("cats", "dogs")}, "has a folder 'eels', which is not one of the 2 classes"),
        ({"spec": TensorSpec(dtype="float32", shape=(8, 8), meaning="x")}, r"read as float32\[8, 8\]"),
        ({"spec": TensorSpec(dtype="uint8", shape=(8, 8, 4), meaning="x")}, r"read as uint8\[8, 8, 4\]"),
    ]
    for changes, sentence in cases:
        arguments: dict[str, Any] = {"root": root, "spec": COLOUR} | changes
        with pytest.raises(TrainError, match=sentence):
            ImageFolder(arguments.pop("root"), arguments.pop("spec"), **arguments)


def test_classes_may_be_given_in_their_own_order(tmp_path: Path) -> None:
    root = picture_folder(tmp_path / "photos", per_class=1)
    folder = ImageFolder(root, COLOUR, classes=("eels", "bees", "dogs", "cats"))
    assert folder.files == ["eels/0.png", "dogs/0.png", "cats/0.png"]
    assert folder.targets.tolist() == [0, 2, 3]


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), MemoryError("no room")])
def test_what_is_wrong_with_the_machine_is_not_put_on_the_picture(tmp_path: Path, error: Exception) -> None:
    def failing(data: bytes, kind: str) -> Array:
        raise error

    examples = ImageFolder(picture_folder(tmp_path / "photos", per_class=1), COLOUR, decode=failing)
    with pytest.raises(TrainError, match="an error of the machine, not of the picture") as raised:
        examples.read(np.arange(1), np.zeros(1, np.uint64), examples.empty(1))
    assert not isinstance(raised.value, BadExample)
