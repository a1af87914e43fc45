# C types of request_age.py, by which Cython compiles it (decision 082).

cdef class TcpAge:
    cdef object _getsockopt
    cdef long long _tick_ns
