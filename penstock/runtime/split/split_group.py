"""The processes that share one network: their collectives, and what happens when one of them is gone."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from torch import Tensor

# A process waits for so long for the others of a batch; the watchdog of the server ends it before.
TIMEOUT = timedelta(minutes=5)
Lost = Callable[[str], NoReturn]
# Its types lack much of what it has.
torch_distributed: Any = dist


@final
class SplitGroup:
    """One process of a split network, and its collectives with the others.

    No group of torch's own registry: each model of an engine has one of its own.

    Args:
        rank: This process; 0 is the engine.
        size: The number of processes.
        device: Its device: NCCL connects GPUs, gloo CPUs.
        lost: Called if another process is gone in the middle of a batch; must not return.
    """

    def __init__(self, rank: int, size: int, device: str, lost: Lost) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._lost = lost
        self._group: Any = None

    def connect(self, meeting: Path) -> None:
        """Connect with the others, which do so too.

        Args:
            meeting: A file that they share, which does not exist before.
        """
        store: Any = torch_distributed.FileStore(str(meeting), self.size)
        if self.device == "cpu":
            options: Any = torch_distributed.ProcessGroupGloo._Options()
            # All processes are on this machine, whatever its name resolves to.
            options._devices = [torch_distributed.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = TIMEOUT
            self._group = torch_distributed.ProcessGroupGloo(store, self.rank, self.size, options)
        else:
            options = torch_distributed.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._group = torch_distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
        # The first collective connects, which takes long with NCCL.
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_gather(self, part: Tensor) -> Tensor:
        """Concatenate the equal parts of all processes along the last dimension."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([parts], [part]))
        return torch.cat(parts, -1)

    def all_reduce(self, part: Tensor) -> Tensor:
        """Sum the tensors of all processes."""
        total = part.contiguous()
        self._wait(lambda: self._group.allreduce([total]))
        return total

    def close(self) -> None:
        """Forget the connections."""
        self._group = None

    def _wait(self, begin: Callable[[], Any]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            # Not the network's own failure, which would be that of one request.
            self._lost(f"a process of the split network is gone ({' '.join(str(error).split())[:200]})")
