"""Finding labelled pictures on disk: class folders, Hugging Face's imagefolder, WebDataset's tar files.

No pixel is decoded here. A label is a class (`cat`), or a general class and the kind within it (`dog/terrier`), as the
folders say: `dog/terrier/1.jpg` or `dog__terrier/1.jpg`.
"""

import csv
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image

from penstock.core.decode import FORMATS
from penstock.core.errors import TrainError
from penstock.train.data.image_folder import SUFFIXES, folders_in, is_picture, pictures_below

# Names of the splits in common layouts.
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
}
METADATA = ("metadata.jsonl", "metadata.csv")
LABEL_FIELDS = ("label", "class", "cls")
# Of each class, where the folder does not say.
HELD_OUT = {"test": 0.2, "validation": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One labelled picture on disk.

    Args:
        file: The picture's, or the tar file that it is in.
        name: Its name, for people.
        label: `"cat"`, or `"dog/terrier"`.
        split: `"train"`, `"validation"` or `"test"`; empty where the folder does not say.
        start: The first byte of it in the file.
        nbytes: How many follow; None for all of the file.
    """

    file: Path
    name: str
    label: str
    split: str = ""
    start: int = 0
    nbytes: int | None = None

    def read(self) -> bytes:
        """The encoded picture."""
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(-1 if self.nbytes is None else self.nbytes)


def find_pictures(root: str | Path) -> list[Picture]:
    """All labelled pictures of a folder, in the order of their labels and names.

    Args:
        root: A folder of class folders; or of such folders called train, validation and test; or with `metadata.csv` or
            `metadata.jsonl` (`file_name` and `label`); or of WebDataset's tar files (`key.jpg` beside `key.cls`, which
            holds a name or the number of a line of `classes.txt`, or beside `key.json` with a `label`).

    Raises:
        TrainError: There are none, one has no label, or a class none.
    """
    root = Path(root)
    # Refuses a root that is no folder.
    folders_in(root)
    found = list(_found(root, ""))
    if not found:
        raise TrainError(
            f"{root} holds no pictures that have a label; put the pictures ({', '.join(SUFFIXES)}) of each class into "
            f"a folder of its own."
        )
    # Python gives bytes of a name that are not UTF-8 as these characters, which no file of text can hold.
    if broken := next((picture.name for picture in found if re.search("[\ud800-\udfff]", picture.name)), None):
        raise TrainError(f"{root} has a picture of the name {broken!a}, which is no text; rename it.")
    return sorted(found, key=lambda picture: (picture.label, picture.name))


def split_pictures(pictures: list[Picture]) -> dict[str, list[Picture]]:
    """Split pictures into training, validation and test set.

    A split that the folder does not define is taken from the training pictures: of each class 20% for the test and 10%
    for validation, at least one each, in the order of a hash of their names.

    Args:
        pictures: The result of `find_pictures`.

    Raises:
        TrainError: A class has too few pictures.
    """
    parts: dict[str, list[Picture]] = {"train": [], "validation": [], "test": []}
    for picture in pictures:
        parts[picture.split or "train"].append(picture)
    wanted = {name: share for name, share in HELD_OUT.items() if not parts[name]}
    of_class: dict[str, list[Picture]] = {label: [] for label in labels_of(pictures)}
    for picture in parts.pop("train"):
        of_class[picture.label].append(picture)
    learned: list[Picture] = []
    for label, all_of_it in of_class.items():
        if len(all_of_it) <= len(wanted):
            raise TrainError(
                f"class {label!r} has {len(all_of_it)} pictures to learn from and to hold out; give it at least "
                f"{len(wanted) + 1}, better a hundred."
            )
        rest = sorted(all_of_it, key=lambda picture: hashlib.sha256(picture.name.encode()).digest())
        for name, share in wanted.items():
            count = max(1, round(share * len(all_of_it)))
            parts[name] += rest[:count]
            rest = rest[count:]
        learned += sorted(rest, key=lambda picture: picture.name)
    return {"train": learned, **parts}


def unreadable(pictures: list[Picture]) -> list[str]:
    """The names of those files that do not begin as a picture does; no pixel is decoded."""
    found: list[str] = []
    for picture in pictures:
        try:
            with picture.file.open("rb") as file:
                own = file if picture.nbytes is None else io.BytesIO(picture.read())
                Image.open(own, formats=FORMATS).close()
        except Exception:  # noqa: BLE001 - each of Pillow's decoders has its own errors for damaged files
            found.append(picture.name)
    return found


def labels_of(pictures: list[Picture]) -> tuple[str, ...]:
    """The labels that occur, sorted."""
    return tuple(sorted({picture.label for picture in pictures}))


def _found(root: Path, split: str) -> Iterator[Picture]:
    for name in METADATA:
        if (root / name).is_file():
            yield from _of_metadata(root, root / name, split)
            return
    shards = sorted(root.glob("*.tar"))
    if shards:
        for shard in shards:
            yield from _of_shard(shard, split or _split_of(shard.stem), _class_names(root))
        return
    folders = folders_in(root)
    # Only where all are: a class may be called "test".
    if not split and folders and any(SPLITS.get(place.name.lower()) == "train" for place in folders):
        strange = [place for place in folders if place.name.lower() not in SPLITS]
        if strange:
            raise TrainError(
                f"{root} has the folder {strange[0].name!r} beside one to train from; give a folder of classes, or one "
                f"of {', '.join(sorted(set(SPLITS.values())))}."
            )
        for place in folders:
            yield from _found(place, SPLITS[place.name.lower()])
        return
    for place in folders:
        # Of a part of the set, a class may be missing.
        for below in pictures_below(place, may_be_empty=bool(split)):
            file = place / below
            label = _label(file.parent.relative_to(root).as_posix(), file.parent)
            yield Picture(file=file, name=file.relative_to(root).as_posix(), label=label, split=split)


def _of_metadata(root: Path, file: Path, split: str) -> Iterator[Picture]:
    """Hugging Face's imagefolder: a line for each picture."""
    try:
        text = file.read_text(encoding="utf-8-sig")
        rows: list[Any]
        if file.suffix == ".csv":
            rows = list(csv.DictReader(text.splitlines()))
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise TrainError(f"{file} cannot be read ({error}); mend it.") from None
    for number, row in enumerate(rows, 1):
        label = _label_in(row)
        named = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(named, str) or not named or label is None:
            raise TrainError(f"{file} has {row!r:.80} as entry {number}; it must have a file_name and a label.")
        place = (root / named).resolve()
        if not place.is_relative_to(root.resolve()):
            raise TrainError(f"{file} names {named!r}, which is not below its folder; move the picture there.")
        parts = PurePosixPath(named).parts
        own = split or (SPLITS.get(parts[0].lower(), "") if len(parts) > 1 else "")
        yield Picture(file=root / named, name=named, label=_label(label, file), split=own)


