"""Device, executor and precision of a network, and the network that was made runnable with them."""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.core.application import Application
from penstock.core.bundle import BundleFiles
from penstock.runtime.executor import Executor
from penstock.runtime.generating import Generating
from penstock.runtime.loading_steps import LoadingSteps

if TYPE_CHECKING:
    from penstock.runtime.gpu.compile_ahead import CompileAhead
    from penstock.runtime.gpu.compile_records import CompileRecords

GRAPH_MEMORY = 0.3


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Device, executor and precision of a network.

    Args:
        cache: The folder of exported graphs.
        cores: CPU cores that a network may use.
        sharing: Engines on the device, which divide its free memory.
        app: Reference of the application, if it moved.
        accept_changed: Accept an application whose sources changed, if the golden examples still agree.
        choice: `"auto"`, `"onnx"` or `"torch"`. On a CPU, `"auto"` takes ONNX Runtime where it can, and for live
            streams where it is faster; the others force one executor.
        device: `"cpu"`, `"cuda"` or `"cuda:N"`; several joined by `+` share the network.
        precision: `"fp32"`; on a GPU also `"tf32"`, `"bf16"` or `"fp16"`. `"auto"` is fp32 on a CPU, and on a GPU the
            fastest whose golden answers hold.
        compile: On a GPU, compile the network while it is already served.
        max_rows: A limit of the batch on a GPU; None for the GPU's own.
        batch_s: The longest batch that is worth preparing on a GPU.
        exact: Pad every batch to one size, so that an answer is bitwise independent of the other rows.
        graph_memory: Share of the GPU's free memory that CUDA graphs by rows and length may take.
        progress: Reports each step of loading.
    """

    cache: Path
    cores: int
    sharing: int = 1
    app: str | None = None
    accept_changed: bool = False
    choice: str = "auto"
    device: str = "cpu"
    precision: str = "fp32"
    compile: bool = False
    max_rows: int | None = None
    batch_s: float = inf
    exact: bool = False
    graph_memory: float = GRAPH_MEMORY
    progress: LoadingSteps = field(default_factory=LoadingSteps)
