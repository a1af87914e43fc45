"""What all kernels have in common."""

from importlib.util import find_spec

import torch

# Not asked for in what is compiled, where torch 2.11 cannot follow the question.
HAS_TRITON = find_spec("triton") is not None
# In which they read and write.
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
