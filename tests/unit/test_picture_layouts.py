"""Pictures with labels, found in the layouts that people have."""

import csv
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from penstock.core.errors import TrainError
from penstock.core.recognition import kinds_and_groups
from penstock.train.data.picture_layouts import Picture, find_pictures, labels_of, split_pictures


def png(shade: int = 0) -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (8, 6), (shade, 100, 200)).save(sink, "PNG")
    return sink.getvalue()


def put(root: Path, *names: str) -> Path:
    for shade, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(png(shade))
    return root


def tar(file: Path, **members: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def shown(pictures: list[Picture]) -> list[tuple[str, str, str]]:
    return [(picture.label, picture.name, picture.split) for picture in pictures]


def test_classes_and_the_kinds_within_them_are_folders(tmp_path: Path) -> None:
    put(tmp_path, "dog/terrier/1.png", "dog/poodle/1.JPG", "cat/2.png", "cat/1.png", "bird__owl/1.png", ".git/1.png")
    (tmp_path / "cat" / "notes.txt").write_text("of cats")
    found = find_pictures(tmp_path)
    assert shown(found) == [
        ("bird/owl", "bird__owl/1.png", ""),
        ("cat", "cat/1.png", ""),
        ("cat", "cat/2.png", ""),
        ("dog/poodle", "dog/poodle/1.JPG", ""),
        ("dog/terrier", "dog/terrier/1.png", ""),
    ]
    assert labels_of(found) == ("bird/owl", "cat", "dog/poodle", "dog/terrier")
    assert found[0].read() == (tmp_path / "bird__owl/1.png").read_bytes()


def test_an_imagefolder_has_parts(tmp_path: Path) -> None:
    put(tmp_path, "train/cat/1.png", "train/dog/1.png", "validation/cat/2.png", "test/dog/2.png")
    assert {(picture.label, picture.split) for picture in find_pictures(tmp_path)} == {
        ("cat", "train"),
        ("dog", "train"),
        ("cat", "validation"),
        ("dog", "test"),
    }


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    put(tmp_path, "test/1.png", "sample/1.png")
    assert {(picture.label, picture.split) for picture in find_pictures(tmp_path)} == {("test", ""), ("sample", "")}


@pytest.mark.parametrize("layout", ["csv", "jsonl"])
def test_an_imagefolder_has_metadata(tmp_path: Path, layout: str) -> None:
    put(tmp_path, "train/a.png", "train/b.png", "test/c.png")
    rows = [("train/a.png", "dog/pug"), ("train/b.png", "cat"), ("test/c.png", "cat")]
    with (tmp_path / f"metadata.{layout}").open("w", newline="") as file:
        if layout == "csv":
            csv.writer(file).writerows([("file_name", "label"), *rows])
        else:
            file.writelines(json.dumps({"file_name": name, "label": label}) + "\n" for name, label in rows)
    assert shown(find_pictures(tmp_path)) == [
        ("cat", "test/c.png", "test"),
        ("cat", "train/b.png", "train"),
        ("dog/pug", "train/a.png", "train"),
    ]


@pytest.mark.parametrize("metadata", [False, True])
def test_a_class_may_begin_like_a_part(tmp_path: Path, metadata: bool) -> None:
    names = ("test-tube/1.png", "train-station/1.png", "flask/1.png")
    put(tmp_path, *names)
    if metadata:
        rows = "".join(f"{name},{name.partition('/')[0]}\n" for name in names)
        (tmp_path / "metadata.csv").write_text(f"file_name,label\n{rows}")
    assert shown(find_pictures(tmp_path)) == [(name.partition("/")[0], name, "") for name in sorted(names)]


def test_webdatasets_are_read_where_they_lie(tmp_path: Path) -> None:
    tar(tmp_path / "train-000.tar", **{"a/01.jpg": png(1), "a/01.cls": b"1\n", "02.cls": b"0", "02.seg.png": png(2)})
    tar(tmp_path / "val-000.tar", **{"03.png": png(3), "03.json": b'{"label": 1}'})
    (tmp_path / "classes.txt").write_text("cat\ndog/pug\n")
    found = find_pictures(tmp_path)
    assert shown(found) == [
        ("cat", "train-000.tar:02.seg.png", "train"),
        ("dog/pug", "train-000.tar:a/01.jpg", "train"),
        ("dog/pug", "val-000.tar:03.png", "validation"),
    ]
    assert [picture.read() for picture in found] == [png(2), png(1), png(3)]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: None, "holds no pictures that have a label"),
        (lambda root: put(root, "lone.png"), "holds no pictures that have a label"),
        (lambda root: put(root, "cat/1.png", "dog/1.txt"), r"dog holds no picture \(.jpg, .*\); remove it or fill it"),
        (lambda root: put(root, "a/b/c/1.png"), "a class, or a class and a kind"),
        (lambda root: put(root, "cat/\udcff.png"), r"the name 'cat/\\udcff\.png', which is no text; rename it"),
        (lambda root: put(root, "train/cat/1.png", "dog/1.png"), "'dog' beside one to train from"),
        (lambda root: (root / "x.tar").write_bytes(b"no archive" * 100), "x.tar is not a tar file"),
        (lambda root: tar(root / "x.tar", **{"1.png": png()}), "1.png and no label for it; put 1.cls"),
        (lambda root: tar(root / "x.tar", **{"1.png": png(), "1.json": b"{"}), "x.tar is not a tar file"),
        (lambda root: (root / "metadata.csv").write_text("file_name\na.png\n"), "must have a file_name and a label"),
        (lambda root: (root / "metadata.jsonl").write_text("[1]\n"), "must have a file_name and a label"),
        (lambda root: (root / "metadata.jsonl").write_text("{\n"), "metadata.jsonl cannot be read"),
        (lambda root: (root / "metadata.csv").write_text("file_name,label\n../a.png,b\n"), "not below its folder"),
    ],
)
def test_what_cannot_be_taken_is_said(tmp_path: Path, make: object, sentence: str) -> None:
    assert callable(make)
    make(tmp_path)
    with pytest.raises(TrainError, match=sentence):
        find_pictures(tmp_path)
    with pytest.raises(TrainError, match="there is no folder"):
        find_pictures(tmp_path / "missing")


