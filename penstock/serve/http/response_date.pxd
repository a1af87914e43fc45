# C types of response_date.py, by which Cython compiles it (decision 082).

cdef class ResponseDate:
    cdef public bytes line
    cdef public long long until_ns
    cdef object _clock_s, _clock_ns

    cpdef object renew_if_due(self, long long now_ns)
