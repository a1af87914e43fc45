"""The index of a folder's pictures: its files, and the exact search in it by the cosine of embeddings."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from penstock.core.errors import InvalidInput, PackCorrupt, PackError
from penstock.core.spec import Array

# N pictures, D numbers of an embedding

Vector = npt.NDArray[np.float32]

SCHEMA_VERSION = 1
DESCRIPTION, VECTORS, ITEMS = "index.json", "vectors.npy", "items.json"
FILES = (VECTORS, ITEMS)
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


def unit_vector(embedding: Array) -> Vector:
    """Normalise an embedding of any shape to unit length, float32 `[D]`.

    Raises:
        InvalidInput: It is zero or not finite.
    """
    vector_D = embedding.astype(np.float64).ravel()
    length = float(np.linalg.norm(vector_D))
    if not 0 < length < float("inf"):
        raise InvalidInput("The embedding of this picture is zero or not finite, so it has no direction.")
    return (vector_D / length).astype(np.float32)


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
        model: The network: the SHA-256 of its graph, and the length of an embedding.
        weights: SHA-256 of the network's weights; empty in an index of an earlier version.
    """

    items: tuple[IndexItem, ...]
    vectors_ND: Vector
    model: dict[str, Any]
    weights: str = ""

    def nearest(self, vector_D: Vector, count: int = TOP) -> list[SearchResult]:
        """The most similar pictures, most similar first; equals in the order of the index.

        Args:
            vector_D: An embedding of unit length.
            count: Number of results.
        """
        rows, cosines = self.nearest_rows(vector_D, count)
        found = zip(rows, cosines, strict=True)
        return [SearchResult(item=self.items[row], similarity=float(cosine)) for row, cosine in found]

    def nearest_rows(self, vector_D: Vector, count: int = TOP) -> tuple[Array, Array]:
        """The rows of the most similar pictures, int64 `[count]`, and their similarities, float64 `[count]`.

        Args:
            vector_D: An embedding of unit length.
            count: Number of results; fewer where the index has fewer pictures.
        """
        rough_N = self.vectors_ND @ vector_D
        count = min(count, len(rough_N))
        least = np.partition(rough_N, -count)[-count] - ROUNDING
        near = np.flatnonzero(rough_N >= least)
        # Not by BLAS, which may sum equal rows in another order.
        cosines = (self.vectors_ND[near].astype(np.float64) * vector_D).sum(1)
        order = np.argsort(-cosines, kind="stable")[:count]
        return near[order], cosines[order]


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
    return PictureIndex(items=items, vectors_ND=vectors_ND, model=model, weights=str(described.get("weights", "")))
