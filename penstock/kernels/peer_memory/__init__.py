"""Collectives of one launch: each GPU of a host reads and writes the others' memory itself."""

from penstock.kernels.peer_memory.dispatch import PeerMemory, why_no_peer_memory

__all__ = ["PeerMemory", "why_no_peer_memory"]
