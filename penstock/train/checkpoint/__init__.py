"""Checkpoints: format, snapshots, asynchronous writes, state dicts."""
