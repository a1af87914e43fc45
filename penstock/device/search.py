"""Which pictures of an index are most like one: exact, by the cosine of their embeddings."""

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
from usearch.index import MetricKind
from usearch.index import search as scan

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.pack import Pack
from penstock.core.spec import Array
from penstock.device.engine import Engine

# N pictures, D numbers of an embedding

Vector = npt.NDArray[np.float32]

SCHEMA_VERSION = 1
DESCRIPTION, VECTORS, ITEMS = "index.json", "vectors.npy", "items.json"
FILES = (VECTORS, ITEMS)
EMBEDDING = "embedding"
TOP = 5
# Beyond those that are asked for, usearch gives so many: equals are put in their order here.
MORE = 27
_SHA256 = re.compile("[0-9a-f]{64}")
# usearch adds in another order than we; what is nearer than this may change places.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture of an index.

    Args:
        file: Its path in the folder.
        sha256: Of its bytes.
        thumbnail: The path of a small picture in the index.
    """

    file: str
    sha256: str
    thumbnail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A picture that is like another.

    Args:
        item: Which.
        similarity: The cosine of the angle between the two embeddings, -1..1.
    """

    item: Item
    similarity: float


def embedding_of(engine: Engine, pixels: Array) -> Vector:
    """What the network makes of a picture, of unit length, `[D]`.

    Args:
        engine: A pack that has an embedding.
        pixels: RGBA `[H, W, 4]`.

    Raises:
        PackError: The pack has none.
        InvalidInput: The picture is too large, or its embedding is zero or not finite.
    """
    vector_D = engine.run(pixels)[embedding_at(engine.pack)].astype(np.float64).ravel()
    length = float(np.linalg.norm(vector_D))
    if not 0 < length < float("inf"):
        raise InvalidInput("The network makes nothing of this picture: its embedding has no direction.")
    return (vector_D / length).astype(np.float32)


def embedding_at(pack: Pack) -> int:
    """Which of the pack's outputs is the embedding.

    Raises:
        PackError: None is.
    """
    names = [output.name for output in pack.outputs]
    if EMBEDDING not in names:
        raise PackError(
            f"the pack {pack.name!r} has no embedding, by which pictures are compared; give its network an `embed` "
            f"and export it again."
        )
    return names.index(EMBEDDING)


def made_by(engine: Engine) -> dict[str, Any]:
    """What an index says of its network: the graph's SHA-256, and how many numbers it makes of a picture."""
    pack = engine.pack
    sha256, _ = pack.files[pack.models[engine.precision].file]
    return {"model": sha256, "dim": prod(pack.outputs[embedding_at(pack)].shape)}


def thumbnail_of(sha256: str) -> str:
    """Where the small picture of a file with this SHA-256 is in an index."""
    return f"thumbs/{sha256[:24]}.jpg"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PictureIndex:
    """An index that can be searched.

    Args:
        items: Its pictures.
        vectors_ND: Their embeddings, mapped from the file.
        made_by: The network, as `made_by` says it.
    """

    items: tuple[Item, ...]
    vectors_ND: Vector
    made_by: dict[str, Any]

    def nearest(self, vector_D: Vector, count: int = TOP) -> list[Found]:
        """The pictures that are most like one, the likest first; of equals, the first.

        Args:
            vector_D: Its embedding, of unit length.
            count: How many.
        """
        total = len(self.items)
        count, asked = min(count, total), count + MORE
        while True:
            asked = min(asked, total)
            near = scan(self.vectors_ND, vector_D, asked, MetricKind.IP, exact=True)
            keys = np.sort(np.asarray(near.keys, np.int64))
            cosines = self.vectors_ND[keys].astype(np.float64) @ vector_D.astype(np.float64)
            order = np.argsort(-cosines, kind="stable")
            # Whatever usearch left out is no better than the worst that it gave.
            if asked == total or cosines[order[count - 1]] > cosines[order[-1]] + ROUNDING:
                return [Found(item=self.items[keys[i]], similarity=float(cosines[i])) for i in order[:count]]
            asked *= 4


def read_index(folder: Path) -> PictureIndex:
    """The index in a folder.

    Raises:
        PackError: There is none.
        PackCorrupt: A file is missing or damaged, or they do not go together.
    """
    if not (folder / DESCRIPTION).exists():
        raise PackError(f"{folder} is no index; 'penstock index PACK FOLDER' makes one.")
    try:
        described: Any = json.loads((folder / DESCRIPTION).read_bytes())
        if described["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {described['schema_version']!r}")
        for name in FILES:
            # What is mapped into memory must be what was written.
            with (folder / name).open("rb") as source:
                if hashlib.file_digest(source, "sha256").hexdigest() != described["sha256"][name]:
                    raise ValueError(f"{name} is not the file that was written")
        listed: Any = json.loads((folder / ITEMS).read_bytes())
        items = tuple(Item(**{name: str(item[name]) for name in Item.__slots__}) for item in listed)
        vectors_ND: Any = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        made = {"model": str(described["model"]), "dim": int(described["dim"])}
        if vectors_ND.shape != (len(items), made["dim"]) or not items:
            raise ValueError(f"{len(items):,} items, vectors of shape {list(vectors_ND.shape)}")
        if vectors_ND.dtype != np.float32 or not all(_SHA256.fullmatch(item.sha256) for item in items):
            raise ValueError("vectors of another dtype, or no SHA-256")
    except (OSError, OverflowError, ValueError, KeyError, TypeError, RuntimeError) as error:
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        raise PackCorrupt(
            f"the index {folder} cannot be read ({cause}); remove it and make it again with 'penstock index'."
        ) from None
    return PictureIndex(items=items, vectors_ND=vectors_ND, made_by=made)


def search(engine: Engine, index: PictureIndex, pixels: Array, count: int = TOP) -> list[Found]:
    """The pictures of an index that are most like one.

    Args:
        engine: The pack with which the index was made.
        index: Of `read_index`.
        pixels: RGBA `[H, W, 4]`.
        count: How many.

    Raises:
        PackError: The index was made by another network.
        InvalidInput: The picture is too large, or its embedding is zero.
    """
    if made_by(engine) != index.made_by:
        raise PackError(
            f"the index was made by another network than that of the pack {engine.pack.name!r}; make it again with "
            f"'penstock index'."
        )
    return index.nearest(embedding_of(engine, pixels), count)
