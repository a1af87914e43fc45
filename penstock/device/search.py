"""Search an index for the pictures most similar to one: exact, by the cosine of their embeddings."""

import hashlib
import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine

# N pictures, D numbers of an embedding

Vector = npt.NDArray[np.float32]

SCHEMA_VERSION = 1
DESCRIPTION, VECTORS, ITEMS = "index.json", "vectors.npy", "items.json"
FILES = (VECTORS, ITEMS)
EMBEDDING = "embedding"
TOP = 5
# Cosines in float32 that are closer than this may change places in float64.
ROUNDING = 1e-5
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexItem:
    """One picture of an index.

    Args:
        file: Its path in the picture folder.
        sha256: Hash of its bytes.
        thumbnail: Path of its thumbnail in the index.
    """

    file: str
    sha256: str
    thumbnail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A similar picture.

    Args:
        item: The picture.
        similarity: Cosine of the angle between the two embeddings, -1..1.
    """

    item: IndexItem
    similarity: float


def embedding_of(engine: PackEngine, pixels: Array) -> Vector:
    """The embedding of a picture, normalised to unit length, `[D]`.

    Args:
        engine: A pack that has an embedding.
        pixels: RGBA `[H, W, 4]`.

    Raises:
        PackError: The pack has none.
        InvalidInput: The picture is too large, or its embedding is zero or not finite.
    """
    vector_D = engine.run(pixels)[_embedding_index(engine)].astype(np.float64).ravel()
    length = float(np.linalg.norm(vector_D))
    if not 0 < length < float("inf"):
        raise InvalidInput("The embedding of this picture is zero or not finite, so it has no direction.")
    return (vector_D / length).astype(np.float32)


def _embedding_index(engine: PackEngine) -> int:
    names = [output.name for output in engine.pack.outputs]
    if EMBEDDING not in names:
        raise PackError(
            f"the pack {engine.pack.name!r} has no embedding to compare pictures by; give its network an `embed` and "
            f"export it again."
        )
    return names.index(EMBEDDING)


def model_of(engine: PackEngine) -> dict[str, Any]:
    """The network's identity in index.json: the graph's SHA-256 and the embedding's length."""
    pack = engine.pack
    sha256, _ = pack.files[pack.models[engine.precision].file]
    return {"model": sha256, "dim": prod(pack.outputs[_embedding_index(engine)].shape)}


def thumbnail_of(sha256: str) -> str:
    """Path in an index of the thumbnail of the picture with this SHA-256."""
    return f"thumbs/{sha256[:24]}.jpg"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PictureIndex:
    """An index that can be searched.

    Args:
        items: Its pictures.
        vectors_ND: Their embeddings, memory-mapped.
        model: The network, as `model_of` returns it.
    """

    items: tuple[IndexItem, ...]
    vectors_ND: Vector
    model: dict[str, Any]

    def nearest(self, vector_D: Vector, count: int = TOP) -> list[SearchResult]:
        """The most similar pictures, most similar first; equals in the order of the index.

        Args:
            vector_D: An embedding of unit length.
            count: Number of results.
        """
        rough_N = self.vectors_ND @ vector_D
        count = min(count, len(rough_N))
        least = np.partition(rough_N, -count)[-count] - ROUNDING
        near = np.flatnonzero(rough_N >= least)
        # Not by BLAS, which may sum equal rows in another order.
        cosines = (self.vectors_ND[near].astype(np.float64) * vector_D).sum(1)
        order = np.argsort(-cosines, kind="stable")[:count]
        return [SearchResult(item=self.items[near[i]], similarity=float(cosines[i])) for i in order]


def read_index(folder: Path) -> PictureIndex:
    """Read the index in a folder.

    Raises:
        PackError: There is none.
        PackCorrupt: A file is missing or damaged, or they do not match.
    """
    if not (folder / DESCRIPTION).exists():
        raise PackError(f"{folder} is no index; 'penstock index PACK FOLDER' makes one.")
    try:
        described: Any = json.loads((folder / DESCRIPTION).read_bytes())
        if described["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema version {described['schema_version']!r}")
        for name in FILES:
            with (folder / name).open("rb") as source:
                if hashlib.file_digest(source, "sha256").hexdigest() != described["sha256"][name]:
                    raise ValueError(f"{name} is not the file that was written")
        listed: Any = json.loads((folder / ITEMS).read_bytes())
        items = tuple(IndexItem(**{name: str(item[name]) for name in IndexItem.__slots__}) for item in listed)
        vectors_ND: Any = np.load(folder / VECTORS, mmap_mode="r", allow_pickle=False)
        model = {"model": str(described["model"]), "dim": int(described["dim"])}
        if vectors_ND.shape != (len(items), model["dim"]) or not items:
            raise ValueError(f"{len(items):,} items, vectors of shape {list(vectors_ND.shape)}")
        if vectors_ND.dtype != np.float32 or not all(_SHA256.fullmatch(item.sha256) for item in items):
            raise ValueError("vectors of another dtype, or no SHA-256")
    except (OSError, OverflowError, ValueError, KeyError, TypeError, RuntimeError) as error:
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        raise PackCorrupt(
            f"the index {folder} cannot be read ({cause}); remove it and make it again with 'penstock index'."
        ) from None
    return PictureIndex(items=items, vectors_ND=vectors_ND, model=model)


def search(engine: PackEngine, index: PictureIndex, pixels: Array, count: int = TOP) -> list[SearchResult]:
    """The pictures of an index that are most similar to one.

    Args:
        engine: The pack that made the index.
        index: From `read_index`.
        pixels: RGBA `[H, W, 4]`.
        count: Number of results.

    Raises:
        PackError: Another network made the index.
        InvalidInput: The picture is too large, or its embedding is zero.
    """
    if model_of(engine) != index.model:
        raise PackError(
            f"the index was made by another network than that of the pack {engine.pack.name!r}; make it again with "
            f"'penstock index'."
        )
    return index.nearest(embedding_of(engine, pixels), count)
