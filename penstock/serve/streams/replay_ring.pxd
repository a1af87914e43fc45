# C types of replay_ring.py, by which Cython compiles it (decision 082).

import cython


cdef class ReplayRing:
    cdef public object _memory, _segments, _marked, _current, _view, _add_frames
    cdef public long long _frame_bytes, _block_bytes, _max_blocks, _blocks, _dropped, _at, reported
    cdef public bint ended, full_memory, _held

    @cython.locals(at=cython.longlong, size=cython.longlong)
    cpdef bint append(self, object samples, long long frames)
    cpdef bint _add_block(self)
