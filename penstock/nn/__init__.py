"""Building blocks that torch lacks."""

from penstock.nn.maxout import Maxout

__all__ = ["Maxout"]
