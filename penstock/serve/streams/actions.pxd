# C types of actions.py, by which Cython compiles it (decision 082).

cdef class PushChunk:
    cdef public object samples
    cdef public long long frames
    cdef public bint last, resets, saves


cdef class Send:
    cdef public bytes payload
    cdef public bint binary
