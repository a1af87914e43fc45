"""Examples of one side of a network as the arrays of a safetensors file, in bundles and packs.

One tensor of fixed size is one array, `inputs` or `outputs`. Otherwise each tensor and each length is an array of its
own, `inputs.NAME`.
"""

from pathlib import Path

from penstock.core.errors import InvalidInput
from penstock.core.record import ChunkSpec, RecordSpec
from penstock.core.spec import Array
from penstock.core.storage.verified_folder import FolderFiles

# N examples


def example_arrays(side: str, spec: ChunkSpec, examples: Array) -> dict[str, Array]:
    """Return the arrays of a file by name.

    Args:
        side: `"inputs"` or `"outputs"`.
        spec: One chunk of that side.
        examples: Chunks, `[N, ...]`.
    """
    if not isinstance(spec, RecordSpec):
        return {side: examples}
    return {f"{side}.{name}": array for name, array in (spec.lengths(examples) | spec.batch(examples)).items()}


def read_examples(files: FolderFiles, file: Path, side: str, spec: ChunkSpec) -> Array:
    """Read the chunks `[N, ...]` of one side from a file that `example_arrays` filled.

    Raises:
        PenstockError: `files.corrupt`: an array is missing or not of its spec.
    """
    if not isinstance(spec, RecordSpec):
        return files.arrays(file, [side])[0]
    names = [*spec.dims, *spec.by_name]
    arrays = dict(zip(names, files.arrays(file, [f"{side}.{name}" for name in names]), strict=True))
    try:
        for name, tensor in spec.by_name.items():
            if arrays[name].dtype != tensor.numpy_dtype:
                raise ValueError(f"{name} is {arrays[name].dtype}, not {tensor.describe()}")
        records = spec.records(arrays, arrays)
        spec.check_numbers(records)
    except (ValueError, TypeError, IndexError, InvalidInput) as error:
        raise files.unusable(file, error) from None
    return records
