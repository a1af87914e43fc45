"""Training of a gated recurrent unit over whole sequences: one kernel for all frames forward, one backward."""

from penstock.kernels.gru_layer.dispatch import gru_layer

__all__ = ["gru_layer"]
