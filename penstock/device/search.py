"""Search an index for the pictures most similar to one, by a pack."""

from math import prod
from typing import Any

from penstock.core.errors import PackError
from penstock.core.pictures.picture_index import TOP, PictureIndex, SearchResult, Vector, unit_vector
from penstock.core.spec import Array
from penstock.device.pack_engine import PackEngine

EMBEDDING = "embedding"


def embedding_of(engine: PackEngine, pixels: Array) -> Vector:
    """The embedding of a picture, normalised to unit length, `[D]`.

    Args:
        engine: A pack that has an embedding.
        pixels: RGBA `[H, W, 4]`.

    Raises:
        PackError: The pack has none.
        InvalidInput: The picture is too large, or its embedding is zero or not finite.
    """
    return unit_vector(engine.run(pixels)[_embedding_index(engine)])


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
