"""ONNX Runtime sessions, configured alike on servers, in exports and on devices."""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ERRORS_ONLY = 3  # ONNX Runtime's log severity


def onnx_session(graph: Path | bytes, *, threads: int = 1, any_size: bool = False, keep_memory: bool = True) -> Any:
    """Open a graph on the CPU.

    Args:
        graph: An ONNX file, or its bytes.
        threads: CPU threads for one run.
        any_size: Inputs vary in size, so memory is not planned once by the first of them.
        keep_memory: Keep the memory of a run for the next one.

    Raises:
        Exception: One of `onnx_errors()`: ONNX Runtime does not run the graph.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    # Threads that spin while they wait take time from other processes, and drain a battery.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_mem_pattern = not any_size
    options.enable_cpu_mem_arena = keep_memory
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@cache
def onnx_errors() -> tuple[type[Exception], ...]:
    """Every exception that ONNX Runtime raises; its own have no base class but Exception."""
    native = import_module("onnxruntime.capi.onnxruntime_pybind11_state")

    own = [kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return (*own, RuntimeError, TypeError, ValueError)