def _of_shard(shard: Path, split: str, names: list[str]) -> Iterator[Picture]:
    """WebDataset: files that follow one another and have one name up to the first dot are one example."""
    pictures: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                place, slash, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                key = f"{place}{slash}{key}"
                if not member.isfile():
                    continue
                if is_picture(base):
                    pictures[key] = member
                elif suffix in ("cls", "json"):
                    content = archive.extractfile(member)
                    assert content is not None, member.name
                    label = _shard_label(content.read(1 << 20), suffix, names)
                    if label is not None:
                        labels[key] = label
    except (tarfile.TarError, ValueError, OSError) as error:
        raise TrainError(f"{shard} is not a tar file that can be read ({error}); write it again.") from None
    for key, member in pictures.items():
        if key not in labels:
            raise TrainError(f"{shard} has {member.name} and no label for it; put {key}.cls beside it.")
        yield Picture(
            file=shard,
            name=f"{shard.name}:{member.name}",
            label=_label(labels[key], shard),
            split=split,
            start=member.offset_data,
            nbytes=member.size,
        )


def _shard_label(content: bytes, suffix: str, names: list[str]) -> str | None:
    text = content.decode().strip()
    label = _label_in(json.loads(text)) if suffix == "json" else text
    if label is None or not label.isdecimal() or not names:
        return label
    if int(label) >= len(names):
        raise ValueError(f"class {label} is not one of the {len(names)} lines of classes.txt")
    return names[int(label)]


def _label_in(fields: Any) -> str | None:
    if not isinstance(fields, dict):
        return None
    value = next((fields[name] for name in LABEL_FIELDS if fields.get(name) not in (None, "")), None)
    return None if value is None else str(value)


def _label(text: str, where: object) -> str:
    parts = [part.strip() for part in text.replace("__", "/").split("/")]
    if not all(parts) or len(parts) > 2:
        raise TrainError(f"{where} gives the label {text!r}; a label is a class, or a class and a kind: 'dog/terrier'.")
    return "/".join(parts)


def _split_of(name: str) -> str:
    """Return the part of a tar file by its name: `train-000000` is of the training part. A folder may be a class."""
    letters = name.lower()
    return next((split for start, split in SPLITS.items() if letters == start or letters.startswith(f"{start}-")), "")


def _class_names(root: Path) -> list[str]:
    for file in (root / "classes.txt", root.parent / "classes.txt"):
        if file.is_file():
            return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return []
