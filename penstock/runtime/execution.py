"""Device, executor and precision of a network."""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from penstock.runtime.loading_steps import LoadingSteps

GRAPH_MEMORY = 0.3


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
        export_stall_s: Give an export up when it uses no processor time for so long; None for no such limit.
        unexported: Why a network that is not in the cache is not exported now; empty to export it.
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
    export_stall_s: float | None = None
    unexported: str = ""
