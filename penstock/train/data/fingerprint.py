"""Fingerprints of examples: what identifies a set, by name, so that a change can be named when a run is resumed."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from penstock.core.spec import Array
from penstock.train.data.trees import leaves, mapped

# A whole set may take hours to read; of a larger one, as many evenly spaced examples are read.
SAMPLED = 32
# Of a hash in hexadecimal digits; no attacker is expected.
DIGITS = 16


def spread_indices(count: int, wanted: int = SAMPLED) -> list[int]:
    """Choose indices from 0 to below `count`: the first, the last, and evenly between."""
    return np.unique(np.linspace(0, max(0, count - 1), min(count, wanted)).round().astype(np.int64)).tolist()


def hash_of(*trees: Any) -> str:
    """Hash arrays, or trees of them, with their names, dtypes and shapes."""
    digest = hashlib.sha256(repr([mapped(_kind, tree) for tree in trees]).encode())
    for leaf in (leaf for tree in trees for leaf in leaves(tree)):
        array: Array = np.asarray(leaf)
        digest.update(np.ascontiguousarray(array).data if array.dtype.kind != "O" else repr(array.tolist()).encode())
    return digest.hexdigest()[:DIGITS]


def _kind(leaf: Any) -> str:
    array: Array = np.asarray(leaf)
    return f"{array.dtype}{array.shape}"


def hash_of_text(lines: Iterable[str]) -> str:
    """Hash lines of text."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(f"{line}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:DIGITS]


def changes(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Describe how a fingerprint differs from an earlier one, a phrase each; none for the same examples.

    Args:
        then: The earlier fingerprint. An entry whose name begins with `example ` is the hash of one example; it is
            missing where the example could not be read, and compared where both have it.
        now: The fingerprint of the examples as they are.
    """
    found: list[str] = []
    moved = [name for name in now if _is_example(name) and name in then and then[name] != now[name]]
    for name in dict.fromkeys([*then, *now]):
        if _is_example(name) or then.get(name) == now.get(name):
            continue
        if _is_hash(then.get(name)) and _is_hash(now.get(name)):
            found.append(f"the {name} changed")
        else:
            found.append(f"{name}: {now.get(name, 'none')} now, {then.get(name, 'none')} then")
    # With another number, other examples are sampled.
    if moved and then.get("examples") == now.get("examples"):
        found.append(f"{moved[0]} changed" + f", and {len(moved) - 1} more of those compared" * (len(moved) > 1))
    return found


def _is_example(name: str) -> bool:
    return name.startswith("example ")


def _is_hash(value: str | None) -> bool:
    return value is not None and len(value) == DIGITS and set(value) <= set("0123456789abcdef")