def test_what_the_folder_does_not_say_is_held_out_by_name(tmp_path: Path) -> None:
    put(tmp_path, *[f"{label}/{number}.png" for label in ("cat", "dog") for number in range(20)])
    pictures = find_pictures(tmp_path)
    parts = split_pictures(pictures)
    assert {name: len(part) for name, part in parts.items()} == {"train": 28, "validation": 4, "test": 8}
    assert sorted(picture.name for part in parts.values() for picture in part) == [p.name for p in pictures]
    assert split_pictures(pictures[::-1])["train"] == parts["train"]
    assert {picture.label for picture in parts["validation"]} == {"cat", "dog"}


def test_parts_that_the_folder_names_stay(tmp_path: Path) -> None:
    put(tmp_path, *[f"train/cat/{number}.png" for number in range(10)], "test/cat/x.png")
    parts = split_pictures(find_pictures(tmp_path))
    assert [picture.name for picture in parts["test"]] == ["cat/x.png"]
    assert (len(parts["train"]), len(parts["validation"])) == (9, 1)


def test_too_few_pictures_of_a_class_are_said(tmp_path: Path) -> None:
    put(tmp_path, "cat/1.png", "cat/2.png", "dog/1.png", "dog/2.png", "dog/3.png")
    with pytest.raises(
        TrainError, match="class 'cat' has 2 pictures to learn from and to hold out; give it at least 3"
    ):
        split_pictures(find_pictures(tmp_path))


def test_kinds_have_their_own_names_where_no_other_class_has_them() -> None:
    assert kinds_and_groups(("cat", "dog/other", "dog/pug", "fish/other")) == (
        ("cat", "dog/other", "pug", "fish/other"),
        ("cat", "dog", "dog", "fish"),
    )
    # A kind may be named like a class.
    assert kinds_and_groups(("cat", "toy/cat"))[0] == ("cat", "toy/cat")
