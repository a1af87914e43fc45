"""Answers that take many steps: their state, its places on a device, and executors."""
