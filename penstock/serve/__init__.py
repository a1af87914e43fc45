"""Batch Dispatch: requests of many users batched under a latency budget."""
