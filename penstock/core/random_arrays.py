"""Random arrays of a spec, for measurements and checks of exported graphs."""

from math import ceil, floor

import numpy as np

from penstock.core.spec import Array, TensorSpec

# Random integers of more than 16 bits stay below this, because they are often indices into a vocabulary.
RANDOM_WHOLE_BELOW = 128


def random_chunks(spec: TensorSpec, count: int, rng: np.random.Generator) -> Array:
    """Random chunks `[count, *shape]` within the limits of a spec."""
    numbers = random_numbers(spec.dtype, (count, *spec.shape), rng)
    if spec.limits is None:
        return numbers
    low, high = spec.limits
    if spec.numpy_dtype.kind in "iu":
        numpy_limits = np.iinfo(spec.numpy_dtype)
        low, high = max(ceil(low), numpy_limits.min), min(floor(high), numpy_limits.max)
    wide = numbers.astype(np.int8) if spec.dtype == "bool" else numbers
    return np.clip(wide, low, high).astype(spec.numpy_dtype)


def random_numbers(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Random numbers of any dtype of a spec, over its whole range up to 16 bits."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    limits = np.iinfo(dtype)
    if limits.bits <= 16:
        return rng.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)
    return rng.integers(0, RANDOM_WHOLE_BELOW, shape, dtype=dtype)
