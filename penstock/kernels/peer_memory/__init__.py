"""Collectives of one launch: each GPU of a host reads and writes the others' memory itself."""

from penstock.kernels.peer_memory.dispatch import KERNELS, PeerMemory, why_no_peer_memory

__all__ = ["KERNELS", "PeerMemory", "why_no_peer_memory"]
