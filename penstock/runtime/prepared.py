"""What prepares raw arrays, run by ONNX Runtime: the graph in the bundle, without torch."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, final

import numpy as np
import onnxruntime

from penstock.core.application import FoundApplication
from penstock.core.bundle import PREPARE, BundleFiles
from penstock.core.errors import ApplicationError, BundleError, ComputeFailed
from penstock.core.prepare import RawSpec
from penstock.core.spec import Array, TensorSpec, random_numbers
from penstock.runtime.onnx_executor import quiet_options

EXPORT_S = 300
# The names in the graph.
RAW, PREPARED = "raw", "prepared"
# Of a dimension that may have any size; those of the next dimension are turned by one.
SIZES = (1, 2, 37, 64, 101, 300)


@final
class Prepared:
    """Makes one chunk of a raw array of any size, in whichever thread it is called.

    Args:
        graph: The exported module, an ONNX file or its bytes.
        raw: One raw array.
        input: One chunk of the application's input.
        threads: CPU threads for one run.

    Raises:
        BundleError: It is not such a graph.
    """

    def __init__(self, graph: Path | bytes, raw: RawSpec, input: TensorSpec, *, threads: int = 1) -> None:
        self._raw = raw
        self._input = input
        options = quiet_options(threads)
        # A large picture's memory goes back when it is prepared, and is not kept for the next one.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        named = graph if isinstance(graph, Path) else PREPARE
        try:
            session: Any = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - ONNX Runtime's own errors share no class but this
            raise BundleError(f"{named} cannot be loaded ({error}); write the bundle again.") from None
        sizes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
        if sizes.keys() != {RAW, PREPARED} or not _takes(raw, sizes[RAW]) or sizes[PREPARED] != list(input.shape):
            raise BundleError(
                f"{named} has {sizes}; it must make {input.describe()} of {raw.describe()}. Write the bundle again."
            )
        self._session = session

    def __call__(self, raw: Array) -> Array:
        """One chunk, `[*input.shape]`.

        Raises:
            InvalidInput: It is not a raw array of the spec.
            TooLarge: It has more than is taken.
            ComputeFailed: It could not be prepared, or to numbers that are not finite.
        """
        checked = self._raw.check(raw)
        try:
            chunk: Array = self._session.run([PREPARED], {RAW: checked})[0]
        except Exception as error:
            raise ComputeFailed(f"The raw array {list(raw.shape)} could not be prepared ({error}).") from error
        self._input.check_finite(chunk)
        return chunk


def prepared_of(files: BundleFiles) -> Prepared | None:
    """What prepares the inputs of a bundle, shown to give its golden ones; None where nothing is prepared.

    Raises:
        BundleError: The graph cannot be loaded, or gives other numbers than were recorded.
    """
    if files.prepare is None or files.manifest.raw is None:
        return None
    prepared = Prepared(files.prepare, files.manifest.raw, files.manifest.input)
    files.golden.check_prepared(prepared)
    return prepared


def exported_prepare(found: FoundApplication) -> bytes:
    """The `prepare` of an application as an ONNX graph, exported in a process of its own and shown to agree with torch.

    Raises:
        ApplicationError: Another process cannot find the application, or its `prepare` cannot be exported.
    """
    name = found.application.name
    if not found.reference:
        raise ApplicationError(
            f"Application {name!r} has a prepare, which another process has to find to export it; put the application "
            f"into a file, app.py, and use find_application('app.py')."
        )
    with TemporaryDirectory(prefix="penstock-") as folder:
        file = Path(folder) / PREPARE
        command = [sys.executable, "-m", "penstock.runtime.export_prepare", found.reference, str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_S, check=False)
        except subprocess.TimeoutExpired:
            raise ApplicationError(
                f"The prepare of application {name!r} took longer than {EXPORT_S} s to export; make it simpler."
            ) from None
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or [f"the exporter ended with status {done.returncode}"]
            raise ApplicationError(
                f"The prepare of application {name!r} cannot be exported ({lines[-1].rstrip('.')}); write it with "
                f"operations that torch.onnx.export knows, for any size of the raw array."
            )
        return file.read_bytes()


def random_raws(raw: RawSpec, count: int) -> list[Array]:
    """Raw arrays of random numbers, of several sizes, the smallest there can be among them."""
    chance = np.random.default_rng(0)
    shapes = [
        tuple(
            min(most, SIZES[(turn + dim) % len(SIZES)]) if size is None else size
            for dim, (size, most) in enumerate(zip(raw.shape, raw.most, strict=True))
        )
        for turn in range(count)
    ]
    return [random_numbers(raw.dtype, shape, chance) for shape in shapes]


def _takes(raw: RawSpec, sizes: list[Any]) -> bool:
    # A dimension of any size has a name.
    return len(sizes) == len(raw.shape) and all(
        isinstance(found, str | None) if size is None else found == size
        for size, found in zip(raw.shape, sizes, strict=True)
    )
