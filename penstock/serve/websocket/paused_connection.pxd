# C types of paused_connection.py, by which Cython compiles it (decision 082).

from penstock.serve.websocket.live_stream cimport StreamOwner


cdef class PausedConnection(StreamOwner):
    cdef public object _clock_s, _transport, _peers
    cdef public bint _reading_paused, _writing_paused
    cdef public long long _unread_bytes
    cdef public double _moved_s

    cpdef object _pause(self)
    cpdef object _resume(self)
