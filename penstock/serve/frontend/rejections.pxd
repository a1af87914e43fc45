# C types of rejections.py, by which Cython compiles it (decision 082).

cdef class Rejections:
    cdef public long long budget_ns
    cdef public bint standing
    cdef public object _last
    cdef public long long _until_ns, _least_finish_ns, _first_ns, _last_ns

    cpdef object cached(self, long long now_ns, long long left_ns)
