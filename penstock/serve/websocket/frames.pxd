# C types of frames.py, by which Cython compiles it (decision 082).

import cython


cdef class FrameReader:
    cdef public long long max_bytes, _at, _kind
    cdef public object _data
    cdef public bytearray _parts

    @cython.locals(there=cython.longlong, size=cython.longlong, body=cython.longlong)
    cpdef object next_alone(self, bytes data)
    cpdef object feed(self, object data)


cpdef bytes frame_head(long long opcode, long long size)
cpdef bytes frame(long long opcode, bytes payload)
