"""The bundle's exported `prepare`, run by ONNX Runtime without torch."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np

from penstock.core.bundles.bundle import PREPARE, BundleFiles
from penstock.core.errors import ApplicationError, BundleError, ComputeFailed
from penstock.core.machine.onnx_session import onnx_errors, onnx_session
from penstock.core.prepare import RawSpec
from penstock.core.random_arrays import random_numbers
from penstock.core.source_files.find_application import FoundApplication
from penstock.core.spec import Array, TensorSpec
from penstock.runtime.onnx.exporter_process import BackgroundExports, run_exporter

# The names in the graph.
RAW, PREPARED = "raw", "prepared"
# Trial sizes of a dimension of any size, rotated by one for the next dimension.
SIZES = (1, 2, 37, 64, 101, 300)


@final
class PrepareSession:
    """Prepares one chunk from a raw array of any size; thread-safe.

    Args:
        graph: The exported module, an ONNX file or its bytes.
        raw: One raw array.
        input: One chunk of the application's input.
        threads: CPU threads for one run.

    Raises:
        BundleError: The graph does not fit the specs.
    """

    def __init__(self, graph: Path | bytes, raw: RawSpec, input: TensorSpec, *, threads: int = 1) -> None:
        self._raw = raw
        self._input = input
        named = graph if isinstance(graph, Path) else PREPARE
        try:
            # Free the memory of a large image at once.
            session = onnx_session(graph, threads=threads, any_size=True, keep_memory=False)
        except onnx_errors() as error:
            raise BundleError(f"{named} cannot be loaded ({error}); write the bundle again.") from None
        sizes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
        if sizes.keys() != {RAW, PREPARED} or not _takes(raw, sizes[RAW]) or sizes[PREPARED] != list(input.shape):
            raise BundleError(
                f"{named} has {sizes}; it must turn {raw.describe()} into {input.describe()}. Write the bundle again."
            )
        self._session = session

    def __call__(self, raw: Array) -> Array:
        """Prepare one chunk, `[*input.shape]`.

        Raises:
            InvalidInput: The raw array does not fit the spec.
            TooLarge: It is larger than the spec allows.
            ComputeFailed: The graph failed, or gave numbers that are not finite.
        """
        checked = self._raw.check(raw)
        try:
            chunk: Array = self._session.run([PREPARED], {RAW: checked})[0]
        except onnx_errors() as error:
            raise ComputeFailed(f"The raw array {list(raw.shape)} could not be prepared ({error}).") from error
        self._input.check_numbers(chunk)
        return chunk


def open_prepare(files: BundleFiles) -> PrepareSession | None:
    """Open the `prepare` of a bundle and check it by the golden examples; None where the bundle has none.

    Raises:
        BundleError: The graph cannot be loaded, or gives other numbers than recorded.
    """
    if files.prepare is None or files.manifest.raw is None:
        return None
    prepared = PrepareSession(files.prepare, files.manifest.raw, files.manifest.inputs[0])
    files.golden.check_prepared(prepared)
    return prepared


def exported_prepare(found: FoundApplication, background: BackgroundExports | None = None) -> bytes:
    """Export the `prepare` of an application as an ONNX graph, in a process of its own, and check it against torch.

    Args:
        found: The application.
        background: Runs the process beside other work.

    Raises:
        ApplicationError: The other process cannot find the application, or cannot export its `prepare`.
    """
    name = found.application.name
    if not found.reference:
        raise ApplicationError(
            f"Application {name!r} has a prepare, which another process has to find to export it; put the application "
            f"into a file, app.py, and use find_application('app.py')."
        )
    with TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / PREPARE
        failure = run_exporter("penstock.runtime.onnx.prepare_export", found.reference, file, background=background)
        if failure is not None:
            raise ApplicationError(
                f"The prepare of application {name!r} cannot be exported ({failure.reason.rstrip('.')}); write it with "
                f"operations that torch.onnx.export knows, for any size of the raw array."
            )
        return file.read_bytes()


def random_raws(raw: RawSpec, count: int) -> list[Array]:
    """Generate raw arrays of random numbers in several sizes, including the smallest."""
    rng = np.random.default_rng(0)
    shapes = [
        tuple(
            min(largest, SIZES[(turn + dim) % len(SIZES)]) if size is None else size
            for dim, (size, largest) in enumerate(zip(raw.shape, raw.max_shape, strict=True))
        )
        for turn in range(count)
    ]
    return [random_numbers(raw.dtype, shape, rng) for shape in shapes]


def _takes(raw: RawSpec, sizes: list[Any]) -> bool:
    # A dimension of any size is a name.
    return len(sizes) == len(raw.shape) and all(
        isinstance(found, str | None) if size is None else found == size
        for size, found in zip(raw.shape, sizes, strict=True)
    )
