# C types of connection.py, by which Cython compiles it (decision 082).

import cython

from penstock.serve.fair_turns cimport Usage
from penstock.serve.http.complete_connection cimport CompleteConnection
from penstock.serve.http.refusals cimport Refusals


cdef class Connection(CompleteConnection):
    @cython.locals(now_ns=cython.longlong, begin_cpu_ns=cython.longlong, usage=Usage)
    cpdef object data_received(self, object data)
    @cython.locals(arrival_ns=cython.longlong)
    cpdef bint _take_known(self, object data, long long now_ns, long long begin_cpu_ns)
    @cython.locals(refusals=Refusals)
    cpdef object _refuse(self, object refusal, object request, long long now_ns, long long arrival_ns,
                          long long begin_cpu_ns)
    cpdef object write_refusal(self, object refusal)
