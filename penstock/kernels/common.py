"""Definitions that all kernels share."""

from importlib.util import find_spec

import torch

# Evaluated here, because torch.compile of 2.11 cannot trace it.
HAS_TRITON = find_spec("triton") is not None
# The dtypes that kernels read and write.
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
