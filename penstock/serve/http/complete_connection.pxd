# C types of complete_connection.py, by which Cython compiles it (decision 082).

from penstock.serve.batch_loop cimport BatchLoop
from penstock.serve.fair_turns cimport FairTurns, Usage
from penstock.serve.frontend.table_writer cimport SlotHandle
from penstock.serve.http.parser cimport RequestParser
from penstock.serve.http.refusals cimport Refusals
from penstock.serve.http.response_date cimport ResponseDate


cdef class CompleteConnection:
    cdef public object handlers, open_connections
    cdef public RequestParser parser
    cdef public BatchLoop batch_loop
    cdef public object clock_ns, draining, age, bounds
    cdef public Refusals refusals
    cdef public ResponseDate date
    cdef public Usage usage
    cdef public long long last_active_ns
    cdef public object lingering_since_ns, _transport, _waiting
    cdef public object _current
    cdef public object _cancel, _rejection
    cdef public bint _paused, _closing, _inside, _ended, _unwanted, _unread, _continued
    cdef public long long _unread_bytes
    cdef public bint _scheduled
    cdef public FairTurns _turns
    cdef public long long _held_bytes
    cdef public bint _in_body
    cdef public long long _part_ns
    cdef public object _short
    cdef public SlotHandle _handle
    cdef public long long _refused_ns
    cdef public long long stays_ns

    cpdef object data_received(self, object data)
    cpdef object _proceed(self, long long began_ns=*)
    cpdef bint _answer_waiting(self, long long began_ns)
    cpdef object _start(self, object request)
    cpdef object _write(self, object data)
    cpdef object _pause(self)
    cpdef object _resume(self)


cdef class ChunkedBody:
    cdef public CompleteConnection connection
