# C types of lane.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.frontend.table_writer cimport TableWriter
from penstock.serve.http.response_date cimport ResponseDate


cdef class Lane:
    cdef public object request, _call, _served, _models, _content_type, _reply_type
    cdef public TableWriter _writer
    cdef public long long _budget_ns, _raw, _nbytes, _small, _epoch
    cdef public bint _rejects_early, _low_priority
    cdef public dict _heads
    cdef public ResponseDate _date
    cdef public bytes _dated

    cpdef object reject(self, long long now_ns)
    @cython.locals(writer=TableWriter)
    cpdef object submit(self, bytes data, object done, long long arrival_ns, long long now_ns)
    cpdef object respond(self, object output)
