"""The GPUs that torch sees."""

import torch

from penstock.core.errors import ServeError


def check_gpu(device: str) -> None:
    """Check that a GPU is there.

    Args:
        device: `"cuda"` or `"cuda:N"`.

    Raises:
        ServeError: torch sees no GPU, or none of that number.
    """
    if not torch.cuda.is_available():
        raise ServeError(f"--device is {device}, but this torch sees no GPU; leave it out, or repair the driver.")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ServeError(f"--device is {device}, but there are {torch.cuda.device_count()} GPUs, from cuda:0 on.")
