# C types of live_stream.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.fair_turns cimport Usage
from penstock.serve.streams.actions cimport PushChunk, Send
from penstock.serve.streams.slot_feed cimport SlotFeed


cdef class StreamOwner:
    cdef public Usage usage
    cdef public long long arrival_ns, pushed

    cpdef object send(self, LiveStream stream, bytes payload, bint binary)


cdef class LiveStream:
    cdef public object streams, session, lane, keep
    cdef public long long id, budget_ns
    cdef public bint full, over
    cdef public StreamOwner _owner
    cdef public SlotFeed _feed
    cdef public object _name, _segments, _endpoints, _receive_binary, _receive_result, _take_state
    cdef public long long _lane_answered, _activity
    cdef public double _active_s

    cpdef object receive_binary(self, bytes payload)
    cpdef object _execute(self, object actions)
    cpdef object _send(self, bytes payload, bint binary)
    @cython.locals(owner=StreamOwner, usage=Usage, arrival_ns=cython.longlong)
    cpdef object _push(self, PushChunk chunk)
