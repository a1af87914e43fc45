"""A network that was made runnable."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.application import Application
from penstock.core.bundles.bundle import BundleFiles
from penstock.runtime.executor import Executor
from penstock.runtime.generation.generating import Generating

if TYPE_CHECKING:
    from penstock.runtime.gpu.compile_ahead import CompileAhead
    from penstock.runtime.gpu.compile_records import CompileRecords


@dataclass(frozen=True, kw_only=True, slots=True)
class Runnable:
    """A verified bundle and its executor.

    Args:
        application: Its application.
        files: The bundle.
        executor: The executor of its network.
        slots: Streams whose states fit into memory; None where the executor keeps no states.
        runs_by: `"ONNX Runtime"` or `"torch"`; on a GPU with the precision.
        fallback: Why a faster way to run the network was not taken, and what to do; empty if none was refused.
        compile_ahead: Compiles the network while it is served; None where it stays as it is.
    """

    application: Application
    files: BundleFiles
    executor: Executor | Generating
    slots: int | None = None
    runs_by: str = "torch"
    fallback: str = ""
    compile_ahead: "CompileAhead | CompileRecords | None" = None
