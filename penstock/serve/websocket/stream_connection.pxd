# C types of stream_connection.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.batch_loop cimport BatchLoop
from penstock.serve.fair_turns cimport FairTurns, Usage
from penstock.serve.websocket.frames cimport FrameReader
from penstock.serve.websocket.live_stream cimport LiveStream
from penstock.serve.websocket.paused_connection cimport PausedConnection


cdef class StreamConnection(PausedConnection):
    cdef public LiveStream stream
    cdef public FrameReader _reader
    cdef public BatchLoop _batch_loop
    cdef public FairTurns _turns
    cdef public object _held, _now_ns, _pace
    cdef public long long _chunk_bytes, _yielded_ns
    cdef public bint _bounds_start, _pulling, _yielded, _closed_by_client

    @cython.locals(now_ns=cython.longlong, begin_cpu_ns=cython.longlong, nbytes=cython.longlong)
    cpdef object data_received(self, bytes data)
    @cython.locals(stream=LiveStream, usage=Usage)
    cpdef object _take_in(self, bytes data)
    cpdef object _write(self, bytes data)
    cpdef object _pull(self)
    cpdef bint _take(self)
