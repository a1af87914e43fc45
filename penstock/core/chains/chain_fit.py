"""Comparison of the outputs of one application with the inputs of another."""

from collections.abc import Mapping
from typing import TypeVar

from penstock.core.dim import Dim
from penstock.core.prepare import RawSpec
from penstock.core.record import ChunkSpec
from penstock.core.spec import TensorSpec

T = TypeVar("T")


def misfit(before: ChunkSpec, after: ChunkSpec) -> str:
    """Explain why a chunk of one spec is no chunk of another; empty if it is one.

    One tensor may have another name than the tensor that it feeds; of several, each is fed by the one of its name. A
    length that varies must stay within the lengths that are taken, and declared limits within those that are taken; of
    a tensor without limits, each number is checked when it is there.

    Args:
        before: The spec of the value before the step.
        after: The spec that the step takes.
    """
    given = renamed({spec.name: spec for spec in before.tensors}, after)
    taken = {spec.name: spec for spec in after.tensors if spec.name in given or spec.default is None}
    if missing := [name for name in taken if name not in given]:
        return f"it has {', '.join(repr(spec.name) for spec in before.tensors)} and no {missing[0]!r}"
    lengths: dict[str, int | Dim] = {}
    for name, spec in taken.items():
        if reason := _tensor_misfit(given[name], spec, lengths):
            return reason
    return ""


def renamed(given: Mapping[str, T], after: ChunkSpec) -> dict[str, T]:
    """Return the given tensors under the names of an input that takes them, without the others.

    One tensor feeds the one that must be given, whatever its name; of several, each feeds the one of its name.
    """
    names = [spec.name for spec in after.tensors]
    required = [spec.name for spec in after.tensors if spec.default is None]
    if len(given) == len(required) == 1 and not given.keys() & set(names):
        return dict(zip(required, given.values(), strict=True))
    return {name: given[name] for name in names if name in given}


def _tensor_misfit(given: TensorSpec, taken: TensorSpec, lengths: dict[str, int | Dim]) -> str:
    differ = f"{given.title} is {given.describe()}, and {taken.title} must be {taken.describe()}"
    if given.dtype != taken.dtype or len(given.shape) != len(taken.shape):
        return differ
    for size, wanted in zip(given.shape, taken.shape, strict=True):
        low = size.min if isinstance(size, Dim) else size
        if not isinstance(wanted, Dim):
            if isinstance(size, Dim) or size != wanted:
                return differ
        elif low < wanted.min or int(size) > int(wanted):
            return f"{differ}, with from {wanted.min:,} to {int(wanted):,} {wanted.name}"
        elif lengths.setdefault(wanted.name, size) != size:
            return f"{differ}, where {wanted.name} is another length already"
    if given.limits is not None and taken.limits is not None:
        low, high = taken.limits
        if given.limits[0] < low or given.limits[1] > high:
            return (
                f"{given.title} has limits from {given.limits[0]:,} to {given.limits[1]:,}, and {taken.title} must be "
                f"from {low:,} to {high:,}"
            )
    return ""


def raw_as_tensor(raw: RawSpec) -> TensorSpec:
    """Return the spec of a raw array as that of a tensor whose lengths vary."""
    shape = tuple(
        Dim(f"{raw.name}_{axis}", max=largest) if size is None else size
        for axis, (size, largest) in enumerate(zip(raw.shape, raw.max_shape, strict=True))
    )
    return TensorSpec(name=raw.name, dtype=raw.dtype, shape=shape, meaning=raw.meaning, units=raw.units)
