"""Choose the golden examples that a pack carries: few bytes, and the same tolerances as with all of them."""

from dataclasses import replace

import numpy as np

from penstock.core.bundles.bundle import BundleFiles
from penstock.core.bundles.example_arrays import example_arrays
from penstock.core.bundles.golden import raw_names
from penstock.core.bundles.golden_rows import rows_by_use
from penstock.core.spec import Array

# N examples

# An example says little more than the one before it; devices run all of them at each start.
MAX_BYTES = 1 << 16
MAX_SHARE = 0.1
MIN_EXAMPLES = 2


def golden_arrays(files: BundleFiles) -> dict[str, Array]:
    """Return the arrays of a pack's golden examples by name."""
    golden, manifest = files.golden, files.manifest
    raws = dict(zip(raw_names(len(golden.raws)), golden.raws, strict=True))
    inputs = raws or example_arrays("inputs", manifest.input, golden.inputs)
    return inputs | example_arrays("outputs", manifest.answer, golden.outputs)


def with_few_examples(files: BundleFiles, graph_bytes: int) -> BundleFiles:
    """Leave out golden examples beyond 64 KiB, or beyond a tenth of the graph if that is more.

    The example with the largest number of each output stays, so that tolerances relative to these numbers are those of
    the bundle; then the smallest pictures, or the shortest and the longest input, one example of each label, and others
    in their order. Two stay whatever their size.

    Args:
        files: The bundle.
        graph_bytes: Size of the pack's graphs.

    Returns:
        The bundle with fewer golden examples, in their order.
    """
    most = max(MAX_BYTES, int(MAX_SHARE * graph_bytes))
    needed, wanted = _largest(files.golden.outputs), rows_by_use(files.manifest, files.golden)
    kept: list[int] = []
    for row in dict.fromkeys((*needed, *wanted)):
        tried = _only(files, sorted([*kept, row]))
        fits = sum(array.nbytes for array in golden_arrays(tried).values()) <= most
        if row in needed or len(kept) < MIN_EXAMPLES or fits:
            kept.append(row)
    return _only(files, sorted(kept))


def _only(files: BundleFiles, rows: list[int]) -> BundleFiles:
    golden = files.golden
    raws = tuple(golden.raws[row] for row in rows) if golden.raws else ()
    few = replace(golden, inputs=golden.inputs[rows], outputs=golden.outputs[rows], raws=raws, network=None)
    return replace(files, golden=few)


def _largest(outputs: Array) -> list[int]:
    """The example with the largest number of each tensor whose scale it is, see `Agreement`."""
    names, found = outputs.dtype.names, list[int]()
    for tensor in [outputs] if names is None else [outputs[name] for name in names]:
        size_N = np.abs(tensor.astype(np.float64)).reshape(len(outputs), -1).max(1, initial=0.0)
        if size_N.max(initial=0.0) > 1:
            found.append(int(size_N.argmax()))
    return found
