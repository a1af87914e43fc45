"""The order in which golden examples are of use to people and devices."""

import numpy as np

from penstock.core.bundles.bundle import Manifest
from penstock.core.bundles.golden import Golden
from penstock.core.record import RecordSpec


def rows_by_use(manifest: Manifest, golden: Golden) -> list[int]:
    """Sort golden examples: those first that are unlike the others.

    Args:
        manifest: Their specs.
        golden: N examples.

    Returns:
        Indexes; some may be there twice. Pictures of any size come by their size, the smallest first; otherwise the
        shortest and the longest input, then one example of each label that is the likeliest of one, then all.
    """
    raws, rows = golden.raws, range(len(golden.inputs))
    if raws:
        # Each small picture is as good as a large one.
        return sorted(rows, key=lambda row: raws[row].nbytes)
    lengths, extremes = _lengths(manifest, golden), list[int]()
    if len(set(lengths)) > 1:
        extremes = [min(rows, key=lengths.__getitem__), max(rows, key=lengths.__getitem__)]
    return [*extremes, *_of_each_label(manifest, golden), *rows]


def _lengths(manifest: Manifest, golden: Golden) -> list[int]:
    spec = manifest.input
    if isinstance(spec, RecordSpec) and spec.dims:
        return np.sum(list(spec.lengths(golden.inputs).values()), axis=0).tolist()
    return [0] * len(golden.inputs)


def _of_each_label(manifest: Manifest, golden: Golden) -> list[int]:
    output = manifest.answer
    if isinstance(output, RecordSpec) or not output.labels or len(output.shape) != 1 or manifest.rate_hz is not None:
        return []
    found = golden.outputs.argmax(1).tolist()
    return [found.index(label) for label in sorted(set(found))]
