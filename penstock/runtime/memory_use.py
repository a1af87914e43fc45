"""Memory of a device that is in use, and giving back what an unloaded model leaves."""

import ctypes
import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_MEMINFO = Path("/proc/meminfo")
# Limit of a container, in version 2 of control groups, then in version 1.
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Memory of a device.

    Args:
        used_bytes: On a CPU, resident memory of this process without shared memory, such as tables; on a GPU, what all
            processes have, as the driver reports it.
        total_bytes: On a CPU, memory of the machine, or the container's limit; on a GPU, all of its memory.
    """

    used_bytes: int
    total_bytes: int


def memory_use(device: str) -> MemoryUse:
    """Measure the memory of a device.

    Args:
        device: `"cpu"`, `"cuda"` or `"cuda:N"`; of several joined by `+`, the sum of the GPUs, or this process's part
            of a CPU's.

    Raises:
        ServeError: There is no such GPU.
    """
    if device.startswith("cuda") and "+" in device:
        each = [memory_use(one) for one in device.split("+")]
        return MemoryUse(
            used_bytes=sum(one.used_bytes for one in each), total_bytes=sum(one.total_bytes for one in each)
        )
    if device.startswith("cpu"):
        status = _kilobytes(_STATUS)
        return MemoryUse(used_bytes=status["RssAnon"] + status["RssFile"], total_bytes=_total_bytes())
    import torch

    from penstock.runtime.gpu.devices import check_gpu

    check_gpu(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return MemoryUse(used_bytes=total_bytes - free_bytes, total_bytes=total_bytes)


def release_memory(device: str) -> None:
    """Collect the cycles of models that are gone, and give freed memory back to the system and the GPU.

    Args:
        device: See `memory_use`.
    """
    # Objects of a model were taken out of the collector's reach when it was loaded.
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    # Of glibc; other C libraries are left as they are.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if not device.startswith("cpu") and "torch" in sys.modules:
        import torch

        torch.cuda.empty_cache()


def _total_bytes() -> int:
    limits = [_kilobytes(_MEMINFO)["MemTotal"]]
    for file in _LIMITS:
        # No such file outside a container, and the word max without a limit.
        with suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return min(limits)


def _kilobytes(file: Path) -> dict[str, int]:
    """Read the sizes in bytes of a file of /proc by name."""
    lines = (line.split() for line in file.read_text().splitlines() if line.endswith(" kB"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
