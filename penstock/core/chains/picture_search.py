"""Image search as a chain: the embedding of a picture by a served network, then an index."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.core.chains.chain import Chain, ChainStep
from penstock.core.errors import PackError
from penstock.core.pictures.picture_index import DESCRIPTION, TOP, read_index, unit_vector
from penstock.core.spec import TensorSpec

# Of a similarity: fp32 has no more.
DIGITS = 6


def search_chain(
    index: str | Path, *, part: str, name: str = "search", count: int = TOP, description: str = ""
) -> Chain:
    """Declare a search for the pictures of an index that are most similar to one.

    A client sends a picture and gets `{"results": [{"file": ..., "similarity": ...}, ...]}`, most similar first; the
    tensors of the answer are the rows of the index and the similarities.

    Args:
        index: The folder that `penstock index` wrote, with a pack of the part's weights. A relative path starts in the
            folder of the file that calls this; where it has no such folder, in the working folder.
        part: Name of the application whose one output is the embedding, see
            `penstock.apps.images.declare.embedding_application`.
        name: Name of the chain.
        count: Number of results; fewer where the index has fewer pictures.
        description: One sentence for people.

    Raises:
        PackError: There is no index, or a file of it is damaged.
    """
    here = inspect.currentframe()
    caller = None if here is None else here.f_back
    known = read_index(_found(Path(index).expanduser(), None if caller is None else caller.f_globals.get("__file__")))
    count = min(count, len(known.items))

    def nearest(results: Mapping[str, Any], picture: Any) -> dict[str, Any]:
        rows, similarities = known.nearest_rows(unit_vector(results[part]), count)
        return {"rows": rows, "similarities": similarities}

    def reply(found: Mapping[str, Any]) -> dict[str, Any]:
        pairs = zip(found["rows"].tolist(), found["similarities"].tolist(), strict=True)
        return {
            "results": [{"file": known.items[row].file, "similarity": round(cosine, DIGITS)} for row, cosine in pairs]
        }

    return Chain(
        name=name,
        description=description or f"Finds similar pictures among {len(known.items):,}.",
        steps=(ChainStep(part=part, weights=known.weights), ChainStep(run=nearest)),
        outputs={
            "rows": TensorSpec(dtype="int64", shape=(count,), meaning="rows of the index, most similar first"),
            "similarities": TensorSpec(dtype="float64", shape=(count,), meaning="cosines", units="-1..1"),
        },
        reply=reply,
    )


def _found(index: Path, declaring: str | None) -> Path:
    """Find an index beside the file that declares the chain, or in the working folder."""
    if index.is_absolute() or declaring is None:
        return index
    beside = Path(declaring).resolve().parent / index
    for folder in (beside, index):
        if (folder / DESCRIPTION).exists():
            return folder
    here = "" if index.resolve() == beside else f", nor is {index.resolve()}"
    raise PackError(f"{beside} is no index{here}; 'penstock index PACK FOLDER --out {index}' makes one.")
