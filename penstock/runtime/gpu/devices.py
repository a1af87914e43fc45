"""The GPUs that torch sees."""

import torch

from penstock.core.errors import ServeError


def no_gpu_remedy(otherwise: str) -> str:
    """Say what to do where torch sees no GPU, as the end of a sentence: a build for the CPU alone never sees one.

    Args:
        otherwise: What to do without a GPU.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f", because it is a build for the CPU alone ({torch.__version__}); {otherwise}, or install torch for CUDA"
        )
    return f"; {otherwise}, or repair the driver"


def check_gpu(device: str) -> None:
    """Check that a GPU is there.

    Args:
        device: `"cuda"` or `"cuda:N"`.

    Raises:
        ServeError: torch sees no GPU, or none of that number.
    """
    if not torch.cuda.is_available():
        raise ServeError(f"--device is {device}, but this torch sees no GPU{no_gpu_remedy('leave it out')}.")
    if (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ServeError(f"--device is {device}, but there are {torch.cuda.device_count()} GPUs, from cuda:0 on.")
