"""Reference implementation in plain torch."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def copy_many(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in the target's precision; both of one shape."""
    cast(Any, torch)._foreach_copy_(list(targets), list(sources))
