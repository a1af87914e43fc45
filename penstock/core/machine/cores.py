"""Cores that this process may use."""

import os


def available_cores() -> int:
    """Count the cores of the affinity mask; all cores where the system has no such mask (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
