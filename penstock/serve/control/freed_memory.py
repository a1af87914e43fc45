"""Freed memory that a process which decodes bodies keeps for the next one."""

import ctypes

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A body of a megabyte, its pixels and what prepares them; a larger array gets pages of its own, and gives them back.
LARGEST_KEPT_BYTES = 4 << 20
KEPT_BYTES = 8 << 20


def keep_freed_memory() -> None:
    """Have malloc keep up to 8 MiB for each thread, and arrays of up to 4 MiB within it.

    By default each array above 128 KiB gets new pages, which the kernel clears one by one: 40% of the time of a
    `prepare`. Other C libraries than glibc are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
