"""One frame of a gated recurrent unit behind its two products: its gates, and the new hidden state of the rows."""

from penstock.kernels.gru_gates.dispatch import chosen, gru_gates

__all__ = ["chosen", "gru_gates"]
