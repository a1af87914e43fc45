"""CPU threads of torch, chosen for each network.

torch keeps their number for each thread that calls it, and a server loads networks in another thread than it runs them
in: a number that is set once where a network is loaded does not reach the thread that runs it.
"""

import torch


def use_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads in calls of this thread; None leaves them as they are."""
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
